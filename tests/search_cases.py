"""Questions for the search's tests: a real job on small clusters, and tables in place of stage models."""

from dataclasses import dataclass, replace
from itertools import product
from math import inf
from pathlib import Path
from typing import Any, cast

import numpy as np

from bidirl.planner.build import build_workload
from bidirl.planner.job import Job, load_job
from bidirl.planner.search.candidates import Objective, Search
from bidirl.planner.search.layouts import RolloutLayout, Style, TrainLayout
from bidirl.planner.search.plans import question_of
from bidirl.planner.search.question import Question

EXAMPLES = Path(__file__).parents[1] / "examples"


def small_job(*overrides: str) -> Job:
    """Return the paper's A6000 job with overrides; eight prompts, so that a test is quick."""
    base = ["workload.prompts_per_step=8", "workload.num_steps=6", "partition.rollout_gpus=1"]
    return load_job(EXAMPLES / "paper_a6000.toml", [*base, *overrides])


def question(*overrides: str) -> Question:
    job = small_job(*overrides)
    return question_of(job, build_workload(job, 0))


@dataclass
class Table:
    """A pool whose seconds are given: ``seconds[i]`` for the grid, ``whole`` for the cluster."""

    question: Question
    layout: Any
    seconds: np.ndarray[Any, np.dtype[np.float64]]
    whole: float

    def reason(self, gpus: int) -> str | None:
        return None if gpus == self.question.cluster.num_gpus and self.whole < inf else "illegal"

    def seconds_on(self, _gpus: int) -> float:
        return self.whole

    def makespan_s(self, _replicas: int) -> float:
        return self.whole


def table_search(
    base: Question,
    num_nodes: int,
    gpus_per_node: int,
    staleness: float,
    rollouts: list[tuple[int, list[float]]],
    trains: list[tuple[int, list[float]]],
) -> Search:
    """Return a search over tables: ``(replica GPUs, seconds by pool size, the whole cluster last)``."""
    cluster = base.cluster.model_copy(update={"num_nodes": num_nodes, "gpus_per_node": gpus_per_node})
    asked = replace(base, cluster=cluster, staleness=staleness)
    search = Search(asked)
    sizes = list(asked.pool_sizes)

    def legal(replica: int, seconds: list[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.asarray([s if g % replica == 0 else inf for g, s in zip(sizes, seconds, strict=False)])

    # replicas of tables differ in tp only: sizes that no real node has are fine here
    search.rollouts = cast(
        Any, [Table(asked, RolloutLayout(r), legal(r, s), s[-1]) for r, s in sorted(rollouts)]
    )
    search.trains = cast(
        Any, [Table(asked, TrainLayout(Style.FSDP, r), legal(r, s), s[-1]) for r, s in sorted(trains)]
    )
    return search


def brute_force(search: Search, objective: Objective) -> float:
    """Return the least cost over every pair of layouts and pools, without any of the search's code."""
    sizes = list(search.question.pool_sizes)
    total = search.question.cluster.num_gpus
    exposed = max(0.0, 1.0 - search.question.staleness)
    best = inf
    for mine, other in product(search.rollouts, search.trains):
        for (i, g_r), (j, g_t) in product(enumerate(sizes), enumerate(sizes)):
            if g_r + g_t > total:
                continue
            a, b = float(mine.seconds[i]), float(other.seconds[j])
            step_s = max(a, b) + (exposed * min(a, b) if exposed else 0.0)
            best = min(best, step_s * (g_r + g_t if objective is Objective.GPU_HOURS else 1))
        places = [(total, mine.makespan_s(1), other.seconds_on(total))]
        places += [(g, float(mine.seconds[i]), float(other.seconds[i])) for i, g in enumerate(sizes)]
        for gpus, a, b in places:
            best = min(best, (a + b) * (gpus if objective is Objective.GPU_HOURS else 1))
    return best
