"""The language in which a framework's log is described: a table of keys and what they mean, no code.

A *dialect* is one way in which one framework logs: which keys prove it, which raw keys make which column of
``COLUMNS`` (or an extra column with its unit in the name), what one row is, and what a reader must know. To
add a framework, write its dialects as in the modules of ``bidirl.traces.logs.dialects`` and name them in
``dialects/__init__.py``; the line formats (``key:value`` lines, dicts, bullets, boxes, ``key = value``, CSV,
JSON lines, TensorBoard) are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bidirl.traces.step_log import Mode

__all__ = [
    "Column",
    "Dialect",
    "Findings",
    "First",
    "Less",
    "Mean",
    "Periodic",
    "Raw",
    "Scaled",
    "Sum",
    "Term",
    "evaluate",
    "keys_of",
]

Column = NDArray[np.float64]
Raw = Mapping[str, Column]
"""Columns of a run by their raw keys; NaN where a row lacks the key."""


@dataclass(frozen=True)
class First:
    """The first of several names of one quantity that a row has."""

    keys: tuple[str, ...]

    def __init__(self, *keys: str) -> None:
        object.__setattr__(self, "keys", keys)


@dataclass(frozen=True)
class Periodic:
    """A timer that only some steps have (validation, checkpoints): elsewhere it took no time."""

    term: Term


@dataclass(frozen=True)
class Sum:
    """A sum; a term that no row has is left out, a row that lacks a term that others have has no sum."""

    terms: tuple[Term, ...]

    def __init__(self, *terms: Term) -> None:
        object.__setattr__(self, "terms", terms)


@dataclass(frozen=True)
class Less:
    """A timer without the timers nested in it; a row that lacks a part that others have has no value."""

    whole: Term
    parts: tuple[Term, ...]

    def __init__(self, whole: Term, *parts: Term) -> None:
        object.__setattr__(self, "whole", whole)
        object.__setattr__(self, "parts", parts)


@dataclass(frozen=True)
class Scaled:
    """A quantity in another unit: value times ``factor``."""

    term: Term
    factor: float


@dataclass(frozen=True)
class Mean:
    """A total divided by a count, both from one row."""

    total: Term
    count: Term


Term = str | First | Sum | Less | Periodic | Scaled | Mean


@dataclass(frozen=True)
class Dialect:
    """One way of one framework to log its steps."""

    framework: str
    variant: str
    """Told apart by ``evidence``; empty where a framework has only one."""
    mode: Mode
    step_unit: str
    """What one row is."""
    evidence: tuple[str, ...]
    """Any of these keys proves the dialect; one that ends in ``/`` or ``*`` stands for all that begin so."""
    columns: Mapping[str, Term]
    ignored: tuple[str, ...] = ()
    """Known keys (or beginnings, as in ``evidence``) that say nothing about time and length."""
    notes: tuple[str, ...] = ()
    """What a reader must know whenever this dialect is met."""
    step_keys: tuple[str, ...] = ()
    """Keys that hold the step where the line itself has none."""
    checks: tuple[Callable[[Findings], None], ...] = ()
    """Repairs that a table of keys cannot express; see ``checks.py``."""
    reads: tuple[str, ...] = ()
    """Further raw keys that the checks read."""
    split_files: bool = False
    """Whether one run writes several files (orchestrator and trainer) that are merged by step."""


@dataclass
class Findings:
    """What is known of a run while it is assembled; ``checks`` change it."""

    raw: Raw
    columns: dict[str, Column]
    mode: Mode
    facts: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def keys_of(term: Term) -> Iterator[str]:
    """Yield the raw keys that a term reads."""
    match term:
        case str():
            yield term
        case First(keys=keys):
            yield from keys
        case Sum(terms=terms):
            for each in terms:
                yield from keys_of(each)
        case Less(whole=whole, parts=parts):
            for each in (whole, *parts):
                yield from keys_of(each)
        case Scaled(term=inner) | Periodic(term=inner):
            yield from keys_of(inner)
        case Mean(total=total, count=count):
            yield from keys_of(total)
            yield from keys_of(count)


def evaluate(term: Term, raw: Raw, num_rows: int) -> Column:
    """Return a term's value for each row, NaN where it has none."""
    match term:
        case str():
            return raw[term] if term in raw else np.full(num_rows, np.nan)
        case First(keys=keys):
            value = np.full(num_rows, np.nan)
            for key in reversed(keys):
                if key in raw:
                    value = np.where(np.isnan(raw[key]), value, raw[key])
            return value
        case Sum(terms=terms):
            parts = np.array([_filled(each, raw, num_rows) for each in terms])
            has_any = np.isfinite([evaluate(each, raw, num_rows) for each in terms]).any(axis=0)
            return np.where(has_any, parts.sum(axis=0), np.nan)
        case Less(whole=whole, parts=parts):
            nested = [_filled(each, raw, num_rows) for each in parts]
            return np.asarray(evaluate(whole, raw, num_rows) - np.sum(nested, axis=0))
        case Periodic(term=inner):
            return evaluate(inner, raw, num_rows)
        case Scaled(term=inner, factor=factor):
            return evaluate(inner, raw, num_rows) * factor
        case Mean(total=total, count=count):
            with np.errstate(divide="ignore", invalid="ignore"):
                value = evaluate(total, raw, num_rows) / evaluate(count, raw, num_rows)
            return np.asarray(np.where(np.isfinite(value), value, np.nan))


def _filled(term: Term, raw: Raw, num_rows: int) -> Column:
    """Return a part of a sum: 0 where it took no time, NaN where a row should have it and does not."""
    value = evaluate(term, raw, num_rows)
    if isinstance(term, Periodic) or not np.isfinite(value).any():
        return np.asarray(np.nan_to_num(value))
    return value
