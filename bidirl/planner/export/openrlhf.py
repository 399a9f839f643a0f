"""Export to OpenRLHF.

Convention: frameworks.md section 12. ``async_queue_size`` slots: the generator takes one before a batch, the
trainer frees it when it takes the batch, so that ``v + 1 + slots`` batches may be started before version
``v + 1``: the plan's bound with ``slots = s``.
"""

from bidirl.errors import InputError
from bidirl.planner.export.behaviour import Behaviour, differences
from bidirl.planner.export.plan_file import ExportPlan, TrainStyle
from bidirl.planner.export.recipe import Recipe, Syntax, Value
from bidirl.planner.export.shapes import PoolShape, pool_shapes, single_shape
from bidirl.planner.export.staleness import whole_steps
from bidirl.planner.policy import BatchOrder, InFlight

__all__ = ["openrlhf"]

BEHAVIOUR = Behaviour(
    in_flight=(InFlight.DRAIN, InFlight.CONTINUE_STALE),
    batch_order=(BatchOrder.ISSUE_ORDER,),
)


def openrlhf(plan: ExportPlan) -> Recipe:
    """Return OpenRLHF's command.

    Raises:
        InputError: a staleness between 0 and 1, pipeline-parallel engines, or pools that cannot be spread
            evenly.
    """
    if plan.rollout.pp > 1:
        raise InputError(
            f"rollout pp {plan.rollout.pp}: OpenRLHF's engines take a tensor size only; plan with rollout "
            "pp 1"
        )
    bound = whole_steps(plan.staleness, "OpenRLHF", "async_queue_size")
    shape: PoolShape
    if plan.colocated:
        shape = single_shape(plan.train_gpus, plan.train, plan, "OpenRLHF")
    else:
        _, shape = pool_shapes(plan, "OpenRLHF")
    settings: dict[str, Value] = {
        "--actor.num_nodes": shape.num_nodes,
        "--actor.num_gpus_per_node": shape.gpus_per_node,
        **_reference(plan, shape),
        "--vllm.num_engines": plan.rollout_replicas,
        "--vllm.tensor_parallel_size": plan.rollout.tp,
        "--vllm.gpu_memory_utilization": plan.engine.gpu_memory_utilization,
        **({"--vllm.enable_prefix_caching": True} if plan.engine.prefix_caching else {}),
        "--ds.tensor_parallel_size": plan.train.tp,
        **({"--ds.ring_attn_size": plan.train.cp} if plan.train.cp > 1 else {}),
        "--rollout.batch_size": plan.prompts_per_step,
        "--rollout.n_samples_per_prompt": plan.samples_per_prompt,
        "--rollout.max_new_tokens": plan.max_response_tokens,
        "--train.batch_size": plan.prompts_per_update * plan.samples_per_prompt,
        **_schedule(plan, bound.steps),
    }
    notes = [*bound.notes, "--train.batch_size counts samples, --rollout.batch_size prompts."]
    if bound.steps > 1:
        notes.append("OpenRLHF's maintainers call a queue of 1 the most stable one (needs.md).")
    notes.append(
        f"Not expressed: {plan.train_style} training. OpenRLHF trains with DeepSpeed; its memory and speed "
        "differ from the plan's."
    )
    if plan.train.pp > 1 or plan.train.ep > 1 or plan.rollout.ep > 1:
        notes.append(
            f"Not expressed: train pp {plan.train.pp}, ep {plan.train.ep}, rollout ep {plan.rollout.ep}. "
            "OpenRLHF has a tensor size only."
        )
    if plan.train_style is TrainStyle.MEGATRON and plan.train.tp > 1:
        notes.append("--ds.tensor_parallel_size is DeepSpeed's AutoTP, not Megatron's.")
    notes += differences(plan, "OpenRLHF", BEHAVIOUR)
    return Recipe("openrlhf", Syntax.FLAGS, "python3 -m openrlhf.cli.train_ppo_ray", settings, tuple(notes))


def _schedule(plan: ExportPlan, steps: int) -> dict[str, Value]:
    if plan.colocated:
        return {"--train.colocate_all": True, "--vllm.enable_sleep": True, "--ds.enable_sleep": True}
    if steps == 0:
        return {}
    partial = plan.policy.in_flight in (InFlight.CONTINUE_STALE, InFlight.CONTINUE_RECOMPUTE)
    return {
        "--train.async_enable": True,
        "--train.async_queue_size": steps,
        **({"--train.partial_rollout_enable": True} if partial else {}),
    }


def _reference(plan: ExportPlan, shape: PoolShape) -> dict[str, Value]:
    if not plan.reference:
        return {}
    return {
        "--ref.num_nodes": shape.num_nodes,
        "--ref.num_gpus_per_node": shape.gpus_per_node,
        **({} if plan.colocated else {"--train.colocate_actor_ref": True}),
    }
