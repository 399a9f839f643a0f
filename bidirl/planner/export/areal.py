"""Export to AReaL: per-engine backends and the legacy allocation string.

Convention: frameworks.md section 4. One rollout is a prompt group; capacity is
``(eta + version + 1) * B - (accepted + running)``, which is the plan's bound with ``eta = s``.
"""

from bidirl.errors import InputError
from bidirl.planner.export.allocation import check_allocation
from bidirl.planner.export.behaviour import Behaviour, differences
from bidirl.planner.export.plan_file import ExportPlan, Layout, TrainStyle
from bidirl.planner.export.recipe import Recipe, Syntax, Value
from bidirl.planner.export.staleness import whole_steps
from bidirl.planner.policy import BatchOrder, InFlight

__all__ = ["allocation_string", "areal"]

BEHAVIOUR = Behaviour(in_flight=(InFlight.CONTINUE_RECOMPUTE,), batch_order=(BatchOrder.OLDEST_FIRST,))


def areal(plan: ExportPlan) -> Recipe:
    """Return AReaL's configuration as YAML.

    Raises:
        InputError: a fractional staleness below 1, or a batch that the rollout replicas do not divide.
    """
    bound = whole_steps(plan.staleness, "AReaL", "max_head_offpolicyness")
    if plan.prompts_per_step % plan.rollout_replicas:
        raise InputError(
            f"prompts_per_step={plan.prompts_per_step}: AReaL needs a multiple of its "
            f"{plan.rollout_replicas} rollout replicas; change the batch or the pool"
        )
    ahead = plan.prompts_per_step * (bound.steps + 1)
    settings: dict[str, Value] = {
        "cluster.n_nodes": plan.num_nodes,
        "cluster.n_gpus_per_node": plan.gpus_per_node,
        "rollout.backend": _rollout_part(plan),
        "rollout.max_head_offpolicyness": bound.steps,
        "rollout.consumer_batch_size": plan.prompts_per_step,
        "rollout.max_concurrent_rollouts": min(ahead, plan.policy.max_concurrency or ahead),
        "actor.backend": _train_part(plan),
        "actor.ppo_n_minibatches": plan.mini_batches,
        "actor.recompute_logprob": plan.old_logprob,
        "gconfig.n_samples": plan.samples_per_prompt,
        "gconfig.max_new_tokens": plan.max_response_tokens,
        "train_dataset.batch_size": plan.prompts_per_step,
        "vllm.gpu_memory_utilization": plan.engine.gpu_memory_utilization,
        "vllm.max_num_seqs": plan.engine.max_num_seqs,
    }
    if plan.colocated:
        settings |= {
            "rollout.scheduling_strategy.type": "colocation",
            "rollout.scheduling_strategy.target": "actor",
            "enable_offload": True,
        }
    else:
        check_allocation(allocation_string(plan), plan.num_nodes * plan.gpus_per_node)
    notes = [
        *bound.notes,
        (
            f"max_concurrent_rollouts is by default one batch ({plan.prompts_per_step} groups), which "
            "would bind before the staleness bound does."
        ),
        f"For the deprecated launchers (local, ray, slurm): allocation_mode: {allocation_string(plan)}",
        *_layout_notes(plan),
        *differences(plan, "AReaL", BEHAVIOUR),
    ]
    return Recipe("areal", Syntax.YAML, "Merge into the YAML of --config.", settings, tuple(notes))


def allocation_string(plan: ExportPlan) -> str:
    """Return the plan as AReaL's legacy allocation string; parts that share GPUs are joined by ``|``."""
    rollout, train = _rollout_part(plan), _train_part(plan)
    if plan.colocated:
        rollout, train = rollout.replace(":", "[rollout]:", 1), train.replace(":", "[actor]:", 1)
        return f"{rollout}|{train}"
    return f"{rollout}+{train}"


def _rollout_part(plan: ExportPlan) -> str:
    return f"vllm:{_dims(plan.rollout_replicas, plan.rollout)}"


def _train_part(plan: ExportPlan) -> str:
    if plan.train_style is TrainStyle.MEGATRON:
        experts = f"e{plan.train.ep}" if plan.train.ep > 1 else ""
        return f"megatron:{_dims(plan.train_dp, plan.train)}{experts}"
    pipeline_free = Layout(tp=plan.train.tp, cp=plan.train.cp)
    return f"fsdp:{_dims(plan.train_gpus // pipeline_free.num_gpus, pipeline_free)}"


def _dims(dp: int, layout: Layout) -> str:
    return "".join(
        f"{letter}{size}"
        for letter, size in (("d", dp), ("t", layout.tp), ("p", layout.pp), ("c", layout.cp))
        if size > 1 or letter == "d"
    )


def _layout_notes(plan: ExportPlan) -> list[str]:
    notes = []
    if plan.rollout.ep > 1:
        notes.append(
            f"Not expressed: rollout ep {plan.rollout.ep}. AReaL's rollout backends take d, t and p only."
        )
    if plan.train_style is TrainStyle.FSDP and (plan.train.pp > 1 or plan.train.ep > 1):
        notes.append(
            f"Not expressed: train layout pp {plan.train.pp}, ep {plan.train.ep}. AReaL's FSDP has "
            "neither; take megatron for them."
        )
    if plan.reference:
        notes.append("The plan counts a reference pass: set actor.kl_ctl above 0 and add a ref section.")
    return notes
