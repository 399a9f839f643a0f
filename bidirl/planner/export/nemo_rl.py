"""Export to NeMo-RL's asynchronous GRPO.

Convention: frameworks.md section 7; the guide ``docs/guides/async-grpo.md`` (d28490ab): a trajectory of
weights 10 may train steps 10 and 11 at ``max_trajectory_age_steps: 1``, so the age is ``s`` in steps.
"""

from bidirl.planner.export.behaviour import Behaviour, differences
from bidirl.planner.export.plan_file import ExportPlan, TrainStyle
from bidirl.planner.export.recipe import Recipe, Syntax, Value
from bidirl.planner.export.shapes import whole_nodes
from bidirl.planner.export.staleness import whole_steps
from bidirl.planner.policy import BatchOrder, InFlight

__all__ = ["nemo_rl"]

BEHAVIOUR = Behaviour(
    in_flight=(InFlight.DRAIN, InFlight.CONTINUE_STALE, InFlight.CONTINUE_RECOMPUTE),
    batch_order=(BatchOrder.ISSUE_ORDER,),
)
GENERATION = "policy.generation"
ASYNC = "grpo.async_grpo"


def nemo_rl(plan: ExportPlan) -> Recipe:
    """Return NeMo-RL's configuration as YAML.

    Raises:
        InputError: a staleness between 0 and 1, or pools that split nodes of a larger cluster.
    """
    bound = whole_steps(plan.staleness, "NeMo-RL", "max_trajectory_age_steps")
    megatron = plan.train_style is TrainStyle.MEGATRON
    settings: dict[str, Value] = {
        "grpo.num_prompts_per_step": plan.prompts_per_step,
        "grpo.num_generations_per_prompt": plan.samples_per_prompt,
        f"{ASYNC}.enabled": bound.steps > 0,
        **_age(plan, bound.steps),
        "policy.train_global_batch_size": plan.prompts_per_update * plan.samples_per_prompt,
        "policy.dtensor_cfg.enabled": not megatron,
        "policy.megatron_cfg.enabled": megatron,
        **_train_layout(plan, megatron=megatron),
        f"{GENERATION}.max_new_tokens": plan.max_response_tokens,
        f"{GENERATION}.vllm_cfg.async_engine": bound.steps > 0,
        f"{GENERATION}.vllm_cfg.tensor_parallel_size": plan.rollout.tp,
        f"{GENERATION}.vllm_cfg.pipeline_parallel_size": plan.rollout.pp,
        f"{GENERATION}.vllm_cfg.expert_parallel_size": plan.rollout.tp if plan.rollout.ep > 1 else 1,
        f"{GENERATION}.vllm_cfg.gpu_memory_utilization": plan.engine.gpu_memory_utilization,
        f"{GENERATION}.colocated.enabled": plan.colocated,
        **_cluster(plan),
    }
    notes = [*bound.notes]
    if bound.steps > 1 and plan.policy.in_flight is InFlight.DRAIN:
        notes.append(
            "An age above 1 gains nothing without in-flight weight updates: NeMo-RL drains at each sync."
        )
    if not megatron and (plan.train.pp > 1 or plan.train.ep > 1):
        notes.append(
            f"Not expressed: train layout pp {plan.train.pp}, ep {plan.train.ep}. The DTensor trainer has "
            "neither."
        )
    if plan.rollout.ep not in (1, plan.rollout.tp):
        notes.append(
            f"Rounded: rollout ep {plan.rollout.ep} became {plan.rollout.tp}; vLLM's expert size is data x "
            "tensor size."
        )
    if not plan.reference:
        notes.append("The plan has no reference pass: set loss_fn.reference_policy_kl_penalty to 0.")
    notes += differences(plan, "NeMo-RL", BEHAVIOUR)
    return Recipe("nemo_rl", Syntax.YAML, "Merge into the recipe's YAML.", settings, tuple(notes))


def _age(plan: ExportPlan, steps: int) -> dict[str, Value]:
    if steps == 0:
        return {}
    in_flight = plan.policy.in_flight
    return {
        f"{ASYNC}.max_trajectory_age_steps": steps,
        f"{ASYNC}.in_flight_weight_updates": in_flight is not InFlight.DRAIN,
        f"{ASYNC}.recompute_kv_cache_after_weight_updates": in_flight is InFlight.CONTINUE_RECOMPUTE,
        "loss_fn.use_importance_sampling_correction": True,
    }


def _train_layout(plan: ExportPlan, *, megatron: bool) -> dict[str, Value]:
    prefix = "policy.megatron_cfg" if megatron else "policy.dtensor_cfg"
    context: dict[str, Value] = (
        {f"{prefix}.context_parallel_size": plan.train.cp} if plan.train.cp > 1 else {}
    )
    if not megatron:
        return {"policy.dtensor_cfg.tensor_parallel_size": plan.train.tp, **context}
    return {
        "policy.megatron_cfg.tensor_model_parallel_size": plan.train.tp,
        "policy.megatron_cfg.pipeline_model_parallel_size": plan.train.pp,
        "policy.megatron_cfg.expert_model_parallel_size": plan.train.ep,
        **context,
    }


def _cluster(plan: ExportPlan) -> dict[str, Value]:
    """Return the cluster and the part that generates: on one node a number of GPUs, else whole nodes."""
    if plan.colocated:
        return {"cluster.num_nodes": plan.num_nodes, "cluster.gpus_per_node": plan.gpus_per_node}
    if plan.num_nodes == 1:
        return {
            f"{GENERATION}.colocated.resources.gpus_per_node": plan.rollout_gpus,
            f"{GENERATION}.colocated.resources.num_nodes": 1,
            "cluster.num_nodes": 1,
            "cluster.gpus_per_node": plan.rollout_gpus + plan.train_gpus,
        }
    rollout_nodes, train_nodes = whole_nodes(plan, "NeMo-RL")
    return {
        f"{GENERATION}.colocated.resources.gpus_per_node": plan.gpus_per_node,
        f"{GENERATION}.colocated.resources.num_nodes": rollout_nodes,
        "cluster.num_nodes": rollout_nodes + train_nodes,
        "cluster.gpus_per_node": plan.gpus_per_node,
    }
