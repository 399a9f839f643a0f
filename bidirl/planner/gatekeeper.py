"""When a lease is proposed: who is idle, what would be lent, and what the gate says."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle
from math import inf

from bidirl.models.lookahead import Outlook, RolloutState, Stretch, outlook
from bidirl.planner.core import Core
from bidirl.planner.events import Direction, GateDecision, Progress, RequestProgress
from bidirl.planner.gates import Forecast, Predictor, SegmentWork, eq6_share
from bidirl.planner.policy import Gate, Lending, Split
from bidirl.planner.rollout import RolloutSide
from bidirl.planner.train import PRIMARY, Phase, TrainSide

__all__ = ["Gatekeeper", "Proposal"]

MIN_GAIN_SHARE = 0.01
"""Predicted gain, as a share of the time to the second next batch, below which a length-aware lease is not
taken: the lookahead's representatives are not finer than that."""
MIN_GAIN_OVER_COST = 0.1
"""Predicted gain, as a share of the switch cost, below which a length-aware lease is not taken: a wrong
lease loses in proportion to what it costs."""
MIN_REVIEW_S = 0.5
"""Shortest time between two reviews of a lease; a review costs a round trip to every replica."""
MAX_ASKED = 64
"""Replicas asked at a time; with all of thousands the questions would cost more than the answer is worth."""
LEAVE_SHARES = (0.0, 0.6, 1.0)
"""Shares of C_out before the batch is complete at which a lease might end: none hidden, most, all."""
RETRY_FACTOR = 1.1
"""A refused lease is weighed again if the batch is later than predicted by this factor."""
NO_GAIN = Forecast(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A lease that should be taken."""

    direction: Direction
    replicas: tuple[int, ...]
    forecast: Forecast = NO_GAIN
    share: int = 0


class Gatekeeper:
    """Weighs leases; holds what it has asked of the replicas."""

    def __init__(self, core: Core, rollout: RolloutSide, train: TrainSide) -> None:
        plan = core.plan
        self.core = core
        self.rollout = rollout
        self.train = train
        self.predictor = Predictor(plan)
        lending = plan.policy.lending
        self.lends_train = lending in (Lending.ROLLOUT_ON_TRAIN, Lending.BOTH)
        self.lends_rollout = lending in (Lending.TRAIN_ON_ROLLOUT, Lending.BOTH)
        self.gated = plan.policy.gate is not Gate.NONE
        self.foresee: Callable[[Proposal], Forecast] | None = None
        """For the oracle: what a simulation of both branches with the true lengths says."""
        self.forced: bool | None = None
        """Inside such a simulation: the answer to the next question; then the models decide."""
        self.split = plan.policy.split
        self.length_aware = self.split is Split.LENGTH_AWARE
        self._closed_in: dict[Direction, tuple[int, int, Phase]] = {}
        """Per direction, the trainer's period in which its last lease closed.

        The same direction is not lent again before the period is over: what made the lease end has not
        changed, so it would only be paid for twice (dwell).
        """
        self.retry_s: float | None = None
        """When to judge a refused lease again, seconds from now."""
        self._judged_in: dict[Direction, tuple[tuple[int, int, Phase], tuple[int, ...]]] = {}
        self._open: set[int] = set()
        """Replicas whose answer is missing."""
        self._ages: dict[int, list[int]] = {}
        """Group -> tokens of its running samples, as of the last question; ended samples are not in it."""
        self._typical = 1
        """Running samples of a group whose replica was not asked."""
        self._asked_of: tuple[int, int, Phase, int] | None = None
        """Period and crowd of busy primaries at the last question."""
        self._asked_in: tuple[int, int, Phase] | None = None
        """Period in which the ages were asked for."""

    # ------------------------------------------------------------------ period

    def _period(self) -> tuple[int, int, Phase]:
        return self.train.step, self.train.at, self.train.phase

    def closed(self, direction: Direction) -> None:
        """Note the end of a lease."""
        self._closed_in[direction] = self._period()

    def stop(self, direction: Direction) -> None:
        """Lend no more in a direction."""
        if direction is Direction.ROLLOUT_ON_TRAIN:
            self.lends_train = False
        else:
            self.lends_rollout = False

    def force(self, *, taken: bool) -> None:
        """In a copy made while a lease is being weighed: answer that question, then let the models decide."""
        self.forced = taken
        self._judged_in.clear()

    def take_retry(self) -> float | None:
        """Return when to judge a lease that was just refused again, once."""
        delay_s, self.retry_s = self.retry_s, None
        return delay_s

    def reconsider(self) -> None:
        """Judge anew: reality has departed from what was predicted."""
        self._judged_in.clear()
        self._asked_in = None
        self._asked_of = None

    def _rests(self, direction: Direction) -> bool:
        return self._closed_in.get(direction) == self._period()

    # --------------------------------------------------------------- proposals

    def _crowd(self) -> tuple[int, int, Phase, int]:
        """Return the period, and how many primaries are busy to a factor of two."""
        return (*self._period(), self.rollout.num_busy_primary.bit_length())

    def _judged(self, direction: Direction, *circumstances: int) -> bool:
        """Return whether the direction was judged before in this period and circumstances; note them.

        A gate asks when a pool becomes idle, a segment starts or credit changes, not at every completion.
        """
        now = (self._period(), circumstances)
        before = self._judged_in.get(direction)
        self._judged_in[direction] = now
        return before == now

    def propose(self) -> Proposal | None:
        """Return the lease that should be taken now, if any."""
        if self.train.waits():
            if self.lends_train and not self._rests(Direction.ROLLOUT_ON_TRAIN):
                return self._rollout_on_train()
            return None
        lends = self.lends_rollout and not self._rests(Direction.TRAIN_ON_ROLLOUT)
        return self._train_on_rollout() if lends and self.train.phase is Phase.SEGMENT else None

    def unstarted(self) -> int:
        """Return how many groups (or parts of groups) wait for a rollouter."""
        return len(self.rollout.queue) + max(0, self.rollout.startable())

    def movable(self, num_auxiliary: int) -> dict[int, list[int]]:
        """Return the groups that levelling the loads would move, per primary, latest-started first."""
        rollout = self.rollout
        sources = [r for r in rollout.replicas[: rollout.num_primary] if r.active and not r.syncing]
        loads = [sum(map(self._load, replica.groups)) for replica in sources]
        level = -(-sum(loads) // (len(sources) + num_auxiliary)) if sources else 0
        found: dict[int, list[int]] = {}
        for replica, load in zip(sources, loads, strict=True):
            extra = load - level
            for group in reversed(replica.groups):
                if extra <= 0:
                    break
                if group not in replica.leaving and self._load(group):
                    found.setdefault(replica.id, []).append(group)
                    extra -= self._load(group)
        return found

    def _load(self, group: int) -> int:
        """Return what a group weighs on its replica: running samples where they are known, else 1."""
        if not self.length_aware or not self._ages:
            return 1
        known = self._ages.get(group)
        return self._typical if known is None else len(known)

    def _rollout_on_train(self) -> Proposal | None:
        rollout = self.rollout
        idle = rollout.num_busy_primary == 0
        known = self._asked_in == self._period() and not self._open
        if self._judged(Direction.ROLLOUT_ON_TRAIN, idle, rollout.credit() > 0, known):
            return None
        missing = min(self.train.missing(), rollout.groups_in_flight() + max(0, rollout.startable()))
        ids = tuple(replica.id for replica in rollout.replicas[rollout.num_primary :] if not replica.lost)
        auxiliary = len(ids)
        primary = self._active_primaries()
        if missing <= 0 or auxiliary < 1 or primary < 1 or rollout.round_open:
            return None
        movable = self.unstarted() + sum(map(len, self.movable(auxiliary).values()))
        if self.length_aware:
            if movable < 1 or not self._known():
                return None
            forecast = self._weigh_rollout_on_train(primary, auxiliary)
            return self._passed(Proposal(Direction.ROLLOUT_ON_TRAIN, ids, forecast, share=rollout.total))
        even = self.split is Split.EVEN
        share = min(missing // 2 if even else eq6_share(missing, primary, auxiliary), movable)
        if share < 1:
            return None
        forecast = self.predictor.rollout_on_train(missing, primary, auxiliary, self.train.step)
        return self._passed(Proposal(Direction.ROLLOUT_ON_TRAIN, ids, forecast, share))

    def _active_primaries(self) -> int:
        return sum(replica.active for replica in self.rollout.replicas[: self.rollout.num_primary])

    def _train_on_rollout(self) -> Proposal | None:
        plan, rollout, train = self.core.plan, self.rollout, self.train
        if rollout.queue or rollout.credit() > 0 or rollout.round_open:
            return None
        if rollout.num_busy_primary and not self.length_aware:
            return None
        busy = rollout.num_busy_primary
        known = self._asked_of == self._crowd() and not self._open
        if self._judged(Direction.TRAIN_ON_ROLLOUT, busy.bit_length(), rollout.num_syncing > 0, known):
            return None
        active = [r for r in rollout.replicas[: rollout.num_primary] if r.active and not r.syncing]
        idle = tuple(replica.id for replica in active if not replica.groups)
        auxiliary = len(idle) * plan.rollout_replica_gpus // plan.train_replica_gpus
        if auxiliary < 1 or (not train.pending and train.last_segment()):
            return None
        segments, primary = self.remaining_work(), train.sides[PRIMARY].num_replicas
        if not self.length_aware:
            forecast = self.predictor.train_on_rollout(segments, primary, auxiliary)
            return self._passed(Proposal(Direction.TRAIN_ON_ROLLOUT, idle, forecast))
        forecast = self.predictor.train_on_rollout_hidden(segments, primary, auxiliary)
        weighed = self.foresee is not None or self.forced is not None  # by simulation
        if busy and not weighed and not self._now_is_best(forecast, segments, len(active)):
            return None
        switch = plan.models.switch
        cost_s = switch.train_on_rollout_in_s + switch.train_on_rollout_out_s + switch.grad_s
        margin_s = MIN_GAIN_SHARE * self.predictor.train_s(segments, primary)
        forecast = Forecast(forecast.gain_s, max(margin_s, MIN_GAIN_OVER_COST * cost_s))
        return self._passed(Proposal(Direction.TRAIN_ON_ROLLOUT, idle, forecast))

    def _now_is_best(self, now: Forecast, segments: list[SegmentWork], num_active: int) -> bool:
        """Return whether lending the idle replicas gains more than waiting until all of them are idle.

        A lease does not grow: whoever becomes idle later stays idle until the step is over.
        """
        plan, rollout = self.core.plan, self.rollout
        if self._asked_of != self._crowd():
            self.ask()
        if self._open:
            return False  # the last answer brings the question back
        state = replace(self._state(), startable=0, per_step=1)
        state = replace(state, need=len(state.running))
        wait_s = self._outlook(state, [(0.0, rollout.num_busy_primary)]).ready_s
        primary = self.train.sides[PRIMARY].num_replicas
        rest = self.predictor.drain_prefix(segments, wait_s, primary)
        auxiliary = num_active * plan.rollout_replica_gpus // plan.train_replica_gpus
        later = self.predictor.train_on_rollout_hidden(rest, primary, auxiliary)
        if later.gain_s > now.gain_s:
            self.retry_s = RETRY_FACTOR * wait_s + MIN_REVIEW_S
        return later.gain_s <= now.gain_s

    def _passed(self, proposal: Proposal) -> Proposal | None:
        forecast = proposal.forecast
        if self.forced is not None:
            taken, self.forced = self.forced, None
            return proposal if taken else None
        if self.foresee is not None:
            forecast = self.foresee(proposal)
            proposal = replace(proposal, forecast=forecast)
        if forecast.pays or not self.gated:
            return proposal
        self.core.actions.append(
            GateDecision(self.core.next_serial(), proposal.direction, forecast.gain_s, forecast.threshold_s)
        )
        return None

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

    # ------------------------------------------------------------ length-aware

    def ask(self) -> bool:
        """Ask the rollouters how far their samples are; return whether nobody has to be asked.

        Of very many an even choice is asked: the lookahead draws a few groups from them anyway.
        """
        holders = [replica for replica in self.rollout.replicas if replica.groups and not replica.lost]
        if len(holders) > MAX_ASKED:
            holders = [holders[index * len(holders) // MAX_ASKED] for index in range(MAX_ASKED)]
        self._ages = {group: [] for replica in holders for group in replica.groups}
        self._open = {replica.id for replica in holders}
        self._asked_in = self._period()
        self._asked_of = self._crowd()
        for replica in holders:
            self.core.actions.append(RequestProgress(self.core.next_serial(), replica.id))
        return not holders

    def _known(self) -> bool:
        """Return whether the ages are known; ask for them once per period if not."""
        if self._asked_in != self._period():
            self.ask()
        return not self._open

    def on_progress(self, event: Progress) -> bool:
        """Take an answer; return whether it was the last one missing."""
        if event.replica not in self._open:
            return False
        self._open.discard(event.replica)
        for group, _, tokens in event.samples:
            self._ages.setdefault(group, []).append(tokens)
        if not self._open:
            counts = [len(ages) for ages in self._ages.values()]
            self._typical = max(1, round(sum(counts) / len(counts)))
        return not self._open

    def forget(self, replica: int) -> bool:
        """Expect no answer of a lost replica; return whether it was the last one missing."""
        if replica not in self._open:
            return False
        self._open.discard(replica)
        return not self._open

    def _state(self) -> RolloutState:
        rollout, n = self.rollout, self.rollout.n
        queued: dict[int, list[int]] = {}
        for group, _, prefixes in rollout.queue:
            queued.setdefault(group.id, []).extend(prefixes)
        running = []
        asked_all = len(self._ages) * 2 > len(rollout.groups)
        others = cycle(list(self._ages.values()) or [[0] * n])
        for group in rollout.groups.values():
            if group.unfinished:
                known = self._ages.get(group.id)
                if known is None and asked_all:  # started since
                    known = [0] * (group.unfinished - len(queued.get(group.id, ())))
                elif known is None:  # on a replica that was not asked: as far as the others are
                    known = next(others)
                running.append(known + queued[group.id] if group.id in queued else known)
        room = self.core.plan.total_groups - rollout.issued + rollout.refunded
        startable = max(0, min(rollout.startable(), room))
        return RolloutState(
            running,
            startable,
            min(self.core.plan.groups_per_step, max(1, room - startable)),
            self.train.missing(),
            n,
            self.core.plan.group_slots * n,
        )

    def _train_s(self) -> float:
        """Predict the trainer's time for a batch, publication included."""
        plan = self.core.plan
        key = min(self.train.step, len(plan.priors) - 1)
        return self.predictor.batch_s(key) + plan.models.sync.seconds(plan.rollout_replicas)

    def _outlook(self, state: RolloutState, schedule: list[Stretch], not_before_s: float = 0.0) -> Outlook:
        models, prior = self.core.plan.models, self.core.plan.prior(self.train.step)
        factor = self.predictor.rollout_factor
        look = outlook(
            models.iteration,
            models.limits,
            prior,
            state,
            schedule,
            train_s=self._train_s(),
            not_before_s=not_before_s,
        )
        return look if factor == 1.0 else Outlook(look.ready_s * factor, look.second_s * factor)

    def _leave(
        self, state: RolloutState, primary: int, auxiliary: int, enter_s: float
    ) -> tuple[float, float]:
        """Return (seconds to the second next batch, when to leave) of the best way back of a lease."""
        out_s = self.core.plan.models.switch.rollout_on_train_out_s
        both: list[Stretch] = [(0.0, primary + auxiliary)]
        if enter_s > 0.0:
            both = [(0.0, primary), (enter_s, primary + auxiliary)]
        ready_s = self._outlook(state, both).ready_s
        if ready_s == inf:
            return inf, 0.0
        best = (inf, 0.0)
        for leave_s in sorted({max(enter_s, ready_s - share * out_s) for share in LEAVE_SHARES}):
            look = self._outlook(state, [*both, (leave_s, primary)], leave_s + out_s)
            best = min(best, (look.second_s, leave_s))
        return best

    def _weigh_rollout_on_train(self, primary: int, auxiliary: int) -> Forecast:
        """Predict what lending the training pool now gains, with the way back hidden as well as may be."""
        state, switch = self._state(), self.core.plan.models.switch
        alone = self._outlook(state, [(0.0, primary)])
        lent_s, _ = self._leave(state, primary, auxiliary, switch.rollout_on_train_in_s)
        if inf in (alone.second_s, lent_s):
            return NO_GAIN
        cost_s = switch.rollout_on_train_in_s + switch.rollout_on_train_out_s
        margin_s = max(MIN_GAIN_SHARE * alone.second_s, MIN_GAIN_OVER_COST * cost_s)
        self.retry_s = RETRY_FACTOR * alone.ready_s + MIN_REVIEW_S
        return Forecast(alone.second_s - lent_s, margin_s)

    def keep_for_s(self, auxiliary: int) -> float | None:
        """Return for how long an active lease should go on, None if it should end now."""
        primary = self._active_primaries()
        if primary < 1:
            return MIN_REVIEW_S
        state = self._state()
        out_s = self.core.plan.models.switch.rollout_on_train_out_s
        now = self._outlook(state, [(0.0, primary)], out_s)
        kept_s, leave_s = self._leave(state, primary, auxiliary, 0.0)
        return max(leave_s, MIN_REVIEW_S) if kept_s < now.second_s else None
