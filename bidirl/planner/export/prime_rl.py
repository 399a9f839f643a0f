"""Export to prime-rl as TOML.

Convention: frameworks.md section 9; needs.md: a batch may train on versions down to ``(step - 1) -
max_off_policy_steps``, so the limit is the lag ``s``; run-ahead itself is at most one step, and at least one
step always overlaps.
"""

from bidirl.errors import InputError
from bidirl.planner.export.behaviour import Behaviour, differences
from bidirl.planner.export.plan_file import ExportPlan, TrainStyle
from bidirl.planner.export.recipe import Recipe, Syntax, Value
from bidirl.planner.export.shapes import whole_nodes
from bidirl.planner.export.staleness import whole_steps
from bidirl.planner.policy import BatchOrder, Expiry, InFlight

__all__ = ["prime_rl"]

BEHAVIOUR = Behaviour(
    in_flight=(InFlight.CONTINUE_STALE,),
    batch_order=(BatchOrder.READY_FIRST,),
    expiry=(Expiry.CANCEL,),
)


def prime_rl(plan: ExportPlan) -> Recipe:
    """Return prime-rl's configuration as TOML.

    Raises:
        InputError: a colocated plan, a staleness below 1, several updates a step, Megatron training, or pools
            that split nodes of a larger cluster.
    """
    if plan.colocated:
        raise InputError("placement = colocated: prime-rl needs two pools; export to verl_sync")
    if plan.mini_batches > 1:
        raise InputError(
            f"mini_batches = {plan.mini_batches}: prime-rl makes one update a step; plan with "
            "workload.mini_batches 1"
        )
    if plan.train_style is TrainStyle.MEGATRON or plan.train.tp * plan.train.pp > 1:
        raise InputError(
            f"train layout {plan.train_style}, tp {plan.train.tp}, pp {plan.train.pp}: prime-rl trains "
            "with FSDP without tensor or pipeline parallelism; plan for FSDP with 1 and 1"
        )
    if plan.rollout.pp > 1:
        raise InputError(
            f"rollout pp {plan.rollout.pp}: prime-rl's engines take tp and dp; plan with rollout pp 1"
        )
    bound = whole_steps(plan.staleness, "prime-rl", "max_off_policy_steps", least=1)
    settings: dict[str, Value] = {
        **_deployment(plan),
        "trainer.model.ep": plan.train.ep,
        **({"trainer.model.cp": plan.train.cp} if plan.train.cp > 1 else {}),
        "orchestrator.batch_size": plan.samples_per_step,
        "orchestrator.group_size": plan.samples_per_prompt,
        "orchestrator.max_off_policy_steps": bound.steps,
        "orchestrator.max_inflight_rollouts": _in_flight(plan, bound.steps),
        "orchestrator.train.sampling.max_completion_tokens": plan.max_response_tokens,
        "inference.parallel.tp": plan.rollout.tp,
        "inference.parallel.dp": _engine_dp(plan),
        "inference.enable_expert_parallel": plan.rollout.ep > 1,
        "inference.gpu_memory_utilization": plan.engine.gpu_memory_utilization,
        "inference.enable_prefix_caching": plan.engine.prefix_caching,
    }
    notes = [
        *bound.notes,
        "Counts of samples, not prompts: batch_size and max_inflight_rollouts.",
        "Differs: max_off_policy_steps is the limit of age; prime-rl itself runs at most one step ahead.",
    ]
    if plan.num_nodes > 1:
        notes.append("On several nodes prime-rl also needs a [slurm] table.")
    if plan.old_logprob:
        notes.append("Differs: the plan recomputes old log-probabilities; prime-rl takes the rollout's.")
    if plan.reference:
        notes.append("Not expressed: the reference pass that the plan counts.")
    notes += differences(plan, "prime-rl", BEHAVIOUR)
    return Recipe("prime_rl", Syntax.TOML, "Read by: uv run rl @ FILE", settings, tuple(notes))


def _in_flight(plan: ExportPlan, steps: int) -> int:
    """Return the samples in flight: what the bound lets ahead, or the plan's own limit."""
    ahead = plan.prompts_per_step * (steps + 1)
    return min(ahead, plan.policy.max_concurrency or ahead) * plan.samples_per_prompt


def _deployment(plan: ExportPlan) -> dict[str, Value]:
    if plan.num_nodes == 1:
        return {
            "deployment.type": "single_node",
            "deployment.gpus_per_node": plan.gpus_per_node,
            "deployment.num_train_gpus": plan.train_gpus,
            "deployment.num_infer_gpus": plan.rollout_gpus,
        }
    rollout_nodes, train_nodes = whole_nodes(plan, "prime-rl")
    return {
        "deployment.type": "multi_node",
        "deployment.gpus_per_node": plan.gpus_per_node,
        "deployment.num_train_nodes": train_nodes,
        "deployment.num_infer_nodes": 1,
        "deployment.num_infer_replicas": rollout_nodes,
    }


def _engine_dp(plan: ExportPlan) -> int:
    gpus = plan.rollout_gpus if plan.num_nodes == 1 else plan.gpus_per_node
    if gpus % plan.rollout.tp:
        raise InputError(
            f"rollout tp {plan.rollout.tp}: prime-rl's engine fills a node of {gpus} GPUs; choose a divisor"
        )
    return gpus // plan.rollout.tp
