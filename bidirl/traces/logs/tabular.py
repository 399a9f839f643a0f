"""Tables with a header: our own CSV, ``steps.csv`` of a run, exports of W&B, and tables of timers.

What a column is comes from its name: ours, a raw key of a framework (also behind ``run name - `` as W&B
exports charts), or the bare name of a timer (``step``, ``gen``, ``update_actor``) in a table of results.
"""

import csv
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from bidirl.traces.logs.assemble import assemble
from bidirl.traces.logs.bare import bare_name, bare_tables, bare_width
from bidirl.traces.logs.dialects import WANTED
from bidirl.traces.logs.own import from_rows
from bidirl.traces.logs.rows import Rows, Store
from bidirl.traces.logs.text import number
from bidirl.traces.step_log import COLUMNS, Mode, StepLog

__all__ = ["TableReader", "cells_of", "header_of"]

STEP_NAMES = (
    "train/global_step",
    "_step",
    "Step",
    "step",
    "trainer/global_step",
    "global_step",
    "training/global_step",
)
OWN_STEPS = ("published_s", "train_start_s", "num_groups")
_WANDB = re.compile(r"^(?P<run>.+?) - (?P<key>[\w./@ ()•-]+?)(?P<bound>__(?:MIN|MAX))?$")
DELIMITERS = (",", "\t", ";", "|", "  ")
"""Tried in this order; two blanks stand for columns that are set with blanks."""


def cells_of(line: str, delimiter: str) -> list[str]:
    """Return the cells of a line, without the outer bars of a Markdown table."""
    if delimiter == "|":
        return [cell.strip() for cell in line.strip().strip("|").split("|")]
    if delimiter == "  ":
        return re.split(r"\s{2,}", line.strip())
    return [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter), [])]


def _key(name: str) -> str:
    found = _WANDB.match(name)
    return found["key"].strip() if found else name


def header_of(line: str) -> tuple[list[str], str] | None:
    """Return names and delimiter if a line is the header of a table that can be read."""
    best: tuple[int, list[str], str] | None = None
    if len(line) > 100_000 or "{" in line:
        return None
    for delimiter in DELIMITERS:
        names = cells_of(line.lstrip("# "), delimiter)
        if len(names) < 2 or any(number(name) is not None for name in names):
            continue
        known = sum(_key(name) in WANTED for name in names)
        ours = sum(name in COLUMNS or name in OWN_STEPS for name in names)
        score = max(known, ours if ours > 1 else 0, bare_width(names))
        if score and (best is None or score > best[0]):
            best = (score, names, delimiter)
    return None if best is None else best[1:]


class TableReader:
    """Reads the rows behind a header; another header begins another table."""

    def __init__(self, names: Sequence[str], delimiter: str) -> None:
        self.names = list(names)
        self._delimiter = delimiter
        self._rows: list[list[str]] = []

    @property
    def num_rows(self) -> int:
        """Rows read."""
        return len(self._rows)

    def line(self, text: str) -> bool:
        """Take a line; say whether it is a row of this table."""
        text = text.removeprefix("\ufeff")
        if text.lstrip().startswith("#") or not text.strip():
            return False
        cells = cells_of(text, self._delimiter)
        if (
            cells == self.names
            or len(cells) != len(self.names)
            or all(set(cell) <= set(":-= ") for cell in cells)
        ):
            return False
        self._rows.append(cells)
        return True

    def tables(self, source: str, framework: str) -> list[StepLog]:
        """Return the tables of all runs in it."""
        rows = [dict(zip(self.names, cells, strict=True)) for cells in self._rows]
        if not rows:
            return []
        if all(name in self.names for name in OWN_STEPS):
            return _own_steps(rows, source)
        is_foreign = any(
            "/" in name or (bare_name(name) or name) not in (name, "step_s") for name in self.names
        )
        if "step_unit" in self.names or (not is_foreign and any(n in COLUMNS[1:] for n in self.names)):
            return from_rows(rows, source)
        if any(_key(name) in WANTED for name in self.names):
            return self._keyed(rows, source, framework)
        return bare_tables(self.names, rows, source)

    def _keyed(self, rows: Sequence[Mapping[str, str]], source: str, framework: str) -> list[StepLog]:
        """Read columns named by raw keys: one run, or one per run name of a W&B export."""
        step_name = next((name for name in STEP_NAMES if name in self.names), None)
        runs: dict[str, dict[str, str]] = {}
        for name in self.names:
            found = _WANDB.match(name)
            if found and found["bound"]:
                continue
            runs.setdefault(found["run"] if found else "", {})[name] = _key(name)
        logs = []
        for run, keys in runs.items():
            store = Store()
            for row in rows:
                _add(store, row, keys, step_name)
            for raw in store.runs:
                log = assemble(raw, f"{source} ({run})" if run else source, framework)
                if log is not None:
                    logs.append(log)
        return logs


def _add(store: Store, row: Mapping[str, str], keys: Mapping[str, str], step_name: str | None) -> None:
    values = {key: number(row[name]) for name, key in keys.items() if row[name] and key in WANTED}
    kept = {key: value for key, value in values.items() if value is not None and math.isfinite(value)}
    step = number(row[step_name]) if step_name and row[step_name] else None
    if not kept:
        return
    if step is None or not math.isfinite(step):
        store.close_row()
        run: Rows = store.add(None, kept)
        store.close_row()
    else:
        run = store.add(int(step), kept)
    run.see([key for key in keys.values() if key not in STEP_NAMES])


def _own_steps(rows: Sequence[Mapping[str, str]], source: str) -> list[StepLog]:
    """Read ``steps.csv`` of a run: the parts of its time line are the trainer's states."""

    def column(*names: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        found = [
            [number(row[name]) if row[name] else None for row in rows] for name in names if name in rows[0]
        ]
        if not found:
            return np.full(len(rows), np.nan)
        return np.asarray(np.nansum([[math.nan if v is None else v for v in each] for each in found], axis=0))

    published = column("published_s")
    groups = column("num_groups")
    columns = {
        "step": column("step"),
        "step_s": np.diff(published, prepend=0.0),
        "wait_s": column("part_wait_s"),
        "old_logprob_s": column("part_old_logprob_s"),
        "reference_s": column("part_reference_s"),
        "update_s": column("part_update_s", "part_optimizer_s", "part_merge_s", "part_broadcast_s"),
        "weight_sync_s": column("part_sync_s"),
        "switch_s": column("part_switch_s"),
        "total_tokens": column("prompt_tokens", "response_tokens"),
        "num_groups": groups,
        "checkpoint_s": column("part_checkpoint_s"),
        "drain_s": column("part_drain_s"),
    }
    return [
        StepLog(
            framework="bidirl",
            mode=Mode.ASYNC,
            step_unit="one step (one published version)",
            columns={name: value for name, value in columns.items() if np.isfinite(value).any()},
            notes=("detected as bidirl: steps.csv of a run",),
            source=source,
        )
    ]
