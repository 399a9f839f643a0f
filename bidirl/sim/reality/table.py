"""The shape of a comparison with published numbers: rows, free parameters, and their markdown."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import NamedTuple

from bidirl.errors import InputError

__all__ = ["Parameter", "RealityRow", "RealityTable", "markdown_table", "number", "published"]


class Parameter(NamedTuple):
    """One number that the source does not print, and how we came by it."""

    name: str
    value: str
    how: str
    """How obtained: fitted on which rows, assumed from what, taken from which source."""


@dataclass(frozen=True, slots=True)
class RealityRow:
    """One published number beside ours, in the same unit."""

    label: str
    measured: float | None
    """None where the source prints none and ours is a prediction only."""
    predicted: float | None
    """None where the simulation cannot answer; the note says why."""
    low: float | None = None
    """Lower end of our band, where there is one."""
    high: float | None = None
    used_for_fit: bool = False
    note: str = ""

    @property
    def error(self) -> float | None:
        """Return ``predicted / measured - 1``; None where a side is missing."""
        if self.measured is None or self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True, slots=True)
class RealityTable:
    """One comparison; every row is printed, also those that miss."""

    title: str
    unit: str
    rows: tuple[RealityRow, ...]
    parameters: tuple[Parameter, ...]
    text: str = ""
    """What the table shows and does not show, markdown, printed between title and rows."""
    source: str = ""

    @property
    def num_fitted(self) -> int:
        """Return how many rows were used for fitting."""
        return sum(row.used_for_fit for row in self.rows)

    def worst_error(self, *, used_for_fit: bool) -> float | None:
        """Return the largest absolute error over the rows that were (or were not) fitted."""
        errors = [
            abs(row.error) for row in self.rows if row.error is not None and row.used_for_fit is used_for_fit
        ]
        return max(errors, default=None)

    def to_markdown(self) -> str:
        """Return the section: title, text, rows, free parameters; ends with a newline."""
        banded = any(row.low is not None or row.high is not None for row in self.rows)
        band_head = ["band"] if banded else []
        head = ["row", f"measured ({self.unit})", "ours", *band_head, "error", "fit", "note"]
        body = []
        for row in self.rows:
            band = "" if row.low is None else f"{number(row.low)} to {number(row.high)}"
            error = row.error
            body.append(
                [
                    row.label,
                    number(row.measured),
                    number(row.predicted),
                    *([band] if banded else []),
                    "" if error is None else f"{error:+.1%}",
                    "yes" if row.used_for_fit else "",
                    row.note,
                ]
            )
        parts = [f"## {self.title}", self.text.strip(), markdown_table(head, body)]
        if self.parameters:
            parts.append(f"Parameters that the source does not give ({len(self.parameters)}):")
            rows = [list(one) for one in self.parameters]
            parts.append(markdown_table(["parameter", "value", "how obtained"], rows))
        if self.source:
            parts.append(f"Source: {self.source}.")
        return "\n\n".join(part for part in parts if part) + "\n"


def number(value: float | None) -> str:
    """Return a number with four significant digits, empty where unknown."""
    if value is None or not math.isfinite(value):
        return ""
    if value == 0:
        return "0"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 4)}f}"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a markdown table; a bar inside a cell is escaped."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def published(name: str) -> list[dict[str, str]]:
    """Return the rows of a packaged table of published figures, as text; ``name`` without ``.csv``.

    Raises:
        InputError: no such table is packaged.
    """
    path = files("bidirl.traces").joinpath("data", "published", f"{name}.csv")
    if not path.is_file():
        raise InputError(f"published table {name!r} is not packaged: see bidirl/traces/data/published/")
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
