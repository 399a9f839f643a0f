"""Fit an engine's coefficients to logged generation times: one factor per iteration, one per token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log as ln

import numpy as np
from numpy.typing import NDArray

from bidirl.errors import InputError
from bidirl.models.estimate import Estimate, Source
from bidirl.models.fit.fitted import COVERAGE
from bidirl.models.fit.fitting import recent_weights
from bidirl.models.fit.regression import fit_map, noise_scale, t_quantile
from bidirl.models.iteration import AffineIteration, IterationModel
from bidirl.models.makespan import rollout_makespan_s
from bidirl.models.roofline import ExpertIteration
from bidirl.planner.plan import Plan
from bidirl.traces.lengths import LengthPrior
from bidirl.traces.step_log import StepLog

__all__ = ["RolloutFit", "fit_rollout", "row_prior"]

Column = NDArray[np.float64]

SCALE_FACTOR = 2.0
"""90 % factor of the roofline's generation time, engine and length law together (docs/models.md)."""
SHARE_SD = 0.2
"""Prior standard deviation of the share of either part in a step's generation time."""
MAX_ROWS = 400
"""Steps that are simulated; a longer log is thinned evenly (each costs two makespans)."""


@dataclass(frozen=True, slots=True)
class RolloutFit:
    """Factors on the prior's coefficients, with 90 % intervals."""

    iteration: IterationModel
    per_iteration: Estimate
    """Factor on the seconds of an iteration (``tau``, and the weights of experts)."""
    per_token: Estimate
    """Factor on the seconds per token and per cached token (``beta``)."""
    prior_s: float
    """Seconds of a typical step before the fit."""
    num_rows: int


def fit_rollout(plan: Plan, log: StepLog, num_samples: int) -> RolloutFit:
    """Fit the plan's engine to ``generation_s``; each step is timed under its own lengths.

    A step's lengths are the plan's law, scaled to the step's mean and cut at its longest. Raises
    ``InputError`` for an engine that is a table of a profile: that needs no fit.
    """
    per_iteration, per_token = _parts(plan.models.iteration)
    times = log.column("generation_s")
    rows = np.flatnonzero(np.isfinite(times) & (times > 0.0))
    if len(rows) > MAX_ROWS:
        rows = rows[np.linspace(0, len(rows) - 1, MAX_ROWS).astype(int)]
    priors = [row_prior(plan.prior(0), log, int(row)) for row in rows]
    design = np.array(
        [
            [_makespan_s(plan, part, prior, num_samples) for part in (per_iteration, per_token)]
            for prior in priors
        ]
    )
    references = np.median(design, axis=0)
    typical = float(np.median(times[rows]))
    expected = float(references.sum())
    fit = fit_map(
        design / references,
        times[rows] / typical,
        references / expected,
        np.full(2, SHARE_SD),
        row_weights=recent_weights(len(rows)),
        scale_prior=(expected / typical, ln(SCALE_FACTOR) / 1.645),
    )
    factors = fit.coefficients * typical / references
    quantile = t_quantile((1.0 + COVERAGE) / 2.0, float(max(3, len(rows) - 2)))
    spread = quantile * np.sqrt(np.diag(fit.covariance)) * typical / references
    note = f"{len(rows)} steps of {log.source or 'a log'}, noise {noise_scale(fit.loo_residuals, 2):.1%}"
    found = [
        Estimate(float(f), float(max(0.0, f - s)), float(f + s), Source.FITTED, note)
        for f, s in zip(factors, spread, strict=True)
    ]
    return RolloutFit(
        iteration=_scaled(plan.models.iteration, found[0].value, found[1].value),
        per_iteration=found[0],
        per_token=found[1],
        prior_s=expected,
        num_rows=len(rows),
    )


def _parts(iteration: IterationModel) -> tuple[IterationModel, IterationModel]:
    return _scaled(iteration, 1.0, 0.0), _scaled(iteration, 0.0, 1.0)


def _scaled(iteration: IterationModel, per_iteration: float, per_token: float) -> IterationModel:
    match iteration:
        case ExpertIteration():
            affine = _scaled(iteration.affine, per_iteration, per_token)
            assert isinstance(affine, AffineIteration)
            return replace(iteration, affine=affine, experts_s=iteration.experts_s * per_iteration)
        case AffineIteration():
            return AffineIteration(
                tau_pre_s=iteration.tau_pre_s * per_iteration,
                tau_dec_s=iteration.tau_dec_s * per_iteration,
                beta_tok_pre_s=iteration.beta_tok_pre_s * per_token,
                beta_tok_dec_s=iteration.beta_tok_dec_s * per_token,
                beta_hist_pre_s=iteration.beta_hist_pre_s * per_token,
                beta_hist_dec_s=iteration.beta_hist_dec_s * per_token,
            )
        case _:
            raise InputError(
                f"[models] holds the engine profile {type(iteration).__name__}, which a log cannot improve: "
                "leave [models] out, or calibrate without --job"
            )


def row_prior(prior: LengthPrior, log: StepLog, row: int) -> LengthPrior:
    """Return a length law with a step's mean, longest response and prompt, where the log gives them."""
    mean = float(log.column("response_mean_tokens")[row])
    longest = float(log.column("response_max_tokens")[row])
    prompt = float(log.column("prompt_mean_tokens")[row])
    scale = mean / prior.mean_tokens if np.isfinite(mean) and mean > 0.0 else 1.0
    cap = longest if np.isfinite(longest) and longest > 0.0 else float(prior.max_tokens)
    return LengthPrior(
        quantiles=tuple(max(1.0, min(cap, tokens * scale)) for tokens in prior.quantiles),
        mean_tokens=prior.mean_tokens * scale,
        max_tokens=int(cap),
        prompt_mean_tokens=prompt if np.isfinite(prompt) and prompt > 0.0 else prior.prompt_mean_tokens,
    )


def _makespan_s(plan: Plan, iteration: IterationModel, prior: LengthPrior, num_samples: int) -> float:
    return rollout_makespan_s(
        iteration,
        plan.models.limits,
        prior,
        num_samples,
        plan.rollout_replicas,
        samples_per_group=plan.samples_per_group,
    )
