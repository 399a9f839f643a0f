"""From the raw rows of a run to its table: which framework, which dialect, which columns, which doubts."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from bidirl.traces.logs.checks import plausible
from bidirl.traces.logs.dialects import DIALECTS, FRAMEWORKS, dialects_of
from bidirl.traces.logs.rows import Rows
from bidirl.traces.logs.table import Column, Dialect, Findings, evaluate, keys_of
from bidirl.traces.step_log import COLUMNS, StepLog

__all__ = ["assemble", "detect", "with_facts"]

MAX_UNKNOWN = 200
"""Unknown keys listed of one run."""


def _evidence(dialect: Dialect, keys: Iterable[str]) -> str | None:
    for mark in dialect.evidence:
        if mark.endswith(("/", "*")):
            found = next((key for key in sorted(keys) if key.startswith(mark.rstrip("*"))), None)
        else:
            found = mark if mark in keys else None
        if found is not None:
            return found
    return None


def detect(keys: frozenset[str], framework: str = "auto") -> tuple[Dialect, str] | None:
    """Return the dialect that a set of raw keys is written in and the key that proves it.

    Of several frameworks the one wins that reads most of the keys; within it the first dialect in the table
    with evidence. A framework that the user names needs no evidence, only keys that it reads.
    """
    best: tuple[int, Dialect, str] | None = None
    for name in FRAMEWORKS if framework == "auto" else (framework,):
        for dialect in dialects_of(name):
            proof = _evidence(dialect, keys)
            if proof is None:
                continue
            read = {key for term in dialect.columns.values() for key in keys_of(term)}
            score = len(read & keys)
            if best is None or score > best[0]:
                best = (score, dialect, proof)
            break
    if best is None and framework != "auto":
        dialect = dialects_of(framework)[-1]
        if any(key in keys for term in dialect.columns.values() for key in keys_of(term)):
            return dialect, "--format"
    return None if best is None else best[1:]


def assemble(rows: Rows, source: str, framework: str = "auto") -> StepLog | None:
    """Return the table of a run; None if no framework's quantities are in it."""
    raw: Mapping[str, Column] = rows.columns()
    found = detect(frozenset(raw) | frozenset(rows.seen), framework)
    if found is None or not len(rows):
        return None
    dialect, proof = found
    num_rows = len(rows)
    steps = np.array(rows.steps)
    for key in dialect.step_keys:
        if key in raw:
            steps = np.where(np.isnan(steps), raw[key], steps)
    columns: dict[str, Column] = {"step": steps}
    for name, term in dialect.columns.items():
        value = evaluate(term, raw, num_rows)
        if np.isfinite(value).any():
            columns[name] = value
    kept = _useful(columns)
    stray = kept & np.isnan(steps)
    has_strays = 0 < stray.sum() < (kept & ~stray).sum()
    if has_strays:
        kept &= ~stray
    if not kept.any():
        return None
    columns = {name: value[kept] for name, value in columns.items()}
    variant = f", {dialect.variant}" if dialect.variant else ""
    findings = Findings(
        raw={key: value[kept] for key, value in raw.items()},
        columns=columns,
        mode=dialect.mode,
        notes=[f"detected as {dialect.framework}{variant}: it logs {proof}", *dialect.notes],
    )
    if has_strays:
        findings.notes.append(f"{stray.sum()} pieces of lines that belong to no step are left out")
    for check in (*dialect.checks, plausible):
        check(findings)
    return StepLog(
        framework=dialect.framework,
        mode=findings.mode,
        step_unit=dialect.step_unit,
        columns=_ordered(findings.columns),
        facts=findings.facts,
        unknown_keys=_unknown(rows, dialect),
        notes=(*findings.notes, *rows.notes, *_gaps(findings.columns)),
        source=source,
    )


def with_facts(log: StepLog, facts: Mapping[str, float]) -> StepLog:
    """Return a table with further facts."""
    from dataclasses import replace

    return replace(log, facts={**log.facts, **facts}) if facts else log


def _useful(columns: Mapping[str, Column]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Say which rows hold a quantity beside their step."""
    rest = [np.isfinite(value) for name, value in columns.items() if name not in ("step", "epoch")]
    return np.any(rest, axis=0) if rest else np.zeros(len(columns["step"]), dtype=bool)


def _ordered(columns: Mapping[str, Column]) -> dict[str, Column]:
    """Sort rows by step where all have one, columns by the contract, and leave out those that are empty."""
    order: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int64]] = np.arange(len(columns["step"]))
    if np.isfinite(columns["step"]).all():
        order = np.argsort(columns["step"], kind="stable")
    names = [name for name in COLUMNS if name in columns] + [name for name in columns if name not in COLUMNS]
    return {name: columns[name][order] for name in names if np.isfinite(columns[name]).any()}


def _unknown(rows: Rows, dialect: Dialect) -> tuple[str, ...]:
    known = tuple(mark.rstrip("*") for mark in dialect.ignored)
    others = {key for other in DIALECTS if other.framework == dialect.framework for key in _all_keys(other)}
    unknown = (key for key in rows.seen if key not in others and not key.startswith(known or ("\0",)))
    return tuple(sorted(unknown)[:MAX_UNKNOWN])


def _all_keys(dialect: Dialect) -> set[str]:
    keys = {key for term in dialect.columns.values() for key in keys_of(term)}
    return keys | set(dialect.evidence) | set(dialect.step_keys) | set(dialect.reads)


def _gaps(columns: Mapping[str, Column]) -> tuple[str, ...]:
    steps = np.unique(columns["step"][np.isfinite(columns["step"])])
    if len(steps) < 2:
        return ()
    missing = int(steps[-1] - steps[0] + 1 - len(steps))
    if missing <= 0:
        return ()
    return (f"{missing} of the steps {steps[0]:g} to {steps[-1]:g} are not in the log",)
