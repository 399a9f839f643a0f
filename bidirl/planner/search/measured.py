"""Models of a file in layouts that they were not measured in: scaled by what the rooflines say (ours).

A coefficient measured in one tensor size is taken to another by the ratio of the two priors, so that what was
measured keeps its weight and only the change of layout is predicted. Its source is then "transferred".
"""

from dataclasses import fields, replace

from bidirl.errors import InputError
from bidirl.models import memory
from bidirl.models.engine_limits import EngineLimits
from bidirl.models.iteration import AffineIteration, IterationModel
from bidirl.models.roofline import ExpertIteration, rollout_prior, trainer_prior
from bidirl.models.stages import StageModels
from bidirl.models.trainer import SegmentCost, TrainerModel
from bidirl.planner.search.layouts import RolloutLayout, Style, TrainLayout
from bidirl.planner.search.question import Question

__all__ = ["layouts_note", "measured_layouts", "moved_iteration", "moved_limits", "moved_trainer"]


def measured_layouts(
    question: Question, rollouts: list[RolloutLayout], trains: list[TrainLayout]
) -> tuple[list[RolloutLayout], list[TrainLayout]]:
    """Return the layouts to which the models of a file reach: their own, and other tensor sizes.

    Tables of a profile have no coefficients to scale and stay in their layout; pipelines, expert and context
    parallelism and Megatron change more than a scale.
    """
    assert question.measured is not None
    rollout_tp, train_tp = question.measured_tp
    own = [RolloutLayout(rollout_tp)], [TrainLayout(Style.FSDP, train_tp)]
    if _blocked(question) is not None:
        return own
    engines = {each for each in rollouts if each.gpus == each.tp} | set(own[0])
    sharded = [each for each in trains if each.style is Style.FSDP and each.cp == 1]
    return sorted(engines), sharded if own[1][0] in sharded else own[1]


def _blocked(question: Question) -> str | None:
    """Return why the models of a file cannot be taken to another layout; None if they can."""
    assert question.measured is not None
    if not isinstance(question.measured.iteration, AffineIteration | ExpertIteration):
        return "its profile tables have no coefficients to scale"
    cluster, model, engine = question.cluster, question.model, question.engine
    rollout_tp, train_tp = question.measured_tp
    nodes = min(cluster.gpus_per_node * 2, cluster.num_gpus)
    try:
        links = question.links(nodes, of_rollout=False)
        memory.kv_estimate(cluster.rollout_device, model, rollout_tp, engine)
        rollout_prior(cluster.rollout_device, model, rollout_tp, links)
        trainer_prior(cluster.train_device, model, train_tp, 1, links)
    except InputError as error:
        return f"no roofline to scale them by ({error})"
    return None


def layouts_note(question: Question) -> str:
    """Return which layouts were searched, and why not others; empty without a models file."""
    if question.measured is None:
        return ""
    rollout_tp, train_tp = question.measured_tp
    known = f"models.file holds for rollout tp{rollout_tp}, fsdp tp{train_tp}"
    if (reason := _blocked(question)) is not None:
        return f"{known}, and only pool sizes are searched: {reason}"
    return (
        f"{known}; other tensor sizes are scaled by the ratio of the rooflines (transferred); pipelines, "
        "expert and context parallelism and Megatron are not searched: they change more than a scale"
    )


def moved_iteration(question: Question, models: StageModels, tp: int) -> IterationModel:
    """Return the measured iteration model for engines of another tensor size."""
    measured, device = models.iteration, question.cluster.rollout_device
    if tp == question.measured_tp[0]:
        return measured
    new, old = (
        rollout_prior(device, question.model, size, question.links(size, of_rollout=True))[0]
        for size in (tp, question.measured_tp[0])
    )
    if isinstance(measured, ExpertIteration):
        experts_s = measured.experts_s * question.measured_tp[0] / tp
        return replace(measured, affine=_scaled(measured.affine, new, old), experts_s=experts_s)
    assert isinstance(measured, AffineIteration)
    return _scaled(measured, new, old)


def _scaled(measured: AffineIteration, new: IterationModel, old: IterationModel) -> AffineIteration:
    numbers = {}
    for field in fields(AffineIteration):
        one, other = (_coefficient(prior, field.name) for prior in (new, old))
        numbers[field.name] = getattr(measured, field.name) * (one / other if other > 0.0 else 1.0)
    return AffineIteration(**numbers)


def _coefficient(prior: IterationModel, name: str) -> float:
    affine = prior.affine if isinstance(prior, ExpertIteration) else prior
    value: float = getattr(affine, name)
    return value


def moved_limits(question: Question, models: StageModels, tp: int) -> EngineLimits:
    """Return the engine's limits in another tensor size: KV tokens by the ratio of the memory model's.

    Raises:
        InputError: the weights leave no KV memory in that size.
    """
    limits = models.limits
    if tp == question.measured_tp[0]:
        return limits
    device, model, engine = question.cluster.rollout_device, question.model, question.engine
    new, old = (memory.kv_estimate(device, model, size, engine) for size in (tp, question.measured_tp[0]))
    return replace(limits, kv_tokens=int(limits.kv_tokens * new.value / old.value))


def moved_trainer(question: Question, models: StageModels, tp: int) -> TrainerModel:
    """Return the measured trainer for replicas of another tensor size."""
    measured = models.trainer
    if tp == question.measured_tp[1]:
        return measured
    node = question.cluster.gpus_per_node
    links = question.links(min(node * 2, question.cluster.num_gpus), of_rollout=False)
    new, old = (
        trainer_prior(question.cluster.train_device, question.model, size, 1, links, measured.micro_tokens)[0]
        for size in (tp, question.measured_tp[1])
    )

    def cost(segment: SegmentCost) -> SegmentCost:
        return replace(segment, alpha_s=segment.alpha_s * new.update.alpha_s / old.update.alpha_s)

    weights = question.measured_tp[1] / tp
    across = new.beta_inter_s_per_byte / old.beta_inter_s_per_byte
    return replace(
        measured,
        old_logprob=cost(measured.old_logprob),
        reference=cost(measured.reference),
        update=cost(measured.update),
        forward_bytes=measured.forward_bytes * weights,
        update_bytes=measured.update_bytes * weights,
        beta_inter_s_per_byte=measured.beta_inter_s_per_byte * across,
        replicas_per_node=max(1, node // tp),
    )
