"""The workers of a run: started together, checked, replaced when lost, ended together."""

import asyncio
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any

from bidirl.errors import RunFault
from bidirl.executor.backends import CallFailed
from bidirl.executor.backends.links import Link, Transport
from bidirl.executor.backends.messages import Message, Role
from bidirl.executor.backends.watchdog import Patience, watch_workers

__all__ = ["Crew", "MakeTransport"]

MAX_CRASHES = 5
"""Losses of one replica that a run gets over; more is a broken machine or a bug, and ends it."""
OPEN_S = 300.0
"""Seconds that all workers get to build their roles: loading a large model takes minutes."""

MakeTransport = Callable[[int, Role], Transport]
"""Returns what reaches a worker, by its number and its pool's role."""


class Crew:
    """Links by number: first those of the rollout pool, then those of the training pool."""

    def __init__(
        self,
        count: int,
        num_rollout: int,
        transports: MakeTransport,
        heard: Callable[[int, Message], None],
        lost: Callable[[int, str], None],
    ) -> None:
        """Take what to do with a worker's messages, and with the news that it is gone."""
        self._num_rollout = num_rollout
        self._transports = transports
        self._heard = heard
        self._lost = lost
        self.links: list[Link] = [self._link(number) for number in range(count)]
        self.about: list[dict[str, Any]] = []
        """What each worker said of itself."""
        self.fresh: set[int] = set()
        """Workers of a resumed run that are new although the scheduler hears that they were lost."""
        self.patience = Patience()
        self._watching: asyncio.Task[None] | None = None
        self._crashes = [0] * count
        self._base_s = 0.0
        self._closing: set[asyncio.Task[None]] = set()

    def _link(self, number: int) -> Link:
        role = Role.ROLLOUT if number < self._num_rollout else Role.TRAIN
        return Link(self._transports(number, role), partial(self._heard, number), partial(self._gone, number))

    def _gone(self, number: int, reason: str) -> None:
        self._crashes[number] += 1
        self._lost(number, reason)

    def wears_out(self, number: int) -> bool:
        """Return whether a worker was lost too often to be replaced once more."""
        return self._crashes[number] > MAX_CRASHES

    async def open(self) -> None:
        """Start all workers.

        Raises:
            RunFault: one does not start, or two sit on one device.
        """
        for link in self.links:
            link.open()
        try:
            async with asyncio.timeout(OPEN_S):
                self.about = await asyncio.gather(*[link.greet() for link in self.links])
        except TimeoutError:
            raise RunFault(f"workers did not start within {OPEN_S:g} s: look at the device's load") from None
        except CallFailed as error:
            raise RunFault(f"a worker did not start: {error}") from error
        self._check_devices()
        self._watching = asyncio.get_running_loop().create_task(watch_workers(self.links, self.patience))

    def _check_devices(self) -> None:
        """Raise ``RunFault`` if two workers use one device, whatever the placement said."""
        owner: dict[str, int] = {}
        for number, about in enumerate(self.about):
            for device in about["devices"]:
                if device in owner:
                    raise RunFault(
                        f"workers {owner[device]} and {number} both use device {device}: give each its own"
                    )
                owner[device] = number

    def start_clock(self, now_s: float) -> None:
        """Let workers' times be counted so that the present is ``now_s``."""
        self._base_s = monotonic() - now_s

    def time(self, number: int, worker_s: float) -> float:
        """Return a worker's time as the run's."""
        return max(0.0, worker_s + self.links[number].offset_s - self._base_s)

    def retire(self, number: int) -> None:
        """End a lost worker, without waiting for it."""
        if number in self.fresh:
            return
        link = self.links[number]
        link.broken = link.broken or "it did not answer"
        task = asyncio.get_running_loop().create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def replace(self, number: int) -> None:
        """Put a new worker in the place of a lost one; CallFailed if it does not start."""
        if number in self.fresh:
            self.fresh.discard(number)
            return
        link = self.links[number] = self._link(number)
        link.open()
        try:
            async with asyncio.timeout(OPEN_S):
                self.about[number] = await link.greet()
        except TimeoutError:
            raise CallFailed(f"worker {number} did not start within {OPEN_S:g} s") from None

    async def close(self) -> None:
        """End all workers and wait for it."""
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.gather(*[link.close() for link in self.links], *self._closing)
