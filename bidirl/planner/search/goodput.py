"""What failures leave of a plan: rollout capacity, the trainer's checkpoints and restarts, and spares.

Rates come from the job's ``[faults]``; without one there is no answer. The simulator injects losses of
rollout replicas, so their part is held against it (tests); losses of the trainer are closed forms only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, comb, exp, expm1, inf, sqrt

import numpy as np

from bidirl.models.faults import FaultsConfig
from bidirl.models.makespan import expected_max_tokens
from bidirl.planner.policy import Placement
from bidirl.planner.search.algorithm1 import step_seconds
from bidirl.planner.search.candidates import Candidate, Search
from bidirl.planner.search.rollout_pool import RolloutPool

__all__ = [
    "Goodput",
    "Spare",
    "capacity_share",
    "checkpoint_interval_s",
    "checkpointed_share",
    "goodput",
    "lost_work_s",
    "up_probability",
]

STATE_BYTES = 12.0
"""FP32 master weight and two moments: what a trainer must save of each parameter."""
MAX_SPARES = 8
"""Spare replicas looked at; a pool that needs more is better planned larger."""


@dataclass(frozen=True, slots=True)
class Spare:
    """One number of rollout replicas beyond the plan's, all generating."""

    replicas: int
    gpus: int
    up_probability: float
    """Chance that at least the plan's number of replicas is up."""
    step_s: float
    """Expected step of the stage models."""
    pays: bool
    """Whether it does more steps per GPU-hour than any smaller number."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """A plan under its failure rate; all from the stage models."""

    gpu_mtbf_s: float
    """Mean up-time of one GPU: that of a replica times its GPUs."""
    rollout_mtbf_s: float
    lost_work_s: float
    """Replica-seconds of generation that one loss throws away, on average: its groups start again."""
    rollout_capacity: float
    """Share of the pool's generation that is left."""
    trainer_mtbf_s: float
    """Mean time between losses of any GPU of the trainer, each of which stops it."""
    checkpoint_s: float
    """Seconds that a checkpoint stops the trainer; a lower bound, see ``goodput``."""
    checkpoint_interval_s: float
    checkpoint_interval_steps: int
    trainer_share: float
    """Share of the trainer's time that is neither checkpoint, restart nor repeated work."""
    step_s: float
    """Expected step without failures, by the stage models."""
    expected_step_s: float
    """The same under the failure rate."""
    goodput: float
    """``step_s / expected_step_s``."""
    spares: tuple[Spare, ...]
    spares_that_pay: int
    note: str


def lost_work_s(pool: RolloutPool, replicas: int) -> float:
    """Return the replica-seconds of work in the unfinished groups of one replica at a random time (ours).

    A lost replica's groups start again, finished samples of theirs included. A group of ``n`` samples that
    started together has generated ``n E[min(L, x)]`` tokens after ``x`` iterations and stays until its
    longest sample ends; by Little's law the work in residence is ``s / E[L]`` times the integral over that
    stay, with ``s`` the seconds of an iteration at the steady batch.
    """
    question, prior = pool.question, pool.question.prior
    lengths = np.sort(np.asarray(prior.quantiles, dtype=np.float64))
    mean = float(lengths.mean())
    stay = expected_max_tokens(prior, question.samples_per_group)
    grid = np.linspace(0.0, stay, 129)
    generated = np.minimum(lengths[None, :], grid[:, None]).mean(axis=1)
    area = float(((generated[1:] + generated[:-1]) / 2.0 * np.diff(grid)).sum())
    here = min(pool.cap, max(1, ceil(question.produced_samples / replicas)))
    base_s, context_s = pool.iteration.decode(here)
    step_s = base_s + context_s * here * (prior.prompt_mean_tokens + mean / 2.0)
    return step_s * area / mean


def capacity_share(mtbf_s: float, restart_s: float, lost_s: float) -> float:
    """Return the share of its work that a replica with exponential up-times keeps: ``m e^(-l/m) / (m + r)``.

    Of an up-time ``U`` the last ``min(U, l)`` seconds of work are lost, on average ``m (1 - e^(-l/m))``.
    Source: renewal-reward theorem.
    """
    return mtbf_s * exp(-lost_s / mtbf_s) / (mtbf_s + restart_s)


def checkpoint_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Return the work between two checkpoints that loses least: ``sqrt(2 C M)``.

    Source: Young 1974, "A first order approximation to the optimum checkpoint interval"; Daly 2006 bounds it
    by ``M`` where checkpoints take long.
    """
    if checkpoint_s >= mtbf_s / 2.0:
        return mtbf_s
    return sqrt(2.0 * checkpoint_s * mtbf_s)


def checkpointed_share(interval_s: float, checkpoint_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the share of time that is useful work: ``W / (M e^(R/M) (e^((W + C)/M) - 1))``.

    Work ``W`` and its checkpoint ``C`` are repeated until they pass without a failure, each of which costs a
    restart ``R`` that may fail too. Source: Daly 2006, "A higher order estimate of the optimum checkpoint
    interval for restart dumps", equation 13.
    """
    return interval_s / (mtbf_s * exp(restart_s / mtbf_s) * expm1((interval_s + checkpoint_s) / mtbf_s))


def up_probability(needed: int, total: int, availability: float) -> float:
    """Return the chance that at least ``needed`` of ``total`` replicas are up, each independently."""
    down = 1.0 - availability
    return sum(comb(total, up) * availability**up * down ** (total - up) for up in range(needed, total + 1))


def goodput(search: Search, candidate: Candidate, faults: FaultsConfig, sync_s: float) -> Goodput | None:
    """Return what a failure rate leaves of a plan; None where the job states none.

    ``faults.replica_mtbf_s`` is that of one rollout replica, as the simulator takes it; every GPU fails as
    often, and any GPU of the trainer stops it. ``faults.restart_s`` is the restart of a replica and of the
    trainer. The states of a trainer go to the host over PCIe (a lower bound of a checkpoint: storage is not
    in a job). While the trainer restarts, generation is taken to wait (an upper bound of the loss).
    """
    if faults.replica_mtbf_s is None:
        return None
    question, mtbf_s, restart_s = search.question, faults.replica_mtbf_s, faults.restart_s
    pool = next(each for each in search.rollouts if each.layout == candidate.rollout)
    gpu_mtbf_s = mtbf_s * candidate.rollout.gpus
    train_gpus = candidate.train_gpus or candidate.rollout_gpus
    trainer_mtbf_s = gpu_mtbf_s / train_gpus
    lost_s = lost_work_s(pool, candidate.rollout_replicas)
    capacity = capacity_share(mtbf_s, restart_s, lost_s)
    colocated = candidate.placement is Placement.COLOCATED
    if colocated:
        capacity = 1.0  # the trainer's devices: each loss is counted there
    device = question.cluster.train_device
    saved = STATE_BYTES * question.model.num_params / train_gpus
    checkpoint_s = saved / device.need("pcie_bytes_per_s")
    step_s = candidate.step_s + sync_s
    interval_s = checkpoint_interval_s(checkpoint_s, trainer_mtbf_s)
    steps = max(1, round(interval_s / step_s))
    share = checkpointed_share(steps * step_s, checkpoint_s, restart_s, trainer_mtbf_s)

    def expected(replicas: int) -> float:
        if colocated:
            return step_s / share
        scale = candidate.rollout_replicas / replicas / capacity
        stages = step_seconds(candidate.rollout_s * scale, candidate.train_s, question.staleness)
        return (max(float(stages), candidate.step_s) + sync_s) / share

    expected_s = expected(candidate.rollout_replicas)
    availability = mtbf_s / (mtbf_s + restart_s)
    spares = () if colocated else tuple(_spares(candidate, availability, expected))
    paying = next((each.replicas for each in reversed(spares) if each.pays), 0)
    note = (
        f"replica_mtbf_s and restart_s from [faults]; a checkpoint of {saved / 1e9:.1f} GB a GPU over PCIe, "
        "at least; spare trainer nodes: cannot tell, a job states no time of repair beside restart_s"
    )
    return Goodput(
        gpu_mtbf_s=gpu_mtbf_s,
        rollout_mtbf_s=mtbf_s,
        lost_work_s=lost_s,
        rollout_capacity=capacity,
        trainer_mtbf_s=trainer_mtbf_s,
        checkpoint_s=checkpoint_s,
        checkpoint_interval_s=interval_s,
        checkpoint_interval_steps=steps,
        trainer_share=share,
        step_s=step_s,
        expected_step_s=expected_s,
        goodput=step_s / expected_s,
        spares=spares,
        spares_that_pay=paying,
        note=note,
    )


def _spares(candidate: Candidate, availability: float, expected: Callable[[int], float]) -> Sequence[Spare]:
    """Return the numbers of spare replicas, none first; one pays while steps per GPU-hour still rise."""
    found: list[Spare] = []
    cheapest = inf
    for extra in range(MAX_SPARES + 1):
        replicas, gpus = candidate.rollout_replicas + extra, extra * candidate.rollout.gpus
        step_s = expected(replicas)
        cost = step_s * (candidate.num_gpus + gpus)
        pays = extra > 0 and cost < cheapest
        cheapest = min(cheapest, cost)
        chance = up_probability(candidate.rollout_replicas, replicas, availability)
        found.append(Spare(extra, gpus, chance, step_s, pays))
    return found
