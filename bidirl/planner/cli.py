"""The command ``bidirl-plan``: the partition to run, why it wins, and lines for the user's framework."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bidirl.errors import RunFault
from bidirl.planner.cli_advise import advise
from bidirl.planner.cli_calibrate import calibrate
from bidirl.planner.cli_read import read
from bidirl.shell import JobArgument, JsonOption, SetOption, guarded, root
from bidirl.shell import console as _console

if TYPE_CHECKING:
    from bidirl.planner.job import Job
    from bidirl.planner.plan import Plan
    from bidirl.planner.search.ranking import Evaluation
    from bidirl.planner.search.run import Found

__all__ = ["app", "main"]

app = typer.Typer(
    name="bidirl-plan",
    help="Plan asynchronous RL post-training: which split, which layouts, whether lending pays.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

SHOWN = 12
"""Rows of the table on the terminal; candidates.csv has all."""


class Goal(StrEnum):
    """What the plan is best at."""

    TIME = "time"
    GPU_HOURS = "gpu_hours"


def main() -> None:
    """Run the command line; every error a user can meet is one line, never a traceback."""
    sys.exit(guarded(app, sys.argv[1:] or ["--help"], "bidirl-plan"))


app.callback()(root)
app.command()(read)
app.command()(calibrate)
app.command()(advise)


@app.command()
def search(
    job: JobArgument,
    objective: Annotated[Goal, typer.Option(help="What to minimise: time, or GPU-hours.")] = Goal.TIME,
    top: Annotated[int, typer.Option(min=0, help="Splits to simulate; 0 trusts the stage models.")] = 5,
    framework: Annotated[
        str | None, typer.Option(help="Only plans that this framework can run.", show_default=False)
    ] = None,
    set_: SetOption = [],  # noqa: B006  # typer copies it
    out: Annotated[
        Path | None, typer.Option(help="Folder for plan.json, the tables and the landscape.")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Search the best partition of the cluster, and say why the others lose.

    Without a legal plan the report is still written, and the exit code is 1.
    """
    from bidirl.planner.job import load_job
    from bidirl.planner.search.candidates import Objective
    from bidirl.planner.search.frameworks import framework as rules_of
    from bidirl.planner.search.report import plan_json, write_report
    from bidirl.planner.search.run import no_plan, search_job

    rules = None if framework is None else rules_of(framework)
    loaded = load_job(job, set_)
    found = search_job(loaded, Objective(objective.value), top, simulated if top else None, rules)
    for note in loaded.notices:
        typer.echo(f"note: {note}", err=True)
    if out is not None:
        typer.echo(f"note: {', '.join(write_report(found, out))} are in {out}", err=True)
    if json_:
        typer.echo(json.dumps(plan_json(found), indent=1, ensure_ascii=False, default=str))
    elif found.best is not None:
        _show(found)
    if found.best is None:
        raise no_plan(found)


@app.command()
def export(
    plan: Annotated[
        Path,
        typer.Argument(help="A plan.json of search, a resolved.json, or a job file.", show_default=False),
    ],
    framework: Annotated[
        str, typer.Option(help="verl, areal, roll, slime, nemo_rl, skyrl, prime_rl, openrlhf.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="File for the lines, instead of the terminal.", show_default=False)
    ] = None,
) -> None:
    """Print config lines for a framework; comment lines say what it cannot express."""
    from bidirl.planner.export import export_command

    text = export_command(plan, framework, out)
    if out is None:
        typer.echo(text, nl=False)
    else:
        typer.echo(f"note: the lines for {framework} are in {out}", err=True)


def simulated(job: "Job", plan: "Plan", seed: int) -> "Evaluation":
    """Simulate a plan of a job: the evaluator that the search is given."""
    from bidirl.models.faults import Faults, FaultsConfig
    from bidirl.planner.build import build_workload
    from bidirl.planner.search.ranking import Evaluation
    from bidirl.sim.diagnosis import diagnose
    from bidirl.sim.driver import Driver
    from bidirl.sim.metrics import summarise
    from bidirl.sim.oracle import attach_oracle
    from bidirl.sim.run import alone_decode_s

    faults = None if job.faults == FaultsConfig() else Faults(job.faults, seed)
    driver = Driver(plan, build_workload(job, seed), faults=faults)
    attach_oracle(driver)
    summary = summarise(driver.run(), sources={}, alone_decode_s=alone_decode_s(plan))
    step_s = summary["step_time_s"]["mean"]
    if not step_s:
        raise RunFault(f"no step was measured in {plan.num_steps} steps: raise workload.num_steps")
    kept = {name: summary[name] for name in ("parts_s", "idle", "borrow", "bound")}
    return Evaluation(step_s, summary["tokens_per_s"], str(diagnose(summary)), kept)


# ---------------------------------------------------------------------- output


def _show(found: "Found") -> None:
    from rich.table import Table

    from bidirl.planner.search.report import plan_json, rows, verdict

    console = _console()
    console.print(verdict(found), style="bold", highlight=False, markup=False, soft_wrap=True)
    table = Table(title="Candidates, best first")
    for name in (
        "",
        "R",
        "T",
        "rollout",
        "trainer",
        "lending",
        "models s",
        "simulated s",
        "over best",
        "limit",
    ):
        table.add_column(
            name, justify="left" if name in ("rollout", "trainer", "lending", "limit") else "right"
        )
    everything = rows(found)
    for row in everything[:SHOWN]:
        table.add_row(
            "" if row["rank"] is None else str(row["rank"]),
            str(row["rollout_gpus"]),
            str(row["train_gpus"] or "-"),
            row["rollout"],
            row["train"],
            row["lending"],
            f"{row['step_s']:.1f}",
            "" if row["simulated_step_s"] is None else f"{row['simulated_step_s']:.1f}",
            _interval(row),
            row["why"].removeprefix("limited by ").partition(" (")[0],
        )
    console.print(table)
    for line in _sentences(plan_json(found)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _interval(row: dict[str, Any]) -> str:
    if row["over_best"] is None:
        return ""
    if row["over_best_low"] is None:
        return f"{row['over_best']:.3f}"
    return f"{row['over_best']:.3f} [{row['over_best_low']:.3f}, {row['over_best_high']:.3f}]"


def _sentences(data: dict[str, Any]) -> list[str]:
    """Return the answers as text, one line each."""
    found = data["answers"]
    limit, ceilings, bounds = found["bottleneck"], found["ceilings"], found["bounds"]
    sure = "" if limit["is_sure"] else f" (not sure: {limit['decide_by']})"
    lines = [f"bottleneck: {limit['limit']}: {limit['evidence']}{sure}"]
    lines.append(
        f"concurrency: KV memory holds {ceilings['kv_samples']:,} samples, staleness admits "
        f"{ceilings['staleness_samples']:,}: {ceilings['binds']}"
    )
    lines.append(
        f"bounds: free generation {bounds['generation_free_speedup']:.2f}x, free training "
        f"{bounds['training_free_speedup']:.2f}x, longest sample {bounds['tail_s']:.1f} s, weight sync "
        f"{bounds['sync_share']:.1%} of the step"
    )
    if bounds["saturated_rollout_gpus"] is not None:
        lines.append(f"more than {bounds['saturated_rollout_gpus']} rollout GPUs no longer help (tail)")
    windows = ", ".join(f"{each['direction']} {each['window_s']:.1f} s" for each in found["break_even"])
    lines.append(f"lending breaks even from idle windows of {windows} on")
    if found["why_no_lending"] is not None:
        lines.append(f"no lending here: {found['why_no_lending']}")
    if "staleness" in found:
        lines.append(f"staleness: the knee is at {found['staleness']['knee']:g}")
    if "partition_and_borrowing" in found:
        four = found["partition_and_borrowing"]
        lines.append(
            f"over {four['base']} without lending: the split gains {four['partition_gain']:.2f}x, lending "
            f"{four['borrowing_gain']:.2f}x, both {four['both_gain']:.2f}x "
            f"(interaction {four['interaction']:.2f})"
        )
    faults = found["goodput"]
    if "goodput" in faults:
        lines.append(
            f"failures leave {faults['goodput']:.1%} of the steps (rollout capacity "
            f"{faults['rollout_capacity']:.1%}, trainer {faults['trainer_share']:.1%} with a checkpoint "
            f"every {faults['checkpoint_interval_steps']} steps); spare replicas that pay: "
            f"{faults['spares_that_pay']}"
        )
    other = found.get("gpu_hour_optimal") or found.get("time_optimal")
    if isinstance(other, dict):
        name = "fewest GPU-hours" if "gpu_hour_optimal" in found else "shortest step"
        lines.append(f"{name}, by the stage models: {other['label']}, {other['step_s']:.1f} s a step")
    able = [name for name, broken in data["frameworks"].items() if not broken]
    lines.append(f"frameworks whose rules it keeps: {', '.join(able) or 'none'}")
    return lines
