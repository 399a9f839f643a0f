"""Weights that somebody may still ask for, by version, and those between two publications."""

import asyncio
from collections.abc import Callable

from bidirl.errors import InvariantBroken
from bidirl.executor.backends.messages import Snapshot

__all__ = ["Snapshots"]


class Snapshots:
    """A snapshot is asked for once, right after the update that made the weights, and kept while needed."""

    def __init__(self, take: Callable[[], "asyncio.Future[Snapshot]"]) -> None:
        """Take what asks the primary trainer for its present weights, in order with its other commands."""
        self._take = take
        self._versions: dict[int, asyncio.Future[Snapshot]] = {}
        self._present: asyncio.Future[Snapshot] | None = None
        self.digests: dict[int, str] = {}
        """Version -> SHA-256 of its weights, where hashing is on."""

    def publish(self, version: int) -> "asyncio.Future[Snapshot]":
        """Keep the trainer's present weights under a version."""
        future = self._versions[version] = self.present()
        future.add_done_callback(lambda done: self._note(version, done))
        return future

    def _note(self, version: int, done: "asyncio.Future[Snapshot]") -> None:
        if not done.cancelled() and done.exception() is None and done.result().digest:
            self.digests[version] = done.result().digest

    def present(self) -> "asyncio.Future[Snapshot]":
        """Return the trainer's present weights."""
        if self._present is None:
            self._present = self._take()
        return self._present

    def updated(self) -> None:
        """Note that the trainer's weights have changed."""
        self._present = None

    def of(self, version: int) -> "asyncio.Future[Snapshot]":
        """Return the weights of a version.

        Raises:
            InvariantBroken: nobody could need it any more, or it was never published.
        """
        future = self._versions.get(version)
        if future is None:
            raise InvariantBroken(f"version {version} was asked for, there are {sorted(self._versions)}")
        return future

    def restore(self, version: int, future: "asyncio.Future[Snapshot]") -> None:
        """Take weights that a checkpoint had for a version."""
        self._versions[version] = future
        future.add_done_callback(lambda done: self._note(version, done))

    def forget_before(self, version: int) -> None:
        """Drop all older versions."""
        for old in [number for number in self._versions if number < version]:
            del self._versions[old]

    def held(self) -> list[int]:
        """Return the versions that are kept, oldest first."""
        return sorted(self._versions)
