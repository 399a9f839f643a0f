"""One real run: a job on workers, from its plan to its record and what it has learned."""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bidirl.errors import InputError
from bidirl.executor.backends.assemble import Kind, assembly
from bidirl.executor.backends.real import RealBackend
from bidirl.executor.backends.real_training import StepLearning
from bidirl.executor.backends.stub import StubConfig
from bidirl.executor.checkpoint import Checkpoint, Keeper, resumable
from bidirl.executor.clock import RealClock
from bidirl.executor.driver import Deadlines, Driver, Sink
from bidirl.planner.build import build_plan, build_workload
from bidirl.planner.events import Direction
from bidirl.planner.job import Job
from bidirl.planner.learn import LearnConfig
from bidirl.planner.plan import Plan
from bidirl.planner.policy import Gate
from bidirl.traces.run_record import RunRecord

__all__ = [
    "DEADLINES",
    "RealRun",
    "learning_columns",
    "learning_summary",
    "real_plan",
    "run_real",
    "with_steps",
]

DEADLINES = Deadlines(replica_s=300.0, lease_s=300.0, score_s=600.0)
"""Seconds without an answer after which a worker counts as lost. Trainer work has none: how long a step
takes is the model's business, and a dead process is noticed without a deadline."""


@dataclass(frozen=True, slots=True)
class RealRun:
    """What a real run leaves."""

    plan: Plan
    record: RunRecord
    learning: list[StepLearning]
    costs: dict[str, list[float]]
    """Measured seconds by kind: ``sync``, ``merge``, ``broadcast``, ``<direction>_in`` and ``_out``."""
    workers: list[dict[str, Any]]
    device: str
    lent: dict[str, int] = field(default_factory=dict)
    """Direction -> what lent devices did: samples that ended there, chunks that were merged from there."""
    sample_digests: dict[tuple[int, int], tuple[str, tuple[tuple[int, int], ...]]] = field(
        default_factory=dict
    )
    """(group, index) -> SHA-256 of its tokens and its segments of versions, where hashing was on."""
    weight_digests: dict[int, str] = field(default_factory=dict)
    """Version -> SHA-256 of the weights, where hashing was on."""


def with_steps(job: Job, num_steps: int | None) -> Job:
    """Return the job with another number of steps."""
    if num_steps is None:
        return job
    return replace(job, workload=job.workload.model_copy(update={"num_steps": num_steps}))


def real_plan(job: Job, seed: int) -> Plan:
    """Return the plan of a real run: rewards are really computed, so scoring is an event of its own.

    Raises:
        InputError: the job's gate needs a simulation.
    """
    if job.policy.gate is Gate.ORACLE:
        raise InputError('policy.gate = oracle: only a simulation knows lengths beforehand; use "models"')
    return replace(build_plan(job, build_workload(job, seed)), scoring=True)


def run_real(
    job: Job,
    seed: int,
    kind: Kind,
    *,
    plan: Plan | None = None,
    ray: str | None = None,
    sink: Callable[[Plan], Sink] | None = None,
    digest: bool = False,
    stub: StubConfig | None = None,
    watch: Callable[[Driver, RealBackend], None] | None = None,
    checkpoints: Path | None = None,
    resumed: Checkpoint | None = None,
    errors: Path | None = None,
) -> RealRun:
    """Run a job on real workers, or their stand-ins, from its first step to its last.

    ``watch`` sees driver and backend before they start; tests hang on to them there. ``checkpoints`` is the
    folder that a checkpoint is kept in every ``learn.checkpoint_every`` steps, ``resumed`` where to go on,
    ``errors`` the folder for the error output of workers in processes of their own.

    Raises:
        InputError: the job asks for what a real run cannot do, or something is not installed.
        RunFault: something was lost that training cannot do without; the root cause comes first.
    """
    workload = build_workload(job, seed)
    plan = plan or real_plan(job, seed)
    if resumed is not None:
        resumed.check(plan, job, seed)
    every = (job.learn or LearnConfig()).checkpoint_every
    folder = checkpoints if every else None
    made_by = assembly(job, plan, workload, seed, kind, ray=ray, digest=digest, stub=stub, errors=errors)
    with nullcontext() if folder is None else resumable(folder), made_by as made:

        async def main() -> tuple[RunRecord, RealBackend]:
            clock = RealClock()
            backend = made.backend(clock, None if resumed is None else resumed.backend)
            keeper = None if folder is None else Keeper(folder, every, backend, job, seed)
            driver = Driver(
                plan,
                backend,
                clock,
                sink=None if sink is None else sink(plan),
                deadlines=DEADLINES,
                resumed=None if resumed is None else resumed.driver,
                keep=keeper,
            )
            if watch is not None:
                watch(driver, backend)
            return await driver.run(), backend

        record, backend = asyncio.run(main())
    record.steps.extra = learning_columns(backend.training.learning)
    record.notes.extend(
        f"{fault} {count} time{'s'[: count > 1]}: {reason}"
        for fault, (count, reason) in sorted(backend.faults.items())
    )
    return RealRun(
        plan,
        record,
        backend.training.learning,
        backend.costs,
        backend.crew.about,
        made.device,
        _lent(backend),
        backend.store.digests,
        backend.training.snapshots.digests,
    )


def _lent(backend: RealBackend) -> dict[str, int]:
    ended = backend.store.num_ended
    on_train = sum(count for replica, count in ended.items() if replica >= backend.num_rollout)
    return {
        Direction.ROLLOUT_ON_TRAIN: on_train,
        Direction.TRAIN_ON_ROLLOUT: backend.training.num_lent_chunks,
    }


def learning_columns(learning: list[StepLearning]) -> dict[str, list[float]]:
    """Return what ``steps.csv`` of a real run has beside a simulation's."""
    return {
        "reward_mean": [step.reward for step in learning],
        "gradient_norm": [step.gradient_norm for step in learning],
        "mismatch_mean": [step.mismatch for step in learning],
        "mismatch_max": [step.mismatch_max for step in learning],
        "lag_mean": [step.lag for step in learning],
        "lag_max": [float(step.lag_max) for step in learning],
    }


def learning_summary(run: RealRun) -> dict[str, Any]:
    """Return the part of ``summary.json`` that only a real run has."""
    rewards = [step.reward for step in run.learning]
    tenth = max(1, len(rewards) // 10)
    capable = next((about["capabilities"] for about in run.workers if about["capabilities"]), None)
    return {
        "reward": {
            "first": sum(rewards[:tenth]) / tenth if rewards else None,
            "last": sum(rewards[-tenth:]) / tenth if rewards else None,
            "steps_averaged": tenth,
        },
        "mismatch": {
            "mean": sum(step.mismatch for step in run.learning) / max(1, len(run.learning)),
            "max": max((step.mismatch_max for step in run.learning), default=0.0),
        },
        "leases": dict(Counter(run.record.leases.direction)),
        "lent": {str(direction): count for direction, count in run.lent.items()},
        "measured_s": {
            name: {
                "count": len(seconds),
                "mean": sum(seconds) / len(seconds),
                "min": min(seconds),
                "max": max(seconds),
            }
            for name, seconds in sorted(run.costs.items())
        },
        "device": run.device,
        "engine": None
        if capable is None
        else {name: getattr(capable, name) for name in type(capable).__dataclass_fields__},
    }
