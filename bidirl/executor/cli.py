"""The command ``bidirl-run``: train on real devices, and prove that borrowing leaves the learning alone."""

import json
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bidirl.errors import InputError, NoFeasiblePlan, RunFault
from bidirl.shell import JobArgument, JsonOption, SetOption, guarded, root
from bidirl.shell import console as _console

if TYPE_CHECKING:
    from bidirl.executor.backends.assemble import Kind
    from bidirl.executor.checkpoint import Checkpoint
    from bidirl.executor.run import RealRun
    from bidirl.planner.job import Job
    from bidirl.planner.plan import Plan
    from bidirl.sim.driver import Sink
    from bidirl.sim.run import Outcome
    from bidirl.traces.run_record import RunRecord

__all__ = ["app", "main"]

app = typer.Typer(
    name="bidirl-run",
    help="Run asynchronous RL post-training on real devices that lend each other's idle time.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


CHECKPOINTS, WORKERS = "checkpoints", "workers"
"""Folders beside a run's tables: its checkpoints, and the error output of its workers."""


class BackendName(StrEnum):
    """What plays the roles."""

    FAKE = "fake"
    VLLM = "vllm"


def main() -> None:
    """Run the command line; every error a user can meet is one line, never a traceback."""
    sys.exit(guarded(app, sys.argv[1:] or ["--help"], "bidirl-run"))


app.callback()(root)

BackendOption = Annotated[
    BackendName,
    typer.Option(help="vllm: vLLM and torch under Ray. fake: stand-ins, without either."),
]
RayOption = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Join this Ray cluster; without it one is started and stopped."),
]
StepsOption = Annotated[
    int | None, typer.Option(min=1, help="Steps to train, instead of the job's.", show_default=False)
]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of model, prompts, lengths and sampling.")]


@app.command()
def train(
    job: JobArgument,
    plan: Annotated[
        Path | None,
        typer.Option(help="plan.json of bidirl-plan search: its partition and policy.", show_default=False),
    ] = None,
    steps: StepsOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for tables, journal, figure and trace; without it none.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")
    ] = False,
    backend: BackendOption = BackendName.VLLM,
    ray: RayOption = None,
    policy: Annotated[
        str | None, typer.Option(help="Preset to run instead of the job's; other policy keys stay.")
    ] = None,
    seed: SeedOption = 0,
    set_: SetOption = [],  # noqa: B006  # typer copies it
    json_: JsonOption = False,
) -> None:
    """Train a job.

    A run with a folder keeps checkpoints in it every learn.checkpoint_every steps. With the fake backend,
    stage models stand for devices and no time passes: the run of the simulator, by the executor's driver.
    """
    from bidirl.sim.report import print_summary
    from bidirl.sim.run import run_to_folder

    chosen = [] if policy is None else [f"policy.name={json.dumps(policy)}"]
    loaded = _load(job, [*set_, *chosen], plan, steps)

    found = _checkpoint(out, backend, resume=resume)

    def run(job: "Job", seed: int, *, sink: "Callable[[Plan], Sink] | None" = None) -> "Outcome":
        if backend is BackendName.FAKE:
            return _fake(job, seed, sink)
        return _outcome(_real(job, seed, backend, ray, sink=sink, out=out, resumed=found))

    if out is None:
        outcome = run(loaded, seed)
    else:
        keep = None if found is None else found.driver.num_events
        outcome = run_to_folder(loaded, seed, out, run, flush=True, keep_events=keep)
    _print_notes([*outcome.plan.notes, *outcome.record.notes])
    if out is not None:
        _print_notes([f"tables, journal, figure and trace are in {out}"])
    if json_:
        _print_json(outcome.summary)
        return
    console = _console()
    print_summary(outcome.summary, loaded.policy.name, console)
    if "learning" in outcome.summary:
        console.print(_learned(outcome.summary["learning"]), highlight=False, markup=False, soft_wrap=True)


@app.command()
def neutral(
    job: JobArgument,
    steps: StepsOption = None,
    backend: BackendOption = BackendName.VLLM,
    ray: RayOption = None,
    seed: SeedOption = 0,
    set_: SetOption = [],  # noqa: B006  # typer copies it
    out: Annotated[Path | None, typer.Option(help="Folder for neutral.json.")] = None,
    json_: JsonOption = False,
) -> None:
    """Train with and without borrowing, and compare every sample and the weights of every version.

    Exit code 3: they differ, and the first difference is named. Exit code 1: nothing was lent in one of the
    two directions, so nothing is shown about it. The fake backend samples and learns with small stand-ins.
    """
    from bidirl.executor.backends.ray_session import shared_ray
    from bidirl.executor.neutral import latest_job, neutrality, pinned_job
    from bidirl.sim.run import make_folder, write_json

    loaded = _load(job, set_, None, steps)
    if out is not None:
        make_folder(out)
    runs = {}
    with _console(stderr=True).status("training") as status, shared_ray():
        for name, variant in (
            ("pinned, alone", pinned_job(loaded, lends=False)),
            ("pinned, lending", pinned_job(loaded, lends=True)),
            ("latest, lending", latest_job(loaded)),
        ):
            status.update(f"training: {name}")
            runs[name] = _real(variant, seed, backend, ray, digest=True)
    found = neutrality(runs, _throughput)
    data = found.to_json() | {"device": next(iter(runs.values())).device, "seed": seed}
    if out is not None:
        write_json(out / "neutral.json", data)
        _print_notes([f"neutral.json is in {out}"])
    if json_:
        _print_json(data)
    else:
        console = _console()
        console.print(found.verdict(), style="bold", highlight=False, markup=False, soft_wrap=True)
        for name, tokens_per_s in found.tokens_per_s.items():
            shown = "no measured step" if tokens_per_s is None else f"{tokens_per_s:,.0f} tokens/s"
            typer.echo(f"  {name}: {shown}")
    if found.difference is not None:
        raise typer.Exit(RunFault.exit_code)
    if found.missing:
        raise typer.Exit(NoFeasiblePlan.exit_code)


@app.command()
def profile(
    job: JobArgument,
    out: Annotated[Path, typer.Option(help="File for the stage models; what was measured lies beside it.")],
    backend: BackendOption = BackendName.VLLM,
    ray: RayOption = None,
    seed: SeedOption = 0,
    set_: SetOption = [],  # noqa: B006  # typer copies it
    json_: JsonOption = False,
) -> None:
    """Measure stage times, sync and switch costs of the devices at hand.

    A short designed experiment on the job's own workers. The file goes into the job as models.file.
    """
    from bidirl.executor.profile import profile as measure
    from bidirl.executor.validate import STAND_IN
    from bidirl.executor.validate_report import profile_lines
    from bidirl.sim.run import make_folder, write_json

    loaded = _load(job, set_, None, None)
    make_folder(out.parent)
    with _console(stderr=True).status("measuring"):
        found = measure(loaded, seed, _kind(backend), ray=ray, stub=STAND_IN)
    found.models.save(out)
    write_json(out.with_suffix(".profile.json"), found.to_json())
    _print_notes([f"stage models are in {out}, cells and residuals in {out.with_suffix('.profile.json')}"])
    if json_:
        _print_json(found.to_json())
        return
    for line in profile_lines(found):
        typer.echo(line)


@app.command()
def validate(
    job: JobArgument,
    out: Annotated[Path, typer.Option(help="Folder for tables, figure and the calibrated models.")],
    steps: StepsOption = None,
    calibrate: Annotated[
        int | None, typer.Option(min=1, help="Steps to calibrate on; a third of all.", show_default=False)
    ] = None,
    backend: BackendOption = BackendName.VLLM,
    ray: RayOption = None,
    seed: SeedOption = 0,
    set_: SetOption = [],  # noqa: B006  # typer copies it
    json_: JsonOption = False,
) -> None:
    """Calibrate on the first part of a run, predict the rest, and compare stage by stage and as a whole.

    The whole is simulated with the calibrated models: step times, makespan, idle time, leases.
    """
    from bidirl.executor.validate import STAND_IN, Simulated
    from bidirl.executor.validate import validate as hold_against
    from bidirl.executor.validate_report import validation_lines, verdict, write_figure, write_rows
    from bidirl.sim.metrics import summarise
    from bidirl.sim.run import make_folder, simulate, write_json

    def foretell(job: "Job", seed: int) -> Simulated:
        outcome = simulate(job, seed)
        return Simulated(outcome.record, outcome.summary)

    loaded = _load(job, set_, None, steps)
    make_folder(out)
    with _console(stderr=True).status("running"):
        found = hold_against(
            loaded,
            seed,
            _kind(backend),
            out,
            simulate=foretell,
            summarise=lambda record: summarise(record, sources={}),
            calibration_steps=calibrate,
            ray=ray,
            stub=STAND_IN,
        )
    write_json(out / "validate.json", found.to_json())
    write_rows(found, out / "stages.csv")
    write_figure(found, out / "validate.png")
    _print_notes([*found.run.record.notes, f"tables, figure and calibrated models are in {out}"])
    if json_:
        _print_json(found.to_json())
        return
    _console().print(verdict(found), style="bold", highlight=False, markup=False, soft_wrap=True)
    for line in validation_lines(found):
        typer.echo(line)


# ---------------------------------------------------------------------- running


def _load(job: Path, overrides: list[str], plan: Path | None, steps: int | None) -> "Job":
    from bidirl.executor.run import with_steps
    from bidirl.planner.job import load_job

    loaded = with_steps(load_job(job, overrides), steps)
    _print_notes(loaded.notices)
    return loaded if plan is None else _with_plan(loaded, plan)


def _with_plan(job: "Job", path: Path) -> "Job":
    """Return the job with the partition and the policy that a search has chosen."""
    from dataclasses import replace

    from bidirl.planner.export.plan_file import read_plan
    from bidirl.planner.policy import Placement
    from bidirl.planner.sections import Partition

    plan = read_plan(path)
    for role, layout in (("rollout", plan.rollout), ("train", plan.train)):
        if layout.num_gpus != layout.tp:
            raise InputError(
                f"{path}: {role} layout tp {layout.tp} x pp {layout.pp}: a worker runs tensor-parallel "
                "layouts only; search with pp = 1"
            )
    colocated = plan.placement is Placement.COLOCATED
    train_gpus = 0 if colocated else plan.train_gpus
    partition = Partition(plan.placement, plan.rollout_gpus, train_gpus, plan.rollout.tp, plan.train.tp)
    if partition.num_gpus > job.cluster.num_gpus:
        raise InputError(
            f"{path}: its pools have {partition.num_gpus} GPUs, the job's cluster {job.cluster.num_gpus}: "
            "search for this job"
        )
    return replace(job, partition=partition, policy=plan.policy)


def _real(
    job: "Job",
    seed: int,
    backend: BackendName,
    ray: str | None,
    *,
    sink: "Callable[[Plan], Sink] | None" = None,
    digest: bool = False,
    out: Path | None = None,
    resumed: "Checkpoint | None" = None,
) -> "RealRun":
    from bidirl.executor.backends.assemble import Kind
    from bidirl.executor.run import run_real

    kind = Kind.VLLM if backend is BackendName.VLLM else Kind.STUB
    return run_real(
        job,
        seed,
        kind,
        ray=ray,
        sink=sink,
        digest=digest,
        checkpoints=None if out is None else out / CHECKPOINTS,
        resumed=resumed,
        errors=None if out is None else out / WORKERS,
    )


def _checkpoint(out: Path | None, backend: BackendName, *, resume: bool) -> "Checkpoint | None":
    """Return where to go on.

    Raises:
        InputError: there is nothing to go on from, or a new run would leave checkpoints of an old one beside
            its journal.
    """
    if not resume:
        if out is not None and (out / CHECKPOINTS).is_dir():
            _nothing_kept(out / CHECKPOINTS)
        return None
    from bidirl.executor.checkpoint import check_journal, newest_checkpoint

    if out is None:
        raise InputError("--resume: where the run lies is missing: give its folder as --out")
    if backend is BackendName.FAKE:
        raise InputError("--resume: a run on stage models takes no time, nothing is kept: start it again")
    found = newest_checkpoint(out / CHECKPOINTS)
    check_journal(out / "journal.jsonl", found.driver.num_events)
    _print_notes([*found.notes, f"going on after step {found.step}"])
    return found


def _nothing_kept(checkpoints: Path) -> None:
    from bidirl.executor.checkpoint import steps_kept

    kept = steps_kept(checkpoints)
    if kept:
        raise InputError(
            f"--out: {checkpoints} has a checkpoint after step {kept[-1]}: go on with --resume, remove the "
            "folder, or choose another --out"
        )


def _kind(backend: BackendName) -> "Kind":
    from bidirl.executor.backends.assemble import Kind

    return Kind.VLLM if backend is BackendName.VLLM else Kind.STUB


def _outcome(run: "RealRun") -> "Outcome":
    from bidirl.executor.run import learning_summary
    from bidirl.sim.metrics import summarise
    from bidirl.sim.run import Outcome

    sources = {name: estimate.source.value for name, estimate in sorted(run.plan.models.sources.items())}
    summary = summarise(run.record, sources=sources)
    return Outcome(run.plan, run.record, {**summary, "learning": learning_summary(run)})


def _fake(job: "Job", seed: int, sink: "Callable[[Plan], Sink] | None") -> "Outcome":
    """Run a job by the executor's driver on stage models, in virtual time."""
    from bidirl.executor.backends.fake import FakeBackend
    from bidirl.executor.clock import VirtualClock, run_virtual
    from bidirl.executor.driver import Driver
    from bidirl.models.faults import Faults, FaultsConfig
    from bidirl.planner.build import build_plan, build_workload
    from bidirl.sim.metrics import summarise
    from bidirl.sim.run import Outcome, alone_decode_s

    workload = build_workload(job, seed)
    plan = build_plan(job, workload)
    faults = None if job.faults == FaultsConfig() else Faults(job.faults, seed)
    writes = None if sink is None else sink(plan)

    async def run(clock: VirtualClock) -> "RunRecord":
        return await Driver(plan, FakeBackend(plan, workload, clock, faults), clock, sink=writes).run()

    record = run_virtual(run)
    sources = {name: estimate.source.value for name, estimate in sorted(plan.models.sources.items())}
    summary = summarise(record, sources=sources, alone_decode_s=alone_decode_s(plan))
    return Outcome(plan, record, summary)


def _throughput(record: "RunRecord") -> float | None:
    from bidirl.sim.metrics import summarise

    found: float | None = summarise(record, sources={})["tokens_per_s"]
    return found


# ---------------------------------------------------------------------- output


def _learned(learning: dict[str, Any]) -> str:
    reward, mismatch = learning["reward"], learning["mismatch"]
    steps = reward["steps_averaged"]
    costs = "; ".join(
        f"{name} {1e3 * cost['mean']:.3g} ms ({cost['count']})"
        for name, cost in learning["measured_s"].items()
    )
    return (
        f"reward {reward['first']:.3f} -> {reward['last']:.3f} (means over {steps} steps); "
        f"|engine - trainer| log-probability {mismatch['mean']:.2g} mean, {mismatch['max']:.2g} max; {costs}"
    )


def _print_json(data: object) -> None:
    typer.echo(json.dumps(data, indent=1, ensure_ascii=False))


def _print_notes(notes: "tuple[str, ...] | list[str]") -> None:
    for note in dict.fromkeys(notes):
        typer.echo(f"note: {note}", err=True)
