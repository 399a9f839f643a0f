"""Export to ROLL's RLVR pipeline: device mappings and ``async_generation_ratio``.

Convention: frameworks.md section 5. The quota is ``ceil(B * ratio) + B`` prompts, then ``B`` a step; prompts
older than ``ceil(ratio)`` steps are aborted.
"""

from bidirl.planner.export.behaviour import Behaviour, differences
from bidirl.planner.export.plan_file import ExportPlan, TrainStyle
from bidirl.planner.export.recipe import Recipe, Syntax, Value
from bidirl.planner.export.staleness import roll_ratio
from bidirl.planner.policy import BatchOrder, Expiry, InFlight

__all__ = ["roll"]

BEHAVIOUR = Behaviour(
    in_flight=(InFlight.CONTINUE_RECOMPUTE,),
    batch_order=(BatchOrder.OLDEST_FIRST,),
    expiry=(Expiry.CANCEL,),
)
TRAIN = "actor_train.strategy_args"
INFER = "actor_infer.strategy_args"
MICRO_BATCH_SAMPLES = 1
"""``per_device_train_batch_size``: the plan does not choose it, and 1 fits wherever the plan fits."""


def roll(plan: ExportPlan) -> Recipe:
    """Return ROLL's configuration as YAML.

    Raises:
        InputError: a staleness between 0 and 1.
    """
    ratio, notes = roll_ratio(plan.staleness, plan.prompts_per_step)
    settings: dict[str, Value] = {
        "num_gpus_per_node": plan.gpus_per_node,
        "rollout_batch_size": plan.prompts_per_step,
        "num_return_sequences_in_group": plan.samples_per_prompt,
        "is_num_return_sequences_expand": True,
        "response_length": plan.max_response_tokens,
        "async_generation_ratio": ratio,
        "enable_old_logprobs_recompute": plan.old_logprob,
        f"{TRAIN}.strategy_name": "megatron_train" if _is_megatron(plan) else "fsdp2_train",
        **_megatron(plan),
        "actor_train.device_mapping": _train_devices(plan),
        f"{INFER}.strategy_name": "vllm",
        f"{INFER}.strategy_config.tensor_parallel_size": plan.rollout.tp,
        f"{INFER}.strategy_config.pipeline_parallel_size": plan.rollout.pp,
        f"{INFER}.strategy_config.gpu_memory_utilization": plan.engine.gpu_memory_utilization,
        "actor_infer.device_mapping": f"list(range(0,{plan.rollout_gpus}))",
    }
    more: list[str] = [*notes]
    per_update = plan.prompts_per_update * plan.samples_per_prompt
    dp = plan.train_dp if _is_megatron(plan) else plan.train_gpus
    if per_update % (dp * MICRO_BATCH_SAMPLES):
        more.append(
            f"Not expressed: {plan.mini_batches} updates a step. An update of {per_update} samples does "
            f"not divide over {dp} data-parallel ranks, so set gradient_accumulation_steps by hand."
        )
    else:
        settings["actor_train.training_args.per_device_train_batch_size"] = MICRO_BATCH_SAMPLES
        settings["actor_train.training_args.gradient_accumulation_steps"] = per_update // (
            dp * MICRO_BATCH_SAMPLES
        )
    if plan.reference:
        settings["reference.device_mapping"] = _train_devices(plan)
        more.append("The plan counts a reference pass, here on the training GPUs: keep use_kl_loss: true.")
    if not plan.colocated:
        more.append(
            f"GPUs 0 to {plan.rollout_gpus - 1} generate, the rest train; ROLL's own lending "
            "(partial_gpu_mode) is for agentic pipelines, at a fixed time in every step, without a gate."
        )
    more += [*_layout_notes(plan), *differences(plan, "ROLL", BEHAVIOUR)]
    return Recipe("roll", Syntax.YAML, "Merge into the pipeline's YAML.", settings, tuple(more))


def _is_megatron(plan: ExportPlan) -> bool:
    return plan.train_style is TrainStyle.MEGATRON


def _megatron(plan: ExportPlan) -> dict[str, Value]:
    if not _is_megatron(plan):
        return {}
    return {
        f"{TRAIN}.strategy_config.tensor_model_parallel_size": plan.train.tp,
        f"{TRAIN}.strategy_config.pipeline_model_parallel_size": plan.train.pp,
        f"{TRAIN}.strategy_config.expert_model_parallel_size": plan.train.ep,
    }


def _train_devices(plan: ExportPlan) -> str:
    first = 0 if plan.colocated else plan.rollout_gpus
    return f"list(range({first},{first + plan.train_gpus}))"


def _layout_notes(plan: ExportPlan) -> list[str]:
    notes = []
    if not _is_megatron(plan) and (plan.train.num_gpus > 1 or plan.train.ep > 1):
        notes.append(
            f"Not expressed: train layout tp {plan.train.tp}, pp {plan.train.pp}, ep {plan.train.ep}. "
            "ROLL's FSDP has none of them; take megatron_train."
        )
    if plan.train.cp > 1:
        notes.append(
            f"Not expressed: train cp {plan.train.cp}. ROLL counts a context size in its Megatron strategy; "
            "its option was not looked up."
        )
    if plan.rollout.ep > 1:
        notes.append(
            f"Not expressed: rollout ep {plan.rollout.ep}. ROLL sizes its vLLM workers by tensor and "
            "pipeline size."
        )
    return notes
