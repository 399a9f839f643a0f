"""Group the rows of ``sweep.csv`` into cells (one per combination of the varied keys) with values by seed."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = [
    "BASELINES",
    "Cell",
    "Ratio",
    "cells_of",
    "is_numeric",
    "name_of",
    "policy_key",
    "ratio",
    "values_of",
]

Row = Mapping[str, object]
Key = tuple[str, ...]

BASELINES = ("no_borrow", "colocated_sync", "verl_sync")
"""Policies that others are compared with, best first."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of the varied keys; ``by_seed`` lacks the seeds that gave no number."""

    key: Key
    by_seed: dict[str, float] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        """Return the mean over seeds; nan without any."""
        return statistics.fmean(self.by_seed.values()) if self.by_seed else math.nan

    @property
    def low(self) -> float:
        """Return the lowest seed; nan without any."""
        return min(self.by_seed.values(), default=math.nan)

    @property
    def high(self) -> float:
        """Return the highest seed; nan without any."""
        return max(self.by_seed.values(), default=math.nan)


@dataclass(frozen=True, slots=True)
class Ratio:
    """How one cell compares with another: mean, lowest and highest ratio over the seeds that both have."""

    mean: float
    low: float
    high: float
    num_seeds: int


def cells_of(rows: Sequence[Row], varied: Sequence[str], metric: str = "tokens_per_s") -> dict[Key, Cell]:
    """Collect the cells in the order of their first row; a cell without any number stays, empty."""
    cells: dict[Key, Cell] = {}
    for number, row in enumerate(rows):
        key = tuple(str(row[name]) for name in varied)
        cell = cells.setdefault(key, Cell(key))
        value = _number(row.get(metric))
        if value is not None:
            cell.by_seed[str(row.get("seed", number))] = value
    return cells


def ratio(one: Cell, other: Cell) -> Ratio | None:
    """Compare two cells seed by seed (same seed, same workload); None without a common seed."""
    common = [seed for seed in one.by_seed if other.by_seed.get(seed, 0.0) > 0.0]
    if not common:
        return None
    each = [one.by_seed[seed] / other.by_seed[seed] for seed in common]
    return Ratio(statistics.fmean(each), min(each), max(each), len(each))


def values_of(cells: Mapping[Key, Cell], index: int) -> list[str]:
    """Return the values of one varied key: numbers ascending, anything else in order of appearance."""
    values = list(dict.fromkeys(key[index] for key in cells))
    return sorted(values, key=float) if is_numeric(values) else values


def is_numeric(values: Sequence[str]) -> bool:
    """Tell whether every value is a finite number."""
    return all(_number(value) is not None for value in values)


def policy_key(varied: Sequence[str]) -> int | None:
    """Return the index of the varied key that names the policy, if any."""
    names = [index for index, key in enumerate(varied) if key in {"policy", "policy.name"}]
    return names[0] if names else None


def name_of(varied: Sequence[str], key: Key, skip: int | None = None) -> str:
    """Return ``key=value, ...`` of a cell, without the key at ``skip``; sections are left out."""
    pairs = zip(varied, key, strict=True)
    return ", ".join(f"{_short(name)}={value}" for index, (name, value) in enumerate(pairs) if index != skip)


def _short(name: str) -> str:
    """Return the last part of a dotted key; ``policy.name`` is ``policy``."""
    return "policy" if name == "policy.name" else name.rpartition(".")[2]


def _number(value: object) -> float | None:
    """Return a finite float, or None for anything else (an empty field of a failed cell, say)."""
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
