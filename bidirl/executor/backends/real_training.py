"""The training half of a real backend: pulls over the workers of a side, merges, updates, publications."""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bidirl.executor.backends import CallFailed, Listener
from bidirl.executor.backends.links import Link
from bidirl.executor.backends.messages import Pull, Snapshot
from bidirl.executor.backends.snapshots import Snapshots
from bidirl.executor.backends.store import SampleStore
from bidirl.executor.backends.torch.merge import Gradient, merge_stats
from bidirl.executor.roles import Piece
from bidirl.planner import events as ev
from bidirl.planner.events import SegmentKind
from bidirl.planner.learn import AdvantageScale
from bidirl.planner.plan import Plan

__all__ = ["StepLearning", "TrainingHalf"]


@dataclass(frozen=True, slots=True)
class StepLearning:
    """What a step learned from, and how far engine and trainer agree."""

    reward: float
    """Mean reward of the batch's samples."""
    gradient_norm: float
    """Norm of the last update's merged gradient."""
    mismatch: float
    """Mean over tokens of |log-probability at generation - at the update|; it has the lag's share in it."""
    mismatch_max: float
    lag: float
    """Mean over samples of consuming version - oldest version of any of its tokens."""
    lag_max: int


@dataclass(slots=True)
class _Work:
    """What a step has of itself so far."""

    groups: dict[int, None] = field(default_factory=dict)
    placed: dict[tuple[int, int], dict[int, list[int]]] = field(default_factory=dict)
    """(side, segment) -> worker -> chunks that run or ran there."""
    fetched: dict[int, list[Gradient]] = field(default_factory=dict)
    """Segment -> gradients that left their worker."""
    stats: dict[int, dict[str, float]] = field(default_factory=dict)
    """Chunk -> statistics of its update."""
    segment: int = 0
    """The update segment that was pulled last."""


class TrainingHalf:
    """Spreads a side's chunks over its workers; the first primary worker owns the optimizer."""

    def __init__(
        self,
        plan: Plan,
        store: SampleStore,
        links: Sequence[Link],
        primary: Sequence[int],
        scale: AdvantageScale,
        *,
        digest: bool,
    ) -> None:
        """Take all workers by number, and the numbers of the primary side's."""
        self.plan = plan
        self.store = store
        self.links = links
        self.primary = tuple(primary)
        self.scale = scale
        self.snapshots = Snapshots(
            lambda: self._call(self.primary[0], "snapshot", digest),
            lambda snapshot: self._call(self.primary[0], "forget", snapshot.handle),
        )
        self.lent: tuple[int, ...] = ()
        """Workers of the auxiliary side."""
        self.lent_weights: asyncio.Future[Snapshot] | None = None
        """The weights that the auxiliary side was given last."""
        self.learning: list[StepLearning] = []
        self.num_lent_chunks = 0
        """Chunks that the auxiliary side handed over."""
        self.work = _Work()
        self.listener: Listener | None = None

    def _call(self, worker: int, name: str, *args: Any) -> "asyncio.Future[Any]":
        return self.links[worker].call(name, *args)

    def _load(
        self, workers: Sequence[int], snapshot: "asyncio.Future[Snapshot]"
    ) -> list["asyncio.Future[Any]"]:
        """Have the trainers of workers load weights."""
        return [
            self.snapshots.carried(snapshot, self._call(worker, "load_trainer", snapshot))
            for worker in workers
        ]

    # ------------------------------------------------------------------ pulls

    def _pulls(self, action: ev.StartChunks, workers: Sequence[int]) -> dict[int, Pull]:
        assert self.listener is not None
        groups = self.listener.chunk_groups(action.first, action.last)
        num_tokens = num_sequences = 0
        if action.kind is SegmentKind.UPDATE:
            first, last = self.listener.segment_chunks(action.segment)
            for members in self.listener.chunk_groups(first, last):
                self.work.groups.update(dict.fromkeys(members))
                for group in members:
                    rows = [row for row in self.store.rows(group, self.scale) if row.weight]
                    num_tokens += sum(len(row.draft.tokens) for row in rows)
                    num_sequences += len(rows)
        shares: dict[int, list[tuple[int, tuple[Any, ...]]]] = {}
        for place, members in enumerate(groups):
            rows_ = tuple(row for group in members for row in self.store.rows(group, self.scale))
            shares.setdefault(workers[place % len(workers)], []).append((action.first + place, rows_))
        return {
            worker: Pull(action.step, action.segment, action.kind, tuple(chunks), num_tokens, num_sequences)
            for worker, chunks in shares.items()
        }

    def run_chunks(self, action: ev.StartChunks) -> Awaitable[None]:
        """Run a pull: chunk after chunk round the workers of the side, each chunk on one of them."""
        workers = self.lent if action.side else self.primary
        loads = self._refresh_lent() if action.side else []
        if action.kind is SegmentKind.UPDATE:
            self.work.segment = action.segment
        placed = self.work.placed.setdefault((action.side, action.segment), {})
        runs = []
        for worker, pull in self._pulls(action, workers).items():
            placed.setdefault(worker, []).extend(chunk for chunk, _ in pull.chunks)
            answer = self._call(worker, "run", pull)
            results = None
            if not action.side and action.kind is not SegmentKind.UPDATE:
                chunks = tuple(placed.pop(worker))
                results = self._call(worker, "fetch", action.step, action.segment, chunks)
            runs.append((pull, answer, results))
        return self._ran(action, loads, runs)

    async def _ran(
        self,
        action: ev.StartChunks,
        loads: list["asyncio.Future[Any]"],
        runs: list[tuple[Pull, "asyncio.Future[Any]", "asyncio.Future[Any] | None"]],
    ) -> None:
        try:
            for load in loads:
                await self._has_loaded(load)
            for pull, answer, results in runs:
                stats = await answer
                for (chunk, _), sums in zip(pull.chunks, stats, strict=True):
                    self.work.stats[chunk] = sums
                if results is not None:
                    self._note(action.kind, await results)
        except asyncio.CancelledError:
            if action.side and self.listener is not None and self.lent:
                self.listener.side_lost()  # too late: nobody may count on what it still does
            raise

    async def _has_loaded(self, load: "asyncio.Future[Any]") -> None:
        """Give the auxiliary side up if it did not get the weights that its chunks are run with."""
        try:
            await load
        except CallFailed:
            if self.listener is not None:
                self.listener.side_lost()
            raise

    def _note(self, kind: SegmentKind, pieces: Sequence[Piece]) -> None:
        assert self.listener is not None
        for piece in pieces:
            members = self.listener.chunk_groups(piece.chunk, piece.chunk + 1)[0]
            keys = [(group, index) for group in members for index in range(self.plan.samples_per_group)]
            self.store.note(keys, piece.logprobs, reference=kind is SegmentKind.REFERENCE)

    def _refresh_lent(self) -> list["asyncio.Future[Any]"]:
        """Give the auxiliary side the primary's weights if they have changed since it got some."""
        present = self.snapshots.present()
        if present is self.lent_weights:
            return []
        self.lent_weights = present
        return self._load(self.lent, present)

    # ------------------------------------------------------------------ merges and updates

    def _collect(self, side: int, step: int, segment: int) -> list["asyncio.Future[Any]"]:
        placed = self.work.placed.pop((side, segment), {})
        mine = self.primary[0] if not side else None
        return [
            self._call(worker, "fetch", step, segment, tuple(sorted(chunks)))
            for worker, chunks in placed.items()
            if worker != mine
        ]

    def merge(self, action: ev.Merge) -> Awaitable[None]:
        """Fetch what the auxiliary side's workers have of a segment."""
        return self._merged(action, self._collect(1, action.step, action.segment))

    async def _merged(self, action: ev.Merge, answers: list["asyncio.Future[Any]"]) -> None:
        found = [piece for answer in answers for piece in await answer]
        self.num_lent_chunks += len(action.chunks)
        if action.kind is SegmentKind.UPDATE:
            self.work.fetched.setdefault(action.segment, []).extend(found)
        else:
            self._note(action.kind, found)

    def forget_side(self) -> None:
        """Drop what the auxiliary side had not handed over."""
        for key in [key for key in self.work.placed if key[0]]:
            del self.work.placed[key]

    def optimizer_step(self, action: ev.OptimizerStep) -> Awaitable[None]:
        """Merge a mini-batch's gradients on the first primary worker, update, and pass the weights on."""
        assert self.listener is not None
        segment = self.work.segment
        first, last = self.listener.segment_chunks(segment)
        chunks = tuple(range(first, last))
        others = asyncio.ensure_future(self._others(segment, self._collect(0, action.step, segment)))
        answer = self._call(self.primary[0], "apply", action.step, segment, others, chunks)
        self.snapshots.updated()
        is_last = action.update == self.plan.mini_batches - 1
        passed: list[asyncio.Future[Any]] = []
        if is_last or len(self.primary) > 1:
            present = self.snapshots.publish(action.step + 1) if is_last else self.snapshots.present()
            passed = self._load(self.primary[1:], present)
        return self._updated(action.step, answer, passed, chunks, is_last=is_last)

    async def _others(self, segment: int, answers: list["asyncio.Future[Any]"]) -> list[Gradient]:
        found = [gradient for answer in answers for gradient in await answer]
        return self.work.fetched.pop(segment, []) + found

    async def _updated(
        self,
        step: int,
        answer: "asyncio.Future[Any]",
        passed: list["asyncio.Future[Any]"],
        chunks: tuple[int, ...],
        *,
        is_last: bool,
    ) -> None:
        applied = await answer
        for other in passed:
            await other
        if not is_last:
            return
        sums = merge_stats(self.work.stats[chunk] for chunk in chunks if chunk in self.work.stats)
        groups = list(self.work.groups)
        rewards = [reward for group in groups for reward in self.store.score(group)]
        lags = [step - version for group in groups for version in self.store.first_versions(group)]
        tokens = max(1.0, sums.get("tokens", 0.0))
        self.learning.append(
            StepLearning(
                sum(rewards) / max(1, len(rewards)),
                applied.get("gradient_norm", 0.0),
                sums.get("mismatch", 0.0) / tokens,
                sums.get("mismatch_max", 0.0),
                sum(lags) / max(1, len(lags)),
                max(lags, default=0),
            )
        )
        self.store.forget(groups)
        if groups:
            self.store.prompts.forget_before(min(groups))
        self.work = _Work()

    def broadcast(self, _: ev.Broadcast) -> Awaitable[None]:
        """Give the auxiliary side the updated weights."""
        present = self.lent_weights = self.snapshots.present()
        return self._all(self._load(self.lent, present))

    def publish(self, action: ev.Publish) -> Awaitable[None]:
        """Wait until a version's weights have left the trainer."""
        return self._all([self.snapshots.of(action.version)])

    @staticmethod
    async def _all(answers: Sequence["asyncio.Future[Any]"]) -> None:
        for answer in answers:
            await asyncio.shield(answer)
