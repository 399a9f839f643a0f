"""Calibrate on the first part of a real run, and hold the rest of it against what was then predicted.

Two predictions are made. *Stage by stage*, each stage is given what it worked on (the iterations, the tokens
of a pull) and only its seconds are predicted. *The run as a whole* is simulated with the calibrated models:
the same job, seed and scheduler, and nothing of the rest of the run but the lengths that the job draws.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bidirl.errors import InputError
from bidirl.executor.backends.assemble import Kind
from bidirl.executor.backends.stub import StubConfig
from bidirl.executor.run import RealRun, run_real
from bidirl.executor.validate_fit import SEGMENTS, Fit, boundary_s, calibrated, iteration_s, pull_work
from bidirl.executor.validate_observe import Generation, Observer, Timing
from bidirl.models.iteration import AffineIteration
from bidirl.models.stages import StageModels
from bidirl.planner.job import Job
from bidirl.traces.run_record import RunRecord

__all__ = [
    "STAND_IN",
    "Errors",
    "Simulated",
    "StageRow",
    "Validation",
    "errors_of",
    "validate",
    "with_models",
]

SKIPPED_STEPS = 1
"""Leading steps that calibrate nothing: allocators, caches and compilers warm up in them."""
MIN_CALIBRATION_STEPS = 2
MODELS_FILE = "models.json"
STAND_IN = StubConfig(step_s=4e-3, token_s=4e-6)
"""Stand-ins that take their time: what is fitted and predicted then has a scale."""

Summarise = Callable[[RunRecord], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Simulated:
    """What the simulator gave for the job."""

    record: RunRecord
    summary: dict[str, Any]


Simulate = Callable[[Job, int], Simulated]


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage of one step, measured and predicted."""

    stage: str
    step: int
    unit: int
    """Replica, side or lease."""
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Return ``|predicted / measured - 1|``."""
        return abs(self.predicted_s / self.measured_s - 1.0)


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of some rows."""

    num_rows: int
    median: float
    p90: float
    total: float
    """Of the sums: ``sum(predicted) / sum(measured) - 1``, signed."""


@dataclass(frozen=True, slots=True)
class Validation:
    """One run, calibrated on its first steps and predicted from there."""

    calibration_steps: int
    num_steps: int
    device: str
    pace: dict[str, float] | None
    """Least times of engine and trainer that the job asks for; None: as fast as they are."""
    models: StageModels
    fits: dict[str, Fit]
    rows: tuple[StageRow, ...]
    """Of the steps after the calibration."""
    step_rows: tuple[StageRow, ...]
    """Seconds between publications, predicted by the simulator."""
    makespan: StageRow
    """Seconds from the last calibration step's publication to the end."""
    leases: dict[str, dict[str, dict[str, float]]]
    """``measured`` and ``predicted``: direction -> count and device-seconds, over the predicted steps."""
    idle: dict[str, dict[str, Any]]
    """``measured`` and ``predicted`` idle of the whole run, as in summary.json."""
    run: RealRun = field(repr=False)

    def errors(self) -> dict[str, Errors]:
        """Return the errors of each stage, of the main ones together, and of the steps."""
        by_stage: dict[str, list[StageRow]] = defaultdict(list)
        for row in self.rows:
            by_stage[row.stage].append(row)
        stages = [row for row in self.rows if row.stage == "generation" or row.stage in SEGMENTS]
        found = {"stages": errors_of(stages), "step": errors_of(self.step_rows)}
        return found | {stage: errors_of(rows) for stage, rows in sorted(by_stage.items())}

    def to_json(self) -> dict[str, Any]:
        """Return validate.json."""
        return {
            "schema": "bidirl-validate",
            "version": 1,
            "calibration_steps": self.calibration_steps,
            "num_steps": self.num_steps,
            "device": self.device,
            "pace": self.pace,
            "errors": {name: asdict(errors) for name, errors in self.errors().items()},
            "makespan": {**asdict(self.makespan), "error": self.makespan.error},
            "leases": self.leases,
            "idle": self.idle,
            "fits": {name: fit.to_json() for name, fit in self.fits.items()},
            "steps": [asdict(row) for row in self.step_rows],
            "rows": [asdict(row) for row in self.rows],
        }


def errors_of(rows: Sequence[StageRow]) -> Errors:
    """Return the relative errors of rows; nan where there is none."""
    if not rows:
        return Errors(0, float("nan"), float("nan"), float("nan"))
    errors = [row.error for row in rows]
    total = sum(row.predicted_s for row in rows) / sum(row.measured_s for row in rows) - 1.0
    return Errors(len(rows), float(np.median(errors)), float(np.quantile(errors, 0.9)), total)


def with_models(job: Job, path: Path) -> Job:
    """Return the job on stage models of a file, without single numbers laid over them."""
    update = {"file": str(path.absolute()), "switch": None, "sync_s": None}
    return replace(job, models=job.models.model_copy(update=update))


def validate(
    job: Job,
    seed: int,
    kind: Kind,
    folder: Path,
    *,
    simulate: Simulate,
    summarise: Summarise,
    calibration_steps: int | None = None,
    ray: str | None = None,
    stub: StubConfig | None = None,
) -> Validation:
    """Run a job, calibrate on its first steps (a third, unless told) and predict the rest.

    ``simulate`` and ``summarise`` are the simulator's; models.json of the calibration is left in ``folder``.

    Raises:
        InputError: too few steps to calibrate and predict, or see ``run_real``.
        RunFault: see ``run_real``.
    """
    num_steps = job.workload.num_steps
    first = calibration_steps if calibration_steps is not None else max(num_steps // 3, 3)
    if not SKIPPED_STEPS + MIN_CALIBRATION_STEPS <= first < num_steps:
        raise InputError(
            f"calibration on {first} of {num_steps} steps: needs {SKIPPED_STEPS + MIN_CALIBRATION_STEPS} or "
            "more, and a step to predict; change --steps or --calibrate"
        )
    observer = Observer()
    run = run_real(job, seed, kind, ray=ray, stub=stub, watch=observer.watch)
    generations, timings = observer.generations(), observer.timings
    iterations = [
        iteration
        for part in generations
        if SKIPPED_STEPS <= part.step < first
        for iteration in part.iterations
    ]
    wait_s = boundary_s(iterations) if iterations else 0.0
    models, fits = calibrated(
        run.plan.models,
        iterations,
        _calibrating(timings, first),
        origin=f"steps {SKIPPED_STEPS} to {first - 1} of a run on {run.device}",
        wait_s=wait_s,
    )
    models.save(folder / MODELS_FILE)
    predicted = simulate(with_models(job, folder / MODELS_FILE), seed)
    published, foretold = run.record.steps.published_s, predicted.record.steps.published_s
    begin_s, begin_predicted_s = published[first - 1], foretold[first - 1]
    pace = None if job.learn is None or job.learn.pace is None else job.learn.pace.model_dump()
    return Validation(
        first,
        num_steps,
        run.device,
        pace,
        models,
        fits,
        tuple(_rows(models, wait_s, generations, timings, first)),
        tuple(
            StageRow(
                "step", step, 0, published[step] - published[step - 1], foretold[step] - foretold[step - 1]
            )
            for step in range(first, num_steps)
        ),
        StageRow("makespan", first, 0, published[-1] - begin_s, foretold[-1] - begin_predicted_s),
        {
            "measured": _leases(run.record, begin_s),
            "predicted": _leases(predicted.record, begin_predicted_s),
        },
        {"measured": summarise(run.record)["idle"], "predicted": predicted.summary["idle"]},
        run,
    )


def _calibrating(timings: Sequence[Timing], first: int) -> list[Timing]:
    """Return the timings of the calibration; a switch that it did not see comes from the warm-up steps."""
    early = [timing for timing in timings if timing.step < first]
    warm = [timing for timing in early if timing.step >= SKIPPED_STEPS]
    seen = {timing.stage for timing in warm}
    return warm + [timing for timing in early if timing.stage not in seen]


def _rows(
    models: StageModels,
    wait_s: float,
    generations: Sequence[Generation],
    timings: Sequence[Timing],
    first: int,
) -> list[StageRow]:
    """Return measured and predicted seconds of each stage of the steps after the calibration."""
    measured: dict[tuple[str, int, int], float] = defaultdict(float)
    predicted: dict[tuple[str, int, int], float] = defaultdict(float)
    iteration = models.iteration
    assert isinstance(iteration, AffineIteration)
    for part in generations:
        key = "generation", part.step, part.replica
        measured[key] += part.seconds
        predicted[key] += sum(iteration_s(iteration, row) for row in part.iterations)
    switch, trainer = models.switch, models.trainer
    means = {
        "optimizer": trainer.optimizer_s,
        "sync": models.sync.seconds(1) + wait_s,
        "merge": switch.grad_s,
        "broadcast": switch.broadcast_s,
        **{name.removesuffix("_s"): value for name, value in asdict(switch).items()},
    }
    for timing in timings:
        key = timing.stage, timing.step, timing.unit
        if timing.stage in SEGMENTS:
            measured[key] += timing.seconds
            predicted[key] += trainer.segment(timing.stage).compute_s(pull_work(timing))
        elif timing.stage in means:
            measured[key] += timing.seconds
            predicted[key] += means[timing.stage]
    return [
        StageRow(*key, measured_s=seconds, predicted_s=predicted[key])
        for key, seconds in sorted(measured.items())
        if key[1] >= first and seconds > 0.0
    ]


def _leases(record: RunRecord, begin_s: float) -> dict[str, dict[str, float]]:
    """Return count and device-seconds of the leases that were asked for after a moment."""
    found: dict[str, dict[str, float]] = {}
    table = record.leases
    for direction, requested_s, useful_s in zip(
        table.direction, table.requested_s, table.useful_device_s, strict=True
    ):
        if requested_s >= begin_s:
            entry = found.setdefault(direction, {"count": 0, "useful_device_s": 0.0})
            entry["count"] += 1
            entry["useful_device_s"] += useful_s
    return found
