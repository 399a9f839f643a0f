"""Seconds of the actions that no engine or trainer computes: switches, merges, publications; pulls of a step.

One home for both drivers, so that a simulated and a real-clock run with fake stages charge the same.
"""

from math import ceil

from bidirl.planner.events import BeginLease, Direction, Merge, SegmentKind
from bidirl.planner.plan import Plan
from bidirl.planner.policy import Granularity
from bidirl.planner.policy import Merge as MergeMode

__all__ = ["enter_s", "merge_s", "num_pulls", "publish_s", "return_s"]

RESULT_BYTES_PER_TOKEN = 4
"""A forward-only segment returns one fp32 log-probability a token."""


def enter_s(plan: Plan, action: BeginLease) -> float:
    """Return ``C_in`` of a lease."""
    switch = plan.models.switch
    match action.direction:
        case Direction.ROLLOUT_ON_TRAIN:
            return switch.rollout_on_train_in_s
        case Direction.TRAIN_ON_ROLLOUT:
            return switch.train_on_rollout_in_s
        case Direction.TIME_SHARE:
            return switch.time_share_in_s


def return_s(plan: Plan, direction: Direction, entered_share: float) -> float:
    """Return ``C_out`` of a lease; one that is revoked while it enters undoes only what it did."""
    switch = plan.models.switch
    match direction:
        case Direction.ROLLOUT_ON_TRAIN:
            cost = switch.rollout_on_train_out_s
        case Direction.TRAIN_ON_ROLLOUT:
            cost = switch.train_on_rollout_out_s
        case Direction.TIME_SHARE:
            cost = switch.time_share_out_s
    return cost * entered_share


def merge_s(plan: Plan, action: Merge) -> float:
    """Return the seconds until the primary holds the auxiliary side's results of a segment.

    ``accumulated`` sends one gradient, ``ordered`` one per chunk; a forward-only segment sends one number a
    token over the slowest link.
    """
    if action.kind is not SegmentKind.UPDATE:
        return action.num_tokens * RESULT_BYTES_PER_TOKEN * plan.models.sync.s_per_byte
    gradients = len(action.chunks) if plan.policy.merge is MergeMode.ORDERED else 1
    return plan.models.switch.grad_s * gradients


def publish_s(plan: Plan) -> float:
    """Return the seconds until a version lies ready for replicas that are still draining."""
    return plan.models.sync.transfer_s(1)


def num_pulls(plan: Plan) -> dict[str, int]:
    """Return how many pulls each segment of a step takes when nothing is lent."""

    def pulls(groups: int) -> int:
        chunks = ceil(groups / plan.chunk_groups)
        return ceil(chunks / plan.policy.max_chunks_per_pull)

    part = plan.groups_per_step // plan.mini_batches
    update = plan.mini_batches * pulls(part)
    streamed = plan.policy.granularity is Granularity.STREAMED
    forward = update if streamed else pulls(plan.groups_per_step)
    return {"old_logprob": forward, "reference": forward, "update": update}
