"""What an engineer asks of a split besides its speed: ceilings, bounds, break-even windows, bottleneck."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from bidirl.models.estimate import Estimate
from bidirl.models.memory_roles import sleep_levels
from bidirl.models.stages import StageModels
from bidirl.planner.admission import Admission
from bidirl.planner.policy import Placement, PolicyConfig
from bidirl.planner.search.algorithm1 import step_seconds
from bidirl.planner.search.candidates import Candidate, Search
from bidirl.planner.search.rollout_pool import RolloutPool

__all__ = [
    "Bottleneck",
    "Bounds",
    "BreakEven",
    "Ceilings",
    "Factorial",
    "Limit",
    "bottleneck",
    "bounds",
    "break_even",
    "ceilings",
    "factorial",
    "modelled_curve",
    "overlap_bound",
    "staleness_knee",
]

KNEE_SHARE = 0.03
"""The knee of staleness is the least bound within this share of the best step: less than one step of seeds
differs by in our simulations of the paper's jobs."""
KNEE_BOUNDS = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0)
"""Bounds tried: those of verl's ablation (needs C45) and the paper's sweep up to 2."""
SATURATION_SHARE = 0.05
"""A rollout pool is tail-bound from the size on at which more GPUs shorten generation by less than this."""
BALANCED_SHARE = 0.05
"""Stages this close are balanced: no split of 16 GPUs comes closer on average."""
DOMINANT_SHARE = 0.2
"""Weight sync or rewards taking this share of a step are named as its limit: halving them gains 10 %."""


class Limit(StrEnum):
    """What limits a step."""

    ROLLOUT = "rollout"
    TRAINER = "trainer"
    TAIL = "tail"
    SYNC = "sync"
    REWARD = "reward"
    BALANCED = "balanced"


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The limit, its evidence, and whether the models' intervals leave room for another answer."""

    limit: Limit
    evidence: str
    is_sure: bool
    decide_by: str
    """The one measurement that would decide; empty where the verdict is sure."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """How many samples can be in flight at once, by memory and by staleness."""

    kv_samples: int
    """What the KV memory and the sequence limit of all engines hold."""
    staleness_samples: int
    """``floor((1 + s) B) n``: what admission lets run ahead."""
    binds: str


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Shortest idle window in which a lease pays, seconds, for one direction."""

    direction: str
    window_s: float
    """``C_in + C_out``, and ``C_grad`` for a trainer: no shorter idle time can pay for a lease."""
    by_sleep_level_s: dict[int, float]
    """The engine's sleep and wake alone, by vLLM's level: what the choice of a level moves."""
    cheaper_level: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """What no split and no lending can beat."""

    tail_s: float
    """The longest sample decoding alone, over the steps that it may span."""
    saturated_rollout_gpus: int | None
    """From here on more rollout GPUs no longer help; None if the cluster is too small for that."""
    generation_free_speedup: float
    """Amdahl: step over what remains if generation took no time."""
    training_free_speedup: float
    sync_share: float
    """Weight sync as a share of the step."""
    work_s: float
    """Both stages on all GPUs at the efficiency of this plan, without any waiting."""


def ceilings(search: Search, candidate: Candidate, policy: PolicyConfig) -> Ceilings:
    """Return both concurrency ceilings and which binds. Source: needs C05."""
    question = search.question
    pool = next(pool for pool in search.rollouts if pool.layout == candidate.rollout)
    kv = candidate.rollout_replicas * pool.cap
    stale = Admission.of(question.groups, policy.staleness).limit(0) * question.samples_per_group
    binds = "staleness binds" if stale < kv else "KV memory binds" if kv < stale else "both bind"
    return Ceilings(kv, stale, binds)


def break_even(models: StageModels, weight_bytes_per_gpu: float) -> list[BreakEven]:
    """Return the break-even windows of both directions. Source: needs C61, C62."""
    switch = models.switch
    levels = {level: sum(pair) for level, pair in sleep_levels(weight_bytes_per_gpu).items()}
    cheaper = min(levels, key=lambda level: (levels[level], level))
    windows = (
        ("rollout_on_train", switch.rollout_on_train_in_s + switch.rollout_on_train_out_s),
        (
            "train_on_rollout",
            switch.train_on_rollout_in_s + switch.train_on_rollout_out_s + switch.grad_s,
        ),
    )
    return [BreakEven(direction, window, levels, cheaper) for direction, window in windows]


def overlap_bound(generation_s: float, training_s: float) -> tuple[float, float]:
    """Return ``(speed-up, idle share of the faster side)`` of perfect overlap over taking turns.

    Source: needs C11b (OpenRLHF#712: 2252 and 1800 s give 1.80x and 20 %).
    """
    longer = max(generation_s, training_s)
    return (generation_s + training_s) / longer, 1.0 - min(generation_s, training_s) / longer


def bounds(search: Search, candidate: Candidate, models: StageModels) -> Bounds:
    """Return the tail, Amdahl and work bounds of a candidate; ``step_s`` counts its weight sync."""
    question = search.question
    pool = next(pool for pool in search.rollouts if pool.layout == candidate.rollout)
    alone = candidate.placement is Placement.COLOCATED
    sync_s = models.sync.seconds(candidate.rollout_replicas)
    step_s = candidate.step_s + sync_s
    saturated = _saturated_gpus(search, pool)
    rest_s = candidate.train_s + sync_s
    other_s = candidate.rollout_s + sync_s
    gpus = search.question.cluster.num_gpus
    train_gpus = candidate.train_gpus or candidate.rollout_gpus
    work = candidate.rollout_s * candidate.rollout_gpus + candidate.train_s * train_gpus
    return Bounds(
        tail_s=pool.alone_s / (1.0 if alone else 1.0 + question.staleness),
        saturated_rollout_gpus=saturated,
        generation_free_speedup=step_s / rest_s,
        training_free_speedup=step_s / other_s,
        sync_share=sync_s / step_s,
        work_s=work / gpus,
    )


def _saturated_gpus(search: Search, pool: RolloutPool) -> int | None:
    """Return the least pool whose generation is within ``SATURATION_SHARE`` of the largest legal pool's."""
    legal = np.flatnonzero(np.isfinite(pool.seconds))
    if not legal.size:
        return None
    enough = legal[pool.seconds[legal] <= pool.seconds[legal].min() * (1.0 + SATURATION_SHARE)]
    return None if enough[0] == legal[-1] else int(search.sizes[enough[0]])


def bottleneck(
    search: Search, candidate: Candidate, models: StageModels, reward_s: float = 0.0
) -> Bottleneck:
    """Name what limits a candidate by its stage seconds; sure only where the models' intervals agree."""
    pool = next(pool for pool in search.rollouts if pool.layout == candidate.rollout)
    rollout_s = pool.steady_s(candidate.rollout_replicas)
    if candidate.placement is Placement.COLOCATED:
        rollout_s = candidate.rollout_s
    train_s, sync_s = candidate.train_s, models.sync.seconds(candidate.rollout_replicas)
    step_s = max(rollout_s, train_s) + sync_s
    text = f"generation {rollout_s:.1f} s, training {train_s:.1f} s, weight sync {sync_s:.1f} s a step"
    if sync_s >= DOMINANT_SHARE * step_s:
        return _verdict(Limit.SYNC, text, models, "sync.s_per_byte", "time one weight sync (models.sync_s)")
    if reward_s >= DOMINANT_SHARE * step_s:
        return Bottleneck(Limit.REWARD, f"{text}, rewards {reward_s:.1f} s", True, "")
    tail_s = pool.alone_s / (1.0 + search.question.staleness)
    low_r, high_r = _spread(models, "iteration.tau_dec_s")
    low_t, high_t = _spread(models, "trainer.update.alpha_s")
    is_sure = rollout_s * low_r > train_s * high_t or train_s * low_t > rollout_s * high_r
    wider = "generation" if high_r / low_r > high_t / low_t else "a trainer update"
    decide = "" if is_sure else f"time {wider} of one step, and calibrate"
    if abs(rollout_s - train_s) <= BALANCED_SHARE * max(rollout_s, train_s):
        return Bottleneck(Limit.BALANCED, text, is_sure, decide)
    if train_s > rollout_s:
        return Bottleneck(Limit.TRAINER, text, is_sure, decide)
    if tail_s >= (1.0 - BALANCED_SHARE) * rollout_s:
        text += f"; the longest sample alone needs {tail_s:.1f} s of it: more rollout GPUs do not help"
        return Bottleneck(Limit.TAIL, text, is_sure, decide)
    return Bottleneck(Limit.ROLLOUT, text, is_sure, decide)


def _verdict(limit: Limit, text: str, models: StageModels, name: str, decide: str) -> Bottleneck:
    low, high = _spread(models, name)
    is_sure = high / low < 2.0
    return Bottleneck(limit, text, is_sure, "" if is_sure else decide)


def _spread(models: StageModels, name: str) -> tuple[float, float]:
    """Return the interval of a coefficient as factors of its value; (1, 1) where none is known."""
    estimate: Estimate | None = models.sources.get(name)
    if estimate is None or estimate.value <= 0.0 or estimate.low <= 0.0:
        return 1.0, 1.0
    return estimate.low / estimate.value, estimate.high / estimate.value


def staleness_knee(curve: Sequence[tuple[float, float]], share: float = KNEE_SHARE) -> float:
    """Return the least bound whose step is within ``share`` of the best one of ``(bound, step_s)`` pairs."""
    best = min(seconds for _, seconds in curve)
    return min(bound for bound, seconds in curve if seconds <= best * (1.0 + share))


def modelled_curve(candidate: Candidate) -> list[tuple[float, float]]:
    """Return ``(bound, step_s)`` by the stage models, where no simulation is at hand."""
    return [
        (bound, float(step_seconds(candidate.rollout_s, candidate.train_s, bound))) for bound in KNEE_BOUNDS
    ]


@dataclass(frozen=True, slots=True)
class Factorial:
    """Throughput of two splits without and with lending, over the first split without: a 2 x 2 table."""

    partition_gain: float
    """The planned split over the other one, neither lending."""
    borrowing_gain: float
    """Lending over none, on the other split."""
    both_gain: float
    interaction: float
    """``both / (partition x borrowing)``: below 1 the two gains share the same idle time."""


def factorial(base_s: float, planned_s: float, base_lent_s: float, planned_lent_s: float) -> Factorial:
    """Return the gains of a 2 x 2 of step seconds (paper.md, what readers asked for, 2)."""
    partition, borrowing, both = base_s / planned_s, base_s / base_lent_s, base_s / planned_lent_s
    return Factorial(partition, borrowing, both, both / (partition * borrowing))
