"""The workers of a job at hand for single measurements: generate, pull, sync, change roles."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic
from typing import Any

import numpy as np

from bidirl.errors import RunFault
from bidirl.executor.backends.assemble import Assembly
from bidirl.executor.backends.links import Link
from bidirl.executor.backends.messages import Message, Pull, Role, Snapshot
from bidirl.executor.backends.vllm.meter import Iteration
from bidirl.executor.roles import Draft, Row
from bidirl.executor.validate_observe import Timing
from bidirl.planner.events import Direction, SegmentKind
from bidirl.planner.plan import Plan

__all__ = ["Session", "session"]

OPEN_S = 300.0
CELL_S = 120.0
"""Seconds that one measurement may take before a worker counts as stuck."""


class Session:
    """All workers of a plan in their own roles, each measurement on every worker that would do it in a run.

    Results are throw-away: advantages are zero, so that no weight moves.
    """

    def __init__(self, plan: Plan, made: Assembly, vocab_size: int, seed: int) -> None:
        self.plan = plan
        self.vocab_size = vocab_size
        self.timings: list[Timing] = []
        self._rng = np.random.default_rng(seed)
        self._num_rollout = plan.rollout_replicas
        count = plan.rollout_replicas + plan.train_replicas
        self._ended: list[int] = [0] * count
        self._news = asyncio.Event()
        self._broken = ""
        self.links = [self._link(made, number) for number in range(count)]
        self._version = self._group = self._step = 0

    def _link(self, made: Assembly, number: int) -> Link:
        role = Role.ROLLOUT if number < self._num_rollout else Role.TRAIN
        return Link(made.transports(number, role), partial(self._heard, number), self._lost)

    def _heard(self, number: int, message: Message) -> None:
        self._ended[number] += len(message.ended)
        self._news.set()

    def _lost(self, reason: str) -> None:
        self._broken = reason
        self._news.set()

    @property
    def rollouters(self) -> range:
        """Return the workers of the rollout pool."""
        return range(self._num_rollout)

    @property
    def trainers(self) -> range:
        """Return the workers of the training pool; the first owns the optimizer."""
        return range(self._num_rollout, len(self.links))

    async def open(self) -> None:
        """Start the workers and wait for all."""
        for link in self.links:
            link.open()
        try:
            async with asyncio.timeout(OPEN_S):
                await asyncio.gather(*[link.greet() for link in self.links])
        except TimeoutError:
            raise RunFault(f"workers did not start within {OPEN_S:g} s: look at the device's load") from None

    async def close(self) -> None:
        """End the workers."""
        await asyncio.gather(*[link.close() for link in self.links], return_exceptions=True)

    # ------------------------------------------------------------------ primitives

    async def _all(self, workers: Sequence[int], name: str, *args: Any) -> list[Any]:
        async with asyncio.timeout(CELL_S):
            return list(await asyncio.gather(*[self.links[number].call(name, *args) for number in workers]))

    async def _timed(self, stage: str, workers: Sequence[int], name: str, *args: Any) -> list[Any]:
        """Give a command to workers at once, and time the answer of each."""

        async def one(number: int) -> Any:
            start_s = monotonic()
            value = await self.links[number].call(name, *args)
            self.timings.append(Timing(stage, self._step, number, start_s, monotonic() - start_s))
            return value

        async with asyncio.timeout(CELL_S):
            return list(await asyncio.gather(*[one(number) for number in workers]))

    def _draft(self, prompt_tokens: int, response_tokens: int, *, generated: int) -> Draft:
        self._group += 1
        prompt, tokens = (
            self._rng.integers(0, self.vocab_size, num).astype(np.int32) for num in (prompt_tokens, generated)
        )
        logprobs = np.full(generated, -np.log(self.vocab_size), np.float32)
        return Draft(self._group, 0, prompt, self._group, response_tokens, tokens, logprobs)

    # ------------------------------------------------------------------ measurements

    async def generate(
        self, num_seqs: int, prompt_tokens: int, num_iterations: int
    ) -> list[tuple[Iteration, ...]]:
        """Generate on all rollouters at once; return the iterations of each."""
        before = list(self._ended)
        await self._all(self.rollouters, "iterations")
        for number in self.rollouters:
            drafts = tuple(self._draft(prompt_tokens, num_iterations, generated=0) for _ in range(num_seqs))
            self.links[number].call("submit", drafts)
        async with asyncio.timeout(CELL_S):
            while any(self._ended[number] - before[number] < num_seqs for number in self.rollouters):
                if self._broken:
                    raise RunFault(f"a worker is gone: {self._broken}")
                self._news.clear()
                await self._news.wait()
        return [tuple(found) for found in await self._all(self.rollouters, "iterations")]

    async def pull(
        self, kind: SegmentKind, num_samples: int, total_tokens: int, *, worker: int | None = None
    ) -> Timing:
        """Run one pull on a worker (the first trainer, unless told) and keep its time."""
        number = self.trainers[0] if worker is None else worker
        self._step += 1
        prompt = max(1, total_tokens // 4)
        drafts = [
            self._draft(prompt, total_tokens - prompt, generated=total_tokens - prompt)
            for _ in range(num_samples)
        ]
        rows = tuple(Row(draft, 0.0, 0.0, old=draft.logprobs, reference=draft.logprobs) for draft in drafts)
        num_tokens = sum(len(draft.tokens) for draft in drafts)
        pull = Pull(self._step, 0, kind, ((0, rows),), num_tokens, num_samples)
        longest = self.plan.models.trainer.sample_work(float(total_tokens))
        start_s = monotonic()
        await self._all((number,), "run", pull)
        timing = Timing(
            kind.value, self._step, 0, start_s, monotonic() - start_s, longest * num_samples, longest
        )
        if number == self.trainers[0]:
            self.timings.append(timing)
            if kind is SegmentKind.UPDATE:
                await self._timed("optimizer", (number,), "apply", self._step, 0, [], (0,))
            else:
                await self._all((number,), "fetch", self._step, 0, (0,))
        return timing

    async def snapshot(self) -> Snapshot:
        """Return the first trainer's weights."""
        found: Snapshot = (await self._all(self.trainers[:1], "snapshot", False))[0]
        return found

    async def _forget(self, snapshot: Snapshot) -> None:
        await self._all(self.trainers[:1], "forget", snapshot.handle)

    async def sync(self) -> None:
        """Bring the weights from the trainer to all rollouters."""
        self._version += 1
        weights = self.links[self.trainers[0]].call("snapshot", False)
        await self._timed("sync", self.rollouters, "sync", self._version, weights, False)
        await self._forget(await weights)
        await self._all(self.rollouters, "resume")

    async def lend(self, direction: Direction) -> None:
        """Let one pool play the other role and come back; a borrowed trainer hands over a gradient."""
        workers = self.trainers if direction is Direction.ROLLOUT_ON_TRAIN else self.rollouters
        role = Role.ROLLOUT if direction is Direction.ROLLOUT_ON_TRAIN else Role.TRAIN
        weights = self.links[self.trainers[0]].call("snapshot", False)
        await self._timed(f"{direction}_in", workers, "enter", role, self._version, weights)
        if direction is Direction.TRAIN_ON_ROLLOUT:
            await self.pull(SegmentKind.UPDATE, 1, 2, worker=workers[0])
            await self._timed("merge", workers[:1], "fetch", self._step, 0, (0,))
            updated = await self.snapshot()
            await self._timed("broadcast", workers[:1], "load_trainer", updated)
            await self._forget(updated)
        await self._timed(f"{direction}_out", workers, "leave")
        await self._forget(await weights)


@asynccontextmanager
async def session(plan: Plan, made: Assembly, vocab_size: int, seed: int) -> AsyncIterator[Session]:
    """Open the workers of a plan, and end them whatever happens."""
    opened = Session(plan, made, vocab_size, seed)
    try:
        await opened.open()
        yield opened
    finally:
        await opened.close()
