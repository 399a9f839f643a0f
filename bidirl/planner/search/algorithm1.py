"""Algorithm 1 as published, and the objective that extends it to fractional staleness.

Source: paper.md, "Static planner (Algorithm 1)"; the objective for fractional staleness is ours.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Envelope", "algorithm1", "compatible", "step_seconds"]


@dataclass(frozen=True, slots=True)
class Envelope:
    """The answer of Algorithm 1; replica counts follow and are never stated twice."""

    rollout_gpus: int
    train_gpus: int
    rollout_replica_gpus: int
    train_replica_gpus: int
    groups_per_s: float
    """``lambda = min(lambda_r, lambda_t)``."""

    @property
    def rollout_replicas(self) -> int:
        """Return ``d_r = g_r / |rho_r|``."""
        return self.rollout_gpus // self.rollout_replica_gpus

    @property
    def train_replicas(self) -> int:
        """Return ``d_t = g_t / |rho_t|``."""
        return self.train_gpus // self.train_replica_gpus


def compatible(
    rollout_gpus: int, train_gpus: int, rollout_replica_gpus: int, train_replica_gpus: int
) -> bool:
    """Return whether each pool divides by both replica sizes, so that either role can run on either pool."""
    sizes = (rollout_replica_gpus, train_replica_gpus)
    return all(gpus > 0 and gpus % size == 0 for gpus in (rollout_gpus, train_gpus) for size in sizes)


def algorithm1(
    partitions: Iterable[tuple[int, int]],
    rollout_replica_gpus: int,
    train_replica_gpus: int,
    num_groups: int,
    rollout_s: Callable[[int], float],
    train_s: Callable[[int], float],
    fits: Callable[[int, int], bool] = lambda _rollout, _train: True,
) -> Envelope | None:
    """Return the best partition for one pair of layouts, or None if none is legal.

    ``partitions`` holds node-aligned ``(g_r, g_t)``; ``rollout_s(d_r)`` is ``M_r(B_p, d_r)`` and
    ``train_s(d_t)`` is ``M_t(U_B, d_t)``, both in seconds; ``num_groups`` is ``B_p``. Of equal throughputs
    the first partition stays.
    """
    best: Envelope | None = None
    for g_r, g_t in partitions:
        if not compatible(g_r, g_t, rollout_replica_gpus, train_replica_gpus) or not fits(g_r, g_t):
            continue
        lambda_r = num_groups / rollout_s(g_r // rollout_replica_gpus)
        lambda_t = num_groups / train_s(g_t // train_replica_gpus)
        rate = min(lambda_r, lambda_t)
        if best is None or rate > best.groups_per_s:
            best = Envelope(g_r, g_t, rollout_replica_gpus, train_replica_gpus, rate)
    return best


def step_seconds(rollout_s: Any, train_s: Any, staleness: float) -> Any:
    """Return the seconds of a step of two pools, for numbers or arrays.

    From a whole batch of run-ahead on the stages overlap: ``max``, which is Algorithm 1. With less, the
    share ``1 - s`` of the shorter stage cannot (ours): on-policy pools take turns.
    """
    longer, shorter = np.maximum(rollout_s, train_s), np.minimum(rollout_s, train_s)
    exposed = max(0.0, 1.0 - staleness)
    return longer + exposed * shorter if exposed else longer
