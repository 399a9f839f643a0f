"""Our own tables: write what ``bidirl-plan read`` shows as CSV and JSON, and read both back.

CSV: the columns of ``COLUMNS`` (all of them, empty where absent), further quantities, then ``run``,
``framework``, ``mode`` and ``step_unit``. JSON: ``{"runs": [{framework, mode, step_unit, facts, notes,
unknown_keys, source, steps: [{...}]}]}``; a quantity that a step lacks is no key of it.
"""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bidirl.traces.logs.bounds import within_bounds
from bidirl.traces.logs.text import MAX_NUMBER, number
from bidirl.traces.step_log import COLUMNS, Mode, StepLog

__all__ = ["TEXT_COLUMNS", "from_json", "from_rows", "to_json", "write_csv"]

TEXT_COLUMNS = ("run", "framework", "mode", "step_unit")


def _names(logs: Sequence[StepLog]) -> list[str]:
    extra = (name for log in logs for name in log.columns if name not in COLUMNS)
    return [*COLUMNS, *dict.fromkeys(extra)]


def _steps(log: StepLog) -> Iterator[dict[str, float | int]]:
    for row in range(len(log)):
        values = {name: float(column[row]) for name, column in log.columns.items()}
        yield {
            name: int(value) if value == int(value) and not name.endswith(("_s", "_share", "_gpu")) else value
            for name, value in values.items()
            if math.isfinite(value)
        }


def to_json(logs: Sequence[StepLog]) -> dict[str, Any]:
    """Return the tables as plain data."""
    return {
        "runs": [
            {
                "framework": log.framework,
                "mode": str(log.mode),
                "step_unit": log.step_unit,
                "source": log.source,
                "facts": dict(log.facts),
                "notes": list(log.notes),
                "unknown_keys": list(log.unknown_keys),
                "steps": list(_steps(log)),
            }
            for log in logs
        ]
    }


def write_csv(path: Path, logs: Sequence[StepLog]) -> None:
    """Write the tables of all runs into one CSV file."""
    names = _names(logs)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*names, *TEXT_COLUMNS])
        for run, log in enumerate(logs):
            for step in _steps(log):
                writer.writerow(
                    [
                        *(step.get(name, "") for name in names),
                        run,
                        log.framework,
                        str(log.mode),
                        log.step_unit,
                    ]
                )


def _mode(text: object) -> Mode:
    try:
        return Mode(str(text))
    except ValueError:
        return Mode.UNKNOWN


def _number(value: object) -> float:
    if isinstance(value, bool) or value in ("", None):
        return math.nan
    if isinstance(value, (int, float)):
        return float(value) if abs(value) <= MAX_NUMBER else math.nan
    found = number(value) if isinstance(value, str) else None
    return math.nan if found is None else found


def _columns(
    steps: Sequence[Mapping[str, object]], names: Sequence[str]
) -> tuple[dict[str, np.ndarray[Any, Any]], list[str]]:
    """Return the columns that hold a number, and what was left out of them."""
    ordered = [name for name in COLUMNS if name in names] + [name for name in names if name not in COLUMNS]
    columns = {name: np.array([_number(step.get(name)) for step in steps], dtype=float) for name in ordered}
    notes = []
    for name in ordered:
        cells = [step.get(name) for step in steps]
        odd = [cell for cell in cells if isinstance(cell, str) and cell.strip() and number(cell) is None]
        if odd:
            notes.append(f"{name}: {odd[0]!r} is no number, {len(odd)} such values are left out")
    columns, impossible = within_bounds(columns)
    return {name: column for name, column in columns.items() if np.isfinite(column).any()}, [
        *notes,
        *impossible,
    ]


def _texts(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def from_json(data: object, source: str) -> list[StepLog]:
    """Read the JSON of ``read`` back; empty if it is something else."""
    if not isinstance(data, dict) or not isinstance(data.get("runs"), list):
        return []
    logs = []
    for run in data["runs"]:
        if not isinstance(run, dict) or not isinstance(run.get("steps"), list):
            continue
        steps = [step for step in run["steps"] if isinstance(step, dict)]
        names = list(dict.fromkeys(str(name) for step in steps for name in step))
        columns, notes = _columns(steps, names)
        told = run.get("facts")
        facts = {str(key): _number(value) for key, value in told.items()} if isinstance(told, dict) else {}
        if columns:
            logs.append(
                StepLog(
                    framework=str(run.get("framework", "bidirl")),
                    mode=_mode(run.get("mode")),
                    step_unit=str(run.get("step_unit", "one step")),
                    columns=columns,
                    facts={key: value for key, value in facts.items() if math.isfinite(value)},
                    unknown_keys=_texts(run.get("unknown_keys")),
                    notes=(*_texts(run.get("notes")), *notes),
                    source=str(run.get("source") or source),
                )
            )
    return logs


def from_rows(rows: Sequence[Mapping[str, str]], source: str) -> list[StepLog]:
    """Read the rows of a CSV whose columns are named as ours; one table per value of ``run``."""
    runs: dict[str, list[Mapping[str, str]]] = {}
    for row in rows:
        runs.setdefault(row.get("run", ""), []).append(row)
    logs = []
    for run in runs.values():
        names = [name for name in run[0] if name not in TEXT_COLUMNS and name != "source"]
        columns, notes = _columns(run, names)
        if columns:
            logs.append(
                StepLog(
                    framework=run[0].get("framework") or "bidirl",
                    mode=_mode(run[0].get("mode")),
                    step_unit=run[0].get("step_unit") or "one step",
                    columns=columns,
                    notes=tuple(notes),
                    source=source,
                )
            )
    return logs
