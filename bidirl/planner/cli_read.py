"""The command ``bidirl-plan read``: one normalised table per run of a log, whatever framework wrote it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bidirl.planner.outputs import writing
from bidirl.shell import JsonOption, console

if TYPE_CHECKING:
    from bidirl.traces.step_log import StepLog

__all__ = ["read", "verdict"]

SHOWN_ROWS = 20
"""Steps of a run on the terminal: the first and the last half of them; ``--out`` has all."""

SHOWN_NOTES = 12
SHOWN_KEYS = 12

LogsArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="LOG...",
        help="Console logs (gz, bz2, xz too), W&B or TensorBoard exports, event files, our tables, journals.",
        show_default=False,
    ),
]


def read(
    logs: LogsArgument,
    format_: Annotated[
        str, typer.Option("--format", help="Framework that wrote it; auto finds out.")
    ] = "auto",
    json_: JsonOption = False,
    out: Annotated[
        Path | None,
        typer.Option(help="File for the table as CSV; JSON if it ends in .json.", show_default=False),
    ] = None,
) -> None:
    """Read logs of training runs into one table of steps per run, with what is doubtful about them."""
    from bidirl.traces.logs import read_logs
    from bidirl.traces.logs.own import to_json, write_csv

    found = read_logs(logs, format_)
    if out is not None:
        with writing(out):
            if out.suffix == ".json":
                out.write_text(json.dumps(to_json(found), indent=1, allow_nan=False) + "\n", encoding="utf-8")
            else:
                write_csv(out, found)
        typer.echo(f"note: the table is in {out}", err=True)
    if json_:
        typer.echo(json.dumps(to_json(found), allow_nan=False, ensure_ascii=False))
    else:
        _show(found)


def verdict(logs: Sequence["StepLog"]) -> str:
    """Say in one sentence what was read."""
    parts = []
    for log in logs[:4]:
        times = log.column("step_s")
        mean = ""
        if log.has("step_s"):
            import numpy as np

            mean = f", {np.nanmedian(times):.1f} s each (median)"
        parts.append(
            f"{len(log)} step{'s' * (len(log) != 1)} of {log.framework} ({log.mode}){mean}; "
            f"a step is {log.step_unit}"
        )
    more = f"; and {len(logs) - 4} more runs" if len(logs) > 4 else ""
    return "; ".join(parts) + more


def _show(logs: Sequence["StepLog"]) -> None:
    from rich.table import Table

    from bidirl.traces.step_log import COLUMNS

    screen = console()
    screen.print(verdict(logs), style="bold", highlight=False, markup=False, soft_wrap=True)
    for log in logs:
        names = [name for name in COLUMNS if name in log.columns]
        table = Table(title=log.source or log.framework)
        for name in names:
            table.add_column(name.replace("_", " "), justify="right")
        rows = list(range(len(log)))
        if len(rows) > SHOWN_ROWS:
            rows = rows[: SHOWN_ROWS // 2] + rows[-SHOWN_ROWS // 2 :]
        for position, row in enumerate(rows):
            if position and row != rows[position - 1] + 1:
                table.add_row(*["..."] * len(names))
            table.add_row(*(_cell(float(log.columns[name][row])) for name in names))
        screen.print(table)
        extra = [name for name in log.columns if name not in COLUMNS]
        lines = [f"also in --out and --json: {', '.join(extra)}"] if extra else []
        lines += [f"{name} = {value:g}" for name, value in log.facts.items()]
        lines += [f"note: {note}" for note in log.notes[:SHOWN_NOTES]]
        if len(log.notes) > SHOWN_NOTES:
            lines.append(f"note: {len(log.notes) - SHOWN_NOTES} more notes are in --json")
        if log.unknown_keys:
            keys = ", ".join(log.unknown_keys[:SHOWN_KEYS])
            rest = len(log.unknown_keys) - SHOWN_KEYS
            lines.append(
                f"unknown keys: {keys}" + (f" and {rest} more (--json lists them)" if rest > 0 else "")
            )
        for line in lines:
            screen.print(line, highlight=False, markup=False, soft_wrap=True)


def _cell(value: float) -> str:
    if value != value:  # noqa: PLR0124  # NaN
        return ""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value)}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
