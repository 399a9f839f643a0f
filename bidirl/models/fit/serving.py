"""Decode time of one serving engine, fitted to measured points (concurrency, prompt, response, TPOT).

Two layers, both ours. First a physical iteration with six non-negative coefficients, MAP with the roofline
as prior. With ``b`` sequences of ``isl`` prompt and ``osl`` response tokens in steady state, each iteration
holds ``b / osl`` new prompts (only where the same engine prefills) and takes

``tau + experts * (1 - (1 - share)**b) + tok * b + hist * b * (isl + osl / 2) + pre * b / osl * P(isl)
+ root * sqrt(b)``, ``P(isl) = isl + pair_tokens * isl**2 / 2``.

Second a smooth correction of its logarithm (a Gaussian process over log b, log isl, log osl) for what the
form misses: graph sizes, kernel choices, what differs between measuring campaigns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from math import exp, sqrt
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from bidirl.errors import InputError
from bidirl.models.architecture import Architecture
from bidirl.models.catalogue import Gpu
from bidirl.models.estimate import Estimate, Source
from bidirl.models.fit.regression import t_quantile
from bidirl.models.iteration import AffineIteration
from bidirl.models.roofline import ExpertIteration, Links, rollout_prior

if TYPE_CHECKING:
    from bidirl.models.iteration import IterationModel

__all__ = [
    "COEFFICIENTS",
    "FittedServing",
    "ServingIteration",
    "ServingPoint",
    "ServingPrior",
    "fit_serving",
    "fitted_from_mapping",
    "leave_one_out",
    "serving_prior",
]

Array = npt.NDArray[np.float64]
Mode = Literal["agg", "disagg"]
"""``agg``: the engine that decodes also prefills; ``disagg``: another one does."""

COEFFICIENTS = ("tau_s", "experts_s", "token_s", "context_token_s", "prefill_token_s", "root_s")
"""The coefficients in the order of the design matrix."""
PRIOR_SPREAD = (1.0, 2.0, 5.0, 2.0, 2.0, 10.0)
"""Prior standard deviation of each coefficient over its prior. Wide: five points decide; the prior settles
what they cannot separate. Chosen among five sets by leave-one-out over all public groups."""
ROOT_SHARE = 0.1
"""Prior of ``root_s`` over ``tau_s``."""
DENSE_TRANSFER = (0.84, 1.0, 0.10, 0.54, 1.20, 0.22)
EXPERT_TRANSFER = (1.34, 0.52, 0.43, 0.36, 2.53, 1.13)
"""Median fitted coefficient over its roofline prior, by class, over the public groups with six or more
conditions (42 dense, 73 experts). Used where a group has too few points of its own.
Source: aiconfigurator's measured serving points; made by benchmarks/fit_points.py."""
FEW_CONDITIONS = 4
"""Below this many different conditions the coefficients stay at the transferred prior."""
NOISE = 0.02
"""Standard deviation of log TPOT of a repeated measurement, a little above the 0.3 % of most repeats."""
STUDENT = 3.0
"""Degrees of freedom of the robust weights: some groups mix two unrecorded setups."""
LENGTH_B, LENGTH_SHAPE = 1.2, 1.0
"""Correlation lengths of the correction in log b and in log isl, log osl."""
FEW_SCALE_VARIANCE, FEW_SMOOTH_VARIANCE, FEW_LENGTH_B, FEW_LENGTH_SHAPE = 0.04, 0.04, 2.0, 4.0
FEW_NOISE = 0.06
"""The same for a group with few conditions, around the transferred prior: a factor of its own, and a wide
smooth part. Chosen by leave-one-model-out over all public groups."""
VARIANCE_RANGE = (1e-4, 2e-2)
"""Bounds of the correction's variance, which otherwise is the mean squared residual of the coefficients."""
LARGEST_RESIDUAL = 0.3
LOST_DOF = 4
"""Degrees of freedom that the coefficients take from the interval's Student quantile. Chosen so that 90 %
intervals hold 90 % of the left-out public points (3, 4 and 5 were tried)."""
Z90 = 1.645


@dataclass(frozen=True, slots=True)
class ServingPoint:
    """One measurement at fixed concurrency: mean seconds per output token after the first."""

    num_seqs: float
    """Requests in flight."""
    isl_tokens: float
    osl_tokens: float
    tpot_s: float
    campaign: str = ""
    """Whatever is known to differ without being a variable (a date, a machine); equal values err together."""

    def __post_init__(self) -> None:
        """Refuse numbers that no measurement can give."""
        for name in ("num_seqs", "isl_tokens", "osl_tokens", "tpot_s"):
            value = getattr(self, name)
            if not 0.0 < value < float("inf"):
                raise InputError(f"serving point {name} = {value}: must be positive; leave the row out")

    @property
    def condition(self) -> tuple[float, float, float]:
        """Return what was set: concurrency, prompt and response tokens."""
        return self.num_seqs, self.isl_tokens, self.osl_tokens


@dataclass(frozen=True, slots=True)
class ServingPrior:
    """Roofline coefficients of one engine, and the two numbers that its architecture fixes."""

    tau_s: float
    experts_s: float
    token_s: float
    context_token_s: float
    prefill_token_s: float
    share: float
    """Share of the experts that one token uses; 0 for a dense model."""
    pair_tokens: float
    note: str = ""

    def vector(self) -> Array:
        """Return the six prior coefficients."""
        named = (self.tau_s, self.experts_s, self.token_s, self.context_token_s, self.prefill_token_s)
        return np.array([*named, ROOT_SHARE * self.tau_s])


def serving_prior(
    device: Gpu, model: Architecture, tp: int, links: Links, dtype_bytes: float = 2.0
) -> ServingPrior:
    """Return the prior of an engine on ``tp`` GPUs from ``roofline.rollout_prior``."""
    iteration, _ = rollout_prior(device, model, tp, links, dtype_bytes)
    experts_s, share = 0.0, 0.0
    if isinstance(iteration, ExpertIteration):
        experts_s, share, iteration = iteration.experts_s, iteration.share, iteration.affine
    assert isinstance(iteration, AffineIteration)
    return ServingPrior(
        tau_s=iteration.tau_dec_s,
        experts_s=experts_s,
        token_s=iteration.beta_tok_dec_s,
        context_token_s=iteration.beta_hist_dec_s,
        prefill_token_s=iteration.beta_tok_pre_s,
        share=share,
        pair_tokens=model.pair_tokens,
        note=f"{device.name}, {model.name}, tp={tp}",
    )


@dataclass(frozen=True, slots=True)
class ServingIteration:
    """The physical layer of a fit as an ``IterationModel``: affine, experts, square root."""

    values: tuple[float, ...]
    share: float
    pair_tokens: float

    def decode(self, num_seqs: int) -> tuple[float, float]:
        """Return ``(base_s, per_context_token_s)`` as ``IterationModel.decode`` does."""
        tau, _, token, context, _, root = self.values
        return tau + self._touched_s(num_seqs) + token * num_seqs + root * sqrt(num_seqs), context

    def mixed(
        self, prefill_tokens: int, prefill_pairs: float, num_seqs: int, context_tokens: int, num_outputs: int
    ) -> float:
        """Return the seconds of an iteration with prefill as ``IterationModel.mixed`` does."""
        tau, _, token, context, prefill, root = self.values
        work = prefill_tokens + self.pair_tokens * prefill_pairs
        decode_s = token * num_seqs + context * context_tokens + root * sqrt(num_seqs)
        return tau + self._touched_s(prefill_tokens + num_seqs) + prefill * work + decode_s

    def _touched_s(self, num_tokens: int) -> float:
        return self.values[1] * (1.0 - (1.0 - self.share) ** num_tokens)


@dataclass(frozen=True, slots=True)
class FittedServing:
    """A fitted engine; only this predicts."""

    mode: Mode
    prior: ServingPrior
    values: tuple[float, ...]
    """Coefficients in the order of ``COEFFICIENTS``, seconds."""
    lows: tuple[float, ...]
    highs: tuple[float, ...]
    points: tuple[ServingPoint, ...]
    weights: tuple[float, ...]
    """Kriging weight of each point's residual: covariance inverse times residuals."""
    noises: tuple[float, ...]
    """Variance of each point's log TPOT, larger for outliers."""
    smooth_variance: float
    residual_median: float
    """Median absolute relative error of the coefficients alone on their own points."""
    data_hash: str

    @property
    def few(self) -> bool:
        """Return whether the coefficients are the transferred prior's."""
        return len({p.condition for p in self.points}) < FEW_CONDITIONS

    def tpot_s(self, num_seqs: float, isl_tokens: float, osl_tokens: float, campaign: str = "") -> Estimate:
        """Return the seconds per output token with a nominal 90 % interval.

        Outside twice the measured concurrency or lengths the estimate is flagged as extrapolated.
        """
        point = ServingPoint(num_seqs, isl_tokens, osl_tokens, 1.0, campaign)
        base = self.physical_s(num_seqs, isl_tokens, osl_tokens)
        cross = _covariance([point], self.points, self.smooth_variance, self.few)[0]
        own = float(_covariance([point], [point], self.smooth_variance, self.few)[0, 0])
        gram = _covariance(self.points, self.points, self.smooth_variance, self.few)
        gram = gram + np.diag(self.noises)
        variance = max(own - float(cross @ np.linalg.solve(gram, cross)), 0.0)
        value = base * exp(float(cross @ np.array(self.weights)))
        noise = self.smooth_variance + float(np.median(self.noises))
        dof = max(len(self.points) - LOST_DOF, 1.5)
        width = Z90 if self.few else t_quantile(0.95, dof)
        spread = exp(width * sqrt(variance + noise))
        source = Source.TRANSFERRED if self.few else Source.FITTED
        estimate = Estimate.within(value, spread, source, self.prior.note)
        far = self._outside(point)
        return estimate.flagged(far) if far else estimate

    def physical_s(self, num_seqs: float, isl_tokens: float, osl_tokens: float) -> float:
        """Return the seconds per output token of the coefficients alone."""
        point = ServingPoint(num_seqs, isl_tokens, osl_tokens, 1.0)
        return float(_design([point], self.prior, self.mode)[0] @ np.array(self.values))

    def _outside(self, point: ServingPoint) -> str:
        names = ("num_seqs", "isl_tokens", "osl_tokens")
        for name in names:
            seen = [getattr(p, name) for p in self.points]
            value = getattr(point, name)
            if not min(seen) / 2.0 <= value <= 2.0 * max(seen):
                return f"{name} = {value:g}, measured {min(seen):g} to {max(seen):g}"
        return ""

    @property
    def coefficients(self) -> dict[str, Estimate]:
        """Return each coefficient with its interval."""
        source = Source.TRANSFERRED if self.few else Source.FITTED
        rows = zip(COEFFICIENTS, self.values, self.lows, self.highs, strict=True)
        return {name: Estimate(v, low, high, source, self.prior.note) for name, v, low, high in rows}

    def iteration(self) -> "IterationModel":
        """Return the physical layer for the replica model; the smooth correction is not in it."""
        return ServingIteration(self.values, self.prior.share, self.prior.pair_tokens)

    def to_mapping(self) -> dict[str, object]:
        """Return plain JSON data; ``fitted_from_mapping`` reads it."""
        return {"kind": "fitted-serving", **asdict(self)}


def fitted_from_mapping(data: Mapping[str, Any]) -> FittedServing:
    """Read what ``FittedServing.to_mapping`` wrote; raise ``InputError`` for anything else."""
    try:
        named = {key: value for key, value in data.items() if key != "kind"}
        if data["kind"] != "fitted-serving":
            raise ValueError(data["kind"])
        for key in ("values", "lows", "highs", "weights", "noises"):
            named[key] = tuple(float(number) for number in named[key])
        named["points"] = tuple(ServingPoint(**point) for point in named["points"])
        named["prior"] = ServingPrior(**named["prior"])
        return FittedServing(**named)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"fitted serving data: {error}: give what to_mapping wrote") from None


def _design(points: Sequence[ServingPoint], prior: ServingPrior, mode: Mode) -> Array:
    """Return one row of six terms per point."""
    b, isl, osl = (np.array(column) for column in zip(*(p.condition for p in points), strict=True))
    prefill = b / osl * (isl + prior.pair_tokens * isl**2 / 2.0) if mode == "agg" else np.zeros_like(b)
    touched = 1.0 - (1.0 - prior.share) ** b
    return np.stack([np.ones_like(b), touched, b, b * (isl + osl / 2.0), prefill, np.sqrt(b)], axis=1)


def _covariance(
    left: Sequence[ServingPoint], right: Sequence[ServingPoint], variance: float, few: bool
) -> Array:
    """Return the covariance of the corrections of two sets of points."""
    a, b = (np.log([p.condition for p in side]) for side in (left, right))
    squared = (a[:, None, :] - b[None, :, :]) ** 2
    if few:
        near = squared[..., 0] / FEW_LENGTH_B**2 + squared[..., 1:].sum(-1) / FEW_LENGTH_SHAPE**2
        return np.asarray(FEW_SCALE_VARIANCE + FEW_SMOOTH_VARIANCE * np.exp(-near / 2.0))
    near = squared[..., 0] / LENGTH_B**2 + squared[..., 1:].sum(-1) / LENGTH_SHAPE**2
    same = np.array([[float(p.campaign == q.campaign) for q in right] for p in left])
    return np.asarray(variance * (np.exp(-near / 2.0) + same))


def _map(design: Array, measured: Array, prior: Array) -> tuple[Array, Array]:
    """Return MAP coefficients and their standard deviations.

    Relative errors, Student-t reweighting, ``coefficient / prior - 1`` Gaussian with ``PRIOR_SPREAD``; a
    coefficient whose prior is 0 stays 0.
    """
    from scipy.optimize import nnls

    active = np.flatnonzero((prior > 0.0) & (np.abs(design).max(axis=0) > 0.0))
    columns = design[:, active] / measured[:, None]
    spread = np.array(PRIOR_SPREAD)[active]
    ridge, target = np.diag(1.0 / (spread * prior[active])), 1.0 / spread
    scale, weights = 0.03, np.ones(len(measured))
    values = prior[active]
    for _ in range(5):
        rows = np.concatenate([columns * (weights / scale)[:, None], ridge])
        right = np.concatenate([weights / scale, target])
        size = np.abs(rows).max(axis=0)
        values = nnls(rows / size, right, maxiter=300)[0] / size
        residual = np.log(np.maximum(columns @ values, 1e-9))
        squares = float((weights**2 * residual**2).sum()) / max(len(measured) - 3, 1)
        scale = min(max(sqrt(squares), 0.015), LARGEST_RESIDUAL) if len(measured) > 3 else scale
        weights = np.sqrt((1.0 + 1.0 / STUDENT) / (1.0 + (residual / scale) ** 2 / STUDENT))
    rows = np.concatenate([columns * (weights / scale)[:, None], ridge])
    size = np.abs(rows).max(axis=0)
    covariance = np.linalg.inv((rows / size).T @ (rows / size)) / np.outer(size, size)
    full, deviation = np.zeros(len(prior)), np.zeros(len(prior))
    full[active], deviation[active] = values, np.sqrt(np.diag(covariance))
    return full, deviation


def fit_serving(
    points: Sequence[ServingPoint],
    prior: ServingPrior,
    mode: Mode = "agg",
    transfer: Sequence[float] | None = None,
) -> FittedServing:
    """Fit one engine (one GPU type, model, layout, precision, software) to its measured points.

    With fewer than ``FEW_CONDITIONS`` conditions the coefficients are the roofline's times ``transfer``
    (default: the medians of the public groups of the class), and only the correction follows the points.
    Raises ``InputError`` without points.
    """
    if not points:
        raise InputError("serving fit of 0 points: needs one or more; predict from the roofline instead")
    ordered = tuple(sorted(points, key=lambda p: (*p.condition, p.tpot_s, p.campaign)))
    measured = np.array([p.tpot_s for p in ordered])
    design, roofline = _design(ordered, prior, mode), prior.vector()
    few = len({p.condition for p in ordered}) < FEW_CONDITIONS
    if few:
        usual_factors = EXPERT_TRANSFER if prior.share > 0.0 else DENSE_TRANSFER
        values = roofline * np.array(usual_factors if transfer is None else transfer)
        deviations = values.copy()
        variance, noises = 0.0, np.full(len(ordered), FEW_NOISE**2)
        residual = np.log(measured / (design @ values))
    else:
        factor = float(np.median(measured / (design @ roofline)))
        values, deviations = _map(design, measured, roofline * factor)
        residual = np.log(measured / (design @ values))
        usual = max(1.4826 * float(np.median(np.abs(residual))), NOISE)
        noises = NOISE**2 * (1.0 + (residual / usual) ** 2 / STUDENT)
        squares = float((np.minimum(np.abs(residual), LARGEST_RESIDUAL) ** 2).mean())
        variance = min(max(squares, VARIANCE_RANGE[0]), VARIANCE_RANGE[1])
    gram = _covariance(ordered, ordered, variance, few) + np.diag(noises)
    lows = np.maximum(values - Z90 * deviations, 0.0)
    text = repr((mode, [asdict(p) for p in ordered], asdict(prior)))
    return FittedServing(
        mode=mode,
        prior=prior,
        values=tuple(values.tolist()),
        lows=tuple(lows.tolist()),
        highs=tuple((values + Z90 * deviations).tolist()),
        points=ordered,
        weights=tuple(np.linalg.solve(gram, residual).tolist()),
        noises=tuple(noises.tolist()),
        smooth_variance=variance,
        residual_median=float(np.median(np.abs(np.expm1(-residual)))),
        data_hash=sha256(text.encode()).hexdigest()[:16],
    )


def leave_one_out(
    points: Sequence[ServingPoint], prior: ServingPrior, mode: Mode = "agg"
) -> list[tuple[ServingPoint, Estimate]]:
    """Predict each point from a fit without any point of its condition (repeats are left out together)."""
    predicted = []
    for condition in sorted({p.condition for p in points}):
        rest = [p for p in points if p.condition != condition]
        if not rest:
            raise InputError("leave-one-out of one condition: needs two or more; measure another one")
        fitted = fit_serving(rest, prior, mode)
        predicted += [
            (p, fitted.tpot_s(*p.condition, campaign=p.campaign)) for p in points if p.condition == condition
        ]
    return predicted
