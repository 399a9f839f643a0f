"""Length laws from statistics: solve, never search for a best compromise.

Every statistic given is met exactly by a law whose log length is piecewise linear in normal score (a
log-normal with a kink at each given quantile), or the set is refused.
"""

from collections.abc import Callable
from math import log
from typing import NamedTuple

import numpy as np

from bidirl.errors import InputError
from bidirl.traces.lengths import LengthLaw
from bidirl.traces.normal import Z_LIMIT, inv_cdf

__all__ = ["ASSUMED_SIGMA", "LengthStats", "fit_length_law", "spread_sigma"]

ASSUMED_SIGMA = 0.74
"""Spread taken when one statistic is all there is: that of the Qwen3-VL-4B row of lengths.json, which is also
the geometric middle of the packaged laws (0.47 to 1.15)."""
Z95 = inv_cdf(0.95)
_MAX_SIGMA = 4.0
"""Above this a log-normal spans five decades between its quartiles: no response law does."""
_NUM_SCAN = 81
_NUM_BISECTIONS = 44


class LengthStats(NamedTuple):
    """Statistics of a workload's response lengths, as observed under the cap ``max_tokens``."""

    mean: float | None
    p50: float | None
    p95: float | None
    truncated: float | None
    """Share of responses cut at ``max_tokens``."""
    sigma: float | None
    """Standard deviation of log length, where the user states it."""
    max_tokens: int


class _Knot(NamedTuple):
    z: float
    x: float


def fit_length_law(stats: LengthStats, *, label: str, source: str) -> LengthLaw:
    """Solve for the law that meets every given statistic, under the cap ``stats.max_tokens``.

    Quantiles strictly below the cap and the truncated share become knots; a mean (taken after censoring)
    then fixes the slope below the first knot, or the common slope of a log-normal if there is one knot.

    Raises:
        InputError: when the set is too small or contradicts itself; the message says how.
    """
    _check(stats)
    knots = _knots(stats)
    notes: list[str] = []
    assumed = False
    sigma = stats.sigma
    if sigma is None and len(knots) + (stats.mean is not None) < 2:
        sigma, assumed = ASSUMED_SIGMA, True
        notes.append(
            f"one statistic fixes one number: the spread sigma={ASSUMED_SIGMA} of log length is assumed"
        )

    def law(lower: float, points: list[_Knot]) -> LengthLaw:
        return _through(points, lower, stats.max_tokens, label, source)

    if stats.mean is None:
        slope = sigma if len(knots) == 1 else (knots[1].x - knots[0].x) / (knots[1].z - knots[0].z)
        assert slope is not None
        fitted = law(slope, knots)
    elif not knots:
        assert sigma is not None
        spread = sigma
        fitted = _solve(lambda x: law(spread, [_Knot(0.0, x)]), 0.0, log(stats.max_tokens) + 12.0, stats)
    else:
        fitted = _solve(lambda s: law(s, knots), 0.0, _MAX_SIGMA, stats)
    if stats.truncated is not None and abs(fitted.truncated_share - stats.truncated) > 0.005:
        share = f"{fitted.truncated_share:.1%}"
        notes.append(f"the law cuts {share} at max={stats.max_tokens}, the table says {stats.truncated:.1%}")
    return LengthLaw(fitted.z, fitted.log_tokens, stats.max_tokens, label, source, assumed, tuple(notes))


def spread_sigma(mean: float, p95: float) -> float:
    """Return sigma of the log-normal with this mean and 95th percentile (same unit, both > 0).

    ``ln(p95 / mean) = z95 * sigma - sigma**2 / 2``, smaller root.

    Raises:
        InputError: when no log-normal has them.
    """
    ratio = log(p95 / mean)
    if not 0.0 <= ratio <= Z95 * Z95 / 2:
        bound = f"{np.exp(Z95 * Z95 / 2):.2f}"
        raise InputError(
            f"p95={p95:g} with mean={mean:g}: p95 / mean must lie in 1 to {bound}: correct one of them"
        )
    return float(Z95 - np.sqrt(Z95 * Z95 - 2.0 * ratio))


def _check(stats: LengthStats) -> None:
    cap = stats.max_tokens
    named = {"mean": stats.mean, "p50": stats.p50, "p95": stats.p95}
    if all(value is None for value in named.values()):
        raise InputError("lengths holds none of mean, p50, p95: give at least one of them, better two")
    if stats.sigma is not None and sum(v is not None for v in (*named.values(), stats.truncated)) > 1:
        raise InputError(f"sigma={stats.sigma:g} with two other statistics is one too many: leave sigma out")
    for name, value in named.items():
        if value is not None and value > cap:
            rule = f"{name}={value:g} exceeds the cap {cap} under which it was observed"
            raise InputError(f"{rule}: set lengths.max to that cap, or correct {name}")
    if stats.p50 is not None and stats.p95 is not None and stats.p50 > stats.p95:
        raise InputError(
            f"p50={stats.p50:g} exceeds p95={stats.p95:g}: a median cannot: swap or correct them"
        )
    if stats.p95 is not None and stats.mean is not None and stats.mean > stats.p95:
        raise InputError(
            f"mean={stats.mean:g} exceeds p95={stats.p95:g}: not a length law: correct one of them"
        )
    for name, level in (("p50", 0.5), ("p95", 0.05)):
        value, share = named[name], stats.truncated
        if value is None:
            continue
        if value >= cap and (share is None or share < level):
            rule = f"{name}={value:g} lies at the cap {cap}, so at least {level:.0%} are truncated"
            raise InputError(f"{rule}: add truncated >= {level:g} (the share cut there) or raise max")
        if value < cap and share is not None and share >= level:
            rule = f"truncated={share:g} means that {name} lies at the cap {cap}, not at {value:g}"
            raise InputError(f"{rule}: correct {name} or truncated")
    if stats.mean is not None and stats.truncated is not None and stats.mean < stats.truncated * cap:
        rule = f"mean={stats.mean:g} is below truncated * max = {stats.truncated * cap:g}"
        raise InputError(f"{rule}: the truncated share alone gives more: correct one of them")
    if stats.mean is not None and stats.mean >= cap:
        raise InputError(f"mean={stats.mean:g} lies at the cap {cap}: every response is cut: raise max")


def _knots(stats: LengthStats) -> list[_Knot]:
    knots = []
    if stats.p50 is not None and stats.p50 < stats.max_tokens:
        knots.append(_Knot(0.0, log(stats.p50)))
    if stats.p95 is not None and stats.p95 < stats.max_tokens:
        knots.append(_Knot(Z95, log(stats.p95)))
    if stats.truncated:
        knots.append(_Knot(-inv_cdf(stats.truncated), log(stats.max_tokens)))
    return sorted(knots)


def _through(knots: list[_Knot], lower: float, max_tokens: int, label: str, source: str) -> LengthLaw:
    """Draw the law through the knots: slope ``lower`` before them, the last piece's slope after them."""
    first, last = knots[0], knots[-1]
    upper = lower if len(knots) == 1 else (last.x - knots[-2].x) / (last.z - knots[-2].z)
    z = [-Z_LIMIT, *(k.z for k in knots), Z_LIMIT]
    x = [first.x - lower * (first.z + Z_LIMIT), *(k.x for k in knots), last.x + upper * (Z_LIMIT - last.z)]
    return LengthLaw(np.array(z), np.array(x), max_tokens, label, source)


def _solve(law_of: Callable[[float], LengthLaw], low: float, high: float, stats: LengthStats) -> LengthLaw:
    """Find the smallest parameter in ``[low, high]`` whose law has the mean asked for (scan, bisection)."""
    assert stats.mean is not None
    target = stats.mean
    grid = np.linspace(low, high, _NUM_SCAN).tolist()
    means = [law_of(value).mean_tokens for value in grid]
    bracket = next(
        (i for i in range(len(grid) - 1) if (means[i] - target) * (means[i + 1] - target) <= 0.0), None
    )
    if bracket is None:
        given = ", ".join(
            f"{name}={getattr(stats, name):g}"
            for name in ("p50", "p95", "truncated", "sigma")
            if getattr(stats, name) is not None
        )
        rule = f"mean={target:g} cannot go with {given} under max={stats.max_tokens}"
        reach = f"such laws have means of {min(means):.4g} to {max(means):.4g}"
        raise InputError(f"{rule}: {reach}: correct one of them or leave one out")
    a, b = grid[bracket], grid[bracket + 1]
    rising = means[bracket + 1] >= means[bracket]
    for _ in range(_NUM_BISECTIONS):
        middle = 0.5 * (a + b)
        if (law_of(middle).mean_tokens < target) == rising:
            a = middle
        else:
            b = middle
    return law_of(0.5 * (a + b))
