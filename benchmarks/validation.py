"""Hold the simulator against published measurements; write docs/validation.md and its figures.

    python benchmarks/validation.py [--only NAME ...] [--check]

Everything is deterministic, so a change of any number shows as a diff of the page. ``--check`` writes
nothing and exits 1 with that diff; ``--only`` prints the named sections and writes nothing.
"""

import argparse
import difflib
import importlib
import importlib.util
import sys
from pathlib import Path

from bidirl.sim.reality import paper, reviewers
from bidirl.sim.reality.paper_plot import plot_paper
from bidirl.sim.reality.table import RealityTable, markdown_table

DOCS = Path(__file__).resolve().parent.parent / "docs"
TABLES = ("rfc", "verl", "verl_more", "paper")
"""Modules of bidirl.sim.reality with a ``table()``, in the order of the page."""
INTRO = """# Validation

Made by `make validation`; do not edit. The simulator against published measurements: each table prints what
was measured, what we predict, the error, and every parameter that its source does not give. Rows used for
fitting are marked; rows that miss stay. Seeds are fixed and nothing depends on the clock, so a changed number
shows as a diff."""

ADVICE = """## Advice from the row before a change

`bidirl-plan advise` was given the row before a change only; how, what is drawn and which rows are missed:
[advise_published.md](advise_published.md), made by `benchmarks/advise_published.py`."""


def tables(names: tuple[str, ...]) -> dict[str, RealityTable]:
    """Return the tables whose module is there, by name."""
    found: dict[str, RealityTable] = {}
    for name in names:
        module = f"bidirl.sim.reality.{name}"
        if importlib.util.find_spec(module) is None:
            print(f"{module} is not there: its section is left out", file=sys.stderr)
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        found[name] = importlib.import_module(module).table()
    return found


def overview(found: dict[str, RealityTable]) -> str:
    """Return one row a table: how much was fitted, how far the rest is off."""
    rows = []
    for table in found.values():
        predicted = [row for row in table.rows if not row.used_for_fit]
        errors = sorted(abs(row.error) for row in predicted if row.error is not None)
        rows.append(
            [
                table.title,
                f"{len(table.rows)}",
                f"{table.num_fitted}",
                f"{len(table.parameters)}",
                f"{errors[len(errors) // 2]:.1%}" if errors else "",
                f"{errors[-1]:.1%}" if errors else "",
            ]
        )
    head = ["table", "rows", "fitted rows", "parameters", "median error of the others", "largest"]
    return markdown_table(head, rows)


def answers() -> str:
    """Return the section of the reviewers' questions."""
    print("reviewers ...", file=sys.stderr, flush=True)
    scale = paper.fit_trainer_scale()
    head = (
        "## What reviewers asked\n\nSimulated with the parameters of the paper's table above "
        f"(trainer seconds x {scale:.2f}, priors else)."
    )
    return "\n".join([head + "\n", *(section.to_markdown() for section in reviewers.answers(scale))])


def figure(found: dict[str, RealityTable], path: Path) -> None:
    """Draw predicted over measured of every row, one panel a table."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    size = (4 * len(found), 3.4)
    plot, axes = plt.subplots(1, len(found), figsize=size, layout="constrained", squeeze=False)
    for axis, table in zip(axes[0], found.values(), strict=True):
        for fitted, color in ((False, "#c44e2b"), (True, "#3b6ea5")):
            errors = [row.error if row.used_for_fit is fitted else None for row in table.rows]
            points = [(place, 100 * error) for place, error in enumerate(errors) if error is not None]
            label = "fitted" if fitted else "predicted"
            if points:
                axis.scatter(*zip(*points, strict=True), s=14, color=color, label=label)
        axis.axhline(0.0, color="black", linewidth=0.8)
        axis.axhspan(-10, 10, color="black", alpha=0.06)
        axis.set_title(table.title, fontsize=9)
        axis.set_xlabel("row")
        axis.legend(fontsize=7)
    axes[0][0].set_ylabel("error (%)")
    plot.savefig(path, dpi=100, metadata={"Software": None})
    plt.close(plot)


def page(found: dict[str, RealityTable]) -> str:
    """Return the whole page."""
    parts = [INTRO, overview(found), "![Error of every row](validation.png)"]
    for name, table in found.items():
        parts.append(table.to_markdown().strip())
        if name == "paper":
            parts.append("![The paper's ranges and ours](validation_paper.png)")
    return "\n\n".join([*parts, answers().strip(), advice()]) + "\n"


def advice() -> str:
    """Return the first table of the page on advice, which is made by its own benchmark."""
    lines = (DOCS / "advise_published.md").read_text(encoding="utf-8").splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("|"))
    last = next(index for index in range(first, len(lines)) if not lines[index])
    table = "\n".join(lines[first:last])
    return f"{ADVICE}\n\n{table}"


def main() -> int:
    """Write the page and its figures, or check them."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--only", nargs="+", choices=[*TABLES, "reviewers"], default=[])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.only:
        for table in tables(tuple(name for name in TABLES if name in options.only)).values():
            print(table.to_markdown())
        if "reviewers" in options.only:
            print(answers())
        return 0
    found = tables(TABLES)
    text = page(found)
    path = DOCS / "validation.md"
    if options.check:
        old = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        changes = list(difflib.unified_diff(old, text.splitlines(), "committed", "now", lineterm="", n=0))
        print("\n".join(changes) or "docs/validation.md is up to date")
        return 1 if changes else 0
    path.write_text(text, encoding="utf-8")
    figure(found, DOCS / "validation.png")
    plot_paper(paper.compare_with_paper(), DOCS / "validation_paper.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
