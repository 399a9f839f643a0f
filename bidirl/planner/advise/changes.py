"""Changes worth trying on a running job: other splits, staleness, streaming, lending, layouts, more GPUs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from math import isfinite

from bidirl.errors import BidirlError
from bidirl.planner.advise.verdict import Limit
from bidirl.planner.advise.worlds import World
from bidirl.planner.gates import Predictor, batch_work
from bidirl.planner.job import Job
from bidirl.planner.policy import Gate, Granularity, Lending, Placement, PolicyConfig, preset
from bidirl.planner.search.algorithm1 import compatible, step_seconds
from bidirl.planner.sections import Partition

__all__ = ["Change", "candidates"]

STALENESS_TRIED = (Decimal("0.25"), Decimal("0.5"), Decimal(1))
"""Bounds that the next one is taken from. Above 1 the paper's and verl's sweeps gain little (needs C45)."""
NUM_BOUNDS = 2
NUM_SPLITS = 2
"""Other splits that are simulated, best first by the stage models of the middle world."""
ASYNC_STALENESS = Decimal("0.5")
"""Bound of a split proposed to a run that takes turns: past the knee of verl's ablation (needs C45)."""


@dataclass(frozen=True, slots=True)
class Change:
    """A changed job and how to make it."""

    name: str
    job: Job
    how: str


def candidates(job: Job, world: World, limit: Limit) -> list[Change]:
    """Return the changes to try on a job with a partition; ``world`` prices the splits.

    More rollout GPUs are not among them where the longest samples are the limit (needs C50).
    """
    partition = job.partition
    assert partition is not None
    found: list[Change] = []
    if partition.placement is Placement.COLOCATED:
        policy = preset("no_borrow", staleness=ASYNC_STALENESS, **_streamed(job))
        overlapped = replace(job, policy=policy)
        for split in _splits(overlapped, world, None)[:NUM_SPLITS]:
            name = f"overlap: {split.rollout_gpus}R:{split.train_gpus}T, staleness {ASYNC_STALENESS:g}"
            how = "disaggregate rollout and training on the same GPUs, stream mini-batches"
            found.append(Change(name, replace(overlapped, partition=split), how))
    else:
        splits = _splits(job, world, partition)[:NUM_SPLITS]
        found += [
            Change(
                f"split {split.rollout_gpus}R:{split.train_gpus}T",
                replace(job, partition=split),
                f"move {abs(split.train_gpus - partition.train_gpus)} GPUs to "
                f"{'training' if split.train_gpus > partition.train_gpus else 'rollout'}",
            )
            for split in splits
        ]
        found += _staleness(job)
        found += _lending(job, partition)
        if splits:
            found += _lending(replace(job, partition=splits[0]), splits[0], both_only=True)
    found += _layouts(job, partition, limit)
    found += _more_gpus(job, partition, limit)
    return found


def _streamed(job: Job) -> dict[str, str]:
    return {"granularity": "streamed"} if job.workload.mini_batches > 1 else {}


def _splits(job: Job, world: World, current: Partition | None) -> list[Partition]:
    """Return legal partitions of the job's GPUs with its layouts, best first by the world's stage models."""
    partition = job.partition
    assert partition is not None
    total = partition.num_gpus
    unit = job.cluster.gpus_per_node if job.cluster.num_nodes > 2 else 1
    priced = []
    for rollout in range(unit, total, unit):
        split = Partition(
            Placement.DISAGGREGATED, rollout, total - rollout, partition.rollout_tp, partition.train_tp
        )
        if rollout % split.rollout_tp or split.train_gpus % split.train_tp or split == current:
            continue
        seconds = _price(replace(job, partition=split), world)
        if isfinite(seconds):
            priced.append((seconds, rollout, split))
    return [split for _, _, split in sorted(priced, key=lambda each: each[:2])]


def _price(job: Job, world: World) -> float:
    """Return the seconds of a step by the stage models; infinite where the split is not legal."""
    try:
        plan = world.plan(
            replace(job, workload=job.workload.model_copy(update={"lengths": world.job.workload.lengths}))
        )
    except BidirlError:
        return float("inf")
    predictor = Predictor(plan)
    rollout_s = predictor.rollout_s(plan.groups_per_step, plan.rollout_replicas, 0)
    train_s = predictor.train_s(batch_work(plan), plan.train_replicas)
    return float(step_seconds(rollout_s, train_s, float(job.policy.staleness)))


def _with_policy(job: Job, **update: object) -> Job:
    return replace(job, policy=job.policy.model_copy(update=update))


def _staleness(job: Job) -> Iterator[Change]:
    now = job.policy.staleness
    for bound in [each for each in STALENESS_TRIED if each > now][:NUM_BOUNDS]:
        yield Change(f"staleness {bound:g}", _with_policy(job, staleness=bound), "raise the staleness bound")
    if job.workload.mini_batches > 1 and job.policy.granularity is Granularity.FULL:
        yield Change(
            "streamed mini-batches",
            _with_policy(job, granularity=Granularity.STREAMED),
            "train on each mini-batch when its groups are there",
        )


def _lending(job: Job, partition: Partition, *, both_only: bool = False) -> Iterator[Change]:
    policy: PolicyConfig = job.policy
    if policy.lending is Lending.BOTH or policy.staleness < 0:
        return
    sizes = partition.rollout_tp, partition.train_tp
    if not compatible(partition.rollout_gpus, partition.train_gpus, *sizes):
        return
    words = {
        Lending.ROLLOUT_ON_TRAIN: "lend waiting trainers to rollout",
        Lending.TRAIN_ON_ROLLOUT: "lend waiting rollout GPUs to training",
        Lending.BOTH: "lend both ways",
    }
    for lending, how in words.items():
        if lending is policy.lending or (both_only and lending is not Lending.BOTH):
            continue
        name = f"lending {lending.value.replace('_', ' ')}"
        if both_only:
            name = f"split {partition.rollout_gpus}R:{partition.train_gpus}T and {name}"
        yield Change(name, _with_policy(job, lending=lending, gate=Gate.MODELS), how)


def _layouts(job: Job, partition: Partition, limit: Limit) -> Iterator[Change]:
    tp = partition.rollout_tp * 2
    if limit not in (Limit.TAIL, Limit.ROLLOUT) or partition.rollout_gpus % tp:
        return
    if tp > job.cluster.gpus_per_node:
        return
    yield Change(
        f"rollout engines of {tp} GPUs",
        replace(job, partition=replace(partition, rollout_tp=tp)),
        "double the tensor parallelism of the engines: the longest sample decodes faster",
    )


def _more_gpus(job: Job, partition: Partition, limit: Limit) -> Iterator[Change]:
    """Propose one node more for the pool that limits; never more rollout to a tail."""
    if partition.placement is Placement.COLOCATED or limit not in (Limit.ROLLOUT, Limit.TRAINER):
        return
    node = job.cluster.gpus_per_node
    cluster = job.cluster.model_copy(update={"num_nodes": job.cluster.num_nodes + 1})
    bigger = (
        replace(partition, rollout_gpus=partition.rollout_gpus + node)
        if limit is Limit.ROLLOUT
        else replace(partition, train_gpus=partition.train_gpus + node)
    )
    pool = "rollout" if limit is Limit.ROLLOUT else "training"
    yield Change(f"{node} more {pool} GPUs", replace(job, cluster=cluster, partition=bigger), "add a node")
