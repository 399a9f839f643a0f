"""The command ``bidirl-plan calibrate``: fitted stages, or a job's stage models, from logs of runs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bidirl.errors import InputError
from bidirl.shell import JsonOption, SetOption, console

if TYPE_CHECKING:
    from bidirl.models.fit.file import FittedRun
    from bidirl.models.fit.fitted import FittedStage
    from bidirl.traces.step_log import StepLog

__all__ = ["calibrate"]


def calibrate(
    inputs: Annotated[
        list[Path], typer.Argument(metavar="INPUT...", help="Logs of runs.", show_default=False)
    ],
    job: Annotated[
        Path | None,
        typer.Option(help="Job of the logged run: writes its stage models.", show_default=False),
    ] = None,
    format_: Annotated[str, typer.Option("--format", help="Framework that wrote the logs.")] = "auto",
    run: Annotated[
        str | None, typer.Option(help="Only runs whose name contains this.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File for the models (JSON).", show_default=False)] = None,
    holdout_after: Annotated[
        int | None,
        typer.Option(help="Fit on the first N steps, report on the rest.", show_default=False),
    ] = None,
    set_: SetOption = [],  # noqa: B006  # typer copies it
    json_: JsonOption = False,
) -> None:
    """Fit stage times to the logs of runs, and say how well they predict.

    Without --job the file holds the fitted stages alone; with it, the job's stage models ([models] reads
    them) and the fitted stages beside them in FILE.fits.json.
    """
    from bidirl.traces.logs import read_logs

    if set_ and job is None:
        raise InputError("--set without --job: there is no job to change; add --job")
    logs = read_logs(inputs, format_)
    if run is not None:
        chosen = [log for log in logs if run in log.source]
        if not chosen:
            names = ", ".join(log.source for log in logs)
            raise InputError(f"--run {run}: no run's name contains it; the input has {names}")
        logs = chosen
    notes = [f"{len(logs)} runs in the input: each is fitted by itself"] if len(logs) > 1 else []
    if holdout_after is not None:
        _hold_out(logs, holdout_after, job, out, json_, notes)
        return
    _fit(logs, job, set_, out, json_, notes)


def _hold_out(
    logs: "list[StepLog]", num_first: int, job: Path | None, out: Path | None, json_: bool, notes: list[str]
) -> None:
    from bidirl.models.fit.file import save_fits
    from bidirl.models.fit.holdout import hold_out
    from bidirl.planner.calibration.report import holdout_json, holdout_table, remarks

    if job is not None:
        raise InputError("--holdout-after judges the log's own fits: leave --job out, or --holdout-after")
    judged = [hold_out(log, num_first) for log in logs]
    for log in logs:
        notes += [f"{log.source}: {note}" for note in log.notes]
    if out is not None:
        save_fits(
            [
                _fitted_run(log, {stage: held.fitted[0] for stage, held in run.items()}, num_first)
                for log, run in zip(logs, judged, strict=True)
            ],
            out,
        )
        notes.append(f"the fits of the first {num_first} steps are in {out}")
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    names = [log.source for log in logs]
    if json_:
        typer.echo(json.dumps(holdout_json(names, judged), indent=1))
        return
    screen = console()
    worst = max((held.to_json()["median_error"], stage) for run in judged for stage, held in run.items())
    screen.print(
        f"fitted on the first {num_first} step{'s' * (num_first != 1)}, later ones are predicted to "
        f"{worst[0]:.1%} ({worst[1]}) or better (median error)",
        style="bold",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    for log, run in zip(logs, judged, strict=True):
        screen.print(holdout_table(log.source, run))
        for line in remarks({stage: held.fitted[0] for stage, held in run.items()}):
            screen.print(line, highlight=False, markup=False, soft_wrap=True)


def _fit(
    logs: "list[StepLog]", job: Path | None, set_: list[str], out: Path | None, json_: bool, notes: list[str]
) -> None:
    from bidirl.models.fit.file import save_fits
    from bidirl.models.fit.fitting import fit_log
    from bidirl.planner.calibration.report import fits_json, fits_table, remarks, verdict

    if job is None:
        runs = [_fitted_run(log, fit_log(log), len(log)) for log in logs]
        if out is not None:
            save_fits(runs, out)
    else:
        runs = _fit_job(logs, job, set_, out, notes)
    for log in logs:
        notes += [f"{log.source}: {note}" for note in log.notes]
    notes.append("nothing is written: give --out" if out is None else f"the models are in {out}")
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    if json_:
        typer.echo(json.dumps(fits_json(runs, None if out is None else str(out), notes), indent=1))
        return
    screen = console()
    screen.print(verdict(runs), style="bold", highlight=False, markup=False, soft_wrap=True)
    for each in runs:
        screen.print(fits_table(each))
        for line in remarks(each.stages):
            screen.print(line, highlight=False, markup=False, soft_wrap=True)


def _fit_job(
    logs: "list[StepLog]", job: Path, set_: list[str], out: Path | None, notes: list[str]
) -> "list[FittedRun]":
    from bidirl.models.fit.file import save_fits
    from bidirl.planner.build import build_plan, build_workload
    from bidirl.planner.calibration.models import calibrate_plan
    from bidirl.planner.job import load_job

    if len(logs) > 1:
        names = ", ".join(log.source for log in logs)
        raise InputError(f"{len(logs)} runs for one --job ({names}): choose one with --run")
    loaded = load_job(job, set_)
    notes += loaded.notices
    calibrated = calibrate_plan(build_plan(loaded, build_workload(loaded, 0)), logs[0])
    notes += calibrated.notes
    for stage, prior_s in calibrated.predicted_s.items():
        if stage in calibrated.stages:
            typical_s = calibrated.stages[stage].typical_s
            notes.append(
                f"{stage}: measured {typical_s:.3g} s, the prior said {prior_s:.3g} s "
                f"(x {typical_s / prior_s:.2f})"
                if prior_s > 0.0
                else f"{stage}: measured {typical_s:.3g} s, the job had no such stage"
            )
    runs = [_fitted_run(logs[0], dict(calibrated.stages), len(logs[0]))]
    if out is not None:
        calibrated.models.save(out)
        beside = out.with_suffix(".fits.json")
        save_fits(runs, beside)
        notes.append(f"the fitted stages are in {beside}")
    return runs


def _fitted_run(log: "StepLog", stages: "dict[str, FittedStage]", num_steps: int) -> "FittedRun":
    from bidirl.models.fit.file import FittedRun

    return FittedRun(log.source, log.framework, str(log.mode), num_steps, stages, dict(log.facts), log.notes)
