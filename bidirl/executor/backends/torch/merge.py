"""Bring the chunk gradients of both sides together: in chunk order, or as one sum a side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bidirl.errors import InputError, InvariantBroken
from bidirl.executor.backends.torch.settings import PlantedFault, Summation
from bidirl.executor.roles import Piece

__all__ = [
    "Gathered",
    "Gradient",
    "MergeKind",
    "add_up",
    "arrange",
    "as_array",
    "check_ordered_memory",
    "merge_stats",
]


class MergeKind(StrEnum):
    """How the gradients of a mini-batch's chunks are added up."""

    ORDERED = "ordered"
    """Each chunk's gradient is kept and added in chunk order: the same bits wherever a chunk ran."""
    ACCUMULATED = "accumulated"
    """Each side adds up its own, then primary + auxiliary: equal up to the order of summation."""


@dataclass(slots=True)
class Gradient:
    """The sum of some chunks' gradients, added in the order of ``chunks``; flat, float32 (exact: float64)."""

    chunks: tuple[int, ...]
    values: Any
    """A numpy array, a torch tensor where it lies on a device, or ``Shards`` where it lies on several."""


def as_array(values: Any) -> NDArray[Any]:
    """Return a gradient as a numpy array: a view of host memory, a copy from a device or from ranks."""
    if isinstance(values, np.ndarray):
        return values
    found: NDArray[Any] = values.whole() if hasattr(values, "whole") else values.detach().cpu().numpy()
    return found


@dataclass(slots=True)
class Gathered:
    """What one side holds of one update segment until it is merged."""

    kind: MergeKind
    gradients: list[Gradient] = field(default_factory=list)
    stats: dict[str, float] = field(default_factory=dict)

    def add(self, piece: Piece) -> None:
        """Take a chunk's gradient over; ``accumulated`` adds it into the side's sum, in place."""
        self.stats = merge_stats((self.stats, piece.stats))
        if self.kind is MergeKind.ACCUMULATED and self.gradients:
            total = self.gradients[0]
            if isinstance(total.values, np.ndarray) and not total.values.flags.writeable:
                total.values = total.values.copy()  # others may read it
            total.values += piece.gradient
            total.chunks = (*total.chunks, piece.chunk)
        else:
            self.gradients.append(Gradient((piece.chunk,), piece.gradient))


def arrange(
    kind: MergeKind,
    primary: Iterable[Gradient],
    auxiliary: Iterable[Gradient],
    chunks: Sequence[int],
    *,
    fault: PlantedFault = PlantedFault.NONE,
) -> list[Any]:
    """Return the gradients of all ``chunks`` in the order in which an optimizer step adds them.

    Raises ``InvariantBroken`` if a chunk is missing, foreign, or there twice.
    """
    both = [*primary, *auxiliary]
    held = [chunk for gradient in both for chunk in gradient.chunks]
    if sorted(held) != sorted(chunks):
        raise InvariantBroken(
            f"chunks {sorted(held)} are to be merged, the segment has {sorted(chunks)}: each counts once"
        )
    if kind is MergeKind.ORDERED:
        both.sort(key=lambda gradient: gradient.chunks)
    if fault is PlantedFault.REVERSED_MERGE:
        both.reverse()
    return [gradient.values for gradient in both]


def add_up(gradients: Sequence[Any]) -> NDArray[Any]:
    """Return the sum of gradients, added from the first to the last in their type; a fresh array."""
    total = as_array(gradients[0]).copy()
    for gradient in gradients[1:]:
        total += as_array(gradient)
    return total


def merge_stats(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add up statistics by name; names that end in ``_max`` keep the largest."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name not in total:
                total[name] = value
            else:
                total[name] = max(total[name], value) if name.endswith("_max") else total[name] + value
    return total


def check_ordered_memory(
    num_chunks: int, num_params: int, limit_bytes: float, summation: Summation = Summation.FLOAT32
) -> float:
    """Return the bytes that an ordered merge of a mini-batch keeps; raise ``InputError`` above the limit."""
    num_bytes = (8.0 if summation is Summation.EXACT else 4.0) * num_params * num_chunks
    if num_bytes > limit_bytes:
        raise InputError(
            f"merge = 'ordered' keeps {num_chunks} gradients of {num_params} parameters, "
            f"{num_bytes / 2**30:.1f} GiB, above the {limit_bytes / 2**30:.1f} GiB at hand: "
            "use 'accumulated' or fewer chunks"
        )
    return num_bytes
