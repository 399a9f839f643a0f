"""Normal scores: the coordinate in which every length law is a table.

Written on numpy and the standard library alone, since importing scipy costs more than a short run.
"""

from functools import lru_cache
from math import erfc, sqrt
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

__all__ = ["Z_LIMIT", "inv_cdf", "normal_cdf", "normal_scores"]

Floats = npt.NDArray[np.float64]

Z_LIMIT = 9.0
"""Normal scores are cut at +-9: the mass beyond is 1e-19, below the spacing of doubles near 1."""
_TABLE_STEP = 0.002
"""Spacing of the table behind `normal_scores`; the error of a score is at most ``step**2 * 9 / 8 < 5e-6``."""
_STANDARD = NormalDist()


def inv_cdf(p: float) -> float:
    """Return the normal score of probability ``p`` in (0, 1), exact to rounding.

    Source: Python's `statistics.NormalDist` (Wichura 1988, algorithm AS 241).
    """
    return _STANDARD.inv_cdf(p)


def normal_cdf(z: Floats) -> Floats:
    """Return P(Z <= z) elementwise, accurate in relative terms in the lower tail; about 0.2 us an element."""
    root = sqrt(0.5)
    return np.array([0.5 * erfc(-x * root) for x in z.ravel().tolist()]).reshape(z.shape)


@lru_cache(maxsize=1)
def _lower_half() -> tuple[Floats, Floats]:
    z = np.linspace(-Z_LIMIT, 0.0, round(Z_LIMIT / _TABLE_STEP) + 1)
    return normal_cdf(z), z


def normal_scores(u: Floats) -> Floats:
    """Return the normal scores of probabilities ``u`` in (0, 1), any shape.

    Interpolates a table (error below 5e-6, which moves a length by less than 5e-6 times the law's sigma);
    20,480 values take about 1 ms.
    """
    probabilities, z = _lower_half()
    folded = np.interp(np.minimum(u, 1.0 - u), probabilities, z)
    return np.where(u > 0.5, -folded, folded)
