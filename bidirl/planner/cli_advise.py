"""The command ``bidirl-plan advise``: what limits a run, what to change, what it would gain."""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bidirl.errors import InputError
from bidirl.planner.outputs import writing
from bidirl.shell import JsonOption, SetOption, console

if TYPE_CHECKING:
    from bidirl.planner.job import Job
    from bidirl.traces.step_log import StepLog

__all__ = ["advise"]

POLL_S = 1.0
"""Seconds between two looks at a followed log."""


def advise(
    logs: Annotated[
        list[Path], typer.Argument(help="One log, or two runs A and B to compare.", metavar="LOG [LOG]")
    ],
    job: Annotated[
        Path | None, typer.Option("--job", help="Job file of the logged run: cluster, model, split, policy.")
    ] = None,
    format_: Annotated[str, typer.Option("--format", help="Log format; auto detects it.")] = "auto",
    run: Annotated[str | None, typer.Option(help="Only the run whose name contains this.")] = None,
    set_: SetOption = [],  # noqa: B006  # typer copies it
    gpus: Annotated[
        str | None, typer.Option(help="GPUs of A and B, as 32,40, where the logs do not name them.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for advice.json and advice.png.")] = None,
    json_: JsonOption = False,
    shadow: Annotated[
        bool, typer.Option("--shadow", help="Report what lending would have saved; touch nothing.")
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", help="With --shadow: keep reading the log.")] = False,
) -> None:
    """Say what limits a run, what to change, what it would gain, and how sure that is.

    With two logs, or two runs in one: is B faster, or are its answers shorter?
    """
    if follow and not shadow:
        raise InputError("--follow without --shadow: there is nothing to follow for; add --shadow")
    if shadow:
        _shadow(logs, job, set_, format_, out=out, as_json=json_, follow=follow)
        return
    if len(logs) > 2:
        raise InputError(f"{len(logs)} logs: give one to advise on, or two to compare")
    if len(logs) == 2 and (job is not None or set_):
        raise InputError("--job with two logs: a comparison simulates nothing; leave out --job and --set")
    counts = _gpu_counts(gpus)
    runs = _runs(logs, format_, run)
    if len(logs) == 2:
        _compare(runs[0][-1], runs[1][-1], counts, out, as_json=json_)
        return
    _advise_one(runs[0], job, set_, counts, out, as_json=json_)


def _runs(logs: list[Path], format_: str, name: str | None) -> "list[list[StepLog]]":
    from bidirl.traces.logs import read_logs

    found = [read_logs([path], format_) for path in logs]
    if name is not None:
        sources = ", ".join(log.source for runs in found for log in runs)
        found = [[log for log in runs if name in log.source] for runs in found]
        if not all(found):
            raise InputError(f"--run {name}: no run's name contains it; there are {sources}")
    for path, runs in zip(logs, found, strict=True):
        if not runs:
            raise InputError(f"{path}: no step found: give a log with step times")
        if len(runs) > 1:
            names = ", ".join(
                log.source.removeprefix(str(path)).strip(" ()") or "unnamed" for log in runs[:4]
            )
            typer.echo(
                f"note: {path} holds {len(runs)} runs: {names}; the last one is advised on, "
                "--run TEXT takes the one whose name contains TEXT",
                err=True,
            )
    return found


def _load(job: Path | None, set_: list[str]) -> "Job | None":
    from bidirl.planner.job import load_job

    if job is None:
        if set_:
            raise InputError("--set without --job: there is no job to change; add --job")
        return None
    loaded = load_job(job, set_)
    for note in loaded.notices:
        typer.echo(f"note: {note}", err=True)
    return loaded


def _advise_one(
    runs: "list[StepLog]",
    job: Path | None,
    set_: list[str],
    gpus: tuple[int | None, int | None],
    out: Path | None,
    *,
    as_json: bool,
) -> None:
    """Advise on the last run; where there are two, say first how it compares with the one before."""
    from bidirl.planner.advise.advice import advise as advise_on
    from bidirl.planner.advise.compare import compare_logs
    from bidirl.planner.advise.report import advice_json, advice_lines, change_rows
    from bidirl.planner.cli import simulated

    def progress(line: str) -> None:
        if sys.stderr.isatty():
            typer.echo(f"{line} ...", err=True)

    loaded = _load(job, set_)
    compared = compare_logs(runs[0], runs[1], gpus) if len(runs) == 2 else None
    found = advise_on(runs[-1], loaded, simulated, progress)
    data = advice_json(found)
    if compared is not None:
        data["comparison"] = compared.to_json()
    if out is not None:
        from bidirl.planner.advise.figure import draw_advice

        names = ["advice.json"]
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
            text = json.dumps(data, indent=1, ensure_ascii=False)
            (out / "advice.json").write_text(text + "\n", encoding="utf-8")
            if draw_advice(found, loaded, simulated, out / "advice.png"):
                names.append("advice.png")
        typer.echo(f"note: {', '.join(names)} are in {out}", err=True)
    if as_json:
        typer.echo(json.dumps(data, indent=1, ensure_ascii=False))
        return
    screen = console()
    if compared is not None:
        _say(screen, f"Run 2 (B) against run 1 (A): {compared.sentence}", style="bold")
        for note in compared.notes:
            _say(screen, f"note: {note}")
    lead = "" if compared is None else "Run 2: "
    _say(screen, f"{lead}{found.verdict.sentence}", style="bold")
    if found.changes:
        from rich.table import Table

        table = Table(title="Changes, best first (step time before over after)")
        for name in ("change", "gain", "per GPU", "how"):
            table.add_column(name)
        for row in change_rows(found.changes):
            table.add_row(*row)
        screen.print(table)
    for line in advice_lines(found):
        _say(screen, line)


def _say(screen: Any, line: str, style: str | None = None) -> None:
    screen.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


def _compare(
    one: "StepLog", other: "StepLog", gpus: tuple[int | None, int | None], out: Path | None, *, as_json: bool
) -> None:
    from bidirl.planner.advise.compare import compare_logs

    found = compare_logs(one, other, gpus)
    text = json.dumps(found.to_json(), indent=1, ensure_ascii=False)
    if out is not None:
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
            (out / "comparison.json").write_text(text + "\n", encoding="utf-8")
        typer.echo(f"note: comparison.json is in {out}", err=True)
    if as_json:
        typer.echo(text)
        return
    screen = console()
    _say(screen, found.sentence, style="bold")
    for note in found.notes:
        _say(screen, f"note: {note}")


def _gpu_counts(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise InputError(f"--gpus {text!r}: must be two whole numbers; write them as 32,40")
    return int(parts[0]), int(parts[1])


def _shadow(
    logs: list[Path],
    job: Path | None,
    set_: list[str],
    format_: str,
    *,
    out: Path | None,
    as_json: bool,
    follow: bool,
) -> None:
    from bidirl.planner.shadow_run import ShadowRun

    if len(logs) != 1:
        raise InputError(f"{len(logs)} logs with --shadow: give one log or journal")
    loaded = _load(job, set_)
    run = ShadowRun(logs[0], loaded, format_)
    try:
        while True:
            changed = run.poll(is_last=not follow)
            if not follow:
                break
            if changed and not as_json:
                typer.echo(run.shadow_line(), err=True)
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        run.poll(is_last=True)
    if not run.num_rows and not follow:
        raise InputError(f"{logs[0]}: no step found: give a log with step times")
    data = run.to_json()
    if out is not None:
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
            (out / "shadow.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        typer.echo(f"note: shadow.json is in {out}", err=True)
    if as_json:
        typer.echo(json.dumps(data, indent=1, ensure_ascii=False))
        return
    screen = console()
    _say(screen, run.verdict(), style="bold")
    for note in run.notes:
        _say(screen, f"note: {note}")
