"""Carry a planned sweep out: take what is there, compute the rest, write table and figures."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bidirl.errors import RunFault
from bidirl.sim.run import build, make_folder, write_json
from bidirl.sim.sweep import Sweep, rows_of, write_rows
from bidirl.sim.sweep_store import Result, Scatter, Store, Task

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Done", "run_sweep"]

FIGURES = ("throughput.png", "speedup.png")


@dataclass(frozen=True, slots=True)
class Done:
    """What a sweep leaves."""

    rows: list[dict[str, Any]]
    notes: list[str]
    first_error: str | None
    """Why the first cell has no result, if none has; else None."""


def run_sweep(sweep: Sweep, folder: Path, scatter: Scatter, progress: "Console") -> Done:
    """Compute the cells that ``folder`` lacks, then write ``sweep.csv``, ``sweep.json`` and the figures.

    ``progress`` shows a bar if it is a terminal. On Ctrl-C what was computed stays in ``cells.jsonl``.

    Raises:
        InputError: the folder cannot be made or read.
        RunFault: the folder cannot be written.
        KeyboardInterrupt: after a line that says how many cells are kept.
    """
    make_folder(folder)
    store = Store(folder / "cells.jsonl")
    unique = {cell.key: cell for cell in sweep.cells if cell.job is not None}
    tasks: list[Task] = [
        (key, cell.job, cell.seed)
        for key, cell in unique.items()
        if cell.job is not None and key not in store.results
    ]
    num_kept = len(unique) - len(tasks)
    if num_kept:
        progress.print(
            f"note: {num_kept} of {len(unique)} runs are taken from {store.path}",
            highlight=False,
            soft_wrap=True,
        )
    num_new = 0
    try:
        results = store.run(tasks, {key: cell.resolved for key, cell in unique.items()}, scatter)
        for _ in _shown(results, len(tasks), progress):
            num_new += 1
        return _write(sweep, folder, store)
    except KeyboardInterrupt:
        progress.print(
            f"interrupted: {num_kept + num_new} of {len(unique)} runs are kept in {store.path}; "
            "the same command goes on from there",
            highlight=False,
            soft_wrap=True,
        )
        raise
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise RunFault(f"{folder}: {reason} while writing: free space or choose another --out") from None


def _shown(results: Iterable[Result], total: int, console: "Console") -> Iterator[Result]:
    """Pass results on, with a bar where the console is a terminal."""
    if not console.is_terminal:
        yield from results
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("runs", total=total)
        for result in results:
            bar.advance(task)
            yield result


def _write(sweep: Sweep, folder: Path, store: Store) -> Done:
    from bidirl.sim.sweep_plots import sweep_figures

    rows = rows_of(sweep, store.results)
    write_rows(folder / "sweep.csv", rows, sweep.varied)
    seeds = sorted({cell.seed for cell in sweep.cells})
    axes = {
        name: list(dict.fromkeys(cell.values[index] for cell in sweep.cells))
        for index, name in enumerate(sweep.varied)
    }
    write_json(folder / "sweep.json", {"provenance": build(), "varied": axes, "seeds": seeds})
    for name in FIGURES:  # an earlier grid's figure would pass for one of this grid
        (folder / name).unlink(missing_ok=True)
    sweep_figures(rows, sweep.varied, folder)
    errors = [str(row["error"]) for row in rows if row["error"]]
    notes = [
        f"{count} of {len(rows)} runs have no result: {text}"
        for text, count in {text: errors.count(text) for text in errors}.items()
    ]
    return Done(rows, notes, errors[0] if len(errors) == len(rows) else None)
