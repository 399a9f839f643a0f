"""Try changes of a running job in every plausible world: gains with intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bidirl.errors import BidirlError
from bidirl.planner.advise.unknowns import draw_unknowns
from bidirl.planner.advise.worlds import Known, Simulator, World, fit_world
from bidirl.planner.job import Job
from bidirl.planner.policy import Placement
from bidirl.planner.search.plans import with_steps
from bidirl.planner.search.ranking import Evaluation

__all__ = ["COVERAGE", "FEWEST_WORLDS", "Gain", "fit_worlds", "steps_of", "try_change", "try_changes"]

COVERAGE = 0.9
"""Share of the plausible worlds that an interval holds."""
FEWEST_WORLDS = 5
"""With fewer worlds that agree with the log there is no interval, and nothing is predicted."""
COLOCATED_STEPS = 3
"""Simulated steps where roles take turns: they are alike."""
MEASURED_STEPS = 4
"""Simulated steps beside the start-up and the end, where they overlap."""


@dataclass(frozen=True, slots=True)
class Gain:
    """Step time before over after a change: above 1 is faster."""

    gain: float
    """Median over the plausible worlds."""
    low: float
    high: float
    """Interval of ``COVERAGE``; with fewer than 19 worlds its ends are the extreme ones."""
    per_gpu: float
    """``gain`` times GPUs before over after."""
    num_worlds: int
    sure_share: float
    """Share of the worlds in which the change is no slower."""
    step_s: float
    """Median step after the change, seconds."""
    limit: str = ""
    """What limits the changed run in the median world."""
    parts_s: Mapping[str, float] = field(default_factory=dict)
    """Parts of the changed step in that world, what nothing explains as ``unexplained``."""


def steps_of(job: Job) -> int:
    """Return how many steps of a job a trial simulates."""
    partition = job.partition
    if partition is not None and partition.placement is Placement.COLOCATED:
        return COLOCATED_STEPS
    edge = max(1, -(-int(job.policy.staleness * 1000) // 1000))
    return 2 * edge + MEASURED_STEPS


def fit_worlds(job: Job, known: Known, simulate: Simulator, num_draws: int) -> list[World]:
    """Return the worlds that agree with the log, one per draw that can be made to.

    Raises:
        BidirlError: the job cannot be planned at all.
    """
    job = with_steps(job, steps_of(job))
    found = []
    for seed, drawn in enumerate(draw_unknowns(num_draws)):
        world = fit_world(job, known, drawn, simulate, seed)
        if world is not None:
            found.append(world)
    return found


def try_changes(
    worlds: Sequence[World], changes: Mapping[str, Job], simulate: Simulator, gpus_before: int
) -> dict[str, Gain | str]:
    """Return the gain of each changed job over the running one, or why it cannot be said."""
    if len(worlds) < FEWEST_WORLDS:
        return dict.fromkeys(changes, f"only {len(worlds)} plausible models agree with the log")
    return {name: try_change(worlds, job, simulate, gpus_before) for name, job in changes.items()}


def try_change(worlds: Sequence[World], job: Job, simulate: Simulator, gpus_before: int) -> Gain | str:
    """Return the gain of one changed job; with one world its interval is a point."""
    gains, steps, found_all = [], [], []
    for world in worlds:
        mine = _with_workload(world, job)
        try:
            found = simulate(mine, world.plan(mine), world.seed)
        except BidirlError as error:
            return str(error)
        after_s = found.step_s + world.unknowns.other_kept * world.other_s + world.exposed_s
        gains.append(world.step_s / after_s)
        steps.append(after_s)
        found_all.append((found, after_s))
    middle = int(np.argsort(gains)[len(gains) // 2])
    levels = [0.5 - COVERAGE / 2, 0.5, 0.5 + COVERAGE / 2]
    low, gain, high = np.quantile(gains, levels, method="weibull").tolist()
    partition = job.partition
    gpus = gpus_before if partition is None else partition.num_gpus
    sure = sum(each >= 1.0 for each in gains) / len(gains)
    return Gain(
        gain,
        low,
        high,
        gain * gpus_before / gpus,
        len(gains),
        sure,
        float(np.median(steps)),
        found_all[middle][0].limit,
        _parts(*found_all[middle], worlds[middle].exposed_s),
    )


def _parts(found: Evaluation, step_s: float, exposed_s: float) -> dict[str, float]:
    parts = {name: float(seconds) for name, seconds in found.details["parts_s"].items()}
    wait_s = parts.get("wait", 0.0) + exposed_s
    return parts | {"wait": wait_s, "unexplained": step_s - found.step_s - exposed_s}


def _with_workload(world: World, job: Job) -> Job:
    """Return a changed job under a world's lengths, cut to the steps of a trial."""
    drawn = world.job.workload
    update = {
        "lengths": drawn.lengths,
        "group_correlation": drawn.group_correlation,
        "drift": drawn.drift,
        "num_steps": steps_of(job),
    }
    return world.after(replace(job, workload=job.workload.model_copy(update=update)))
