"""Weights that somebody may still ask for, by version, and those between two publications."""

import asyncio
from collections.abc import Callable
from typing import Any

from bidirl.errors import InvariantBroken
from bidirl.executor.backends.messages import Snapshot

__all__ = ["Snapshots"]

Promise = asyncio.Future[Snapshot]


class Snapshots:
    """A snapshot is asked for once, right after the update that made the weights, and kept while needed.

    It is needed while it is a version's or the present one, and while a command that carries it is
    unanswered. Then its holder is told to forget it.
    """

    def __init__(self, take: Callable[[], Promise], forget: Callable[[Snapshot], object]) -> None:
        """Take what asks the primary trainer for its present weights and what tells it to forget some.

        Both queue a command behind the trainer's others.
        """
        self._take = take
        self._forget = forget
        self._versions: dict[int, Promise] = {}
        self._present: Promise | None = None
        self._uses: dict[Promise, int] = {}
        """Versions, the present, and unanswered commands that need each."""
        self.digests: dict[int, str] = {}
        """Version -> SHA-256 of its weights, where hashing is on."""

    def publish(self, version: int) -> Promise:
        """Keep the trainer's present weights under a version."""
        future = self.present()
        self.restore(version, future)
        return future

    def _note(self, version: int, done: Promise) -> None:
        if not done.cancelled() and done.exception() is None and done.result().digest:
            self.digests[version] = done.result().digest

    def present(self) -> Promise:
        """Return the trainer's present weights."""
        if self._present is None:
            self._present = self._take()
            self._use(self._present)
        return self._present

    def updated(self) -> None:
        """Note that the trainer's weights have changed."""
        if self._present is not None:
            self._release(self._present)
        self._present = None

    def of(self, version: int) -> Promise:
        """Return the weights of a version.

        Raises:
            InvariantBroken: nobody could need it any more, or it was never published.
        """
        future = self._versions.get(version)
        if future is None:
            raise InvariantBroken(f"version {version} was asked for, there are {sorted(self._versions)}")
        return future

    def restore(self, version: int, future: Promise) -> None:
        """Keep weights under a version: the present ones, or those that a checkpoint had."""
        self._use(future)
        if version in self._versions:
            self._release(self._versions[version])
        self._versions[version] = future
        future.add_done_callback(lambda done: self._note(version, done))

    def forget_before(self, version: int) -> None:
        """Drop all older versions."""
        for old in [number for number in self._versions if number < version]:
            self._release(self._versions.pop(old))

    def held(self) -> list[int]:
        """Return the versions that are kept, oldest first."""
        return sorted(self._versions)

    # ---------------------------------------------------------------- use

    def carried(self, snapshot: Promise, answer: "asyncio.Future[Any]") -> "asyncio.Future[Any]":
        """Keep weights until a command that carries them is answered; return its answer."""
        self._use(snapshot)
        answer.add_done_callback(lambda _: self._release(snapshot))
        return answer

    def _use(self, snapshot: Promise) -> None:
        self._uses[snapshot] = self._uses.get(snapshot, 0) + 1

    def _release(self, snapshot: Promise) -> None:
        self._uses[snapshot] -= 1
        if not self._uses[snapshot]:
            del self._uses[snapshot]
            snapshot.add_done_callback(self._no_longer_used)

    def _no_longer_used(self, snapshot: Promise) -> None:
        """Have it forgotten, unless somebody has begun to use it again before it was there."""
        if snapshot not in self._uses and not snapshot.cancelled() and snapshot.exception() is None:
            self._forget(snapshot.result())
