"""Advantages, counts and normalisation of a mini-batch: the part of GRPO that needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from bidirl.executor.roles import Row
from bidirl.planner.learn import AdvantageScale, Normalisation

__all__ = ["coefficient", "global_counts", "group_advantages"]

STD_EPSILON = 1e-6
"""Keeps the division finite for rewards that hardly differ; the usual value of public GRPO code."""


def group_advantages(
    rewards: Sequence[float], scale: AdvantageScale = AdvantageScale.GROUP_STD
) -> NDArray[np.float64]:
    """Return the advantages of one group's samples, in float64.

    ``(reward - mean) / (std + 1e-6)`` with the sample standard deviation (n - 1). Equal rewards give exact
    zeros, also where rounding would make the mean differ from them.
    Source: Shao et al. 2024 (DeepSeekMath), section 4.1.2.
    """
    values = np.asarray(rewards, np.float64)
    if values.size == 0 or float(values.max()) == float(values.min()):
        return np.zeros_like(values)
    centred: NDArray[np.float64] = values - values.mean()
    if scale is AdvantageScale.NONE:
        return centred
    return centred / (float(values.std(ddof=1)) + STD_EPSILON)


def global_counts(rows: Iterable[Row]) -> tuple[int, int]:
    """Return (response tokens, sequences) of a whole mini-batch, samples of weight 0 left out."""
    lengths = [len(row.draft.tokens) for row in rows if row.weight]
    return sum(lengths), len(lengths)


def coefficient(
    normalisation: Normalisation, weight: float, length: int, *, num_tokens: int, num_sequences: int
) -> float:
    """Return the factor of each token's loss in a row of ``length`` response tokens.

    Token: ``weight / num_tokens``; sequence: ``weight / (length * num_sequences)``. The counts are those of
    the whole mini-batch, so the sum over all its rows is its mean however it is cut into chunks.
    """
    if not weight or not length:
        return 0.0
    if normalisation is Normalisation.TOKEN:
        return weight / num_tokens
    return weight / (length * num_sequences)
