"""The command ``bidirl-sim``: simulate a job, sweep it, compare policies, replay a journal, run an engine."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bidirl.errors import BidirlError, NoFeasiblePlan, RunFault
from bidirl.shell import JobArgument, JsonOption, SetOption, guarded, root
from bidirl.shell import console as _console

if TYPE_CHECKING:
    from bidirl.planner.replay import Replay

__all__ = ["app", "main"]

app = typer.Typer(
    name="bidirl-sim",
    help="Simulate asynchronous RL post-training on two pools of GPUs that lend each other idle devices.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Run the command line; every error a user can meet is one line, never a traceback."""
    sys.exit(guarded(app, sys.argv[1:] or ["--help"], "bidirl-sim"))


app.callback()(root)


@app.command()
def run(
    job: JobArgument,
    policy: Annotated[
        str | None, typer.Option(help="Preset to run instead of the job's; other policy keys stay.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of lengths, prompts and rewards.")] = 0,
    set_: SetOption = [],  # noqa: B006  # typer copies it
    out: Annotated[
        Path | None, typer.Option(help="Folder for tables, journal, figure and trace; without it none.")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Simulate one run of a job."""
    from bidirl.planner.job import load_job
    from bidirl.sim.report import print_summary
    from bidirl.sim.run import run_to_folder, simulate

    chosen = [] if policy is None else [f"policy.name={json.dumps(policy)}"]
    try:
        loaded = load_job(job, [*set_, *chosen])
    except BidirlError as error:
        written = f"--set {chosen[0]}: " if chosen else "--policy: "
        raise type(error)(str(error).replace(written, f"--policy {policy}: ")) from None
    try:
        outcome = simulate(loaded, seed) if out is None else run_to_folder(loaded, seed, out)
    except NoFeasiblePlan as error:
        if json_:
            _print_json({"error": str(error)})
        raise
    _print_notes(outcome.plan.notes)
    if loaded.partition is None:
        chosen_by_planner = (
            f"rollout_gpus = {outcome.plan.rollout_gpus}, train_gpus = {outcome.plan.train_gpus}"
        )
        _print_notes([f"no [partition] in the job: the planner chose {chosen_by_planner}"])
    if out is not None:
        _print_notes([f"tables, journal, figure and trace are in {out}"])
    if json_:
        _print_json(outcome.summary)
        return
    print_summary(outcome.summary, loaded.policy.name, _console())


@app.command()
def sweep(
    job: JobArgument,
    vary: Annotated[
        list[str], typer.Option(metavar="KEY=V1,V2,...", help="Values of a key to try; repeat for a grid.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for sweep.csv, figures and computed cells.")],
    seeds: Annotated[int, typer.Option(min=1, help="Seeds per cell: 0 .. N-1.")] = 1,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes; without it one per processor.", show_default=False)
    ] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run cells as Ray tasks on this cluster.")
    ] = None,
    set_: SetOption = [],  # noqa: B006  # typer copies it
    json_: JsonOption = False,
) -> None:
    """Run a grid of jobs.

    It goes on where an interrupted sweep of the same folder stopped, and computes only cells that changed.
    """
    from bidirl.sim.report import sweep_table, sweep_verdict
    from bidirl.sim.sweep import plan_sweep
    from bidirl.sim.sweep_run import run_sweep
    from bidirl.sim.sweep_store import local, num_cpus

    planned = plan_sweep(job, set_, vary, seeds)
    _print_notes(planned.notices)
    if ray is None:
        scatter = local(jobs or num_cpus())
    else:
        from bidirl.executor.backends.ray_tasks import scatter_over

        scatter = scatter_over(ray)
    done = run_sweep(planned, out, scatter, _console(stderr=True))
    verdict = sweep_verdict(done.rows, planned.varied)
    if json_:
        _print_json({"verdict": verdict, "varied": planned.varied, "rows": done.rows})
    else:
        console = _console()
        console.print(verdict, style="bold", highlight=False, markup=False, soft_wrap=True)
        console.print(sweep_table(done.rows, planned.varied))
        _print_notes(done.notes)
    if done.first_error is not None:
        raise NoFeasiblePlan(f"no cell has a result: {done.first_error}")


@app.command()
def compare(
    job: JobArgument,
    policies: Annotated[
        str, typer.Option(metavar="P1,P2,...", help="Presets to compare; speed-ups are over the first.")
    ],
    seeds: Annotated[int, typer.Option(min=1, help="Seeds per policy; one gives no interval.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="First seed; the others follow it.")] = 0,
    set_: SetOption = [],  # noqa: B006  # typer copies it
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes; without it one per processor.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for compare.csv and compare.png.")] = None,
    json_: JsonOption = False,
) -> None:
    """Run a job under several policies with the same seeds.

    A winner is named only where the paired interval over seeds leaves no doubt.
    """
    from bidirl.sim.compare import plan_comparison, run_comparison, write_comparison
    from bidirl.sim.report import compare_table, compare_verdict
    from bidirl.sim.run import make_folder
    from bidirl.sim.sweep_store import local, num_cpus

    planned = plan_comparison(job, policies, set_, seed, seeds)
    if out is not None:
        make_folder(out)
    _print_notes(planned.notices)
    found = run_comparison(planned, local(jobs or num_cpus()), _console(stderr=True))
    chosen = [name for name, each in planned.jobs.items() if each.partition is None and found.pools(name)]
    if chosen:
        pools = ", ".join(f"{found.pools(name)} for {name}" for name in chosen)
        _print_notes([f"no [partition] in the job: the planner chose rollout + training GPUs {pools}"])
    _print_notes([f"{name} has no result: {error}" for name, error in found.errors.items()])
    if out is not None:
        write_comparison(planned, found, out)
        _print_notes([f"compare.csv, compare.png and resolved.json are in {out}"])
    verdict = compare_verdict(found)
    if json_:
        _print_json({"verdict": verdict, **found.to_json()})
    else:
        console = _console()
        console.print(verdict, style="bold", highlight=False, markup=False, soft_wrap=True)
        console.print(compare_table(found))
    if not found.ranked():
        error = next(iter(found.errors.values()), "no run finished a step")
        raise NoFeasiblePlan(f"no policy has a result: {error}")


@app.command()
def paper(
    out: Annotated[Path | None, typer.Option(help="Folder for paper.csv and paper.md.")] = None,
    json_: JsonOption = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer steps, and only the ends of each sweep.")
    ] = False,
) -> None:
    """Hold the paper's printed numbers against ours, row by row, with what was fitted and chosen."""
    from bidirl.sim.reality.paper import FULL, QUICK, compare_with_paper
    from bidirl.sim.reality.paper_report import print_paper, write_paper
    from bidirl.sim.run import make_folder

    if out is not None:
        make_folder(out)
    with _console(stderr=True).status("simulating") as status:
        found = compare_with_paper(QUICK if quick else FULL, status.update)
    if out is not None:
        write_paper(found, out)
        _print_notes([f"paper.csv and paper.md are in {out}"])
    if json_:
        _print_json(found.to_json())
    else:
        print_paper(found, _console())


@app.command()
def replay(
    journal: Annotated[Path, typer.Argument(help="journal.jsonl of a run.", show_default=False)],
    json_: JsonOption = False,
) -> None:
    """Check that a journal's events give its actions again.

    They are fed through a fresh scheduler; the first different action is shown, with exit code 3.
    """
    from bidirl.planner.replay import replay as replay_journal
    from bidirl.sim.run import build

    found = replay_journal(journal, build())
    if json_:
        _print_json(found.to_json())
    else:
        typer.echo(_replay_verdict(found))
    if found.difference is not None:
        raise typer.Exit(RunFault.exit_code)


def _replay_verdict(found: "Replay") -> str:
    agreed = f"{found.num_events:,} events agree ({found.num_actions:,} actions)"
    if found.num_close:
        agreed += f"; {found.num_close:,} of them only within 1e-9, another build wrote the journal"
    first = found.difference
    if first is not None:
        place = f"line {first.line}, t = {first.time_s} s, action {first.index + 1}"
        lines = [
            f"the replay differs at {place}; before it {agreed}",
            f"  event     {_shown(first.event)}",
            f"  expected  {_shown(first.expected)}",
            f"  got       {_shown(first.got)}",
        ]
        return "\n".join(lines)
    if found.cut_line is not None:
        return f"{agreed}; line {found.cut_line} is cut off: the run was killed there, replayed up to it"
    return agreed if found.is_complete else f"{agreed}; the run stopped before its last step"


def _shown(item: "dict[str, Any] | str | None") -> str:
    if item is None:
        return "nothing"
    if isinstance(item, str):
        return item
    fields = ", ".join(f"{name}={json.dumps(value)}" for name, value in item.items() if name != "kind_of")
    return f"{item.get('kind_of')}({fields})"


@app.command()
def engine(
    requests: Annotated[
        Path, typer.Argument(help="CSV with arrival_s, input_toks, output_toks.", show_default=False)
    ],
    models: Annotated[Path, typer.Option(help="JSON with the time model of an engine iteration.")],
    kv_tokens: Annotated[int | None, typer.Option(min=1, help="KV memory in tokens.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Running sequences.")] = None,
    max_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Token budget of an iteration.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the times of each request.")] = None,
    json_: JsonOption = False,
) -> None:
    """Run one rollout replica against a file of requests."""
    from bidirl.sim.engine import engine_command
    from bidirl.sim.run import make_folder, write_json

    if out is not None:
        make_folder(out)
    table = None if out is None else out / "requests.csv"
    report = engine_command(requests, models, kv_tokens, max_num_seqs, max_batched_tokens, table)
    if out is not None:
        write_json(out / "summary.json", report.to_json())
        _print_notes([f"requests.csv and summary.json are in {out}"])
    if json_:
        _print_json(report.to_json())
    else:
        report.render(_console())


# ---------------------------------------------------------------------- output


def _print_json(data: object) -> None:
    typer.echo(json.dumps(data, indent=1, ensure_ascii=False))


def _print_notes(notes: Sequence[str]) -> None:
    for note in dict.fromkeys(notes):
        typer.echo(f"note: {note}", err=True)
