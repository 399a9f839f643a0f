"""Response-length laws: uncensored lengths, cut at ``max_response_tokens``.

A law is a table of ``(normal score, log tokens)`` knots with straight lines between them: a log-normal is
two knots, a mixture a few hundred, an observed sample one knot per observation. The table describes lengths
*without* a cap; the cap is applied afterwards, so that one law serves runs at 1K, 2K and 4K alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import exp, inf, log
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from bidirl.errors import InputError
from bidirl.traces.normal import Z_LIMIT, inv_cdf, normal_cdf, normal_scores

__all__ = ["Component", "LengthLaw", "LengthPrior", "empirical", "log_normal", "mixture"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

NUM_PRIOR_QUANTILES = 64
"""Points of a `LengthPrior`: their mean is within 1 % of the law's for every packaged law."""
_NUM_MIXTURE_KNOTS = 1024
"""Knots of a mixture; quantiles are then within 0.02 % of the exact ones, up to that of 1 - 1e-7."""
_MEAN_STEP = 0.005
"""Spacing in normal score of the sums behind means; the relative error is below 1e-5."""
_SAME_MAXIMUM_SHARE = 0.02
"""An observed file with this share of its lengths at one maximum was most likely cut there."""


@dataclass(frozen=True, slots=True)
class LengthPrior:
    """What a scheduler may know of response lengths before it sees them (censored, with drift)."""

    quantiles: tuple[float, ...]
    """Tokens at the midpoints of equal-probability slices, ascending."""
    mean_tokens: float
    max_tokens: int
    prompt_mean_tokens: float
    """Mean prefilled prompt, image tokens included."""


@dataclass(frozen=True, slots=True)
class Component:
    """One log-normal part of a mixture; weights of a mixture sum to 1."""

    weight: float
    median_tokens: float
    sigma: float
    """Standard deviation of the natural logarithm of the length."""


@dataclass(frozen=True, eq=False, slots=True)
class LengthLaw:
    """Distribution of response lengths, uncensored knots plus a cap.

    Invariants: at least one knot; both columns ascend (strictly in ``z``); 1 <= ``max_tokens``. Below the
    first and above the last knot the length is constant.
    """

    z: Floats
    """Normal scores of the knots."""
    log_tokens: Floats
    """Natural logarithm of the uncensored length at each knot."""
    max_tokens: int
    """Cap: longer responses are cut and count as truncated."""
    label: str
    source: str
    assumed: bool = False
    """True where no public or observed statistic stands behind the law."""
    notes: tuple[str, ...] = field(default=())

    def sample(self, u: Floats) -> Ints:
        """Map uniform numbers in (0, 1), any shape, to tokens in ``[1, max_tokens]``, monotone in ``u``."""
        return self.sample_scores(normal_scores(u))[0]

    def sample_scores(self, z: Floats) -> tuple[Ints, Bools]:
        """Map normal scores, any shape, to ``(tokens, truncated)``; truncated means longer than the cap."""
        uncut = np.exp(self._log_at(z))
        tokens = np.rint(np.clip(uncut, 1.0, self.max_tokens)).astype(np.int64)
        return tokens, uncut > self.max_tokens

    def quantile(self, p: float) -> float:
        """Return the tokens that a share ``p`` in (0, 1) of the responses does not exceed, after the cap."""
        return min(exp(float(np.interp(inv_cdf(p), self.z, self.log_tokens))), float(self.max_tokens))

    def survival(self, tokens: float) -> float:
        """Return the share of responses longer than ``tokens`` after the cap (0 at and above it)."""
        if tokens >= self.max_tokens:
            return 0.0
        return self._uncut_survival(tokens)

    @property
    def truncated_share(self) -> float:
        """Share of responses that the cap cuts."""
        return self._uncut_survival(float(self.max_tokens))

    @property
    def mean_tokens(self) -> float:
        """Mean after the cap, before rounding to whole tokens (which moves it by less than half a token)."""
        z, weights = _mean_grid()
        return float(weights @ np.minimum(np.exp(self._log_at(z)), self.max_tokens))

    def scaled(self, factor: float) -> "LengthLaw":
        """Return the law with every uncensored length multiplied by ``factor`` > 0, under the same cap."""
        return self if factor == 1.0 else replace(self, log_tokens=self.log_tokens + log(factor))

    def capped(self, max_tokens: int) -> "LengthLaw":
        """Return the same uncensored law under another cap (>= 1)."""
        return replace(self, max_tokens=max_tokens)

    def prior(self, prompt_mean_tokens: float) -> LengthPrior:
        """Return what a scheduler may know: 64 midpoint quantiles, mean and cap."""
        midpoints = self._log_at(_prior_scores())
        quantiles = np.minimum(np.exp(midpoints), self.max_tokens)
        return LengthPrior(tuple(quantiles.tolist()), self.mean_tokens, self.max_tokens, prompt_mean_tokens)

    def _log_at(self, z: Floats) -> Floats:
        if len(self.z) == 2:  # a log-normal: one line, an order of magnitude faster than a search
            slope = (self.log_tokens[1] - self.log_tokens[0]) / (self.z[1] - self.z[0])
            line: Floats = self.log_tokens[0] + slope * (np.clip(z, self.z[0], self.z[1]) - self.z[0])
            return line
        return np.interp(z, self.z, self.log_tokens)

    def _uncut_survival(self, tokens: float) -> float:
        x = log(tokens) if tokens > 0 else -inf
        if x < self.log_tokens[0]:
            return 1.0
        if x >= self.log_tokens[-1]:
            return 0.0
        return NormalDist().cdf(-float(np.interp(x, self.log_tokens, self.z)))


def log_normal(
    median_tokens: float, sigma: float, max_tokens: int, *, label: str, source: str, assumed: bool = False
) -> LengthLaw:
    """Make a log-normal law: ``ln L = ln median + sigma * Z``, Z standard normal."""
    z = np.array([-Z_LIMIT, Z_LIMIT])
    return LengthLaw(z, log(median_tokens) + sigma * z, max_tokens, label, source, assumed)


def mixture(
    components: Sequence[Component], max_tokens: int, *, label: str, source: str, assumed: bool = False
) -> LengthLaw:
    """Make a mixture of log-normals (weights sum to 1) as a table of its exact normal scores."""
    if len(components) == 1:
        only = components[0]
        return log_normal(
            only.median_tokens, only.sigma, max_tokens, label=label, source=source, assumed=assumed
        )
    x = np.linspace(
        min(log(c.median_tokens) - Z_LIMIT * c.sigma for c in components),
        max(log(c.median_tokens) + Z_LIMIT * c.sigma for c in components),
        _NUM_MIXTURE_KNOTS,
    )
    scores = [(x - log(c.median_tokens)) / c.sigma for c in components]
    below = sum((c.weight * normal_cdf(s) for c, s in zip(components, scores, strict=True)), np.zeros_like(x))
    above = sum(
        (c.weight * normal_cdf(-s) for c, s in zip(components, scores, strict=True)), np.zeros_like(x)
    )
    # Each tail from its own small probability, so that neither loses digits near 1.
    z = np.array(
        [
            inv_cdf(b) if b <= a else -inv_cdf(a)
            for b, a in zip(
                np.maximum(below, 1e-300).tolist(), np.maximum(above, 1e-300).tolist(), strict=True
            )
        ]
    )
    keep = np.concatenate([[True], np.diff(z) > 0.0])
    return LengthLaw(z[keep], x[keep], max_tokens, label, source, assumed)


def empirical(observed: Sequence[int], max_tokens: int, *, label: str, source: str) -> LengthLaw:
    """Make a law from observed lengths (integers >= 1).

    Draws interpolate the observed quantiles (log length, linear in normal score between plotting positions
    ``(i - 1/2) / n``) rather than resampling the values: drift and priors then see a smooth law from a small
    file, and no draw leaves the observed range, since nothing is known beyond it. Observations above the cap
    are cut by it, with a note.

    Raises:
        InputError: when there is no observation, or one is below 1.
    """
    lengths = np.sort(np.asarray(observed, dtype=np.int64))
    if lengths.size == 0:
        raise InputError(f"{label}: holds no observed length: give at least one response")
    if lengths[0] < 1:
        raise InputError(f"{label}: observed length {lengths[0]} is below 1 token: remove empty responses")
    notes = []
    num_over = int((lengths > max_tokens).sum())
    if num_over:
        share = f"{num_over} of {lengths.size} observed lengths"
        notes.append(f"{share} exceed max_response_tokens={max_tokens} and count as truncated there")
    at_maximum = float((lengths == lengths[-1]).mean())
    if lengths.size > 1 and at_maximum > _SAME_MAXIMUM_SHARE and lengths[-1] < max_tokens:
        notes.append(
            f"{at_maximum:.0%} of the observed lengths equal their maximum {lengths[-1]}: they were probably "
            f"cut there, and what lies between it and max_response_tokens={max_tokens} is not known"
        )
    positions = (np.arange(lengths.size) + 0.5) / lengths.size
    z = np.array([inv_cdf(p) for p in positions.tolist()])
    return LengthLaw(z, np.log(lengths), max_tokens, label, source, notes=tuple(notes))


@lru_cache(maxsize=1)
def _mean_grid() -> tuple[Floats, Floats]:
    z = np.linspace(-Z_LIMIT, Z_LIMIT, round(2 * Z_LIMIT / _MEAN_STEP) + 1)
    density = np.exp(-0.5 * z * z)
    return z, density / density.sum()


@lru_cache(maxsize=1)
def _prior_scores() -> Floats:
    return np.array([inv_cdf((i + 0.5) / NUM_PRIOR_QUANTILES) for i in range(NUM_PRIOR_QUANTILES)])
