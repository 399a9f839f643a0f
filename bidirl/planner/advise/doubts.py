"""What is wrong with a run beyond its split: implausible speeds, drains in a sync, drift."""

from collections.abc import Mapping

import numpy as np

from bidirl.planner.advise.evidence import Evidence
from bidirl.planner.advise.tryout import steps_of
from bidirl.planner.advise.worlds import Simulator
from bidirl.planner.build import build_plan, build_workload
from bidirl.planner.gates import Predictor
from bidirl.planner.job import Job
from bidirl.planner.policy import Placement
from bidirl.planner.search.plans import with_steps
from bidirl.traces.step_log import Mode, StepLog

__all__ = ["doubts_of_job", "doubts_of_log", "is_misconfigured", "over_prior"]

FAR_BELOW = 8.0
"""Slower than the hardware's prior by this factor is a configuration error, not a split problem. The priors'
intervals reach a factor of 2 to 3; the public cases of needs C30 lie at 20 and more."""
SLOW_DECODE = 3.0
"""Generation slower than the prior by this factor is worth a remark (needs C31: server mode against SPMD)."""
SYNC_GROWTH = 3.0
"""A weight sync that grows by this factor within a run waits for something (needs C53)."""
LENGTH_DRIFT = 0.2
"""Change of the mean response from which a plan is worth making again (needs C93)."""
SLOWING = 1.5
"""Growth of generation seconds per token within a run from which the engine itself has become slower."""
MIN_ROWS = 9
"""Steps below which first and last thirds are not compared."""


def _thirds(column: np.ndarray) -> tuple[float, float] | None:
    known = column[np.isfinite(column)]
    if len(known) < MIN_ROWS:
        return None
    third = len(known) // 3
    return float(np.median(known[:third])), float(np.median(known[-third:]))


def doubts_of_log(log: StepLog) -> list[str]:
    """Return what a log alone raises, one line each."""
    found = []
    sync = _thirds(log.column("weight_sync_s"))
    if sync is not None and sync[0] > 0.0 and sync[1] >= SYNC_GROWTH * sync[0]:
        found.append(
            f"weight sync grew from {sync[0]:.1f} to {sync[1]:.1f} s: bytes did not, so the timer holds a "
            "drain of running requests; abort or bound them (C53)"
        )
    length = _thirds(log.column("response_mean_tokens"))
    if length is not None and length[0] > 0.0 and abs(length[1] / length[0] - 1.0) >= LENGTH_DRIFT:
        found.append(
            f"mean response moved from {length[0]:.0f} to {length[1]:.0f} tokens within the log: plan again, "
            "and compare runs per token (C93)"
        )
    tokens = log.column("response_mean_tokens")
    rate = _thirds(log.column("generation_s") / np.where(tokens > 0.0, tokens, np.nan))
    longest = _thirds(log.column("response_max_tokens"))
    grew = longest is not None and longest[1] > longest[0] * SLOWING
    if rate is not None and rate[0] > 0.0 and rate[1] >= SLOWING * rate[0] and not grew:
        found.append(
            f"generation takes {rate[1] / rate[0]:.1f} times as long per token as at the start of the log: "
            "the engine became slower (KV memory lost at weight syncs, preemptions), so calibrate again (C31)"
        )
    return found


def doubts_of_job(ratios: Mapping[str, float]) -> list[str]:
    """Return what the hardware raises: stages far below what the job's GPUs do (``over_prior``)."""
    slow = {name: ratio for name, ratio in ratios.items() if ratio >= FAR_BELOW}
    if slow:
        each = " and ".join(f"{name} {ratio:.0f}x" for name, ratio in slow.items())
        line = (
            f"{each} below what this hardware does: a configuration error (wrong devices, eager mode, tiny "
            "batches, logging, storage), not a split problem; no split is advised before it is found (C30)"
        )
        return [line]
    if ratios.get("generation", 1.0) >= SLOW_DECODE:
        line = (
            f"generation is {ratios['generation']:.1f}x slower than the engine's prior: compare with the "
            "engine alone (server mode, CUDA graphs off, KV memory), and give measured models (C31)"
        )
        return [line]
    return []


def is_misconfigured(ratios: Mapping[str, float]) -> bool:
    """Return whether a stage is so far below the hardware that no split explains it."""
    return any(ratio >= FAR_BELOW for ratio in ratios.values())


def over_prior(evidence: Evidence, job: Job, simulate: Simulator) -> dict[str, float]:
    """Return measured over predicted seconds of each stage that both sides know."""
    job = with_steps(job, steps_of(job))
    plan = build_plan(job, build_workload(job, 0))
    parts = simulate(job, plan, 0).details["parts_s"]
    train = sum(parts.get(name, 0.0) for name in ("old_logprob", "reference", "update"))
    known = evidence.known()
    ratios = {}
    if known.train_s is not None and train > 0.0:
        ratios["training"] = known.train_s / train
    partition = job.partition
    colocated = partition is not None and partition.placement is Placement.COLOCATED
    if colocated and evidence.mode is Mode.COLOCATED and known.generation_s and parts.get("wait"):
        ratios["generation"] = known.generation_s / parts["wait"]
    elif not colocated and (logged := evidence.seconds.get("generation_s")):
        prior = Predictor(plan).rollout_s(plan.groups_per_step, plan.rollout_replicas, 0)
        ratios["generation"] = logged / prior
    elif known.train_s is None:
        ratios["the step"] = known.step_s / max(1e-9, sum(parts.values()))
    return ratios
