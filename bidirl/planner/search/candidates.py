"""Every way to run a job on a cluster, priced by the stage models: the layer above Algorithm 1.

Without lending the two pools are independent given their sizes, so the best layout of a role is chosen per
pool size, and all pairs of layouts are covered at the cost of each role alone. With lending both pools must
divide by both replica sizes; then layouts are grouped by replica size. Nothing is pruned but what is beaten.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import inf

import numpy as np
import numpy.typing as npt

from bidirl.models.transfer import SwitchCosts
from bidirl.planner.policy import Lending, Placement
from bidirl.planner.search.algorithm1 import compatible, step_seconds
from bidirl.planner.search.frameworks import Framework
from bidirl.planner.search.layouts import (
    RolloutLayout,
    Style,
    TrainLayout,
    rollout_layouts,
    train_layouts,
)
from bidirl.planner.search.measured import measured_layouts
from bidirl.planner.search.question import Question
from bidirl.planner.search.rollout_pool import RolloutPool
from bidirl.planner.search.train_pool import TrainPool
from bidirl.planner.sections import Partition

__all__ = ["Candidate", "Objective", "Pricing", "Search"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Objective(StrEnum):
    """What a plan is best at."""

    TIME = "time"
    """Seconds of a step."""
    GPU_HOURS = "gpu_hours"
    """GPU-seconds of a step; GPUs may stay unused."""


class Pricing(StrEnum):
    """What generation of a step costs."""

    BATCH = "batch"
    """``M_r``: it ends with the slowest sample of the batch. Algorithm 1."""
    STEADY = "steady"
    """``RolloutPool.steady_s``: the tail overlaps the next batch as far as staleness allows (ours)."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run the job, with the stage seconds that price it."""

    placement: Placement
    rollout_gpus: int
    train_gpus: int
    """0 where the two roles take turns on ``rollout_gpus``."""
    rollout: RolloutLayout
    train: TrainLayout
    rollout_s: float
    """``M_r(B_p, d_r)``."""
    train_s: float
    """``M_t(U_B, d_t)``."""
    step_s: float
    """Seconds of a step by the stage models, weight sync left out."""
    lending: Lending = Lending.NONE

    @property
    def num_gpus(self) -> int:
        """Return the GPUs in use."""
        return self.rollout_gpus + self.train_gpus

    @property
    def rollout_replicas(self) -> int:
        """Return ``d_r``."""
        return self.rollout_gpus // self.rollout.gpus

    @property
    def train_replicas(self) -> int:
        """Return ``d_t``."""
        return (self.train_gpus or self.rollout_gpus) // self.train.gpus

    @property
    def hot_switch(self) -> bool:
        """Return whether both pools divide by both replica sizes."""
        sizes = (self.rollout.gpus, self.train.unit_gpus)
        return self.train_gpus > 0 and compatible(self.rollout_gpus, self.train_gpus, *sizes)

    def cost(self, objective: Objective) -> float:
        """Return what is minimised."""
        return self.step_s if objective is Objective.TIME else self.step_s * self.num_gpus

    @property
    def key(self) -> tuple[object, ...]:
        """Return what makes it the same candidate, whatever its price."""
        pools = (self.placement, self.rollout_gpus, self.train_gpus)
        return (*pools, self.rollout, self.train, self.lending)

    @property
    def label(self) -> str:
        """Return the candidate in one short text."""
        layouts = f"{self.rollout.label} / {self.train.label}"
        if self.placement is Placement.COLOCATED:
            return f"{self.rollout_gpus} colocated, {layouts}"
        return f"{self.rollout_gpus}R:{self.train_gpus}T, {layouts}"

    def order(self, objective: Objective) -> tuple[float, ...]:
        """Return the sort key, ties included: cost, GPUs, rollout pool, replica sizes."""
        sizes = (self.num_gpus, self.rollout_gpus, self.rollout.gpus, self.train.gpus)
        return (self.cost(objective), *map(float, sizes))


class Search:
    """All candidates of a question; arrays are computed once and shared by every answer."""

    def __init__(
        self, question: Question, switch: SwitchCosts | None = None, framework: Framework | None = None
    ) -> None:
        self.question = question
        self.switch = switch
        self.framework = framework
        num, node = question.cluster.num_gpus, question.cluster.gpus_per_node
        rollouts = rollout_layouts(question.model, node, num + 1)
        trains = train_layouts(question.model, node, num + 1)
        if question.measured is not None:
            rollouts, trains = measured_layouts(question, rollouts, trains)
        self.rollouts = [RolloutPool(question, layout, framework) for layout in rollouts]
        self.trains = [TrainPool(question, layout, framework) for layout in trains]
        self.sizes = question.sizes

    @property
    def num_evaluated(self) -> int:
        """Return how many (layout, pool size) pairs were priced: the cost of a search."""
        return len(self.sizes) * (len(self.rollouts) + len(self.trains))

    @cached_property
    def num_candidates(self) -> int:
        """Return how many pairs of legal (layout, pool size) choices use the whole cluster."""
        legal = [np.isfinite(self._stack(role)).sum(axis=0) for role in (self.rollouts, self.trains)]
        return int((legal[0] * legal[1][::-1]).sum())

    def _stack(self, role: "list[RolloutPool] | list[TrainPool]") -> Floats:
        if not len(self.sizes):
            return np.full((len(role), 0), inf)
        return np.stack([pool.seconds for pool in role])

    @cached_property
    def best_rollout(self) -> tuple[Floats, Ints]:
        """Return per pool size the least ``M_r`` over layouts, and which one has it (the first of equals)."""
        return _least(self._stack(self.rollouts))

    @cached_property
    def steadiest_rollout(self) -> tuple[Floats, Ints]:
        """Return per pool size the least ``RolloutPool.steady_s`` over layouts, and which one has it."""
        if not len(self.sizes):
            return self.best_rollout
        return _least(np.stack([pool.steady for pool in self.rollouts]))

    @cached_property
    def best_train(self) -> tuple[Floats, Ints]:
        """Return per pool size the least ``M_t`` over layouts, and which layout has it."""
        return _least(self._stack(self.trains))

    def splits(self, pricing: Pricing = Pricing.BATCH) -> list[Candidate]:
        """Return the best candidate without lending of each split of the whole cluster, by rollout pool."""
        steady = pricing is Pricing.STEADY
        mine, which = self.steadiest_rollout if steady else self.best_rollout
        other, layout = self.best_train
        found = []
        for index in range(len(self.sizes)):
            back = len(self.sizes) - 1 - index
            if np.isfinite(mine[index]) and np.isfinite(other[back]):
                pair = self._pair(index, back, int(which[index]), int(layout[back]))
                if steady:
                    seconds = step_seconds(float(mine[index]), pair.train_s, self.question.staleness)
                    pair = replace(pair, step_s=float(seconds))
                found.append(pair)
        return found

    def _pair(self, index: int, back: int, which: int, layout: int) -> Candidate:
        rollout, train = self.rollouts[which], self.trains[layout]
        rollout_s, train_s = float(rollout.seconds[index]), float(train.seconds[back])
        return Candidate(
            Placement.DISAGGREGATED,
            int(self.sizes[index]),
            int(self.sizes[back]),
            rollout.layout,
            train.layout,
            rollout_s,
            train_s,
            float(step_seconds(rollout_s, train_s, self.question.staleness)),
        )

    def compatible_splits(self) -> list[Candidate]:
        """Return the best candidate of each split of which both pools divide by both replica sizes."""
        count = len(self.sizes)
        best = np.full(count, inf)
        chosen: list[tuple[int, int] | None] = [None] * count
        for rollout_gpus, mine, which in self._by_size(self.rollouts):
            for unit, other, layout in self._by_size(self.trains):
                seconds = step_seconds(mine, other[::-1], self.question.staleness)
                divides = (self.sizes % rollout_gpus == 0) & (self.sizes % unit == 0)
                divides &= divides[::-1]
                better = np.flatnonzero(divides & (seconds < best))
                best[better] = seconds[better]
                for index in better:
                    chosen[index] = int(which[index]), int(layout[count - 1 - index])
        return [
            self._pair(index, count - 1 - index, *pair)
            for index, pair in enumerate(chosen)
            if pair is not None and np.isfinite(best[index])
        ]

    def alternatives(self, candidate: Candidate, share: float, count: int) -> list[Candidate]:
        """Return other layouts of a candidate's split whose step is within ``share`` of it, best first."""
        if candidate.placement is Placement.COLOCATED:
            return []
        index = int(np.searchsorted(self.sizes, candidate.rollout_gpus))
        back = int(np.searchsorted(self.sizes, candidate.train_gpus))
        limit = candidate.step_s * (1.0 + share)
        found = [
            self._pair(index, back, which, layout)
            for which, rollout in enumerate(self.rollouts)
            for layout, train in enumerate(self.trains)
            if step_seconds(rollout.seconds[index], train.seconds[back], self.question.staleness) <= limit
        ]
        same = (candidate.rollout, candidate.train)
        others = [each for each in found if (each.rollout, each.train) != same]
        return sorted(others, key=lambda each: each.order(Objective.TIME))[:count]

    def _by_size(self, role: "list[RolloutPool] | list[TrainPool]") -> Iterator[tuple[int, Floats, Ints]]:
        """Yield, per replica size, the least seconds over its layouts and the layouts' places."""
        units = [pool.layout.unit_gpus for pool in role]
        table = self._stack(role)
        for unit in sorted(set(units)):
            places = np.asarray([place for place, size in enumerate(units) if size == unit])
            seconds, which = _least(table[places])
            yield unit, seconds, places[which]

    def colocated(self) -> list[Candidate]:
        """Return the best candidate of each size on which the roles take turns, the whole cluster last."""
        (mine, which), (other, layout) = self.best_rollout, self.best_train
        found = [
            self._turns(int(self.sizes[index]), int(which[index]), int(layout[index]))
            for index in np.flatnonzero(np.isfinite(mine + other))
        ]
        total = self.question.cluster.num_gpus
        rollout_s, place = min((_on(pool, total), place) for place, pool in enumerate(self.rollouts))
        train_s, other_place = min((_on(pool, total), place) for place, pool in enumerate(self.trains))
        if rollout_s + train_s < inf:
            found.append(self._turns(total, place, other_place))
        return found

    def _turns(self, gpus: int, which: int, layout: int) -> Candidate:
        rollout, train = self.rollouts[which], self.trains[layout]
        rollout_s, train_s = _on(rollout, gpus), _on(train, gpus)
        switch_s = 0.0 if self.switch is None else self.switch.time_share_in_s + self.switch.time_share_out_s
        step_s = rollout_s + train_s + switch_s
        return Candidate(
            Placement.COLOCATED, gpus, 0, rollout.layout, train.layout, rollout_s, train_s, step_s
        )

    def smaller(self, objective: Objective) -> Candidate | None:
        """Return the pair of pools that costs least where GPUs may stay unused; of equals fewer GPUs. Exact.

        A size that no smaller one needs more seconds than is on no optimum, so each role is cut to its
        frontier, whose length the workload bounds, and the frontiers are tried in full.
        """
        (mine, which), (other, layout) = self.best_rollout, self.best_train
        rows, columns = _frontier(mine), _frontier(other)
        if not rows.size or not columns.size:
            return None
        seconds = step_seconds(mine[rows][:, None], other[columns][None, :], self.question.staleness)
        used = self.sizes[rows][:, None] + self.sizes[columns][None, :]
        cost = seconds * used if objective is Objective.GPU_HOURS else seconds
        cost = np.where(used <= self.question.cluster.num_gpus, cost, inf)
        least = cost.min()
        if not np.isfinite(least):
            return None
        place = int(np.argmin(np.where(cost == least, used, np.iinfo(np.int64).max)))
        index, back = int(rows[place // len(columns)]), int(columns[place % len(columns)])
        return self._pair(index, back, int(which[index]), int(layout[back]))

    def ranked(self, objective: Objective) -> list[Candidate]:
        """Return the best candidate of each split, colocated ones included, best first, none lending."""
        found = {candidate.label: candidate for candidate in (*self.splits(), *self.compatible_splits())}
        colocated = self.colocated()
        if objective is Objective.TIME and colocated:
            colocated = [min(colocated, key=lambda candidate: candidate.order(objective))]
        if (small := self.smaller(objective)) is not None:
            found.setdefault(small.label, small)
        everything = [*found.values(), *colocated]
        return sorted(everything, key=lambda candidate: candidate.order(objective))

    def named(self, partition: Partition) -> Candidate | None:
        """Return the candidate that a job's [partition] means (full sharding); None if it is illegal."""
        rollout = next((p for p in self.rollouts if p.layout == RolloutLayout(partition.rollout_tp)), None)
        wanted = TrainLayout(Style.FSDP, partition.train_tp)
        train = next((pool for pool in self.trains if pool.layout == wanted), None)
        if rollout is None or train is None or partition.placement is Placement.COLOCATED:
            return None
        rollout_s, train_s = _on(rollout, partition.rollout_gpus), _on(train, partition.train_gpus)
        if rollout_s + train_s == inf:
            return None
        return Candidate(
            Placement.DISAGGREGATED,
            partition.rollout_gpus,
            partition.train_gpus,
            rollout.layout,
            train.layout,
            rollout_s,
            train_s,
            float(step_seconds(rollout_s, train_s, self.question.staleness)),
        )

    def lent(self, candidate: Candidate, lending: Lending) -> Candidate:
        """Return the candidate with lending, its step shortened by what the models predict (ours).

        The idle side enters (``C_in``) when its own stage ends, both work at the sum of their rates, and the
        borrowed side returns (``C_out``, and ``C_grad`` for a trainer). Never longer than without.
        """
        step_s = float(step_seconds(candidate.rollout_s, candidate.train_s, self.question.staleness))
        if self.switch is None or self.question.staleness < 1.0:
            return replace(candidate, lending=lending, step_s=step_s)
        switch = self.switch
        longer, shorter = candidate.rollout_s, candidate.train_s
        into, out = switch.rollout_on_train_in_s, switch.rollout_on_train_out_s
        own, lent, direction = candidate.rollout_gpus, candidate.train_gpus, Lending.ROLLOUT_ON_TRAIN
        if longer < shorter:
            longer, shorter = shorter, longer
            into, out = switch.train_on_rollout_in_s, switch.train_on_rollout_out_s + switch.grad_s
            own, lent, direction = lent, own, Lending.TRAIN_ON_ROLLOUT
        if lending in (direction, Lending.BOTH) and longer - shorter > into + out:
            joint = (longer - shorter - into) * own / (own + lent)
            step_s = min(step_s, shorter + into + joint + out)
        return replace(candidate, lending=lending, step_s=step_s)


def _on(pool: RolloutPool | TrainPool, gpus: int) -> float:
    """Return the seconds of a role on any number of GPUs; infinite where that is illegal."""
    if gpus in pool.question.pool_sizes:
        return float(pool.seconds[pool.question.pool_sizes.index(gpus)])
    if isinstance(pool, TrainPool):
        return pool.seconds_on(gpus)
    return inf if pool.reason(gpus) is not None else pool.makespan_s(gpus // pool.layout.gpus)


def _least(table: Floats) -> tuple[Floats, Ints]:
    if not table.shape[1]:
        return np.full(0, inf), np.zeros(0, dtype=np.int64)
    which = np.argmin(table, axis=0)
    return np.take_along_axis(table, which[None, :], axis=0)[0], which.astype(np.int64)


def _frontier(seconds: Floats) -> Ints:
    """Return the places whose seconds are below those of every smaller pool."""
    before = np.concatenate([[inf], np.minimum.accumulate(seconds)[:-1]]) if seconds.size else seconds
    return np.flatnonzero(seconds < before)
