"""Carry fitted trainer stages over to a trainer model: same time at the log's lengths, same growth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bidirl.models.estimate import Estimate, Source
from bidirl.models.fit.fitted import FittedStage
from bidirl.models.trainer import SegmentCost, TrainerModel, slowest_work
from bidirl.planner.costs import num_pulls
from bidirl.planner.plan import Plan
from bidirl.traces.lengths import LengthPrior

__all__ = ["SEGMENTS", "fit_trainer", "predicted_s"]

SEGMENTS: Mapping[str, str] = {
    "old_logprob_s": "old_logprob",
    "reference_s": "reference",
    "update_s": "update",
}
"""Segment of the trainer that a logged stage times."""
MAX_COMMUNICATION = 0.7
"""Largest share of a measured pull that predicted communication may fill; above it the prediction of the
links is scaled down for all segments, because some compute there must be."""
MIN_PULL_SHARE = 0.1
"""Least share of an update that is left for its pulls when the predicted optimizer step is taken off."""


def predicted_s(plan: Plan, prior: LengthPrior, num_samples: int) -> dict[str, float]:
    """Return the seconds a step that the plan's trainer predicts for each logged stage."""
    trainer, pulls = plan.models.trainer, num_pulls(plan)
    total, longest = _works(trainer, prior, num_samples)
    found = {}
    for stage, kind in SEGMENTS.items():
        each_s = trainer.pull_s(kind, total / pulls[kind], longest, plan.train_replicas)
        found[stage] = pulls[kind] * each_s
    found["update_s"] += plan.mini_batches * trainer.optimizer_s
    return found


def fit_trainer(
    plan: Plan,
    prior: LengthPrior,
    num_samples: int,
    fitted: Mapping[str, FittedStage],
    measured: Mapping[str, float],
) -> tuple[TrainerModel, dict[str, Estimate]]:
    """Return the plan's trainer with the segments of the log, and the sources of what changed.

    ``prior`` holds the log's typical lengths, ``measured`` the seconds a step of each stage at them. A
    segment of the log keeps its predicted communication; compute is what is left. Segments that the log
    lacks stay the prior's.
    """
    trainer, pulls, replicas = plan.models.trainer, num_pulls(plan), plan.train_replicas
    total, longest = _works(trainer, prior, num_samples)
    sources: dict[str, Estimate] = {}
    log_name = next((stage.source for stage in fitted.values() if stage.source), "a log")
    each_s: dict[str, float] = {}
    for stage, kind in SEGMENTS.items():
        if stage not in measured:
            continue
        left_s = measured[stage]
        if kind == "update":
            optimizer_s = min(trainer.optimizer_s, (1.0 - MIN_PULL_SHARE) * left_s / plan.mini_batches)
            if optimizer_s < trainer.optimizer_s:
                trainer = replace(trainer, optimizer_s=optimizer_s)
                sources["trainer.optimizer_s"] = Estimate(
                    optimizer_s, 0.0, optimizer_s, Source.FITTED, "bounded by the measured update"
                )
            left_s -= plan.mini_batches * optimizer_s
        each_s[kind] = left_s / pulls[kind]
    works = {kind: slowest_work(total / pulls[kind], longest, replicas) for kind in each_s}
    excess = max(
        (
            trainer.communication_s(kind, works[kind], replicas) / (MAX_COMMUNICATION * s)
            for kind, s in each_s.items()
        ),
        default=0.0,
    )
    if excess > 1.0:
        trainer = replace(
            trainer,
            alpha_comm_s=trainer.alpha_comm_s / excess,
            beta_comm_s_per_byte=trainer.beta_comm_s_per_byte / excess,
            beta_inter_s_per_byte=trainer.beta_inter_s_per_byte / excess,
        )
        for name in ("alpha_comm_s", "beta_comm_s_per_byte", "beta_inter_s_per_byte"):
            value = getattr(trainer, name)
            sources[f"trainer.{name}"] = Estimate(
                value, 0.0, value, Source.FITTED, f"at most {MAX_COMMUNICATION:.0%} of a measured pull"
            )
    costs: dict[str, SegmentCost] = {}
    for stage, kind in SEGMENTS.items():
        if kind not in each_s:
            continue
        communication_s = trainer.communication_s(kind, works[kind], replicas)
        compute_s = _without(each_s[kind], communication_s, trainer.overlap_p)
        fixed = _fixed_share(fitted[stage])
        cost = SegmentCost(fixed * compute_s, (1.0 - fixed) * compute_s / works[kind])
        costs[kind] = cost
        note = f"{fitted[stage].form.name}, {fitted[stage].num_rows} steps of {log_name}"
        tau, alpha = _spreads(fitted[stage])
        for name, value, spread in (("tau_s", cost.tau_s, tau), ("alpha_s", cost.alpha_s, alpha)):
            sources[f"trainer.{kind}.{name}"] = Estimate(
                value, value * spread[0], value * spread[1], Source.FITTED, note
            )
        sources[f"trainer.{kind}.power"] = Estimate.exact(1.0, Source.FITTED, "linear in work")
    fitted_trainer = replace(
        trainer,
        old_logprob=costs.get("old_logprob", trainer.old_logprob),
        reference=costs.get("reference", trainer.reference),
        update=costs.get("update", trainer.update),
    )
    return fitted_trainer, sources


def _works(trainer: TrainerModel, prior: LengthPrior, num_samples: int) -> tuple[float, float]:
    """Return the effective tokens of a step, and of its longest sample."""
    prompt = prior.prompt_mean_tokens
    each = sum(trainer.sample_work(prompt + tokens) for tokens in prior.quantiles) / len(prior.quantiles)
    return num_samples * each, trainer.sample_work(prompt + prior.quantiles[-1])


def _without(total_s: float, communication_s: float, power: float) -> float:
    """Return the compute seconds of ``(comp**p + comm**p)**(1/p) = total``."""
    ratio = communication_s / total_s
    return float(total_s * (1.0 - ratio**power) ** (1.0 / power))


def _fixed_share(fitted: FittedStage) -> float:
    """Return the share of a typical step that does not grow with work.

    A padded batch costs the same whatever its lengths, but is still shared out over replicas: its time
    counts as work at the log's lengths.
    """
    share = 0.0
    for form in fitted.forms:
        if len(form.terms) > 1:
            share += form.weight * form.shares[0] / sum(form.shares)
    return share


def _spreads(fitted: FittedStage) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the relative interval ends of the fixed part and of the part that grows."""
    terms = list(fitted.coefficients().values())
    if len(terms) == 1:
        terms = [fitted.typical()] * 2
    first, last = (
        (found.low / found.value, found.high / found.value) if found.value > 0.0 else (1.0, 1.0)
        for found in (terms[0], terms[-1])
    )
    return first, last
