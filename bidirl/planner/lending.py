"""Leases: when one pool plays the other's role for a while, and how it gets back.

One lease at a time; opposite leases therefore never coexist. States: entering (C_in), active, emptying
(its samples or chunks are being taken back), returning (C_out), closed.
"""

from dataclasses import dataclass
from enum import Enum, auto

from bidirl.planner.budget import Budget
from bidirl.planner.core import Core
from bidirl.planner.events import (
    BeginLease,
    Direction,
    EndLease,
    LeaseEntered,
    LeaseFailed,
    LeaseReturned,
    LendingStopped,
    Progress,
    SetTimer,
    TimerFired,
)
from bidirl.planner.gatekeeper import Gatekeeper, Proposal
from bidirl.planner.policy import Placement, Split
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
    filled: bool = False
    """Whether running samples have been moved to its auxiliary rollouters."""
    wanted_s: float | None = None
    """When its owner first had to wait for the devices."""
    timer: int = 0
    """The timer that asks whether to go on."""


class Lender:
    """Decides about leases and carries them through their states."""

    def __init__(self, core: Core, rollout: RolloutSide, train: TrainSide) -> None:
        plan = core.plan
        self.core = core
        self.rollout = rollout
        self.train = train
        self.gatekeeper = Gatekeeper(core, rollout, train)
        self.length_aware = plan.policy.split is Split.LENGTH_AWARE
        self.num_timers = 0
        self.gate_timer = 0
        self.budget = Budget()
        self.lease: Lease | None = None
        self.num_leases = 0
        self.time_shared = plan.placement is Placement.COLOCATED

    # --------------------------------------------------------------- decisions

    def consider(self) -> None:
        """Take a lease if one is due; called when a pool became idle, or credit or a phase changed."""
        if self.lease is not None or self.train.phase is Phase.DONE:
            return
        if self.time_shared:
            if self.train.batch_ready():
                self._begin(Proposal(Direction.TIME_SHARE, tuple(range(self.rollout.num_primary))))
            return
        proposal = self.gatekeeper.propose()
        retry_s = self.gatekeeper.take_retry()
        if proposal is not None:
            self._begin(proposal)
        elif retry_s is not None:
            self.gate_timer = self._set_timer(retry_s)

    def _set_timer(self, delay_s: float) -> int:
        self.num_timers += 1
        self.core.actions.append(SetTimer(self.core.next_serial(), self.num_timers, delay_s))
        return self.num_timers

    def on_progress(self, event: Progress) -> None:
        """Take the tokens of a replica's samples; the last answer completes the question."""
        if self.gatekeeper.on_progress(event):
            self._answered()

    def on_timer(self, event: TimerFired) -> None:
        """Ask again whether an active lease should end."""
        lease = self.lease
        if lease is None:
            if event.timer == self.gate_timer:
                self.gatekeeper.reconsider()
                self.core.gate_due = True
        elif lease.state is LeaseState.ACTIVE and lease.timer == event.timer:
            self._review()

    def _review(self) -> None:
        if self.gatekeeper.ask():
            self._answered()

    def _answered(self) -> None:
        lease = self.lease
        if lease is None:
            self.core.gate_due = True
        elif lease.direction is Direction.ROLLOUT_ON_TRAIN and lease.state is LeaseState.ACTIVE:
            num_active = sum(self.rollout.replicas[number].active for number in lease.replicas)
            until_s = self.gatekeeper.keep_for_s(num_active) if num_active else None
            if not lease.filled and until_s is not None:
                lease.filled = True
                self._migrate(lease.share - self.gatekeeper.unstarted(), num_active)
            if until_s is None:
                self._empty(lease)
            else:
                lease.timer = self._set_timer(until_s)

    def _begin(self, proposal: Proposal) -> None:
        self.num_leases += 1
        direction, ids = proposal.direction, proposal.replicas
        self.lease = Lease(self.num_leases, direction, ids, self.rollout.confirmed, share=proposal.share)
        if direction is not Direction.ROLLOUT_ON_TRAIN:
            for number in ids:
                replica = self.rollout.replicas[number]
                replica.active = replica.accepting = False
        else:
            self.train.sides[PRIMARY].may_pull = False
        self.rollout.auxiliary_tokens = 0
        self.train.sides[AUXILIARY].worked_s = 0.0
        self.core.actions.append(
            BeginLease(
                self.core.next_serial(),
                self.lease.id,
                direction,
                ids,
                self.lease.version,
                proposal.forecast.gain_s,
                proposal.forecast.threshold_s,
            )
        )

    # ------------------------------------------------------------------ states

    def on_entered(self, event: LeaseEntered) -> None:
        """Put the lent devices to work."""
        lease = self._current(event.lease, LeaseState.ENTERING)
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
            if replica.lost:
                continue
            replica.active = replica.accepting = True
            replica.version = lease.version
            rollout.catch_up(replica)
        rollout.auxiliary_share = lease.share
        if self.length_aware:
            self._review()
        else:
            self._migrate(lease.share - self.gatekeeper.unstarted(), len(lease.replicas))

    def _migrate(self, wanted: int, num_auxiliary: int) -> None:
        """Ask ``wanted`` groups off the primaries, as far as moving them levels the loads."""
        for number, groups in self.gatekeeper.movable(num_auxiliary).items():
            chosen = groups[: max(0, wanted)]
            wanted -= len(chosen)
            self.rollout.preempt(self.rollout.replicas[number], tuple(sorted(chosen)))

    def settle(self) -> None:
        """Revoke a lease whose owner has work, and give back devices that have none left."""
        lease = self.lease
        if lease is None:
            return
        if lease.wanted_s is None and (
            self.train.batch_ready() or self.rollout.published > self.rollout.confirmed
        ):
            lease.wanted_s = self.core.now
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
        rollout = self.rollout
        wanted_back = self.train.batch_ready()
        if lease.state is LeaseState.ENTERING:
            if wanted_back:
                self._return(lease)
            return
        if lease.state is LeaseState.ACTIVE and wanted_back:
            self._empty(lease)
        if rollout.num_busy_auxiliary or rollout.num_syncing_auxiliary:
            return
        gone = not any(rollout.replicas[number].active for number in lease.replicas)
        if lease.state is LeaseState.EMPTYING or gone or not self._work_ahead():
            self._return(lease)

    def _empty(self, lease: Lease) -> None:
        """Take the auxiliary rollouters' samples back; they return when the last one has left."""
        lease.state = LeaseState.EMPTYING
        self.rollout.auxiliary_share = 0
        for number in lease.replicas:
            replica = self.rollout.replicas[number]
            replica.accepting = False
            held = sorted(group for group in replica.groups if group not in replica.leaving)
            self.rollout.preempt(replica, tuple(held))

    def _work_ahead(self) -> bool:
        """Return whether idle auxiliary rollouters still have something to wait for."""
        if self.rollout.auxiliary_share <= 0:
            return False
        if self.length_aware and self.lease is not None and not self.lease.filled:
            return True
        return self.rollout.num_leaving > 0 or bool(self.rollout.queue) or self.rollout.startable() > 0

    def _settle_train_on_rollout(self, lease: Lease) -> None:
        train, side = self.train, self.train.sides[AUXILIARY]
        if lease.state is LeaseState.RETURNING:
            return
        step_over = train.phase in (Phase.OPTIMIZING, Phase.PUBLISHING, Phase.DONE) and train.last_segment()
        step_over = step_over or train.phase is Phase.PUBLISHING
        nothing_left = train.phase is Phase.SEGMENT and train.last_segment() and not train.pending
        nothing_left = nothing_left or side.declines
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
            leaves = lease.state is LeaseState.EMPTYING or (self.length_aware and nothing_left)
            if leaves and side.running is None and train.phase is Phase.SEGMENT and not side.merging:
                train.merge()
            return
        if lease.state is LeaseState.EMPTYING or step_over or nothing_left or waiting:
            self._return(lease)

    def _return(self, lease: Lease) -> None:
        lease.state = LeaseState.RETURNING
        if lease.direction is Direction.ROLLOUT_ON_TRAIN:
            self.rollout.auxiliary_share = 0
            for number in lease.replicas:
                replica = self.rollout.replicas[number]
                replica.active = replica.accepting = False
        elif lease.direction is Direction.TRAIN_ON_ROLLOUT:
            side = self.train.sides[AUXILIARY]
            side.may_pull, side.num_replicas, side.declines = False, 0, False
        else:
            self.train.sides[PRIMARY].may_pull = False
        self.core.actions.append(EndLease(self.core.next_serial(), lease.id))

    def on_returned(self, event: LeaseReturned | LeaseFailed) -> None:
        """Let the owner have its devices back."""
        lease = self.lease
        if lease is None or lease.id != event.lease:
            return
        self.lease = None
        if not self.time_shared:
            self._account(lease)
        self.gatekeeper.closed(lease.direction)
        self.core.gate_due = True
        if lease.direction is Direction.ROLLOUT_ON_TRAIN:
            self.train.sides[PRIMARY].may_pull = True
            return
        for number in lease.replicas:
            self._give_back(self.rollout.replicas[number])

    def _account(self, lease: Lease) -> None:
        plan, gatekeeper = self.core.plan, self.gatekeeper
        cost_s = 0.0 if lease.wanted_s is None else self.core.now - lease.wanted_s
        gave_s = self.train.sides[AUXILIARY].worked_s
        if lease.direction is Direction.ROLLOUT_ON_TRAIN:
            batch_s = gatekeeper.predictor.rollout_s(
                plan.groups_per_step, plan.rollout_replicas, self.train.step
            )
            batch_tokens = plan.groups_per_step * self.rollout.n * plan.prior(self.train.step).mean_tokens
            gave_s = self.rollout.auxiliary_tokens / batch_tokens * batch_s
        if gatekeeper.gated and self.budget.account(lease.direction, gave_s, cost_s):
            gatekeeper.stop(lease.direction)
            losses = self.budget.losses[lease.direction]
            self.core.actions.append(
                LendingStopped(self.core.next_serial(), lease.direction, losses, gave_s, cost_s)
            )

    def _give_back(self, replica: Rollouter) -> None:
        if not replica.lost:
            replica.active = replica.accepting = True
            self.rollout.catch_up(replica)

    def has_lent(self, replica: int) -> bool:
        """Return whether a lease lets a primary rollout replica play the trainer's role."""
        lease = self.lease
        return (
            lease is not None
            and lease.direction is not Direction.ROLLOUT_ON_TRAIN
            and replica in lease.replicas
        )

    def on_side_lost(self) -> None:
        """Give back, as soon as nothing of them is in use, the devices of a trainer side that is gone."""
        lease = self.lease
        if (
            lease is not None
            and lease.direction is Direction.TRAIN_ON_ROLLOUT
            and lease.state is LeaseState.ACTIVE
        ):
            lease.state = LeaseState.EMPTYING

    def on_failed(self, event: LeaseFailed) -> None:
        """Take a role change that did not work as one that is over."""
        self.on_returned(event)

    def on_replica_lost(self, replica: int) -> None:
        """Expect no answer of a replica that is gone."""
        if self.gatekeeper.forget(replica):
            self._answered()

    def _current(self, lease_id: int, state: LeaseState) -> Lease | None:
        lease = self.lease
        return lease if lease is not None and lease.id == lease_id and lease.state is state else None
