"""Jobs of verl's published tables as plans, and the fits of their free numbers.

One optimizer mini-batch of verl is a barrier of the trainer, so it is one *pull* here (``chunk_groups`` =
its prompts, one chunk a pull); ``mini_batches`` are the local fit steps (4 per version) that are streamed.
verl's timer ``gen`` of an asynchronous row spans waiting, deserialising and padding samples into a batch.
The latter two are CPU work of the trainer: ``assembly_s``, carried by the forward segment that the bypass
mode of these runs leaves unused.
Source: verl-project/verl docs/advance/fully_async.md and experimental/fully_async_policy/ (semantics, and
layouts of its run scripts); frameworks.md section 2.3.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

from bidirl.models.architecture import ModelConfig
from bidirl.models.catalogue import gpu
from bidirl.models.iteration import AffineIteration, IterationModel
from bidirl.models.replica import EngineLimits
from bidirl.models.roofline import ExpertIteration, Links, rollout_prior
from bidirl.models.stages import StageModels
from bidirl.models.trainer import SegmentCost, TrainerModel
from bidirl.models.transfer import SwitchCosts, SyncModel
from bidirl.planner.plan import Plan
from bidirl.planner.policy import preset
from bidirl.sim.driver import Driver
from bidirl.sim.metrics import summarise
from bidirl.traces.workload import Workload
from bidirl.traces.workload_config import LengthTable, TurnsConfig, WorkloadConfig

__all__ = ["Lengths", "System", "Times", "bisect", "level_for_update", "plan_of", "times"]

NO_SWITCH = SwitchCosts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
NODE_BYTES_PER_S = 200e9
"""Network of a node of H20 boards (8 x 200 Gb/s); it only matters to layouts that span nodes, none here."""
SEED = 20260822
LEVEL_TRIES = 3
"""Secant steps from a length factor to the update time that a row prints; two leave 1 %."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A response length law by at most three statistics (tokens); see ``LengthTable``."""

    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    truncated: float | None = None
    correlation: float = 0.0
    """Share of the variance of log length that the prompt explains."""


@dataclass(frozen=True, slots=True)
class System:
    """One run of a table: what its source says, and the numbers that it does not say."""

    model: str
    lengths: Lengths
    rollout_gpus: int
    train_gpus: int
    """0 = colocated on ``rollout_gpus``."""
    max_response_tokens: int
    update_s: float
    """Seconds per effective token of an update on one trainer replica."""
    prompts: int = 512
    samples: int = 16
    prompt_tokens: int = 150
    rollout_tp: int = 4
    train_replica_gpus: int = 4
    mini_batch_prompts: int = 32
    """Prompts of one optimizer step: a barrier of the trainer."""
    fits_per_version: int = 4
    """Local fit steps per version, each streamed when its prompts are there."""
    staleness: str = "0"
    policy: str = "verl_fully_async"
    concurrency: int | None = 16
    """Groups that one rollout replica holds. Source: verl ``concurrent_samples_per_replica``."""
    decode_factor: float = 1.0
    """Times the roofline prior of an engine iteration."""
    reference_s: float = 0.0
    """As ``update_s``, for the reference pass; 0 = none."""
    assembly_s: float = 0.0
    """CPU seconds per version with which the trainer deserialises and pads its samples."""
    sync_s: float = 0.0
    """Seconds per version that belong to no printed part: weight sync, advantages, metrics."""
    update_fixed_s: float = 0.0
    """Seconds of one pull of the update that do not grow with tokens."""
    level: float = 1.0
    """Length drift: this run's lengths as a multiple of those of the fitted run."""
    turns: TurnsConfig | None = None
    num_steps: int = 8
    device: str = "H20 96GB"
    kv_tokens: int = 5_000_000
    """KV memory of one replica; four H20 at 0.8 hold 290 GB of cache beside a 7B model, 57 KB a token."""
    switch: SwitchCosts = NO_SWITCH
    choices: tuple[tuple[str, Any], ...] = ()
    """Further policy choices by name."""


@dataclass(frozen=True, slots=True)
class Times:
    """Mean seconds of a version; ``step_s`` is the sum of the others."""

    step_s: float
    wait_s: float
    """Waiting and assembly: what verl logs as ``gen``."""
    reference_s: float
    update_s: float
    other_s: float


def _slower(iteration: IterationModel, factor: float) -> IterationModel:
    if isinstance(iteration, ExpertIteration):
        affine = _slower(iteration.affine, factor)
        assert isinstance(affine, AffineIteration)
        return replace(iteration, affine=affine, experts_s=iteration.experts_s * factor)
    assert isinstance(iteration, AffineIteration)
    return AffineIteration(*(factor * getattr(iteration, name) for name in AffineIteration.__slots__))


def plan_of(system: System, seed: int = SEED) -> tuple[Plan, Workload]:
    """Return the plan and the workload of a run."""
    law = system.lengths
    config = WorkloadConfig(
        prompts_per_step=system.prompts,
        samples_per_prompt=system.samples,
        max_response_tokens=system.max_response_tokens,
        lengths=LengthTable(mean=law.mean, p50=law.p50, p95=law.p95, truncated=law.truncated),
        num_steps=system.num_steps,
        prompt_tokens=system.prompt_tokens,
        image_tokens=0,
        mini_batches=system.fits_per_version,
        group_correlation=law.correlation,
        drift=(system.level,),
        turns=system.turns,
    )
    workload = Workload(config, Path(), seed)
    model = ModelConfig(name=system.model).resolve(Path())
    device = gpu(system.device)
    links = Links(device.nvlink_bytes_per_s or 1e12, NODE_BYTES_PER_S, 8)
    iteration, _ = rollout_prior(device, model, system.rollout_tp, links)
    pulls = max(1, system.prompts // system.mini_batch_prompts)
    models = StageModels(
        iteration=_slower(iteration, system.decode_factor),
        limits=EngineLimits(system.kv_tokens, max_num_seqs=1024, max_num_batched_tokens=30_720),
        trainer=TrainerModel(
            old_logprob=SegmentCost(system.assembly_s / pulls, 0.0),
            reference=SegmentCost(0.0, system.reference_s),
            update=SegmentCost(system.update_fixed_s, system.update_s),
            pair_tokens=model.pair_tokens,
        ),
        sync=SyncModel(system.sync_s, 0.0, 0.0, 0.0, 1, 0.0, 0.0),
        switch=system.switch,
    )
    choices: dict[str, Any] = {"chunk_groups": system.mini_batch_prompts, "max_chunks_per_pull": 1}
    if system.concurrency is not None and system.train_gpus:
        choices["concurrency_groups_per_replica"] = system.concurrency
    policy = preset(system.policy, staleness=Decimal(system.staleness), **{**choices, **dict(system.choices)})
    plan = Plan(
        num_steps=system.num_steps,
        groups_per_step=system.prompts,
        samples_per_group=system.samples,
        mini_batches=system.fits_per_version,
        rollout_gpus=system.rollout_gpus,
        train_gpus=system.train_gpus,
        rollout_replica_gpus=system.rollout_tp,
        train_replica_gpus=system.train_replica_gpus,
        policy=policy,
        models=models,
        priors=(workload.prior(0),),
        old_logprob=system.assembly_s > 0.0,
        reference=system.reference_s > 0.0,
        group_slots=system.prompts,
    )
    return plan, workload


@lru_cache(maxsize=256)
def times(system: System) -> Times:
    """Simulate a run and return its mean times per version."""
    plan, workload = plan_of(system)
    summary = summarise(Driver(plan, workload).run())
    parts = dict(summary["parts_s"])
    step = float(summary["step_time_s"]["mean"])
    reference, update = float(parts.get("reference", 0.0)), float(parts.get("update", 0.0))
    wait = float(parts.get("wait", 0.0)) + float(parts.get("old_logprob", 0.0))
    return Times(step, wait, reference, update, step - reference - update - wait)


def bisect(value_of: Callable[[float], float], target: float, low: float, high: float, steps: int) -> float:
    """Return where an increasing function meets ``target`` between ``low`` and ``high`` (``steps`` halvings).

    An end of the range is the answer to a target beyond it.
    """
    for _ in range(steps):
        middle = 0.5 * (low + high)
        if value_of(middle) < target:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def level_for_update(system: System, update_s: float) -> float:
    """Return the length factor under which a run updates for ``update_s`` a version: drift as an input."""
    level = system.level
    for _ in range(LEVEL_TRIES):
        found = times(replace(system, level=round(level, 4))).update_s
        level *= update_s / found
    return round(level, 3)
