"""Plans to export: one to change by hand, and a strategy over all that the reader would accept."""

from dataclasses import replace
from decimal import Decimal
from typing import Any

from hypothesis import strategies as st

from bidirl.planner.export.plan_file import ExportPlan, Layout, TrainStyle
from bidirl.planner.policy import Placement, preset
from bidirl.planner.sections import EngineConfig

PLAN = ExportPlan(
    placement=Placement.DISAGGREGATED,
    rollout_gpus=4,
    train_gpus=12,
    rollout=Layout(),
    train=Layout(),
    train_style=TrainStyle.FSDP,
    policy=preset("no_borrow"),
    num_nodes=2,
    gpus_per_node=8,
    prompts_per_step=60,
    samples_per_prompt=8,
    mini_batches=1,
    max_response_tokens=2048,
    reference=False,
    old_logprob=False,
    engine=EngineConfig(),
    model_name="Qwen3-VL-4B",
)


def plan(staleness: str = "1", policy: str = "no_borrow", **changes: Any) -> ExportPlan:
    """Return ``PLAN`` with a bound, a policy and other fields replaced."""
    choices = {key: changes.pop(key) for key in ("lending", "in_flight", "expiry") if key in changes}
    return replace(PLAN, policy=preset(policy, staleness=Decimal(staleness), **choices), **changes)


def colocated(**changes: Any) -> ExportPlan:
    """Return a plan whose roles take turns on all 16 GPUs."""
    return plan(
        "0", "colocated_sync", placement=Placement.COLOCATED, rollout_gpus=16, train_gpus=16, **changes
    )


@st.composite
def plans(draw: st.DrawFn) -> ExportPlan:
    """Return any plan with whole replicas that fits its cluster."""
    num_nodes, per_node = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 4, 8]))
    sizes = st.sampled_from([1, 2, 4])
    rollout = Layout(draw(sizes), draw(st.sampled_from([1, 1, 2])), draw(sizes))
    train = Layout(draw(sizes), draw(st.sampled_from([1, 1, 2])), draw(sizes))
    total = num_nodes * per_node
    rollout_gpus = rollout.num_gpus * draw(st.integers(1, max(1, total // rollout.num_gpus)))
    train_gpus = train.num_gpus * draw(st.integers(1, max(1, total // train.num_gpus)))
    mini_batches = draw(st.sampled_from([1, 1, 2, 4]))
    bound = draw(st.sampled_from(["0", "0.1", "0.5", "1", "1.5", "2", "4"]))
    made = replace(
        PLAN,
        policy=preset(
            "no_borrow",
            staleness=bound,
            lending=draw(st.sampled_from(["none", "rollout_on_train", "train_on_rollout", "both"])),
            in_flight=draw(st.sampled_from(["drain", "continue_recompute", "continue_stale"])),
            granularity=draw(st.sampled_from(["full", "streamed"])),
        ),
        num_nodes=num_nodes,
        gpus_per_node=per_node,
        rollout=rollout,
        train=train,
        train_style=draw(st.sampled_from(list(TrainStyle))),
        rollout_gpus=rollout_gpus,
        train_gpus=train_gpus,
        prompts_per_step=mini_batches * draw(st.integers(1, 40)),
        samples_per_prompt=draw(st.integers(1, 16)),
        mini_batches=mini_batches,
        reference=draw(st.booleans()),
        old_logprob=draw(st.booleans()),
    )
    if draw(st.integers(0, 4)) == 0:
        return replace(
            made,
            placement=Placement.COLOCATED,
            rollout_gpus=total,
            train_gpus=total,
            rollout=Layout(),
            train=Layout(),
            policy=preset("colocated_sync"),
        )
    return made
