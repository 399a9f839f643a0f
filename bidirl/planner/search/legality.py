"""Rules that forbid a candidate, with numbers: pools, hot switches, memory of a GPU with two roles."""

from dataclasses import dataclass
from math import inf

from bidirl.models.memory import host_memory
from bidirl.models.memory_roles import engine_residue_bytes, lent_memory
from bidirl.planner.policy import Placement
from bidirl.planner.search.candidates import Candidate, Search
from bidirl.planner.search.rollout_pool import RolloutPool
from bidirl.planner.search.train_pool import TrainPool

__all__ = ["Rejection", "lending_reason", "rejections", "sharing_reason"]

GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why some pool sizes of one role cannot run a layout; sizes with the same reason stand together."""

    role: str
    layout: str
    smallest_gpus: int
    largest_gpus: int
    num_sizes: int
    reason: str
    """The binding constraint with the numbers of the smallest size."""


def rejections(search: Search) -> list[Rejection]:
    """Return every (role, layout, pool size) that is illegal, neighbours with the same kind of reason merged.

    Sizes that a replica does not divide are the grid of the layout rather than a finding: one line each.
    """
    found: list[Rejection] = []
    roles: tuple[tuple[str, list[RolloutPool] | list[TrainPool]], ...] = (
        ("rollout", search.rollouts),
        ("train", search.trains),
    )
    for role, pools in roles:
        for pool in pools:
            same: dict[str, list[int]] = {}
            for gpus, seconds in zip(search.sizes.tolist(), pool.seconds.tolist(), strict=True):
                if seconds == inf:
                    same.setdefault(pool.kind(gpus), []).append(gpus)
            for sizes in same.values():
                reason = pool.reason(sizes[0]) or "no time model"
                found.append(Rejection(role, pool.layout.label, sizes[0], sizes[-1], len(sizes), reason))
    return found


def lending_reason(search: Search, candidate: Candidate) -> str | None:
    """Return why the candidate cannot lend in either direction; None if it can.

    Memory is that of the moments when both roles share a GPU: the trainer beside a sleeping engine, and the
    engine awake beside a waiting trainer. A plan that does not fit is refused, never made smaller.
    """
    question = search.question
    if candidate.placement is Placement.COLOCATED:
        return "colocated: the roles share one pool, so there is nobody to lend to"
    if not candidate.hot_switch:
        return (
            f"hot switch: pools of {candidate.rollout_gpus} and {candidate.train_gpus} GPUs must both be "
            f"multiples of {candidate.rollout.gpus} (rollout replica) and {candidate.train.unit_gpus} "
            "(trainer replica)"
        )
    cluster = question.cluster
    if cluster.rollout_device.name != cluster.train_device.name:
        return (
            f"hot switch: the pools have different GPUs ({cluster.rollout_device.name}, "
            f"{cluster.train_device.name}), and no model of a role on the other's GPU is given"
        )
    return sharing_reason(search, candidate)


def sharing_reason(search: Search, candidate: Candidate) -> str | None:
    """Return why the two roles do not fit one GPU in turn, in its memory or the host's; None if they do."""
    question = search.question
    cluster, engine = question.cluster, question.engine
    gpus = candidate.train_gpus or candidate.rollout_gpus
    pool = next(pool for pool in search.trains if pool.layout == candidate.train)
    residue = engine_residue_bytes(candidate.rollout.tp)
    for own in sorted({gpus, candidate.rollout_gpus}):
        budget = pool.budget(own, question.longest_tokens)
        if own == gpus and budget.headroom_bytes < residue:
            return (
                f"memory: beside the trainer a sleeping engine keeps {residue / GIB:.2f} GiB, and "
                f"{budget.headroom_bytes / GIB:.2f} GiB are free on {own} GPUs"
            )
    if question.measured is None and engine.kv_tokens is None:
        rollout = next(each for each in search.rollouts if each.layout == candidate.rollout)
        awake = lent_memory(
            cluster.rollout_device,
            rollout.part,
            engine,
            rollout_tp=candidate.rollout.tp,
            train_gpus=gpus,
        )
        if not awake.fits:
            return f"memory: {awake.verdict()}; lower engine.gpu_memory_utilization"
    if cluster.host_memory_gib is not None:
        node = host_memory(
            question.model,
            rollout_tp=candidate.rollout.gpus,
            train_gpus=gpus,
            gpus_per_node=cluster.gpus_per_node,
            capacity_bytes=cluster.host_memory_gib * GIB,
        )
        engines, trainers = node.items
        if trainers.num_bytes > node.capacity_bytes:  # sleep level 2 needs nothing for the engines
            states, all_, more = (
                number / GIB for number in (trainers.num_bytes, node.capacity_bytes, engines.num_bytes)
            )
            return (
                f"host memory: the states of yielding trainers take {states:.0f} GiB of a node's {all_:.0f} "
                f"(engines asleep at level 1 {more:.0f} GiB more)"
            )
    return None
