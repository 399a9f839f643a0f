"""One simulated run: from a job and a seed to its record, its summary, and its folder."""

import gc
import json
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bidirl import __version__
from bidirl.errors import BidirlError, InputError, NoFeasiblePlan, RunFault
from bidirl.models.faults import Faults, FaultsConfig
from bidirl.planner.build import build_plan, build_workload
from bidirl.planner.events import Action, Event, to_json
from bidirl.planner.job import FILES, Job, resolved_json
from bidirl.planner.plan import Plan
from bidirl.planner.plan_json import plan_to_json
from bidirl.planner.policy import Placement
from bidirl.planner.sections import Partition
from bidirl.sim.driver import Driver, Sink
from bidirl.sim.metrics import summarise
from bidirl.sim.oracle import attach_oracle
from bidirl.traces.journal import JournalWriter
from bidirl.traces.perfetto import Counter, write_trace
from bidirl.traces.run_record import Activity, Owner, RunRecord
from bidirl.traces.tables import columns_of, write_samples, write_steps

__all__ = [
    "Outcome",
    "Runner",
    "alone_decode_s",
    "build",
    "make_folder",
    "provenance",
    "run_to_folder",
    "simulate",
    "write_json",
]

POOLS = {Owner.ROLLOUT: "rollout pool", Owner.TRAIN: "training pool"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run gives."""

    plan: Plan
    record: RunRecord
    summary: dict[str, Any]


def build() -> dict[str, str]:
    """Return what decides the last bits of a result, besides the job: versions and machine type."""
    return {
        "bidirl": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
    }


def provenance(seed: int) -> dict[str, Any]:
    """Return where results come from: the build and the seed."""
    return {**build(), "seed": seed}


def simulate(job: Job, seed: int, *, sink: Callable[[Plan], Sink] | None = None) -> Outcome:
    """Run a job under a seed; ``sink`` makes the journal's sink from the plan, once there is one.

    Raises:
        InputError: numbers that a model needs are missing, or a rule is broken.
        NoFeasiblePlan: no partition of the cluster fits.
        InvariantBroken: a bug.
    """
    workload = build_workload(job, seed)
    plan = build_plan(job, workload)
    faults = None if job.faults == FaultsConfig() else Faults(job.faults, seed)
    driver = Driver(plan, workload, sink=None if sink is None else sink(plan), faults=faults)
    attach_oracle(driver)
    gc.freeze()  # what exists already is not looked at again: cost per sample stays flat
    gc.disable()  # a run makes no cycles, so looking for them is wasted
    try:
        record = driver.run()
    finally:
        gc.enable()
        gc.unfreeze()
    sources = {name: estimate.source.value for name, estimate in sorted(plan.models.sources.items())}
    summary = summarise(record, sources=sources, alone_decode_s=alone_decode_s(plan))
    return Outcome(plan, record, summary)


def alone_decode_s(plan: Plan) -> Callable[[int, int], float]:
    """Return the seconds of decoding one sample alone, from (prompt tokens, response tokens).

    The prefill, which gives the first token, is left out: groups share it, and this is a lower bound.
    Source: ``IterationModel.decode``, summed over ``k = response - 1`` iterations in closed form.
    """
    base_s, context_s = plan.models.iteration.decode(1)

    def seconds(prompt_tokens: int, response_tokens: int) -> float:
        k = response_tokens - 1
        return k * base_s + context_s * (k * prompt_tokens + k * (k - 1) / 2)

    return seconds


# ------------------------------------------------------------------ run folder


def make_folder(folder: Path) -> None:
    """Make the output folder; raise one-line ``InputError`` if that is impossible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {folder}: {_reason(error)}: choose a folder that can be written") from None


def write_json(path: Path, data: object) -> None:
    """Write JSON that a person can read."""
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


class Runner(Protocol):
    """What runs a job: `simulate`, or a real run."""

    def __call__(self, job: Job, seed: int, *, sink: Callable[[Plan], Sink] | None = None) -> Outcome:
        """Run a job under a seed and give its journal to ``sink``."""
        ...


def run_to_folder(
    job: Job,
    seed: int,
    folder: Path,
    run: Runner = simulate,
    *,
    flush: bool = False,
    keep_events: int | None = None,
) -> Outcome:
    """Run a job and leave everything in a folder: what was resolved, tables, journal, figure, trace.

    ``resolved.json`` is there from the start, the journal grows with the run, the rest follows. Without a
    feasible plan, ``summary.json`` holds the reason under ``error``. ``flush`` hands each line of the journal
    to the operating system at once, so that a killed run has all of it. ``keep_events`` continues the journal
    in the folder after so many events.

    Raises:
        InputError: the folder cannot be made, or see `simulate`.
        RunFault: writing failed on the way (a full disk).
    """
    make_folder(folder)
    about = provenance(seed)
    try:
        with ExitStack() as stack:
            write_json(folder / "resolved.json", {**_resolved(job, folder), "provenance": about})

            def sink(plan: Plan) -> Sink:
                resolved = _resolved(job, folder, plan)
                write_json(folder / "resolved.json", {**resolved, "provenance": about})
                path = folder / "journal.jsonl"
                writer = JournalWriter(
                    path, provenance=about, plan=plan_to_json(plan), keep_events=keep_events
                )
                return _journal(stack.enter_context(writer), flush=flush)

            outcome = run(job, seed, sink=sink)
        _write_results(folder, outcome, job, about)
    except NoFeasiblePlan as error:
        write_json(folder / "summary.json", {"error": str(error)})
        raise
    except BidirlError:
        raise
    except OSError as error:
        raise RunFault(
            f"{folder}: {_reason(error)} while writing: free space or choose another --out"
        ) from None
    return outcome


def _journal(writer: JournalWriter, *, flush: bool) -> Sink:
    write = writer.write

    def sink(now: float, event: Event, actions: Sequence[Action]) -> None:
        write(now, to_json(event), [to_json(action) for action in actions])
        if flush:
            writer.flush()

    return sink


def _write_results(folder: Path, outcome: Outcome, job: Job, about: dict[str, Any]) -> None:
    from bidirl.sim.plots import timeline

    record = outcome.record
    write_json(folder / "summary.json", outcome.summary)
    write_steps(folder / "steps.csv", columns_of(record.steps))
    write_samples(folder / "samples.csv", columns_of(record.samples))
    write_trace(
        folder / "trace.json",
        record.spans,
        pools=[POOLS[owner] for owner in Owner],
        activities=[activity.name.lower() for activity in Activity],
        published_s=record.steps.published_s,
        counters=_counters(record),
        about={name: str(value) for name, value in about.items()},
    )
    name = job.policy.name
    title = f"{name}, staleness {job.policy.staleness}: {record.rollout_gpus} + {record.train_gpus} GPUs"
    timeline(record, folder / "timeline.png", title=title)


def _counters(record: RunRecord) -> dict[str, Counter]:
    """Return the groups that are being generated, and those that wait for training, over time."""
    samples, n = record.samples, record.samples_per_prompt
    if not samples.step:
        return {}
    start = np.asarray(samples.start_s, dtype=np.float64).reshape(-1, n)[:, 0]
    finish = np.asarray(samples.finish_s, dtype=np.float64).reshape(-1, n).max(axis=1)
    step = np.asarray(samples.step, dtype=np.int64).reshape(-1, n)[:, 0]
    trained = np.flatnonzero(step >= 0)
    taken = np.full(step.size, np.nan)
    taken[trained] = np.asarray(record.steps.train_start_s, dtype=np.float64)[step[trained]]
    return {
        "groups in generation": _level(start, finish),
        "groups waiting for training": _level(finish, np.fmax(taken, finish)),
    }


def _level(
    up_s: np.ndarray[Any, np.dtype[np.float64]], down_s: np.ndarray[Any, np.dtype[np.float64]]
) -> Counter:
    """Count what has begun and not ended; nan is never."""
    up, down = up_s[~np.isnan(up_s)], down_s[~np.isnan(down_s)]
    times, which = np.unique(np.concatenate((up, down)), return_inverse=True)
    change = np.bincount(which, weights=np.concatenate((np.ones(up.size), -np.ones(down.size))))
    return times.tolist(), np.rint(np.cumsum(change)).astype(np.int64).tolist()


def _resolved(job: Job, folder: Path, plan: Plan | None = None) -> dict[str, Any]:
    """Return the resolved job as it lies in ``folder``: chosen partition filled in, paths from the folder."""
    data = resolved_json(job)
    if job.partition is None and plan is not None:
        chosen = Partition(
            Placement(plan.placement),
            plan.rollout_gpus,
            plan.train_gpus,
            plan.rollout_replica_gpus,
            plan.train_replica_gpus,
        )
        data["partition"] = chosen.as_written()
    for *tables, last in FILES:
        node: Any = data
        for key in tables:
            node = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, dict) and isinstance(node.get(last), str) and Path(node[last]).is_absolute():
            node[last] = os.path.relpath(node[last], folder.absolute())
    return data


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
