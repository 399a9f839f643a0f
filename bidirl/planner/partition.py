"""Algorithm 1: the partition of a cluster into a rollout and a training pool.

Source: paper.md, "Static planner".
"""

from collections.abc import Callable, Iterator

from bidirl.errors import InputError, NoFeasiblePlan
from bidirl.planner.gates import Predictor, batch_work
from bidirl.planner.job import Job
from bidirl.planner.plan import Plan
from bidirl.planner.policy import Placement
from bidirl.planner.sections import Partition

__all__ = ["best_partition", "candidate_partitions", "throughput"]

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


def throughput(plan: Plan) -> float:
    """Return ``min(lambda_r, lambda_t)`` in groups per second for a representative batch."""
    predictor = Predictor(plan)
    rollout_s = predictor.rollout_s(plan.groups_per_step, plan.rollout_replicas, 0)
    train_s = predictor.train_s(batch_work(plan), plan.train_replicas)
    return plan.groups_per_step / max(rollout_s, train_s)


def best_partition(job: Job, build: Callable[[Partition], Plan]) -> Plan:
    """Return the plan of the best partition of the smallest engine that fits; the smaller pool wins a tie.

    Both pools divide by the engine's GPUs, so either role can run on either pool. All layouts of both roles
    are weighed by ``bidirl-plan search``. ``NoFeasiblePlan`` names the last reason if nothing can be built.
    """
    best: tuple[float, Plan] | None = None
    total, node = job.cluster.num_gpus, job.cluster.gpus_per_node
    reason = f"{total} GPUs leave no room for two pools"
    for rollout_tp in (size for size in range(1, node + 1) if node % size == 0):
        for partition in candidate_partitions(total, node, rollout_tp):
            try:
                plan = build(partition)
            except InputError as error:
                reason = str(error)
                continue
            rate = throughput(plan)
            if best is None or rate > best[0]:
                best = (rate, plan)
        if best is not None:
            return best[1]
    raise NoFeasiblePlan(f"no partition of the cluster is feasible: {reason}")
