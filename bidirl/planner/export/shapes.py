"""Pools as ``nodes x GPUs per node``, the form in which most frameworks take them."""

from collections.abc import Iterator
from dataclasses import dataclass

from bidirl.errors import InputError
from bidirl.planner.export.plan_file import ExportPlan, Layout

__all__ = ["PoolShape", "pool_shapes", "single_shape", "whole_nodes"]


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The same number of GPUs on each of some nodes."""

    num_nodes: int
    gpus_per_node: int


def pool_shapes(plan: ExportPlan, framework: str) -> tuple[PoolShape, PoolShape]:
    """Return the shapes of the rollout and the training pool that fit the cluster side by side.

    Prefers few shared nodes, then few nodes. A tensor-parallel group stays within a node, or
    takes whole ones.

    Raises:
        InputError: no such pair exists.
    """
    best: tuple[tuple[int, int, int], PoolShape, PoolShape] | None = None
    for rollout in _shapes(plan.rollout_gpus, plan.rollout, plan):
        for train in _shapes(plan.train_gpus, plan.train, plan):
            shared = max(0, rollout.num_nodes + train.num_nodes - plan.num_nodes)
            if shared and rollout.gpus_per_node + train.gpus_per_node > plan.gpus_per_node:
                continue
            order = (shared, rollout.num_nodes + train.num_nodes, rollout.num_nodes)
            if best is None or order < best[0]:
                best = order, rollout, train
    if best is None:
        raise InputError(
            f"rollout_gpus={plan.rollout_gpus}, train_gpus={plan.train_gpus} on {plan.num_nodes} x "
            f"{plan.gpus_per_node} GPUs: {framework} takes the same number of GPUs on each node of a pool "
            "and no such pair fits; choose pools that divide the nodes"
        )
    return best[1], best[2]


def single_shape(num_gpus: int, layout: Layout, plan: ExportPlan, framework: str) -> PoolShape:
    """Return the shape of one pool alone, with the fewest nodes.

    Raises:
        InputError: the GPUs cannot be spread evenly.
    """
    shape = next(_shapes(num_gpus, layout, plan), None)
    if shape is None:
        raise InputError(
            f"{num_gpus} GPUs on {plan.num_nodes} x {plan.gpus_per_node}: {framework} takes the same "
            "number of GPUs on each node; choose a pool that divides the nodes"
        )
    return shape


def whole_nodes(plan: ExportPlan, framework: str) -> tuple[int, int]:
    """Return the nodes of the rollout and the training pool, for frameworks that never split a node.

    Raises:
        InputError: a pool is no whole number of nodes.
    """
    per_node = plan.gpus_per_node
    if plan.rollout_gpus % per_node or plan.train_gpus % per_node:
        raise InputError(
            f"rollout_gpus={plan.rollout_gpus}, train_gpus={plan.train_gpus}: on several nodes {framework} "
            f"gives each role whole nodes of {per_node} GPUs; choose multiples of {per_node}"
        )
    return plan.rollout_gpus // per_node, plan.train_gpus // per_node


def _shapes(num_gpus: int, layout: Layout, plan: ExportPlan) -> Iterator[PoolShape]:
    group = layout.tp * layout.cp
    for num_nodes in range(1, min(plan.num_nodes, num_gpus) + 1):
        per_node = num_gpus // num_nodes
        if num_gpus % num_nodes or per_node > plan.gpus_per_node:
            continue
        spans = group % per_node == 0 and per_node == plan.gpus_per_node
        if per_node % group == 0 or spans:
            yield PoolShape(num_nodes, per_node)
