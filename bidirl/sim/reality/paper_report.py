"""Print and write the comparison with the paper's numbers."""

import csv
from pathlib import Path
from typing import TYPE_CHECKING

from bidirl.sim.reality.paper import READING, Comparison, PaperRow, parameters
from bidirl.sim.reality.paper_rows import Span
from bidirl.sim.reality.table import markdown_table

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["paper_markdown", "print_paper", "write_paper"]

HEAD = ("quantity", "setting", "paper", "ours", "same split", "best split", "priors", "verdict")
READINGS = ("ours", "same_split", "over_best", "prior")


def print_paper(found: Comparison, console: "Console") -> None:
    """Print the verdict, the rows, the reasons of those that miss, and what was fitted or chosen."""
    from rich.table import Table

    console.print(found.sentence, style="bold", highlight=False, markup=False, soft_wrap=True)
    grid = Table(*HEAD)
    for row in found.rows:
        grid.add_row(*_cells(row))
    console.print(grid)
    for row in found.rows:
        if row.reason and row.inside is False:
            line = f"outside: {row.quantity}, {row.setting}: {row.reason}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print("\nparameters", style="bold")
    for one in parameters(found.trainer_scale):
        line = f"  {one.name}: {one.value} ({one.how})"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print("\n" + READING, highlight=False, markup=False, soft_wrap=True)


def write_paper(found: Comparison, folder: Path) -> None:
    """Write paper.csv (one row a printed number, full digits) and paper.md into a folder."""
    names = ["quantity", "setting", "unit", "paper_low", "paper_high"]
    names += [f"{reading}_{end}" for reading in READINGS for end in ("low", "high")]
    names += ["num_settings", "verdict", "reason"]
    with (folder / "paper.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        for row in found.rows:
            spans: list[float | str] = []
            for reading in READINGS:
                span: Span | None = getattr(row, reading)
                spans += ["", ""] if span is None else [span.low, span.high]
            head = [row.quantity, row.setting, row.unit, row.low, row.high]
            writer.writerow([*head, *spans, row.num_settings, row.verdict, row.reason])
    (folder / "paper.md").write_text(paper_markdown(found), encoding="utf-8")


def paper_markdown(found: Comparison) -> str:
    """Return the same as markdown."""
    rows = [[*_cells(row), row.reason] for row in found.rows]
    chosen = [[one.name, one.value, one.how] for one in parameters(found.trainer_scale)]
    parts = [
        "# The paper's numbers and ours",
        f"{found.sentence}.",
        READING,
        markdown_table([*HEAD, "why outside"], rows),
        markdown_table(["parameter", "value", "how obtained"], chosen),
    ]
    return "\n\n".join(parts) + "\n"


def _cells(row: PaperRow) -> list[str]:
    spans: list[Span | None] = [getattr(row, reading) for reading in READINGS]
    printed = f"{row.low:g}" if row.low == row.high else f"{row.low:g}-{row.high:g}"
    return [row.quantity, row.setting, printed, *("" if s is None else s.text for s in spans), row.verdict]
