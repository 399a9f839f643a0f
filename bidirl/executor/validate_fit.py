"""Stage models from what a run or a profile showed: iterations, pulls, and the costs of changing over.

Shapes are fitted robustly, so that a stalled iteration does not bend them; the level is then set by the sum,
so that stalls, which a real machine has, count in a prediction of the whole.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bidirl.errors import InputError
from bidirl.executor.backends.vllm.meter import Iteration
from bidirl.executor.validate_observe import Timing
from bidirl.models.estimate import Estimate, Source
from bidirl.models.iteration import AffineIteration
from bidirl.models.stages import StageModels
from bidirl.models.trainer import SegmentCost, TrainerModel, slowest_work
from bidirl.models.transfer import SwitchCosts

__all__ = [
    "Fit",
    "Level",
    "boundary_s",
    "calibrated",
    "fit_iteration",
    "fit_segment",
    "iteration_s",
    "pull_work",
]

Column = NDArray[np.float64]

MAX_ROWS = 4000
"""Iterations that a fit takes at most, spread evenly: more rows no longer move five coefficients."""
SEGMENTS = ("old_logprob", "reference", "update")
TERMS = tuple(spec.name for spec in fields(AffineIteration) if spec.name != "beta_hist_pre_s")
"""Coefficients of an iteration; prompts of one length do not show the (query, visible) pairs of a prefill."""
ROUNDS = 12
"""Rounds of reweighting; the weights settle within a few."""
HUBER, NORMAL_MEDIAN, MIN_DEVIATION = 1.345, 0.6745, 1e-6
"""Deviations within which a row counts fully (95 % efficient for normal noise, Huber's usual constant); the
median of |normal|; the least relative deviation."""
Z90 = 1.645
MEASURED = "measured"
"""``provenance["kind"]`` of models that hold measured costs."""
STAGE_OF = {"grad_s": "merge", "broadcast_s": "broadcast"}
LIKE: Mapping[str, tuple[str, ...]] = {
    "rollout_on_train_in": ("train_on_rollout_in", "sync"),
    "rollout_on_train_out": ("train_on_rollout_out", "sync"),
    "train_on_rollout_in": ("rollout_on_train_in", "sync"),
    "train_on_rollout_out": ("rollout_on_train_out", "sync"),
    "merge": ("sync",),
    "broadcast": ("sync",),
    "time_share_in": (),
    "time_share_out": (),
}
"""What stands for a cost that a run did not show, where nothing else was measured on the device: the same
change in the other direction, or a transfer of as many bytes."""


class Level(StrEnum):
    """What a fitted time stands for."""

    SUM = "sum"
    """The mean, stalls included: sums of predicted and measured times agree."""
    TYPICAL = "typical"
    """A time without stalls: what the device does when nothing disturbs it."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted group of coefficients with what was left over."""

    coefficients: dict[str, Estimate]
    num_rows: int
    level: float
    """Sum of the measured over the sum of the robustly fitted times; already in the coefficients."""
    median_error: float
    p90_error: float
    """Of |predicted / measured - 1| over the fitted rows."""
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "num_rows": self.num_rows,
            "num_free_parameters": len(self.coefficients) + 1,
            "level": self.level,
            "median_error": self.median_error,
            "p90_error": self.p90_error,
            "ranges": {name: list(ends) for name, ends in self.ranges.items()},
            "coefficients": {name: found.to_mapping() for name, found in self.coefficients.items()},
        }


def _row(iteration: Iteration) -> tuple[float, ...]:
    """Return the multipliers of ``TERMS``: iterations with any prefill have a constant of their own."""
    has_prefill = iteration.prefill_tokens > 0
    context = max(0, iteration.context_tokens - iteration.prefill_tokens)
    return (
        float(has_prefill),
        float(not has_prefill),
        float(iteration.prefill_tokens),
        float(iteration.decode_tokens),
        float(context),
    )


def _robust(rows: Column) -> tuple[Column, Column]:
    """Solve ``rows @ x = 1`` for ``x >= 0``, far rows weighed down; return x and its covariance.

    Source: Huber 1964, robust estimation of a location parameter (weights); Lawson and Hanson 1974 (x >= 0).
    """
    from scipy.optimize import nnls

    weights = np.ones(len(rows))
    solution = np.zeros(rows.shape[1])
    deviation = 0.0
    for _ in range(ROUNDS):
        solution, _ = nnls(rows * weights[:, None], weights)
        residuals = np.abs(rows @ solution - 1.0)
        deviation = max(float(np.median(residuals)) / NORMAL_MEDIAN, MIN_DEVIATION)
        weights = np.sqrt(np.minimum(1.0, HUBER * deviation / np.maximum(residuals, MIN_DEVIATION)))
    weighted = rows * weights[:, None]
    return solution, np.asarray(deviation**2 * np.linalg.pinv(weighted.T @ weighted))


def _fit(design: Column, seconds: Column, names: Sequence[str], kind: Level) -> Fit:
    """Fit times that are linear in some terms; a term that no row has keeps no coefficient."""
    shown = np.flatnonzero(design.max(axis=0) > 0.0)
    scale = design[:, shown].max(axis=0)  # terms of one size: the solver works to an absolute tolerance
    values, covariance = _robust(design[:, shown] / scale / seconds[:, None])
    values, deviations = values / scale, np.sqrt(np.diag(covariance)) / scale
    fitted_s = float((design[:, shown] @ values).sum())
    level = float(seconds.sum()) / fitted_s if kind is Level.SUM else 1.0
    estimates = {name: Estimate.exact(0.0, Source.ASSUMED, "not seen in the run") for name in names}
    for at, value, deviation in zip(shown, values * level, deviations * level, strict=True):
        low, high = max(0.0, value - Z90 * deviation), value + Z90 * deviation
        estimates[names[int(at)]] = Estimate(float(value), float(low), float(high), Source.FITTED)
    errors = np.abs(level * (design[:, shown] @ values) / seconds - 1.0)
    ranges = {
        names[int(at)]: (float(design[:, at].min()), float(design[:, at].max()))
        for at in shown
        if design[:, at].min() < design[:, at].max()
    }
    return Fit(
        estimates, len(seconds), level, float(np.median(errors)), float(np.quantile(errors, 0.9)), ranges
    )


def fit_iteration(iterations: Sequence[Iteration], kind: Level = Level.SUM) -> tuple[AffineIteration, Fit]:
    """Fit the seconds of an engine iteration.

    Raises:
        InputError: there is none.
    """
    if not iterations:
        raise InputError("engine iterations to fit: 0: give a run with more steps")
    step = -(-len(iterations) // MAX_ROWS)
    rows = np.array([_row(iteration) for iteration in iterations])
    seconds = np.array([iteration.seconds for iteration in iterations])
    fit = _fit(rows[::step], seconds[::step], TERMS, kind)
    values = {name: found.value for name, found in fit.coefficients.items()}
    if not values["tau_pre_s"]:  # a run without prefill says nothing of it: take it for a decode
        values["tau_pre_s"], values["beta_tok_pre_s"] = values["tau_dec_s"], 0.0
    model = AffineIteration(**values, beta_hist_pre_s=0.0)
    predicted_s = sum(iteration_s(model, iteration) for iteration in iterations)
    level = float(seconds.sum()) / predicted_s if kind is Level.SUM else 1.0
    model = replace(model, **{name: level * getattr(model, name) for name in TERMS})
    return model, replace(
        fit,
        level=fit.level * level,
        num_rows=len(iterations),
        coefficients={name: found * level for name, found in fit.coefficients.items()},
    )


def iteration_s(model: AffineIteration, iteration: Iteration) -> float:
    """Return the predicted seconds of an iteration that took place."""
    terms = _row(iteration)
    return float(sum(getattr(model, name) * value for name, value in zip(TERMS, terms, strict=True)))


def boundary_s(iterations: Sequence[Iteration]) -> float:
    """Return the mean wait of a command for the end of the iteration that it comes into.

    ``E[s**2] / (2 E[s])``. Source: mean residual life of a renewal process (Cox 1962, Renewal Theory).
    """
    seconds = np.array([iteration.seconds for iteration in iterations])
    return float((seconds**2).sum() / (2.0 * seconds.sum()))


def pull_work(timing: Timing) -> float:
    """Return the effective tokens of the replica that had most of a pull."""
    return slowest_work(timing.work, timing.longest, timing.num_replicas)


def fit_segment(pulls: Sequence[Timing], kind: Level = Level.SUM) -> tuple[SegmentCost, Fit]:
    """Fit ``tau_s + alpha_s * W`` to pulls of one kind, the control plane's own latency included.

    Raises:
        InputError: there is none.
    """
    if not pulls:
        raise InputError("trainer pulls to fit: 0: give a run with more steps")
    work = np.array([pull_work(pull) for pull in pulls])
    seconds = np.array([pull.seconds for pull in pulls])
    design = np.stack([np.ones_like(work), work], axis=1)
    fit = _fit(design, seconds, ("tau_s", "alpha_s"), kind)
    return SegmentCost(fit.coefficients["tau_s"].value, fit.coefficients["alpha_s"].value), fit


def _mean(values: Sequence[float]) -> Estimate:
    """Return a mean with its 90 % interval."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Estimate(mean, mean / 2, mean * 2, Source.MEASURED, "measured once")
    half = Z90 * float(np.std(values, ddof=1)) / len(values) ** 0.5
    return Estimate(mean, max(0.0, mean - half), mean + half, Source.MEASURED, f"mean of {len(values)}")


def calibrated(
    models: StageModels,
    iterations: Sequence[Iteration],
    timings: Iterable[Timing],
    *,
    origin: str,
    wait_s: float = 0.0,
    level: Level = Level.SUM,
) -> tuple[StageModels, dict[str, Fit]]:
    """Return stage models in which all that was seen replaces what was believed; the rest stays.

    A cost that was not seen is that of a similar one (``LIKE``). A sync counts from its request to the
    replica's confirmation: on this path lies the trainer. ``models`` keeps its limits, its effective tokens
    and every cost that no timing shows. ``wait_s`` of each sync is the wait for an iteration's end, which a
    simulated engine has too.

    Raises:
        InputError: no iteration, or no update, was seen.
    """
    by_stage: dict[str, list[Timing]] = defaultdict(list)
    for timing in timings:
        by_stage[timing.stage].append(timing)
    iteration, fit = fit_iteration(iterations, level)
    fits = {"iteration": fit}
    trainer: TrainerModel = models.trainer
    for kind in SEGMENTS:
        if by_stage[kind] or kind == "update":
            cost, fits[f"trainer.{kind}"] = fit_segment(by_stage[kind], level)
            segments: dict[str, Any] = {kind: cost}
            trainer = replace(trainer, **segments)
    sources = {name: source for name, source in models.sources.items() if not name.startswith("iteration.")}
    for group, found in fits.items():
        sources |= {f"{group}.{name}": estimate for name, estimate in found.coefficients.items()}

    def mean_of(stage: str, name: str, otherwise: float) -> float:
        seen = [timing.seconds for timing in by_stage[stage]]
        if not seen:
            return otherwise
        sources[name] = _mean(seen)
        return sources[name].value

    # What replicas exchange is in the pulls and syncs that were timed.
    trainer = replace(
        trainer,
        alpha_comm_s=0.0,
        beta_comm_s_per_byte=0.0,
        beta_inter_s_per_byte=0.0,
        optimizer_s=mean_of("optimizer", "trainer.optimizer_s", trainer.optimizer_s),
    )
    sync = models.sync
    if by_stage["sync"]:
        fixed_s = mean_of("publish", "sync.fixed_s", 0.0)
        apply_s = mean_of("sync", "sync.apply_s", 0.0)
        apply_s = max(0.0, apply_s - fixed_s - wait_s)
        sync = replace(
            sync, fixed_s=fixed_s, apply_s=apply_s, s_per_byte=0.0, per_tensor_s=0.0, per_hop_s=0.0
        )
    costs: dict[str, float] = {}
    for spec in fields(SwitchCosts):
        stage = STAGE_OF.get(spec.name, spec.name.removesuffix("_s"))
        like = next((timing for timing in LIKE[stage] if by_stage[timing]), None)
        otherwise = getattr(models.switch, spec.name)
        if not by_stage[stage] and like is not None and models.provenance.get("kind") != MEASURED:
            sibling = _mean([timing.seconds for timing in by_stage[like]])
            note = f"{stage} was not seen: as {like}"
            sources[f"switch.{spec.name}"] = replace(sibling, source=Source.TRANSFERRED, note=note)
            otherwise = sibling.value
        costs[spec.name] = mean_of(stage, f"switch.{spec.name}", otherwise)
    switch = SwitchCosts(**costs)
    return (
        replace(
            models,
            iteration=iteration,
            trainer=trainer,
            sync=sync,
            switch=switch,
            sources=sources,
            provenance={**models.provenance, "kind": MEASURED, "origin": origin},
        ),
        fits,
    )
