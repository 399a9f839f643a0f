"""Write and read ``steps.csv`` and ``samples.csv``: plain CSV that ``pandas.read_csv`` takes as it is.

The first line is the header and there are no comment lines. Version and provenance are in
``resolved.json`` and ``summary.json`` of the same folder, not in the tables. An unknown number (nan) is an
empty field; floats are written so that they read back to the same bits.
"""

import csv
import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bidirl.errors import InputError

__all__ = [
    "LEARNING_COLUMNS",
    "SAMPLE_COLUMNS",
    "STEP_COLUMNS",
    "columns_of",
    "flatten",
    "read_samples",
    "read_steps",
    "write_samples",
    "write_steps",
    "write_table",
]

SAMPLE_COLUMNS: dict[str, type] = {
    "group": int,
    "index": int,
    "prompt_tokens": int,
    "response_tokens": int,
    "generated_tokens": int,
    "start_s": float,
    "finish_s": float,
    "version": int,
    "last_version": int,
    "step": int,
    "dropped": str,
    "num_resumes": int,
    "prefix_tokens": int,
    "chunk": int,
}
"""Columns of ``samples.csv`` in order; one row per issued sample, in order of its id."""

STEP_COLUMNS: dict[str, type] = {
    "step": int,
    "batch_ready_s": float,
    "train_start_s": float,
    "published_s": float,
    "prompt_tokens": int,
    "response_tokens": int,
    "num_groups": int,
}
"""Columns of ``steps.csv``; behind them one column ``part_<state>_s`` for each state of the trainer."""

LEARNING_COLUMNS: tuple[str, ...] = (
    "reward_mean",
    "gradient_norm",
    "mismatch_mean",
    "mismatch_max",
    "lag_mean",
    "lag_max",
)
"""Columns that ``steps.csv`` of a real run has behind those: mean reward of the batch, norm of the last
merged gradient, |log-probability at generation - at the update| over tokens, and the lag of the batch's
samples in versions."""

PART_PREFIX, PART_SUFFIX = "part_", "_s"

Columns = Mapping[str, Sequence[Any]]


def columns_of(record: object) -> dict[str, Any]:
    """Return the fields of a dataclass of columns by name, in order; nothing is copied."""
    if not dataclasses.is_dataclass(record):
        raise TypeError(f"{type(record).__name__} is not a dataclass of columns")
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def write_table(path: Path, columns: Columns) -> None:
    """Write columns of equal length as CSV; nan becomes an empty field.

    Raises:
        ValueError: the columns differ in length.
    """
    text = [_texts(values) for values in columns.values()]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*text, strict=True))


def write_samples(path: Path, columns: Columns) -> None:
    """Write ``samples.csv`` from the columns named in ``SAMPLE_COLUMNS``."""
    write_table(path, {name: columns[name] for name in SAMPLE_COLUMNS})


def write_steps(path: Path, columns: Columns) -> None:
    """Write ``steps.csv``.

    ``columns`` holds ``STEP_COLUMNS`` (``step`` is counted here) and ``parts``, one mapping of state to
    seconds per step; a state that a step lacks took 0 s. ``extra`` may hold ``LEARNING_COLUMNS``.
    """
    parts: Sequence[Mapping[str, float]] = columns["parts"]
    states = list(dict.fromkeys(state for row in parts for state in row))
    table: dict[str, Sequence[Any]] = {"step": range(len(columns["published_s"]))}
    table |= {name: columns[name] for name in STEP_COLUMNS if name != "step"}
    table |= {
        f"{PART_PREFIX}{state}{PART_SUFFIX}": [row.get(state, 0.0) for row in parts] for state in states
    }
    extra: Any = columns.get("extra", {})
    table |= {name: extra[name] for name in LEARNING_COLUMNS if name in extra}
    write_table(path, table)


def read_samples(path: Path) -> dict[str, list[Any]]:
    """Read ``samples.csv`` back as typed columns.

    Raises:
        InputError: the file is missing, lacks a column, or holds a value of another type.
    """
    return _read(path, SAMPLE_COLUMNS)


def read_steps(path: Path) -> dict[str, list[Any]]:
    """Read ``steps.csv`` back as typed columns; ``parts`` is one dict of state to seconds per step.

    ``LEARNING_COLUMNS`` are there if the table has them.

    Raises:
        InputError: the file is missing, lacks a column, or holds a value of another type.
    """
    table = _read(path, STEP_COLUMNS)
    states = [name for name in table if name not in STEP_COLUMNS and name not in LEARNING_COLUMNS]
    names = [name.removeprefix(PART_PREFIX).removesuffix(PART_SUFFIX) for name in states]
    rows = zip(*(table.pop(state) for state in states), strict=True)
    parts = [dict(zip(names, row, strict=True)) for row in rows] if states else [{} for _ in table["step"]]
    return table | {"parts": parts}


def flatten(summary: Mapping[str, Any]) -> dict[str, str | int | float | None]:
    """Flatten nested mappings to dotted names, the columns of ``sweep.csv``; a list becomes its JSON text."""
    flat: dict[str, str | int | float | None] = {}
    for key, value in summary.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": item for inner, item in flatten(value).items()}
        else:
            flat[key] = json.dumps(value) if isinstance(value, list | tuple) else value
    return flat


def _texts(values: Sequence[Any]) -> Sequence[Any]:
    """Replace nan by an empty field; ``csv`` writes the rest exactly (floats by ``repr``)."""
    if values and not isinstance(values[0], str) and any(map(math.isnan, values)):
        return ["" if math.isnan(value) else value for value in values]
    return values


def _read(path: Path, schema: Mapping[str, type]) -> dict[str, list[Any]]:
    """Read a CSV; columns outside the schema must be ``part_<state>_s`` and are floats."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            header, *rows = csv.reader(file, strict=True)
    except OSError as error:
        reason = error.strerror or "unknown"
        raise InputError(f"{path}: cannot be read ({reason}): give a table that a run wrote") from None
    except (ValueError, csv.Error, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a CSV table ({error}): give a table that a run wrote") from None
    missing = [name for name in schema if name not in header]
    if missing:
        raise InputError(f"{path}:1: column {missing[0]!r} is missing: the table needs {', '.join(schema)}")
    extra = [name for name in header if name not in schema and not _is_part(name)]
    if len(set(header)) < len(header):
        extra = [name for name in header if header.count(name) > 1]
    if extra:
        raise InputError(f"{path}:1: column {extra[0]!r} is unknown or doubled: remove it")
    for line, row in enumerate(rows, start=2):
        if len(row) != len(header):
            found = f"{len(row)} fields, the header has {len(header)}"
            raise InputError(f"{path}:{line}: {found}: write the table again")
    columns = zip(*rows, strict=True) if rows else ((),) * len(header)
    return {
        name: _typed(path, name, schema.get(name, float), column)
        for name, column in zip(header, columns, strict=True)
    }


def _is_part(name: str) -> bool:
    return name in LEARNING_COLUMNS or (name.startswith(PART_PREFIX) and name.endswith(PART_SUFFIX))


def _typed(path: Path, name: str, kind: type, column: Sequence[str]) -> list[Any]:
    """Convert one column; an empty float field is nan."""
    convert: Callable[[str], Any] = _float if kind is float else kind
    try:
        return list(map(convert, column))
    except ValueError:
        for line, text in enumerate(column, start=2):
            try:
                convert(text)
            except ValueError:
                what = "a number" if kind is float else "an integer"
                message = f"{path}:{line}: {name}={text!r} must be {what}: correct the field"
                raise InputError(message) from None
        raise


def _float(text: str) -> float:
    return float(text) if text else math.nan
