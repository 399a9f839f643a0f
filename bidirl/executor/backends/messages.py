"""What workers and the control plane say to each other; plain values that any transport can carry."""

import traceback
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from bidirl.executor.backends import CallFailed
from bidirl.executor.roles import Draft

__all__ = [
    "LocalPost",
    "Message",
    "Post",
    "Problem",
    "Pull",
    "Pulse",
    "Role",
    "Snapshot",
    "WorkerLost",
    "one_line",
    "out_of_memory",
]


class Role(StrEnum):
    """Which of its two roles a worker plays."""

    ROLLOUT = "rollout"
    TRAIN = "train"


class WorkerLost(CallFailed):
    """The worker is gone, or broken beyond use; the text starts with the root cause."""


class Post(Protocol):
    """How bulk data (weights, gradients) goes from one worker to another, past the control plane."""

    def put(self, value: Any, *, once: bool = False) -> Any:
        """Leave a value to be fetched, as often as wanted or ``once``; return a handle for messages."""
        ...

    def get(self, handle: Any) -> Any:
        """Fetch a value; CallFailed if it was dropped, its holder is gone, or it does not come in time."""
        ...

    def drop(self, handle: Any) -> None:
        """Forget a value that was put here."""
        ...

    def drop_unclaimed(self) -> None:
        """Forget what was put here to be fetched once and was not."""
        ...

    def close(self) -> None:
        """Forget everything, and leave no thread."""
        ...


class LocalPost:
    """Workers of one process: the handle is the value. Nobody writes into what was put."""

    def put(self, value: Any, *, once: bool = False) -> Any:
        del once
        return value

    def get(self, handle: Any) -> Any:
        return handle

    def drop(self, handle: Any) -> None:
        """Do nothing: nothing is kept."""

    def drop_unclaimed(self) -> None:
        """Do nothing: nothing is kept."""

    def close(self) -> None:
        """Do nothing: there is no thread."""


@dataclass(frozen=True, slots=True)
class Problem:
    """An error on its way from a worker to the control plane."""

    text: str
    """One line, the cause first."""
    is_fatal: bool
    """Whether the worker is of no more use."""


@dataclass(slots=True)
class Message:
    """What a worker reports, in the order in which it happened."""

    answer_to: int | None = None
    """Number of the command that it answers; None: nobody asked."""
    value: Any = None
    problem: Problem | None = None
    ended: list[Draft] = field(default_factory=list)
    """Samples that ended; ``finish_s`` is the worker's clock."""
    busy: list[tuple[float, float]] = field(default_factory=list)
    """Intervals of generation since the last message, the worker's clock."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The weights of one moment."""

    handle: Any
    digest: str
    """SHA-256 of the weights, empty where nobody wanted it."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Pull:
    """Chunks that one worker runs in one go: (chunk, rows), with the counts of their mini-batch."""

    step: int
    segment: int
    kind: str
    chunks: tuple[tuple[int, tuple[Any, ...]], ...]
    num_tokens: int
    num_sequences: int


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a worker's thread is at, told by another thread of its process."""

    doing: str
    """A command, ``STEP`` or ``OPEN``; empty: it waits for something to do."""
    for_s: float
    """Seconds since it began that."""
    where: str
    """The innermost calls, outermost first."""


def one_line(error: BaseException) -> str:
    """Return an error as one line, the root cause first."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    lines = str(root).strip().splitlines()
    text = f"{type(root).__name__}: {lines[0]}" if lines else type(root).__name__
    frames = traceback.extract_tb(root.__traceback__)
    return f"{text} ({frames[-1].name}:{frames[-1].lineno})" if frames else text


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out: Python's, torch's, or an engine's in words."""
    name = type(error).__name__
    return isinstance(error, MemoryError) or "OutOfMemory" in name or "out of memory" in str(error).lower()
