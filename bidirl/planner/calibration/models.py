"""Stage models of a job fitted to the log of one of its runs: the file that ``[models]`` names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log as ln

import numpy as np

from bidirl.models.estimate import Estimate, Source
from bidirl.models.fit.fitted import RANGE_SLACK, FittedStage
from bidirl.models.fit.fitting import PriorTime, fit_log
from bidirl.models.stages import StageModels
from bidirl.planner.calibration.rollout import fit_rollout, row_prior
from bidirl.planner.calibration.trainer import SEGMENTS, fit_trainer, predicted_s
from bidirl.planner.plan import Plan
from bidirl.traces.lengths import LengthPrior
from bidirl.traces.step_log import StepLog

__all__ = ["Calibrated", "calibrate_plan", "typical_row"]

TRAIN_FACTOR = 1.9
"""90 % factor of the trainer's roofline, ``bidirl.models.roofline.TRAIN_SPREAD``."""
BATCH_DIFFERENCE = 0.2
"""Relative difference of batch sizes from which on log and job are said to differ."""


@dataclass(frozen=True)
class Calibrated:
    """Fitted models, the stages they come from, and what the user should know."""

    models: StageModels
    stages: Mapping[str, FittedStage]
    predicted_s: Mapping[str, float]
    """Seconds a step of each stage that the prior predicted at the log's lengths."""
    notes: tuple[str, ...]


def calibrate_plan(plan: Plan, log: StepLog) -> Calibrated:
    """Return the plan's stage models with what the log measured in place of the prior.

    Stages that the log lacks keep their prior and its source. Raises ``InputError`` where the log has no
    stage times, or the plan's engine is a profile that a log cannot improve.
    """
    notes: list[str] = []
    num_samples = _num_samples(plan, log, notes)
    lengths = row_prior(plan.prior(0), typical_row(log), 0)
    before_s = predicted_s(plan, lengths, num_samples)
    priors = {
        stage: PriorTime(seconds, ln(TRAIN_FACTOR) / 1.645)
        for stage, seconds in before_s.items()
        if seconds > 0.0
    }
    stages = fit_log(log, priors=priors)
    measured = {stage: stages[stage].typical().value for stage in SEGMENTS if stage in stages}
    trainer, sources = fit_trainer(plan, lengths, num_samples, stages, measured)
    iteration, sync = plan.models.iteration, plan.models.sync
    if "generation_s" in stages:
        rollout = fit_rollout(plan, log, num_samples)
        iteration = rollout.iteration
        before_s["generation_s"] = rollout.prior_s
        sources |= _iteration_sources(plan.models, rollout.per_iteration, rollout.per_token)
    else:
        notes.append("the log has no generation_s: the engine's coefficients stay the prior's")
    if "weight_sync_s" in stages:
        seconds = stages["weight_sync_s"].typical()
        sync = replace(
            sync, fixed_s=seconds.value, s_per_byte=0.0, per_tensor_s=0.0, per_hop_s=0.0, apply_s=0.0
        )
        sources["sync.fixed_s"] = seconds
    missing = [stage for stage in SEGMENTS if stage not in stages]
    if missing:
        notes.append(f"the log has no {', '.join(missing)}: those segments stay the prior's")
    if "values_s" in stages:
        notes.append("a job has no critic: values_s is fitted, but no model of the job holds it")
    gpus = log.facts.get("num_gpus")
    here = plan.rollout_gpus + plan.train_gpus
    if gpus is not None and int(gpus) != here:
        notes.append(
            f"the log ran on {int(gpus)} GPUs, the job has {here}: times are taken as those of the job's "
            "replicas; give the job of the logged run"
        )
    outside = _outside(plan.prior(0), stages)
    if outside:
        notes.append(f"{outside}: predictions for this job extrapolate")
        sources = {name: each.flagged(outside) for name, each in sources.items()}
    models = replace(
        plan.models,
        iteration=iteration,
        trainer=trainer,
        sync=sync,
        sources={**plan.models.sources, **sources},
        provenance={
            **plan.models.provenance,
            "kind": "fitted",
            "log": log.source,
            **{f"hash.{stage}": fitted.data_hash for stage, fitted in stages.items()},
        },
    )
    return Calibrated(models, stages, before_s, tuple(notes))


def _num_samples(plan: Plan, log: StepLog, notes: list[str]) -> int:
    """Return the samples of a step: the log's, where it says or implies them, else the job's."""
    of_job = plan.groups_per_step * plan.samples_per_group
    each = log.column("response_mean_tokens") + log.column("prompt_mean_tokens")
    ratio = log.column("total_tokens") / each
    known = ratio[np.isfinite(ratio)]
    if "batch_samples" in log.facts:
        found = round(log.facts["batch_samples"])
    elif len(known):
        found = round(float(np.median(known)))
    else:
        return of_job
    if abs(found / of_job - 1.0) > BATCH_DIFFERENCE:
        notes.append(
            f"a step of the log has {found:,} samples, one of the job {of_job:,}: coefficients are fitted "
            "with the log's"
        )
    return max(1, found)


def typical_row(log: StepLog) -> StepLog:
    """Return one row of medians."""
    columns = {
        name: np.array([np.nanmedian(column)])
        for name, column in log.columns.items()
        if np.isfinite(column).any()
    }
    return replace(log, columns=columns)


def _iteration_sources(
    models: StageModels, per_iteration: Estimate, per_token: Estimate
) -> dict[str, Estimate]:
    found = {}
    for name, before in models.sources.items():
        if not name.startswith("iteration."):
            continue
        factor = per_token if ".beta_" in name else per_iteration
        value = before.value * factor.value
        ends = (before.value * factor.low, before.value * factor.high)
        found[name] = Estimate(value, min(ends), max(ends), Source.FITTED, factor.note)
    return found


def _outside(prior: LengthPrior, stages: Mapping[str, FittedStage]) -> str:
    """Return which of the job's lengths lies outside what was fitted, or nothing."""
    lengths = {"response_mean_tokens": prior.mean_tokens, "prompt_mean_tokens": prior.prompt_mean_tokens}
    for name, value in lengths.items():
        for stage, fitted in stages.items():
            low, high = fitted.ranges.get(name, (0.0, np.inf))
            if not low * (1.0 - RANGE_SLACK) <= value <= high * (1.0 + RANGE_SLACK):
                return f"the job's {name} = {value:.0f} lies outside {stage}'s {low:.0f} to {high:.0f}"
    return ""
