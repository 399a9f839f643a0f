"""What one worker process can do in each of its two roles, without any word of how workers are reached.

A *worker* owns the devices of one replica. It holds an ``Engine`` (rollout role) and a ``Trainer`` (training
role), one awake at a time. Both are plain objects that are called from one thread; the control plane decides
which process they live in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bidirl.planner.events import SegmentKind

__all__ = ["Capabilities", "Draft", "Engine", "NamedTensors", "Piece", "Row", "Trainer"]

NamedTensors = Iterator[tuple[str, Any]]
"""Names of the Hugging Face checkpoint and torch tensors; ``Any`` keeps torch out of this module."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine really does on the device at hand; reports quote it."""

    sleep_frees_memory: bool
    native_seed_resumes: bool
    """Whether a per-request seed gives the same tokens after a resume."""
    batch_invariant: bool
    """Whether a sample's log-probabilities do not depend on its neighbours, to the last bit."""
    device: str


@dataclass(slots=True)
class Draft:
    """A sample on its way: what was generated so far, by which versions, and how it goes on.

    ``tokens`` and ``logprobs`` (float32, of the untempered policy) are of the response only and of one
    length. ``segments`` holds (first response token, version) in order. ``finish_s`` is 0 until it ended.
    """

    group: int
    index: int
    prompt: NDArray[np.int32]
    seed: int
    """Key of the position-keyed sampling: with it, token and position decide the noise."""
    max_tokens: int
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    segments: tuple[tuple[int, int], ...] = ()
    finish_s: float = 0.0
    truncated: bool = False


class Engine(Protocol):
    """The rollout role: one inference engine, driven step by step."""

    @property
    def capabilities(self) -> Capabilities:
        """What it does on this device."""
        ...

    @property
    def version(self) -> int:
        """Version of the weights that it runs."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Samples that it holds, waiting ones included."""
        ...

    def submit(self, drafts: Sequence[Draft]) -> None:
        """Queue samples, fresh or with a prefix of response tokens to continue."""
        ...

    def step(self) -> list[Draft]:
        """Run one iteration; return the samples that ended in it."""
        ...

    def preempt(self, groups: Sequence[int]) -> list[Draft]:
        """Take the samples of some groups off, with the tokens that they have."""
        ...

    def progress(self) -> list[tuple[int, int, int]]:
        """Return (group, index, response tokens) of every sample that it holds."""
        ...

    def load(self, version: int, tensors: NamedTensors) -> float:
        """Replace the weights, forget cached prefixes, stamp the version last; return the seconds taken."""
        ...

    def sleep(self, level: int) -> None:
        """Give device memory up as far as the device allows (1: weights to the host, 2: drop them)."""
        ...

    def wake(self) -> None:
        """Take it back; after level 2 the weights must be loaded before the next step."""
        ...

    def close(self) -> None:
        """Stop it and free what it holds."""
        ...


@dataclass(frozen=True, slots=True)
class Row:
    """One sample as the trainer sees it."""

    draft: Draft
    reward: float
    advantage: float
    weight: float = 1.0
    """0 leaves the sample out of the loss and of the counts (filtered groups in pinned mode)."""
    old: NDArray[np.float32] | None = None
    """Result of the old-logprob segment for this sample, where the step has one."""
    reference: NDArray[np.float32] | None = None
    """Result of the reference segment, where the step has one."""


@dataclass(slots=True)
class Piece:
    """What one chunk gave on the worker that ran it.

    ``logprobs`` (old-logprob and reference segments): per row, float32 of the response tokens.
    ``gradient`` (update): one flat float32 array (float64 where summation is exact) in the order of the
    model's parameters; sums of loss terms over tokens, *already divided* by the mini-batch's global count.
    """

    chunk: int
    logprobs: list[NDArray[np.float32]] = field(default_factory=list)
    gradient: Any = None
    stats: dict[str, float] = field(default_factory=dict)
    """Sums over tokens (loss, ratio, clip count, mismatch, ...), never means: sums can be merged."""


class Trainer(Protocol):
    """The training role: one torch replica."""

    def run(
        self, kind: SegmentKind, chunk: int, rows: Sequence[Row], *, num_tokens: int, num_sequences: int
    ) -> Piece:
        """Run one chunk of a segment; the counts are those of the whole mini-batch."""
        ...

    def logprobs(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """Return the log-probabilities of the response tokens under the present weights."""
        ...

    def digest(self) -> str:
        """Return the SHA-256 of the weights; equal digests mean equal weights, bit for bit."""
        ...

    def apply(self, gradients: Sequence[Any]) -> dict[str, float]:
        """Add gradients in the given order and take one optimizer step; return its statistics."""
        ...

    def tensors(self) -> NamedTensors:
        """Return the weights under their checkpoint names; views, not copies."""
        ...

    def load(self, tensors: NamedTensors) -> None:
        """Replace the weights (not the optimizer's state)."""
        ...

    def save(self, folder: str) -> None:
        """Write weights and optimizer state, atomically."""
        ...

    def restore(self, folder: str) -> None:
        """Read what ``save`` wrote."""
        ...

    def sleep(self) -> None:
        """Give device memory up."""
        ...

    def wake(self) -> None:
        """Take it back."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...
