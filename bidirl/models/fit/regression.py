"""Robust maximum-a-posteriori regression of positive times on positive terms, for every fit of a stage.

``log y = log(X theta) + scale * t`` with Student-t noise ``t``, ``theta >= 0`` and a normal prior on it.
The noise is a share of the time (logs of stage times show that), and heavy tails let a stalled step lose its
pull. Rows and terms are scaled by the caller, so that a coefficient is a share of a typical time.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import exp, lgamma, log, pi

import numpy as np
from numpy.typing import NDArray

from bidirl.errors import InputError

__all__ = ["TAIL_DOFS", "MapFit", "fit_map", "noise_scale", "t_quantile"]

Column = NDArray[np.float64]
Matrix = NDArray[np.float64]

TAIL_DOFS = (4.0, 8.0, 30.0)
"""Degrees of freedom of the noise to choose from by evidence: stalls, occasional outliers, nearly normal."""
NOISE_PRIOR = 0.02
"""Typical noise of a stage time, as a share of it: 1 to 3 % in the public step logs (docs/calibration.md)."""
NOISE_PRIOR_LOG_SD = 1.0
"""How well that is known: to a factor of e. Keeps a fit of as many rows as terms from claiming certainty."""
NOISE_PRIOR_ROWS = 2.0
"""Rows that the typical noise counts for beside the residuals' own quantiles in ``noise_scale``."""
MIN_SCALE = 1e-6
MAX_ITERATIONS = 100
DAMPING = 0.7
"""Share of a Gauss-Newton step taken: full steps of IRLS with log residuals can oscillate."""
MAX_LEVERAGE = 0.8
"""Leverage above which a leave-one-out residual is no longer inflated: one row alone then fixes a term."""


@dataclass(frozen=True)
class MapFit:
    """The mode of the posterior, and what it says about itself."""

    coefficients: Column
    """k terms, in units of ``observed`` per unit of the design's column, all >= 0."""
    covariance: Matrix
    """k x k, of the coefficients (Laplace approximation, bounds ignored)."""
    scale: float
    """Scale of the Student-t noise of log time."""
    tail_dof: float
    residuals: Column
    """n, ``log(observed / fitted)``."""
    loo_residuals: Column
    """n, the same with the row itself left out (by its leverage)."""
    pull: Column
    """n, how much each row counts: its given weight times its robustness weight in [0, 1]."""
    log_evidence: float
    """Laplace approximation of the log marginal likelihood; comparable between fits of the same rows."""

    def log_variance(self, design: Matrix) -> Column:
        """Return the variance of the log prediction of each row, from the coefficients' uncertainty."""
        jacobian = design / (design @ self.coefficients)[:, None]
        return np.asarray(np.einsum("ij,jk,ik->i", jacobian, self.covariance, jacobian))


def fit_map(
    design: Matrix,
    observed: Column,
    prior_mean: Column,
    prior_sd: Column,
    *,
    row_weights: Column | None = None,
    scale_prior: tuple[float, float] | None = None,
    tail_dofs: tuple[float, ...] = TAIL_DOFS,
) -> MapFit:
    """Fit ``observed`` (n, > 0) on ``design`` (n x k, >= 0); return the fit of the best tail weight.

    ``scale_prior`` is ``(value, log_sd)``: what the sum of all coefficients (the time of a row of ones) is
    believed to be before any row. Raises ``InputError`` for no rows or times that are not positive.
    """
    if len(observed) == 0:
        raise InputError("no rows to fit: give a log with at least one complete step")
    if not (np.isfinite(observed).all() and (observed > 0.0).all() and np.isfinite(design).all()):
        raise InputError("times to fit must be positive and finite: drop the other rows")
    weights = np.ones(len(observed)) if row_weights is None else row_weights
    fits = [_fit(design, observed, prior_mean, prior_sd, weights, scale_prior, dof) for dof in tail_dofs]
    return max(fits, key=lambda fit: fit.log_evidence)


def noise_scale(residuals: Column, num_terms: int) -> float:
    """Return the standard deviation of a normal law with the spread of leave-one-out log residuals.

    The mean of what the quantiles 0.5, 0.68 and 0.9 of their size imply: less noisy than the last alone,
    heavier-tailed than the first. Few rows beyond the ``num_terms`` of the fit are drawn towards
    ``NOISE_PRIOR``.
    """
    size = np.abs(residuals)
    num = max(0, len(size) - num_terms)
    parts = [float(np.quantile(size, p)) / z for p, z in ((0.5, 0.6745), (0.68, 0.9945), (0.9, 1.6449))]
    own = max(MIN_SCALE, sum(parts) / len(parts))
    return exp((num * log(own) + NOISE_PRIOR_ROWS * log(NOISE_PRIOR)) / (num + NOISE_PRIOR_ROWS))


def t_quantile(probability: float, dof: float) -> float:
    """Return the quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(dof, probability))


def _fit(
    design: Matrix,
    observed: Column,
    prior_mean: Column,
    prior_sd: Column,
    weights: Column,
    scale_prior: tuple[float, float] | None,
    dof: float,
) -> MapFit:
    num_terms = design.shape[1]
    precision = np.diag(1.0 / np.square(prior_sd))
    logs = np.log(observed)
    theta, scale = np.array(prior_mean, dtype=float), 0.1
    for _ in range(MAX_ITERATIONS):
        hessian, gradient = _normal_equations(design, logs, theta, scale, weights, dof)
        hessian, gradient = hessian + precision, gradient + precision @ prior_mean
        if scale_prior is not None:
            value, log_sd = scale_prior
            ones = np.full(num_terms, 1.0 / theta.sum())
            target = log(value) - log(theta.sum()) + 1.0
            hessian = hessian + np.outer(ones, ones) / log_sd**2
            gradient = gradient + ones * target / log_sd**2
        step = _non_negative(hessian, gradient) - theta
        theta = theta + DAMPING * step
        residuals = logs - np.log(design @ theta)
        pull = weights * _robust(residuals, scale, dof)
        new_scale = _scale(float(np.sum(pull * residuals**2)), float(weights.sum()))
        moved = max(float(np.abs(step).max()), abs(new_scale / scale - 1.0))
        scale = new_scale
        if moved < 1e-8:
            break
    theta = np.where(theta < 1e-9, 0.0, theta)
    hessian, _ = _normal_equations(design, logs, theta, scale, weights, dof)
    hessian = hessian + precision
    if scale_prior is not None:
        hessian = hessian + np.full((num_terms, num_terms), (theta.sum() * scale_prior[1]) ** -2.0)
    covariance = np.linalg.inv(hessian)
    fitted = design @ theta
    residuals = logs - np.log(fitted)
    pull = weights * _robust(residuals, scale, dof)
    jacobian = design / fitted[:, None]
    leverage = np.einsum("ij,jk,ik->i", jacobian, covariance, jacobian) * pull / scale**2
    share = (dof + (residuals / scale) ** 2) / (dof + 1.0)
    return MapFit(
        coefficients=theta,
        covariance=covariance,
        scale=scale,
        tail_dof=dof,
        residuals=residuals,
        loo_residuals=residuals / (1.0 - np.minimum(leverage, MAX_LEVERAGE)),
        pull=weights * np.minimum(1.0, 1.0 / share),
        log_evidence=_log_evidence(residuals, weights, scale, dof)
        + float(np.sum(-0.5 * ((theta - prior_mean) / prior_sd) ** 2 - np.log(prior_sd)))
        + 0.5 * float(np.linalg.slogdet(covariance)[1]),
    )


def _robust(residuals: Column, scale: float, dof: float) -> Column:
    """Return the weights of the expectation step for Student-t noise; up to ``(dof + 1) / dof``."""
    return np.asarray((dof + 1.0) / (dof + (residuals / scale) ** 2))


def _normal_equations(
    design: Matrix, logs: Column, theta: Column, scale: float, weights: Column, dof: float
) -> tuple[Matrix, Column]:
    fitted = design @ theta
    residuals = logs - np.log(fitted)
    pull = weights * _robust(residuals, scale, dof) / scale**2
    jacobian = design / fitted[:, None]
    weighted = jacobian * pull[:, None]
    return weighted.T @ jacobian, weighted.T @ (residuals + jacobian @ theta)


def _scale(squares: float, num: float) -> float:
    """Return the mode of the scale under a log-normal prior: the root of ``n + l - S exp(-2 log s) = 0``."""
    squares = max(squares, MIN_SCALE**2 * num)
    level = 0.5 * log(squares / num)
    for _ in range(20):
        pull = squares * exp(-2.0 * level)
        step = (num + (level - log(NOISE_PRIOR)) / NOISE_PRIOR_LOG_SD**2 - pull) / (
            NOISE_PRIOR_LOG_SD**-2.0 + 2.0 * pull
        )
        level -= max(-1.0, min(1.0, step))
        if abs(step) < 1e-12:
            break
    return exp(max(level, log(MIN_SCALE)))


def _non_negative(hessian: Matrix, gradient: Column) -> Column:
    """Minimise ``x H x / 2 - g x`` over ``x >= 0`` exactly: try all sets of free terms (few)."""
    free_of_bounds = np.linalg.solve(hessian, gradient)
    if (free_of_bounds >= 0.0).all():
        return np.asarray(free_of_bounds)
    num = len(gradient)
    best, best_value = np.full(num, 1e-9), 0.0
    for size in range(num - 1, 0, -1):
        for chosen in combinations(range(num), size):
            free = list(chosen)
            part = np.linalg.solve(hessian[np.ix_(free, free)], gradient[free])
            value = -0.5 * float(part @ gradient[free])
            if (part >= 0.0).all() and value < best_value:
                best = np.zeros(num)
                best[free], best_value = part, value
    return best


def _log_evidence(residuals: Column, weights: Column, scale: float, dof: float) -> float:
    constant = lgamma((dof + 1.0) / 2.0) - lgamma(dof / 2.0) - 0.5 * log(dof * pi)
    density = constant - log(scale) - (dof + 1.0) / 2.0 * np.log1p((residuals / scale) ** 2 / dof)
    prior = -0.5 * ((log(scale) - log(NOISE_PRIOR)) / NOISE_PRIOR_LOG_SD) ** 2
    return float(np.sum(weights * density)) + prior
