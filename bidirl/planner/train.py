"""The trainer half of the scheduler: batches, segments, chunks, pulls, merges and updates."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice
from math import ceil

from bidirl.planner.core import Core, Group
from bidirl.planner.events import (
    Broadcast,
    BroadcastDone,
    ChunkFailed,
    ChunkFinished,
    Merge,
    Merged,
    OptimizerStep,
    SegmentKind,
    StartChunks,
    Updated,
)
from bidirl.planner.policy import BatchOrder, Expiry, Granularity, Split
from bidirl.planner.rollout import RolloutSide

__all__ = ["Phase", "Segment", "Side", "TrainSide"]

PRIMARY, AUXILIARY = 0, 1


class Phase(Enum):
    """What the primary trainer is doing."""

    WAITING = auto()
    """For complete groups."""
    SEGMENT = auto()
    MERGING = auto()
    OPTIMIZING = auto()
    BROADCASTING = auto()
    PUBLISHING = auto()
    DONE = auto()


@dataclass(slots=True)
class Segment:
    """Chunks ``first .. last - 1`` of the step, to be run as one kind of work."""

    index: int
    kind: SegmentKind
    first: int
    last: int
    update: int
    """Mini-batch of the step that it belongs to."""


@dataclass(slots=True)
class Side:
    """One puller: all trainer replicas of one pool in lockstep."""

    num_replicas: int = 0
    """0: not there."""
    may_pull: bool = False
    running: StartChunks | None = None
    since: float = 0.0
    results: list[int] = field(default_factory=list)
    """Finished chunks of the current segment that the primary does not hold yet."""
    merging: bool = False
    """Whether ``results`` are on their way to the primary."""
    worked_s: float = 0.0
    """Seconds that the primary side would have needed for what this side has done in its lease."""
    declines: bool = False
    """Whether it leaves the rest of the step to the other side, to return in time."""


class TrainSide:
    """Owns groups from the moment they are batched."""

    def __init__(self, core: Core, rollout: RolloutSide) -> None:
        plan = core.plan
        self.core = core
        self.rollout = rollout
        self.step = 0
        """The step in progress; it publishes version ``step + 1``."""
        self.phase = Phase.WAITING
        self.sides = (Side(plan.train_replicas, may_pull=plan.train_gpus > 0), Side())
        self.streamed = plan.policy.granularity is Granularity.STREAMED
        self.order = plan.policy.batch_order
        self.expiry = plan.policy.expiry
        self.max_lag = ceil(plan.policy.staleness)
        self.groups_per_update = plan.groups_per_step // plan.mini_batches
        self.need = self.groups_per_update if self.streamed else plan.groups_per_step
        """Groups that must be ready before training starts or goes on."""
        self.chunk_groups = plan.chunk_groups
        self.pull_chunks = plan.policy.max_chunks_per_pull
        self.splits_tail = plan.policy.split is not Split.EVEN
        switch = plan.models.switch
        self.leave_s = 0.0
        """What the auxiliary side still has to do after its last chunk of a step."""
        if plan.policy.split is Split.LENGTH_AWARE:
            self.leave_s = switch.grad_s + switch.train_on_rollout_out_s
        self.batch: list[Group] = []
        self.chunk_of: list[int] = []
        """Chunk of each group of ``batch``."""
        self.last_batch: list[Group] = []
        self.last_chunk_of: list[int] = []
        self.chunks: list[tuple[float, float, int]] = []
        """Per chunk of the step: effective tokens, those of its longest sample, and response tokens."""
        self.segments: list[Segment] = []
        self.at = 0
        self.pending: list[int] = []
        """Chunks of the current segment that no side has pulled, in order."""
        self.unfinished = 0
        """Chunks of the current segment that are pending or running."""
        self.updates_done = 0
        self.cursor = 0
        """Next group id in issue order."""
        self.attempt = 0
        self.num_trained = 0

    # ---------------------------------------------------------------- batches

    def _in_order(self) -> Iterator[Group]:
        """Yield the groups that are next in issue order, as far as they are ready."""
        ready = self.rollout.ready
        dropped = 0
        number = self.cursor
        while number < self.rollout.issued:
            group = ready.get(number)
            if group is None:
                if number in self.rollout.groups:
                    return
                dropped += 1
            else:
                yield group
            number += 1

    def _ready_groups(self) -> list[Group]:
        if self.expiry in (Expiry.DROP, Expiry.CANCEL):
            self.rollout.expire(self.step - self.max_lag, running=False)
        ready, need = self.rollout.ready, self.need
        if len(ready) < need or self._overdue():
            return []
        match self.order:
            case BatchOrder.READY_FIRST:
                return list(islice(ready.values(), need))
            case BatchOrder.OLDEST_FIRST:
                return sorted(ready.values(), key=lambda group: (group.version, group.id))[:need]
            case BatchOrder.ISSUE_ORDER:
                chosen = list(islice(self._in_order(), need))
                return chosen if len(chosen) == need else []

    def _overdue(self) -> int:
        """Return how many groups in flight must be trained in this step lest they grow too old."""
        if self.expiry is not Expiry.WAIT:
            return 0
        return sum(group.version <= self.step - self.max_lag for group in self.rollout.groups.values())

    def missing(self) -> int:
        """Return how many groups the trainer still waits for."""
        overdue = self._overdue()
        if overdue:
            return overdue
        if self.order is BatchOrder.ISSUE_ORDER:
            return self.need - len(list(islice(self._in_order(), self.need)))
        return max(0, self.need - len(self.rollout.ready))

    def batch_ready(self) -> bool:
        """Return whether the trainer waits although the groups that it needs are there."""
        return self.phase is Phase.WAITING and not self.rollout.trainer_blocked and not self.missing()

    def waits(self) -> bool:
        """Return whether the trainer is idle for want of groups."""
        return self.phase is Phase.WAITING and not self.rollout.trainer_blocked and self.missing() > 0

    def _take(self, groups: list[Group]) -> None:
        self.rollout.train(groups)
        if self.expiry is Expiry.CANCEL and len(self.batch) + len(groups) == self.core.plan.groups_per_step:
            self.rollout.expire(self.step + 1 - self.max_lag, running=True)
        if self.order is BatchOrder.ISSUE_ORDER:
            self.cursor = groups[-1].id + 1
        work_of = self.core.plan.models.trainer.sample_work
        groups.sort(key=lambda group: group.id)
        first = len(self.chunks)
        bounds: list[tuple[int, int]] = []
        for start in range(0, len(groups), self.groups_per_update):
            for lead in range(start, start + self.groups_per_update, self.chunk_groups):
                members = groups[lead : min(lead + self.chunk_groups, start + self.groups_per_update)]
                works = [
                    work_of(float(group.prompt_tokens + tokens))
                    for group in members
                    if not group.filtered
                    for tokens in group.tokens.values()
                ]
                tokens = sum(sum(group.tokens.values()) for group in members)
                self.chunk_of.extend([len(self.chunks)] * len(members))
                self.chunks.append((sum(works), max(works, default=0.0), tokens))
            bounds.append((first, len(self.chunks)))
            first = len(self.chunks)
        done = len(self.batch) // self.groups_per_update
        self.batch.extend(groups)
        for kind in self.core.plan.segments:
            self.segments.append(Segment(len(self.segments), kind, bounds[0][0], bounds[-1][1], done))
        for number, (lo, hi) in enumerate(bounds):
            self.segments.append(Segment(len(self.segments), SegmentKind.UPDATE, lo, hi, done + number))

    # --------------------------------------------------------------- progress

    def settle(self) -> None:
        """Start what can start: the next (mini-)batch, and pulls of idle sides."""
        if self.phase is Phase.WAITING and not self.rollout.trainer_blocked and self.sides[PRIMARY].may_pull:
            groups = self._ready_groups()
            if groups:
                self._take(groups)
                self._enter_segment()
        if self.phase is Phase.SEGMENT:
            for number in (PRIMARY, AUXILIARY):
                self._pull(number)

    def _enter_segment(self) -> None:
        segment = self.segments[self.at]
        self.phase = Phase.SEGMENT
        self.pending = list(range(segment.first, segment.last))
        self.unfinished = len(self.pending)
        self.core.gate_due = True

    def _pull(self, number: int) -> None:
        side = self.sides[number]
        if side.running is not None or not side.may_pull or not self.pending:
            return
        if side.declines or side.merging:
            return  # it is on its way out
        count = self._share(number)
        if not count:
            side.declines = number == AUXILIARY and self.leave_s > 0.0 and self.last_segment()
            return
        first, pending = self.pending[0], self.pending
        run = 1
        while run < count and pending[run] == first + run:
            run += 1
        del pending[:run]
        segment = self.segments[self.at]
        chunks = self.chunks[first : first + run]
        serial = self.core.next_serial()
        side.running = StartChunks(
            serial,
            number,
            self.step,
            segment.index,
            segment.kind,
            first,
            first + run,
            sum(chunk[0] for chunk in chunks),
            max(chunk[1] for chunk in chunks),
            side.num_replicas,
            self.attempt,
        )
        side.since = self.core.now
        self.core.actions.append(side.running)

    def _share(self, number: int) -> int:
        """Return how many pending chunks a side pulls now (LazyPull, and JointTailSplit at the end).

        Source: paper.md, Algorithm 2. In the tail window (what is left fits into one pull of each side)
        the rest is divided so that both sides end together: the split with the earliest later end.
        """
        left = len(self.pending)
        other = self.sides[1 - number]
        leave_s = self.leave_s if self.last_segment() else 0.0
        window = 2 * self.pull_chunks
        if not other.may_pull or not self.splits_tail or (left > window and not leave_s):
            return min(self.pull_chunks, left)
        kind = self.segments[self.at].kind
        free_s = 0.0
        if other.running is not None:
            running = other.running
            spent = self.core.now - other.since
            free_s = max(0.0, self.pull_s(kind, running.work, running.longest, other.num_replicas) - spent)
        mine, best = self.sides[number].num_replicas, (float("inf"), 0)
        my_leave_s, other_leave_s = (0.0, leave_s) if number == PRIMARY else (leave_s, 0.0)
        if left > window:  # too early to split; only ask whether the auxiliary side should still pull
            if number == PRIMARY:
                return self.pull_chunks
            rest_s = free_s + self.chunks_s(kind, self.pending[self.pull_chunks :], other.num_replicas)
            end_s = self.chunks_s(kind, self.pending[: self.pull_chunks], mine) + my_leave_s
            return self.pull_chunks if end_s <= rest_s else 0
        for count in range(min(left, self.pull_chunks) + 1):
            end_s = max(
                self.chunks_s(kind, self.pending[:count], mine) + my_leave_s if count else 0.0,
                free_s + self.chunks_s(kind, self.pending[count:], other.num_replicas) + other_leave_s
                if count < left
                else 0.0,
            )
            best = min(best, (end_s, -count))
        return -best[1]

    def pull_s(self, kind: SegmentKind, work: float, longest: float, num_replicas: int) -> float:
        """Predict the seconds of one pull."""
        if work <= 0.0:
            return 0.0
        return self.core.plan.models.trainer.pull_s(kind.value, work, longest, num_replicas)

    def chunks_s(self, kind: SegmentKind, chunks: list[int], num_replicas: int) -> float:
        """Predict the seconds of some chunks in one pull."""
        if not chunks:
            return 0.0
        picked = [self.chunks[chunk] for chunk in chunks]
        work = sum(chunk[0] for chunk in picked)
        return self.pull_s(kind, work, max(chunk[1] for chunk in picked), num_replicas)

    # ----------------------------------------------------------------- events

    def on_chunk_finished(self, event: ChunkFinished) -> None:
        """Take the end of a pull; the last one of a segment leads to its merge or its end."""
        side = self.sides[event.side]
        if side.running is None or side.running.serial != event.cause:
            return
        side_pull, side.running = side.running, None
        self.unfinished -= event.last - event.first
        if event.side == AUXILIARY:
            primary = self.sides[PRIMARY].num_replicas
            pull = side_pull
            side.worked_s += self.pull_s(pull.kind, pull.work, pull.longest, primary)
            side.results.extend(range(event.first, event.last))
        if self.unfinished == 0:
            self._end_segment()

    def on_chunk_failed(self, event: ChunkFailed) -> None:
        """Put the chunks of a failed pull back in front."""
        side = self.sides[event.side]
        if side.running is None or side.running.serial != event.cause:
            return
        side.running = None
        self._return(list(range(event.first, event.last)))

    def on_side_lost(self) -> None:
        """Take back everything that the auxiliary side had not merged."""
        side = self.sides[AUXILIARY]
        lost = list(side.results)
        self.unfinished += len(lost)
        if side.running is not None:
            lost += range(side.running.first, side.running.last)
            side.running = None
        side.results.clear()
        side.merging, side.may_pull, side.num_replicas = False, False, 0
        if self.phase is Phase.MERGING:
            self.phase = Phase.SEGMENT
        self._return(lost)

    def _return(self, chunks: list[int]) -> None:
        if chunks:
            self.attempt += 1
            self.pending = sorted(self.pending + chunks)

    def _end_segment(self) -> None:
        side, segment = self.sides[AUXILIARY], self.segments[self.at]
        if side.results:
            self.phase = Phase.MERGING
            if not side.merging:
                self.merge()
        elif segment.kind is SegmentKind.UPDATE:
            self.phase = Phase.OPTIMIZING
            self.core.actions.append(OptimizerStep(self.core.next_serial(), self.step, segment.update))
        else:
            self.at += 1
            self._enter_segment()

    def merge(self) -> None:
        """Send what the auxiliary side has finished to the primary."""
        side, segment = self.sides[AUXILIARY], self.segments[self.at]
        side.merging = True
        chunks = tuple(sorted(side.results))
        tokens = sum(self.chunks[chunk][2] for chunk in chunks)
        self.core.actions.append(
            Merge(self.core.next_serial(), self.step, segment.index, segment.kind, chunks, tokens)
        )

    def on_merged(self, _: Merged) -> None:
        """Go on after the auxiliary side's results have arrived."""
        side = self.sides[AUXILIARY]
        if not side.merging:
            return
        side.merging = False
        side.results.clear()
        if self.phase is Phase.MERGING:
            self._end_segment()

    def last_segment(self) -> bool:
        """Return whether no further segment of the step will follow the current one."""
        return self.at == len(self.segments) - 1 and self.updates_ahead() <= 1

    def updates_ahead(self) -> int:
        """Return how many updates of the step are still to be done, streamed ones included."""
        return self.core.plan.mini_batches - self.updates_done

    def on_updated(self, event: Updated) -> None:
        """Go on after an optimizer step: next segment, next mini-batch, or publication."""
        self.updates_done += 1
        self.at += 1
        if self.updates_done == self.core.plan.mini_batches:
            self.phase = Phase.PUBLISHING
        elif self.sides[AUXILIARY].may_pull:
            self.phase = Phase.BROADCASTING
            self.core.actions.append(Broadcast(self.core.next_serial(), self.step, event.update))
        else:
            self._after_update()

    def on_broadcast_done(self, _: BroadcastDone) -> None:
        """Go on after the auxiliary side has the new weights."""
        if self.phase is Phase.BROADCASTING:
            self._after_update()

    def _after_update(self) -> None:
        if self.at < len(self.segments):
            self._enter_segment()
        else:
            self.phase = Phase.WAITING
            self.core.gate_due = True

    def end_step(self) -> None:
        """Close the step whose weights are being published."""
        self.num_trained += len(self.batch)
        self.step += 1
        self.last_batch, self.last_chunk_of = self.batch, self.chunk_of
        self.batch, self.chunk_of, self.chunks, self.segments = [], [], [], []
        self.at = self.updates_done = 0
        self.phase = Phase.WAITING
        self.core.gate_due = True
