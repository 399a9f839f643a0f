"""Leases: when one pool plays the other's role for a while, and how it gets back.

One lease at a time; opposite leases therefore never coexist. States: entering (C_in), active, emptying
(its samples or chunks are being taken back), returning (C_out), closed.
"""

from dataclasses import dataclass
from enum import Enum, auto

from bidirl.planner.core import Core
from bidirl.planner.events import BeginLease, Direction, EndLease, GateDecision
from bidirl.planner.gates import Forecast, Predictor, SegmentWork, eq6_share
from bidirl.planner.policy import Gate, Lending, Placement, Split
from bidirl.planner.rollout import Rollouter, RolloutSide
from bidirl.planner.train import AUXILIARY, PRIMARY, Phase, TrainSide

__all__ = ["Lease", "LeaseState", "Lender"]


class LeaseState(Enum):
    """Where a lease is in its life."""

    ENTERING = auto()
    ACTIVE = auto()
    EMPTYING = auto()
    RETURNING = auto()


@dataclass(slots=True)
class Lease:
    """The permission for some replicas to play the other role."""

    id: int
    direction: Direction
    replicas: tuple[int, ...]
    version: int
    """Version that auxiliary rollouters load while they enter."""
    state: LeaseState = LeaseState.ENTERING
    share: int = 0
    """Groups that the auxiliary rollouters are to take."""


class Lender:
    """Decides about leases and carries them through their states."""

    def __init__(self, core: Core, rollout: RolloutSide, train: TrainSide) -> None:
        plan = core.plan
        self.core = core
        self.rollout = rollout
        self.train = train
        self.predictor = Predictor(plan)
        self.lease: Lease | None = None
        self.num_leases = 0
        self._closed_in: dict[Direction, tuple[int, int, Phase]] = {}
        """Per direction, the trainer's period in which its last lease closed.

        The same direction is not lent again before the period is over: what made the lease end has not
        changed, so it would only be paid for twice (dwell).
        """
        self.time_shared = plan.placement is Placement.COLOCATED
        lending = plan.policy.lending
        self.lends_train = lending in (Lending.ROLLOUT_ON_TRAIN, Lending.BOTH) and not self.time_shared
        self.lends_rollout = lending in (Lending.TRAIN_ON_ROLLOUT, Lending.BOTH) and not self.time_shared
        self.gated = plan.policy.gate is not Gate.NONE

    # --------------------------------------------------------------- decisions

    def consider(self) -> None:
        """Take a lease if one is due; called when a pool became idle, or credit or a phase changed."""
        if self.lease is not None or self.train.phase is Phase.DONE:
            return
        if self.time_shared:
            if self.train.batch_ready():
                self._begin(Direction.TIME_SHARE, tuple(range(self.rollout.num_primary)), None, 0)
        elif self.train.waits():
            if self.lends_train:
                self._consider_rollout_on_train()
        elif self.train.phase is Phase.SEGMENT and self.lends_rollout and self._rollout_idle():
            self._consider_train_on_rollout()

    def _period(self) -> tuple[int, int, Phase]:
        return self.train.step, self.train.at, self.train.phase

    def _rests(self, direction: Direction) -> bool:
        return self._closed_in.get(direction) == self._period()

    def _rollout_idle(self) -> bool:
        rollout = self.rollout
        return (
            rollout.num_busy_primary == 0
            and not rollout.queue
            and rollout.credit() <= 0
            and not rollout.round_open
        )

    def _consider_rollout_on_train(self) -> None:
        plan, rollout = self.core.plan, self.rollout
        missing = min(self.train.missing(), rollout.groups_in_flight() + max(0, rollout.startable()))
        auxiliary = plan.auxiliary_rollouters
        primary = sum(replica.active for replica in rollout.replicas[: rollout.num_primary])
        if missing <= 0 or auxiliary < 1 or primary < 1 or rollout.round_open:
            return
        if self._rests(Direction.ROLLOUT_ON_TRAIN):
            return
        even = plan.policy.split is Split.EVEN
        share = missing // 2 if even else eq6_share(missing, primary, auxiliary)
        share = min(share, self._unstarted() + sum(map(len, self._movable(auxiliary).values())))
        if share < 1:
            return
        forecast = self.predictor.rollout_on_train(missing, primary, auxiliary, self.train.step)
        ids = tuple(range(rollout.num_primary, len(rollout.replicas)))
        self._decide(Direction.ROLLOUT_ON_TRAIN, ids, forecast, share)

    def _consider_train_on_rollout(self) -> None:
        plan, rollout = self.core.plan, self.rollout
        ids = tuple(replica.id for replica in rollout.replicas[: rollout.num_primary] if replica.active)
        auxiliary = len(ids) * plan.rollout_replica_gpus // plan.train_replica_gpus
        if auxiliary < 1 or (not self.train.pending and self.train.last_segment()):
            return
        if self._rests(Direction.TRAIN_ON_ROLLOUT):
            return
        forecast = self.predictor.train_on_rollout(
            self.remaining_work(), self.train.sides[PRIMARY].num_replicas, auxiliary
        )
        self._decide(Direction.TRAIN_ON_ROLLOUT, ids, forecast, 0)

    def remaining_work(self) -> list[SegmentWork]:
        """Return what the trainer still has to do in this step, as far as its groups are known.

        A running pull counts by the share of its predicted time that is still to come.
        """
        train = self.train
        works: list[SegmentWork] = []
        for segment in train.segments[train.at :]:
            current = segment.index == train.at
            chunks = train.pending if current else range(segment.first, segment.last)
            work = sum(train.chunks[chunk][0] for chunk in chunks)
            longest = max((train.chunks[chunk][1] for chunk in chunks), default=0.0)
            count = len(chunks)
            running = train.sides[PRIMARY].running
            if current and running is not None:
                total = train.pull_s(running.kind, running.work, running.longest, running.num_replicas)
                left = max(0.0, 1.0 - (self.core.now - train.sides[PRIMARY].since) / total) if total else 0.0
                work += left * running.work
                longest = max(longest, left * running.longest)
                count += 1
            works.append(SegmentWork(segment.kind, work, longest, count))
        return works

    def _decide(self, direction: Direction, ids: tuple[int, ...], forecast: Forecast, share: int) -> None:
        if forecast.pays or not self.gated:
            self._begin(direction, ids, forecast, share)
        else:
            self.core.actions.append(
                GateDecision(self.core.next_serial(), direction, forecast.gain_s, forecast.threshold_s)
            )

    def _begin(
        self, direction: Direction, ids: tuple[int, ...], forecast: Forecast | None, share: int
    ) -> None:
        self.num_leases += 1
        self.lease = Lease(self.num_leases, direction, ids, self.rollout.confirmed, share=share)
        if direction is not Direction.ROLLOUT_ON_TRAIN:
            for number in ids:
                replica = self.rollout.replicas[number]
                replica.active = replica.accepting = False
        else:
            self.train.sides[PRIMARY].may_pull = False
        self.core.actions.append(
            BeginLease(
                self.core.next_serial(),
                self.lease.id,
                direction,
                ids,
                self.lease.version,
                forecast.gain_s if forecast else 0.0,
                forecast.threshold_s if forecast else 0.0,
            )
        )

    # ------------------------------------------------------------------ states

    def on_entered(self, lease_id: int) -> None:
        """Put the lent devices to work."""
        lease = self._current(lease_id, LeaseState.ENTERING)
        if lease is None:
            return
        lease.state = LeaseState.ACTIVE
        match lease.direction:
            case Direction.ROLLOUT_ON_TRAIN:
                self._fill_auxiliary(lease)
            case Direction.TRAIN_ON_ROLLOUT:
                plan, side = self.core.plan, self.train.sides[AUXILIARY]
                side.num_replicas = len(lease.replicas) * plan.rollout_replica_gpus // plan.train_replica_gpus
                side.may_pull = True
            case Direction.TIME_SHARE:
                self.train.sides[PRIMARY].may_pull = True

    def _fill_auxiliary(self, lease: Lease) -> None:
        """Give the auxiliary rollouters their share: unstarted samples first, then running ones."""
        rollout = self.rollout
        for number in lease.replicas:
            replica = rollout.replicas[number]
            replica.active = replica.accepting = True
            replica.version = lease.version
            rollout.catch_up(replica)
        rollout.auxiliary_share = lease.share
        self._migrate(lease.share - self._unstarted(), len(lease.replicas))

    def _unstarted(self) -> int:
        """Return how many groups (or parts of groups) wait for a rollouter."""
        return len(self.rollout.queue) + max(0, self.rollout.startable())

    def _movable(self, num_auxiliary: int) -> dict[int, list[int]]:
        """Return the groups that levelling the loads would move, per primary, latest-started first."""
        rollout = self.rollout
        sources = [r for r in rollout.replicas[: rollout.num_primary] if r.active and not r.syncing]
        total = sum(len(replica.groups) for replica in sources)
        level = -(-total // (len(sources) + num_auxiliary)) if sources else 0
        found: dict[int, list[int]] = {}
        for replica in sources:
            extra = len(replica.groups) - level
            if extra > 0:
                held = [group for group in replica.groups if group not in replica.leaving]
                found[replica.id] = held[: -extra - 1 : -1]
        return found

    def _migrate(self, wanted: int, num_auxiliary: int) -> None:
        """Ask ``wanted`` groups off the primaries, as far as moving them levels the loads."""
        for number, groups in self._movable(num_auxiliary).items():
            chosen = groups[: max(0, wanted)]
            wanted -= len(chosen)
            self.rollout.preempt(self.rollout.replicas[number], tuple(sorted(chosen)))

    def settle(self) -> None:
        """Revoke a lease whose owner has work, and give back devices that have none left."""
        lease = self.lease
        if lease is None:
            return
        match lease.direction:
            case Direction.ROLLOUT_ON_TRAIN:
                self._settle_rollout_on_train(lease)
            case Direction.TRAIN_ON_ROLLOUT:
                self._settle_train_on_rollout(lease)
            case Direction.TIME_SHARE:
                if self.train.phase is Phase.PUBLISHING and lease.state is LeaseState.ACTIVE:
                    self._return(lease)

    def _settle_rollout_on_train(self, lease: Lease) -> None:
        if lease.state is LeaseState.RETURNING:
            return
        replicas = [self.rollout.replicas[number] for number in lease.replicas]
        wanted_back = self.train.batch_ready()
        if lease.state is LeaseState.ENTERING:
            if wanted_back:
                self._return(lease)
            return
        if lease.state is LeaseState.ACTIVE and wanted_back:
            lease.state = LeaseState.EMPTYING
            self.rollout.auxiliary_share = 0
            for replica in replicas:
                replica.accepting = False
                held = sorted(group for group in replica.groups if group not in replica.leaving)
                self.rollout.preempt(replica, tuple(held))
        idle = all(not replica.groups and not replica.syncing for replica in replicas)
        if idle and (lease.state is LeaseState.EMPTYING or not self._work_ahead()):
            self._return(lease)

    def _work_ahead(self) -> bool:
        """Return whether idle auxiliary rollouters still have something to wait for."""
        if self.rollout.auxiliary_share <= 0:
            return False
        leaving = any(replica.leaving for replica in self.rollout.replicas)
        return leaving or bool(self.rollout.queue) or self.rollout.startable() > 0

    def _settle_train_on_rollout(self, lease: Lease) -> None:
        train, side = self.train, self.train.sides[AUXILIARY]
        if lease.state is LeaseState.RETURNING:
            return
        step_over = train.phase in (Phase.OPTIMIZING, Phase.PUBLISHING, Phase.DONE) and train.last_segment()
        step_over = step_over or train.phase is Phase.PUBLISHING
        nothing_left = train.phase is Phase.SEGMENT and train.last_segment() and not train.pending
        waiting = train.phase is Phase.WAITING
        owner_has_work = self.rollout.credit() > 0 or bool(self.rollout.queue)
        if lease.state is LeaseState.ENTERING:
            if step_over or nothing_left or waiting or owner_has_work:
                self._return(lease)
            return
        if lease.state is LeaseState.ACTIVE and owner_has_work:
            lease.state = LeaseState.EMPTYING
            side.may_pull = False
        if side.running is not None or side.results or train.phase in (Phase.MERGING, Phase.BROADCASTING):
            if lease.state is LeaseState.EMPTYING and side.running is None and train.phase is Phase.SEGMENT:
                self._merge_early()
            return
        if lease.state is LeaseState.EMPTYING or step_over or nothing_left or waiting:
            self._return(lease)

    def _merge_early(self) -> None:
        """Save what a side has finished before it leaves in the middle of a segment."""
        train, side = self.train, self.train.sides[AUXILIARY]
        if side.merging:
            return
        train.merge()

    def _return(self, lease: Lease) -> None:
        lease.state = LeaseState.RETURNING
        if lease.direction is Direction.ROLLOUT_ON_TRAIN:
            self.rollout.auxiliary_share = 0
            for number in lease.replicas:
                replica = self.rollout.replicas[number]
                replica.active = replica.accepting = False
        elif lease.direction is Direction.TRAIN_ON_ROLLOUT:
            side = self.train.sides[AUXILIARY]
            side.may_pull, side.num_replicas = False, 0
        else:
            self.train.sides[PRIMARY].may_pull = False
        self.core.actions.append(EndLease(self.core.next_serial(), lease.id))

    def on_returned(self, lease_id: int) -> None:
        """Let the owner have its devices back."""
        lease = self.lease
        if lease is None or lease.id != lease_id:
            return
        self.lease = None
        self._closed_in[lease.direction] = self._period()
        self.core.gate_due = True
        if lease.direction is Direction.ROLLOUT_ON_TRAIN:
            self.train.sides[PRIMARY].may_pull = True
            return
        for number in lease.replicas:
            self._give_back(self.rollout.replicas[number])

    def _give_back(self, replica: Rollouter) -> None:
        if not replica.lost:
            replica.active = replica.accepting = True
            self.rollout.catch_up(replica)

    def on_failed(self, lease_id: int) -> None:
        """Take a role change that did not work as one that is over."""
        self.on_returned(lease_id)

    def _current(self, lease_id: int, state: LeaseState) -> Lease | None:
        lease = self.lease
        return lease if lease is not None and lease.id == lease_id and lease.state is state else None
