"""What a driver asks of a backend: the devices, engines and trainers that carry actions out.

*Commands are given in order, answers come when they come.* A method that returns an ``Awaitable`` must have
queued its command before it returns (a Ray actor call does; a plain ``async def`` does not), so commands to
one replica take effect in the order in which they were given. An answer that raises ``CallFailed`` is a
fault that the scheduler gets over; any other exception is a bug and ends the run.
"""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bidirl.planner.events import (
    BeginLease,
    Broadcast,
    EndLease,
    Merge,
    OptimizerStep,
    Preempt,
    Publish,
    RequestProgress,
    RestartReplica,
    ScoreGroup,
    StartChunks,
    StartSamples,
    SyncReplica,
)

__all__ = ["Backend", "CallFailed", "Counters", "Ended", "Listener", "Taken"]


class CallFailed(Exception):
    """A backend could not do what it was asked to do; the scheduler tries again or goes another way.

    ``since_s`` of a failed sync is when the replica had paused, where that is known.
    """

    def __init__(self, reason: str, *, since_s: float | None = None) -> None:
        super().__init__(reason)
        self.since_s = since_s


@dataclass(frozen=True, slots=True)
class Ended:
    """A finished sample."""

    group: int
    index: int
    tokens: int
    """Response tokens."""
    prompt_tokens: int
    finish_s: float
    version: int
    """Version that gave its last token."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What a preemption took off a replica."""

    unfinished: tuple[tuple[int, int, int], ...]
    """(group, index, generated tokens)."""
    ended: tuple[Ended, ...]
    """Samples that had ended and were not collected."""
    version: int
    """Version that gave the unfinished samples their last tokens."""


@dataclass(frozen=True, slots=True)
class Counters:
    """What all engines have done so far."""

    decode_tokens: int = 0
    recomputed_tokens: int = 0
    recompute_s: float = 0.0


class Listener(Protocol):
    """Where a backend reports what it was not asked for; the driver."""

    def ready(self, replica: int, group: int) -> None:
        """Say that the samples of ``group`` on ``replica`` have ended and wait to be collected.

        One group a replica at a time: a later call takes the place of an earlier one that was not collected.
        """
        ...

    def lost(self, replica: int) -> None:
        """Say that a rollout replica is gone."""
        ...

    def side_lost(self) -> None:
        """Say that the auxiliary trainer side is gone."""
        ...

    def broken(self, error: BaseException) -> None:
        """Say that the run cannot go on: the primary trainer is gone, for one."""
        ...

    def chunk_groups(self, first: int, last: int) -> Sequence[Sequence[int]]:
        """Return the groups of chunks ``first .. last - 1`` of the step in progress, chunk by chunk."""
        ...

    def segment_chunks(self, segment: int) -> tuple[int, int]:
        """Return the chunks ``(first, last + 1)`` of a segment of the step in progress."""
        ...


class Backend(Protocol):
    """Devices with engines and trainers. Sides and replicas are numbered as in ``planner.events``."""

    async def open(self, listener: Listener) -> None:
        """Get all replicas and the trainer ready, holding version 0."""
        ...

    async def close(self) -> None:
        """Stop everything; legal at any time, also when ``open`` failed."""
        ...

    # ------------------------------------------------------------------ rollout

    def describe(self, group: int) -> tuple[int, Sequence[int]]:
        """Return a group's prompt tokens and its samples' response tokens (0 where not known before)."""
        ...

    def start_samples(self, action: StartSamples) -> None:
        """Queue samples on a replica."""
        ...

    def collect(self, replica: int, group: int) -> tuple[Ended, ...] | None:
        """Hand over the ended samples of an announced group, by index; None if they are not there now."""
        ...

    def preempt(self, action: Preempt) -> Awaitable[Taken]:
        """Take groups off a replica at its next iteration boundary."""
        ...

    def progress(self, action: RequestProgress) -> Awaitable[Sequence[tuple[int, int, int]]]:
        """Return (group, index, generated tokens) of the unfinished samples."""
        ...

    def score(self, action: ScoreGroup) -> Awaitable[bool]:
        """Compute rewards; the answer says whether the group is filtered (all rewards equal)."""
        ...

    def drop(self, group: int) -> None:
        """Forget a group that will never be trained."""
        ...

    def sync(self, actions: Sequence[SyncReplica]) -> Sequence[Awaitable[float]]:
        """Pause replicas and load one version into each; per replica, when it had paused (seconds)."""
        ...

    def resume(self, action: SyncReplica, *, applied: bool) -> None:
        """Let a replica go on after its sync, under the new version or, if it failed, under the old one."""
        ...

    def discard(self, replica: int) -> None:
        """Clear away what is left of a lost replica."""
        ...

    def restart(self, action: RestartReplica) -> Awaitable[None]:
        """Bring a lost replica's engine back, empty."""
        ...

    def join(self, replica: int, version: int) -> None:
        """Load a version into a restarted replica, before any later command to it."""
        ...

    def take_busy(self, replica: int) -> Sequence[tuple[float, float]]:
        """Return and forget the intervals in which a replica generated, up to its last command."""
        ...

    def stop(self, replica: int) -> None:
        """Stop a replica's engine at the end of the run."""
        ...

    def counters(self) -> Counters:
        """Return the sums over all engines, lost ones included."""
        ...

    # ----------------------------------------------------------------- training

    def run_chunks(self, action: StartChunks) -> Awaitable[None]:
        """Run a pull on a side."""
        ...

    def merge(self, action: Merge) -> Awaitable[None]:
        """Bring the auxiliary side's results to the primary trainer, in chunk order."""
        ...

    def optimizer_step(self, action: OptimizerStep) -> Awaitable[None]:
        """Apply the merged gradient."""
        ...

    def broadcast(self, action: Broadcast) -> Awaitable[None]:
        """Give updated weights to the auxiliary side."""
        ...

    def publish(self, action: Publish) -> Awaitable[None]:
        """Put a version where replicas can take it later."""
        ...

    # ------------------------------------------------------------------- leases

    def enter(self, action: BeginLease) -> Awaitable[None]:
        """Let the devices of a lease take the other role, auxiliary rollouters with ``action.version``."""
        ...

    def leave(self, action: EndLease, *, entered: bool) -> Awaitable[None]:
        """Give the devices back; not ``entered``: while they still change role (that call is cancelled)."""
        ...
