"""Watch workers for what no answer tells: a process that is stopped, a call that never returns.

A worker's own thread may hang in a transfer, a kernel or a lock for ever. Another thread of its process then
still tells what it is at and since when; a process that is stopped, or whose machine is, tells nothing.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from bidirl.executor.backends import CallFailed
from bidirl.executor.backends.links import Link
from bidirl.executor.backends.messages import Pulse
from bidirl.executor.backends.worker import OPEN, STEP

__all__ = ["Patience", "watch_workers"]


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds after which a worker counts as lost; a loss is noticed ``every_s`` later at most."""

    every_s: float = 10.0
    """Between two looks."""
    silent_s: float = 120.0
    """Without any sign of life: far above what a process under load needs to answer."""
    step_s: float = 300.0
    """In one iteration of an engine, or one command to it: milliseconds where nothing is wrong."""
    train_s: float = 1800.0
    """In one chunk, update or other command to a trainer: PyTorch's own limit for a collective on a host.

    Source: PyTorch, torch/distributed/constants.py, ``default_pg_timeout``: 30 minutes.
    """

    def limit_s(self, doing: str) -> float:
        """Return how long a worker may be at one thing."""
        return self.step_s if doing in ENGINE else self.train_s


ENGINE = frozenset({STEP, "submit", "preempt", "progress", "sync", "resume", "hello"})
"""What only the engine works on."""


async def watch_workers(links: Sequence[Link], patience: Patience) -> None:
    """Take workers that hang as lost, until cancelled; ``links`` may change meanwhile."""
    watched: dict[int, asyncio.Task[None]] = {}
    try:
        while True:
            for number, link in enumerate(links):
                if link.broken is None and (number not in watched or watched[number].done()):
                    watched[number] = asyncio.ensure_future(_look(link, patience))
            await asyncio.sleep(patience.every_s)
    finally:
        for task in watched.values():
            task.cancel()


async def _look(link: Link, patience: Patience) -> None:
    """Look at a worker once; one that is still starting has a deadline of its own."""
    try:
        async with asyncio.timeout(patience.silent_s):
            pulse = await link.pulse()
    except TimeoutError:
        link.fail(f"no sign of life for {patience.silent_s:g} s: the process or its machine is stopped")
    except CallFailed:
        pass  # it has ended; who holds its process says why
    else:
        limit_s = patience.limit_s(pulse.doing)
        if pulse.doing not in ("", OPEN) and pulse.for_s > limit_s:
            link.fail(_hung(pulse, limit_s))


def _hung(pulse: Pulse, limit_s: float) -> str:
    return f"hangs in {pulse.doing} for {pulse.for_s:.0f} s (limit {limit_s:g} s), at {pulse.where}"
