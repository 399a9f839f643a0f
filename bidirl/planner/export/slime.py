"""Export to slime: ``train.py`` on-policy, ``train_async.py`` one rollout ahead.

Convention: frameworks.md section 3. ``train_async.py`` (read at 03f33927) prefetches one rollout; slime's
fully asynchronous rollout function has no version bound and is not used.
"""

from bidirl.planner.export.behaviour import Behaviour, differences
from bidirl.planner.export.plan_file import ExportPlan, TrainStyle
from bidirl.planner.export.recipe import Recipe, Syntax, Value
from bidirl.planner.export.shapes import pool_shapes, single_shape
from bidirl.planner.export.staleness import whole_steps
from bidirl.planner.policy import BatchOrder, InFlight

__all__ = ["slime"]

BEHAVIOUR = Behaviour(in_flight=(InFlight.DRAIN,), batch_order=(BatchOrder.ISSUE_ORDER,))


def slime(plan: ExportPlan) -> Recipe:
    """Return slime's command.

    Raises:
        InputError: a staleness between 0 and 1, or pools that cannot be spread evenly.
    """
    bound = whole_steps(plan.staleness, "slime", "train_async.py", most=1)
    if plan.colocated:
        train = single_shape(plan.train_gpus, plan.train, plan, "slime")
    else:
        _, train = pool_shapes(plan, "slime")
    settings: dict[str, Value] = {
        "--actor-num-nodes": train.num_nodes,
        "--actor-num-gpus-per-node": train.gpus_per_node,
        "--num-gpus-per-node": plan.gpus_per_node,
        **({"--colocate": True} if plan.colocated else {"--rollout-num-gpus": plan.rollout_gpus}),
        "--rollout-num-gpus-per-engine": plan.rollout.num_gpus * plan.rollout.engine_groups,
        "--tensor-model-parallel-size": plan.train.tp,
        "--pipeline-model-parallel-size": plan.train.pp,
        "--expert-model-parallel-size": plan.train.ep,
        **({"--context-parallel-size": plan.train.cp} if plan.train.cp > 1 else {}),
        "--rollout-batch-size": plan.prompts_per_step,
        "--n-samples-per-prompt": plan.samples_per_prompt,
        "--num-steps-per-rollout": plan.mini_batches,
        "--rollout-max-response-len": plan.max_response_tokens,
        "--sglang-mem-fraction-static": plan.engine.gpu_memory_utilization,
    }
    if not plan.old_logprob:
        settings["--use-rollout-logprobs"] = True
    notes = list(bound.notes)
    if plan.train_style is TrainStyle.FSDP:
        notes.append(
            "Not expressed: FSDP training. slime trains with Megatron; its memory and speed differ from "
            "the plan's."
        )
    if plan.rollout.ep > 1 or plan.rollout.pp > 1:
        notes.append(
            f"Not expressed: rollout pp {plan.rollout.pp}, ep {plan.rollout.ep}. SGLang has options of its "
            "own for them, inside the engine's GPUs."
        )
    if plan.reference:
        notes.append("The plan counts a reference pass: keep --use-kl-loss and --ref-load.")
    notes += differences(plan, "slime", BEHAVIOUR)
    program = "train.py" if bound.steps == 0 else "train_async.py"
    return Recipe("slime", Syntax.FLAGS, f"python3 {program}", settings, tuple(notes))
