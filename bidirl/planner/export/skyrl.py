"""Export to SkyRL, fully asynchronous or synchronous.

Convention: frameworks.md section 6: capacity is ``(max_staleness_steps + step) * B - (accepted + running)``
with steps from 1, which is the plan's bound with ``max_staleness_steps = s``.
"""

from bidirl.errors import InputError
from bidirl.planner.export.behaviour import Behaviour, differences
from bidirl.planner.export.plan_file import ExportPlan, TrainStyle
from bidirl.planner.export.recipe import Recipe, Syntax, Value
from bidirl.planner.export.shapes import PoolShape, pool_shapes, single_shape
from bidirl.planner.export.staleness import whole_steps
from bidirl.planner.policy import BatchOrder, InFlight

__all__ = ["skyrl"]

BEHAVIOUR = Behaviour(
    in_flight=(InFlight.CONTINUE_STALE, InFlight.CONTINUE_RECOMPUTE),
    batch_order=(BatchOrder.READY_FIRST,),
)
ASYNC = "trainer.fully_async"
MEGATRON = "trainer.policy.megatron_config"
ENGINE = "generator.inference_engine"


def skyrl(plan: ExportPlan) -> Recipe:
    """Return SkyRL's command.

    Raises:
        InputError: a staleness between 0 and 1, several updates a step, or pools that cannot be spread
            evenly.
    """
    bound = whole_steps(plan.staleness, "SkyRL", "max_staleness_steps")
    if plan.mini_batches > 1 and not plan.colocated:
        raise InputError(
            f"mini_batches = {plan.mini_batches}: SkyRL's asynchronous trainer needs train_batch_size = "
            "policy_mini_batch_size, one update a sync; plan with workload.mini_batches 1"
        )
    settings: dict[str, Value] = {
        "trainer.placement.colocate_all": plan.colocated,
        **_placement(plan),
        "trainer.strategy": str(plan.train_style),
        **_train_layout(plan),
        "trainer.train_batch_size": plan.prompts_per_step,
        "trainer.policy_mini_batch_size": plan.prompts_per_update,
        f"{ASYNC}.enabled": not plan.colocated,
        "generator.n_samples_per_prompt": plan.samples_per_prompt,
        "generator.sampling_params.max_generate_length": plan.max_response_tokens,
        f"{ENGINE}.num_engines": plan.rollout_replicas,
        f"{ENGINE}.tensor_parallel_size": plan.rollout.tp,
        f"{ENGINE}.pipeline_parallel_size": plan.rollout.pp,
        f"{ENGINE}.expert_parallel_size": plan.rollout.tp if plan.rollout.ep > 1 else 1,
        f"{ENGINE}.gpu_memory_utilization": plan.engine.gpu_memory_utilization,
        f"{ENGINE}.max_num_seqs": plan.engine.max_num_seqs,
        f"{ENGINE}.max_num_batched_tokens": plan.engine.max_num_batched_tokens,
        f"{ENGINE}.enable_prefix_caching": plan.engine.prefix_caching,
    }
    notes = list(bound.notes)
    command = "python3 -m skyrl.train.entrypoints.main_base"
    if not plan.colocated:
        most = plan.prompts_per_step * (bound.steps + 1)
        settings |= {
            f"{ASYNC}.max_staleness_steps": bound.steps,
            f"{ASYNC}.num_parallel_generation_workers": _workers(plan, most),
            f"{ASYNC}.clear_kv_cache_on_weight_sync": plan.policy.in_flight is InFlight.CONTINUE_RECOMPUTE,
        }
        command = "python3 -m examples.train.fully_async.main_fully_async"
    notes += [*_layout_notes(plan), *differences(plan, "SkyRL", BEHAVIOUR)]
    return Recipe("skyrl", Syntax.HYDRA, command, settings, tuple(notes))


def _workers(plan: ExportPlan, most: int) -> int:
    """Return the groups in flight; SkyRL wants a whole batch at least and ``B * (s + 1)`` at most."""
    wanted = plan.policy.max_concurrency or most
    return min(most, max(plan.prompts_per_step, wanted))


def _placement(plan: ExportPlan) -> dict[str, Value]:
    shape: PoolShape
    if plan.colocated:
        shape = single_shape(plan.train_gpus, plan.train, plan, "SkyRL")
    else:
        _, shape = pool_shapes(plan, "SkyRL")
    roles = ("policy", "ref") if plan.reference else ("policy",)
    return {
        f"trainer.placement.{role}_{key}": value
        for role in roles
        for key, value in (("num_nodes", shape.num_nodes), ("num_gpus_per_node", shape.gpus_per_node))
    }


def _train_layout(plan: ExportPlan) -> dict[str, Value]:
    """Return the trainer's sizes; FSDP has a sequence size (Ulysses) in place of a tensor size."""
    if plan.train_style is not TrainStyle.MEGATRON:
        size = plan.train.tp * plan.train.cp
        roles = ("policy", "ref") if plan.reference else ("policy",)
        return {f"trainer.{role}.sequence_parallel_size": size for role in roles} if size > 1 else {}
    context = {f"{MEGATRON}.context_parallel_size": plan.train.cp} if plan.train.cp > 1 else {}
    return {
        f"{MEGATRON}.tensor_model_parallel_size": plan.train.tp,
        f"{MEGATRON}.pipeline_model_parallel_size": plan.train.pp,
        f"{MEGATRON}.expert_model_parallel_size": plan.train.ep,
        **context,
    }


def _layout_notes(plan: ExportPlan) -> list[str]:
    notes = []
    if plan.train_style is TrainStyle.FSDP and plan.train.tp > 1:
        notes.append(
            f"Differs: train tp {plan.train.tp}. FSDP in SkyRL has no tensor parallelism; the same GPUs "
            "share each sequence instead (Ulysses), with as many ranks and the same states."
        )
    if plan.train_style is TrainStyle.FSDP and (plan.train.pp > 1 or plan.train.ep > 1):
        notes.append(
            f"Not expressed: train layout pp {plan.train.pp}, ep {plan.train.ep}. FSDP in SkyRL has neither."
        )
    if plan.rollout.ep not in (1, plan.rollout.tp):
        notes.append(
            f"Rounded: rollout ep {plan.rollout.ep} became {plan.rollout.tp}, the engine's own tensor size."
        )
    if plan.old_logprob and not plan.colocated:
        notes.append(
            "Differs: the plan recomputes old log-probabilities; SkyRL's asynchronous losses take the "
            "rollout's."
        )
    return notes
