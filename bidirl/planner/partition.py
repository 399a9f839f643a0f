"""The partition of a job that leaves it open: Algorithm 1 over the smallest engine that fits.

`bidirl-plan search` weighs all layouts of both roles and the answers around them; a job that is only to be
run needs a split and no report, so this asks Algorithm 1 (`search.algorithm1`, its one home) about one pair
of layouts, with the plans of the job itself as the stage models.
"""

from collections.abc import Callable, Iterator

from bidirl.errors import InputError, NoFeasiblePlan
from bidirl.planner.gates import Predictor, batch_work
from bidirl.planner.job import Job
from bidirl.planner.plan import Plan
from bidirl.planner.policy import Placement
from bidirl.planner.search.algorithm1 import algorithm1
from bidirl.planner.sections import Partition

__all__ = ["best_partition", "candidate_partitions"]

TRAIN_TP = 1
"""Trainer layout of a job that leaves its partition open: one GPU a replica, fully sharded."""


def candidate_partitions(num_gpus: int, gpus_per_node: int, replica_gpus: int) -> Iterator[Partition]:
    """Yield the partitions whose pools both divide by an engine of ``replica_gpus``, smallest rollout first.

    Node-aligned where there are at least two nodes for each pool to choose from; inside one or two nodes
    every divisible split counts.
    """
    step = gpus_per_node if num_gpus > 2 * gpus_per_node else replica_gpus
    for rollout in range(step, num_gpus, step):
        if rollout % replica_gpus == 0 and (num_gpus - rollout) % replica_gpus == 0:
            yield Partition(Placement.DISAGGREGATED, rollout, num_gpus - rollout, replica_gpus, TRAIN_TP)


def best_partition(job: Job, build: Callable[[Partition], Plan]) -> Plan:
    """Return the plan of the best partition of the smallest engine that fits; the smaller pool wins a tie.

    Both pools divide by the engine's GPUs, so either role can run on either pool. ``NoFeasiblePlan`` names
    the last reason if nothing can be built.
    """
    total, node = job.cluster.num_gpus, job.cluster.gpus_per_node
    reason = f"{total} GPUs leave no room for two pools"
    for rollout_tp in (size for size in range(1, node + 1) if node % size == 0):
        plans: dict[int, Plan] = {}
        for partition in candidate_partitions(total, node, rollout_tp):
            try:
                plans[partition.rollout_gpus] = build(partition)
            except InputError as error:
                reason = str(error)
        if plans:
            return _best(plans, rollout_tp)
    raise NoFeasiblePlan(f"no partition of the cluster is feasible: {reason}")


def _best(plans: dict[int, Plan], rollout_tp: int) -> Plan:
    """Return the best plan of one pair of layouts; ``plans`` by rollout pool, one a partition."""
    by_train = {plan.train_replicas: plan for plan in plans.values()}

    def rollout_s(replicas: int) -> float:
        plan = plans[replicas * rollout_tp]
        return Predictor(plan).rollout_s(plan.groups_per_step, plan.rollout_replicas, 0)

    def train_s(replicas: int) -> float:
        plan = by_train[replicas]
        return Predictor(plan).train_s(batch_work(plan), plan.train_replicas)

    pools = [(plan.rollout_gpus, plan.train_gpus) for plan in plans.values()]
    groups = next(iter(plans.values())).groups_per_step
    found = algorithm1(pools, rollout_tp, TRAIN_TP, groups, rollout_s, train_s)
    assert found is not None  # every plan's pools divide by the engine
    return plans[found.rollout_gpus]
