"""Collect key-value records into the rows of runs: merge lines of one step, split runs, keep doubts."""

import math
from array import array
from collections import Counter
from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from bidirl.traces.logs.text import MAX_NUMBER

__all__ = ["Rows", "Store"]

REORDER_STEPS = 4
"""Lines of one run may be out of order by so many steps (pools log at their own pace); a counter that falls
further has restarted."""

SAME_RELATIVE, SAME_ABSOLUTE = 2e-3, 6e-4
"""Two prints of one value may differ by their rounding (three decimals in old logs)."""

MIN_REPEATED = 3
"""Values that two records must share for one to be taken for the other's repetition."""

MAX_NOTES = 20
"""Contradictions told one by one."""

MAX_SEEN = 2000
"""Names of keys kept for detection and for the list of unknown keys."""


def _same(a: float, b: float) -> bool:
    if math.isnan(a) or math.isnan(b):
        return True
    return abs(a - b) <= SAME_ABSOLUTE + SAME_RELATIVE * max(abs(a), abs(b))


class Rows:
    """The rows of one run, one array per raw key."""

    def __init__(self) -> None:
        self.steps = array("d")
        """Step of each row, NaN where no line says it."""
        self.seen: set[str] = set()
        self.notes: list[str] = []
        self.max_step: int | None = None
        self._row_of: dict[int, int] = {}
        self._columns: dict[str, array[float]] = {}
        self._last_keys: list[str] = []
        self._last_key_of = array("i")
        self._last_ids: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.steps)

    def row(self, step: int) -> int | None:
        """Return the row of a step, None if it has none yet."""
        return self._row_of.get(step)

    def append(self, step: int | None) -> int:
        """Add an empty row and return its number."""
        row = len(self.steps)
        self.steps.append(math.nan if step is None else step)
        self._last_key_of.append(-1)
        if step is not None:
            self.name(row, step)
        return row

    def name(self, row: int, step: int) -> None:
        """Say which step a row is."""
        self.steps[row] = step
        self._row_of[step] = row
        self.max_step = step if self.max_step is None else max(step, self.max_step)

    def get(self, row: int, key: str) -> float:
        """Return a value, NaN if the row lacks the key."""
        column = self._columns.get(key)
        return column[row] if column is not None and row < len(column) else math.nan

    def put(self, row: int, key: str, value: float) -> None:
        """Set a value; what is beyond ``MAX_NUMBER`` is damage and counts as not there."""
        if abs(value) > MAX_NUMBER:
            value = math.nan
        column = self._columns.get(key)
        if column is None:
            column = self._columns[key] = array("d")
        missing = row - len(column)
        if missing < 0:
            column[row] = value
            return
        if missing:
            column.extend([math.nan] * missing)
        column.append(value)

    def conflicts(self, row: int, values: Mapping[str, float]) -> tuple[list[str], int]:
        """Return the keys whose value differs from the row's, and how many keys both have."""
        both = [key for key in values if not math.isnan(self.get(row, key))]
        return [key for key in both if not _same(self.get(row, key), values[key])], len(both)

    def end_with(self, row: int, key: str) -> None:
        """Remember which key a row's line ended with: a line that ends at another one was cut."""
        if key not in self._last_ids:
            self._last_ids[key] = len(self._last_keys)
            self._last_keys.append(key)
        self._last_key_of[row] = self._last_ids[key]

    def ends_with(self, row: int, key: str) -> bool:
        """Say whether a row's line ended with a key."""
        return self._last_ids.get(key, -2) == self._last_key_of[row]

    def see(self, keys: Collection[str]) -> None:
        """Note names of keys, whether they are of use or not."""
        if len(self.seen) < MAX_SEEN:
            self.seen.update(keys)

    def columns(self) -> dict[str, NDArray[np.float64]]:
        """Return all columns in order of rows; values that a cut line left incomplete are NaN."""
        full: dict[str, NDArray[np.float64]] = {}
        for key, column in self._columns.items():
            values = np.full(len(self), np.nan)
            values[: len(column)] = column
            full[key] = values
        self._drop_cut(full)
        return full

    def _drop_cut(self, full: Mapping[str, NDArray[np.float64]]) -> None:
        counts = Counter(each for each in self._last_key_of if each >= 0)
        if sum(counts.values()) < 3:
            return
        usual = counts.most_common(1)[0][1]
        for identity, count in counts.items():
            key = self._last_keys[identity]
            if count == 1 and usual > 1 and key in full:
                row = self._last_key_of.index(identity)
                full[key][row] = math.nan
                step = self.steps[row]
                note = f"the line of step {step:g} ends at {key}, as no other does: value dropped as cut"
                if note not in self.notes:
                    self.notes.append(note)


class Store:
    """The runs of a log in their order; a restarted step counter begins a new one."""

    def __init__(self) -> None:
        self.runs: list[Rows] = []
        self._open: int | None = None
        self._open_has_step = False

    @property
    def current(self) -> Rows:
        """The run that lines now belong to."""
        if not self.runs:
            self.runs.append(Rows())
        return self.runs[-1]

    @property
    def num_rows(self) -> int:
        """Rows of all runs."""
        return sum(map(len, self.runs))

    def new_run(self) -> Rows:
        """Begin another run."""
        if not self.runs or len(self.runs[-1]):
            self.runs.append(Rows())
        self._open = None
        return self.runs[-1]

    def add(self, step: int | None, values: Mapping[str, float], last_key: str | None = None) -> Rows:
        """Add a record to the row of its step; without a step, to the row that is being filled.

        A record that contradicts a row of the same step in several values belongs to another run. A single
        contradiction is noted: the value that does not end its line wins (it may be cut), else the first.
        """
        run, row = self._placed(step, values)
        if row is None:
            return run
        for key, value in values.items():
            known = run.get(row, key)
            if math.isnan(known):
                run.put(row, key, value)
            elif not _same(known, value):
                is_cut = run.ends_with(row, key) and key != last_key
                if is_cut:
                    run.put(row, key, value)
                if len(run.notes) < MAX_NOTES:
                    kept = value if is_cut else known
                    run.notes.append(
                        f"step {run.steps[row]:g}: {key} is logged as {known:g} and as {value:g}: "
                        f"{kept:g} is kept"
                    )
        if last_key is not None:
            run.end_with(row, last_key)
        return run

    def begin(self, step: int) -> None:
        """Say that the lines without a step that follow (or, if it has none, the open row) are this step."""
        run = self.current
        is_next = run.max_step is None or step >= run.max_step - REORDER_STEPS
        if self._open is not None and not self._open_has_step and run.row(step) is None and is_next:
            run.name(self._open, step)
            self._open_has_step = True
            return
        if run.max_step is not None and step < run.max_step - REORDER_STEPS:
            run = self.new_run()
        found = run.row(step)
        self._open = run.append(step) if found is None else found
        self._open_has_step = True

    def close_row(self) -> None:
        """Say that what follows without a step belongs to a new row."""
        self._open = None

    def attach(self, values: Mapping[str, float]) -> None:
        """Add values to the newest row, if there is one that lacks them."""
        run = self.current
        if len(run):
            for key, value in values.items():
                if math.isnan(run.get(len(run) - 1, key)):
                    run.put(len(run) - 1, key, value)

    def _placed(self, step: int | None, values: Mapping[str, float]) -> tuple[Rows, int | None]:
        run = self.current
        if step is None:
            row = self._open
            if row is None or run.conflicts(row, values)[0]:
                row = run.append(None)
                self._open, self._open_has_step = row, False
            return run, row
        row = run.row(step)
        if row is not None:
            different, num_both = run.conflicts(row, values)
            is_older = run.max_step is not None and step < run.max_step
            if len(different) > 1 or (is_older and len(different) == num_both == 1):
                run = self.new_run()
                row = None
        elif run.max_step is not None and step < run.max_step - REORDER_STEPS:
            run = self.new_run()
        elif self._is_open_row(run, values):
            row = self._open
            run.name(row or 0, step)
        if row is None:
            row = run.append(step)
        self._open = None
        return run, row

    def _is_open_row(self, run: Rows, values: Mapping[str, float]) -> bool:
        """Say whether a record repeats the row that is being filled: then it says which step that is."""
        if self._open is None or self._open_has_step:
            return False
        different, num_both = run.conflicts(self._open, values)
        return not different and num_both >= MIN_REPEATED
