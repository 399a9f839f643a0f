"""Timers that are logged line by line, not as a record: SkyRL's spans and DeepSpeed's milliseconds."""

import re

from bidirl.traces.logs.rows import Rows
from bidirl.traces.logs.shapes import timers_ms

__all__ = ["DeepSpeedTimers", "Spans"]

_SPAN = re.compile(r"\bFinished: '(\w+)', time cost: ([\d.]+)s")

_OUTSIDE_STEP = frozenset({"eval", "save_checkpoints", "save_hf_model"})
"""SkyRL's timers that may end after the step that they belong to."""


class Spans:
    """Collects SkyRL's ``Finished: 'name', time cost: 1.23s`` into one row a step.

    A row is held back when its step ends: a dict with the same timers, more digits and the step may follow.
    """

    def __init__(self) -> None:
        self.ended: dict[str, float] = {}
        """The row of the last step that ended, until it is taken."""
        self._open: dict[str, float] = {}
        self._last = ""

    def begin(self) -> dict[str, float]:
        """Say that a step has begun; return the row of the one before it."""
        self._open.clear()
        return self.take()

    def take(self) -> dict[str, float]:
        """Return the row that was held back, once."""
        ended, self.ended = self.ended, {}
        return ended

    def end(self, text: str) -> tuple[dict[str, float], dict[str, float]] | None:
        """Take a line; return a row that is complete by now, and late timers of the row before it.

        None if the line ends no timer. A doubled line counts once.
        """
        found = _SPAN.search(text)
        if found is None:
            return None
        if text == self._last:
            return {}, {}
        self._last = text
        name, key, seconds = found[1], f"timing/{found[1]}", float(found[2])
        if name == "step":
            row = self.take()
            self.ended, self._open = self._open | {key: seconds}, {}
            return row, {}
        if name not in _OUTSIDE_STEP or self._open:
            self._open[key] = self._open.get(key, 0.0) + seconds
        elif self.ended:
            self.ended[key] = seconds
        else:
            return {}, {key: seconds}
        return {}, {}


class DeepSpeedTimers:
    """Collects DeepSpeed's ``time (ms) | fwd: 1.23 | ...`` into rows; the line with ``fwd`` ends one."""

    def __init__(self) -> None:
        self.rows = Rows()
        self._parts: dict[str, float] = {}
        self._last = ""

    def line(self, text: str) -> None:
        """Take a line; other ranks than the first and doubled lines say nothing new."""
        if text == self._last or ("[Rank " in text and "[Rank 0]" not in text):
            return
        self._last = text
        values = {f"deepspeed/{name}": value for name, value in timers_ms(text)}
        self._parts |= values
        if "deepspeed/fwd" in values:
            row = self.rows.append(None)
            for key, value in self._parts.items():
                self.rows.put(row, key, value)
            self._parts = {}
