"""The paper's settings as jobs, and their simulation: one number per (setting, policy, split, scale).

Nothing here knows what the paper printed. Jobs are built from the public setup (paper.md) and our priors:
roofline stage models, published switch costs. The only number that may be fitted is a factor on the
trainer's compute seconds, and this module takes it as an argument.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

from bidirl.errors import InputError
from bidirl.models.architecture import ModelConfig
from bidirl.models.cluster import ClusterConfig
from bidirl.models.faults import FaultsConfig
from bidirl.models.stages import StageModels
from bidirl.planner.build import build_plan, build_workload
from bidirl.planner.gates import Predictor, batch_work
from bidirl.planner.job import Job
from bidirl.planner.plan import Plan
from bidirl.planner.policy import Placement, preset
from bidirl.planner.sections import EngineConfig, ModelsConfig, Partition
from bidirl.sim.driver import Driver
from bidirl.sim.metrics import summarise
from bidirl.sim.run import alone_decode_s
from bidirl.traces.workload_config import WorkloadConfig

__all__ = [
    "ASYNC_BASELINES",
    "GPUS_PER_NODE",
    "SAMPLES_PER_PROMPT",
    "Cell",
    "Setting",
    "num_steps",
    "planned_split",
    "rates",
    "run_cell",
    "scaled_trainer",
    "splits",
    "unsupported_reason",
]

GPUS_PER_NODE, SAMPLES_PER_PROMPT = 8, 8
"""Source: paper.md, setup."""
SPLIT_STEP_SHARE = 4
"""Pools grow in quarters of the cluster: the paper's ablation has 4R:12T of 16, one quarter."""
SEED = 20260710
"""Fixed, so that the tables are reproducible; the same for all cells (common random numbers)."""
ASYNC_BASELINES = ("verl_fully_async", "areal", "roll")
"""The paper's three baselines in their asynchronous form; veRL's colocated form is held apart."""
NETWORKS = {"A6000": (200.0, 512.0), "H100": (3200.0, 2048.0)}
"""GPU -> (node's network in Gb/s, host memory in GiB). Source: paper.md, setup (H100: 8 x 400 Gb/s)."""
LENGTHS = {"Qwen3-8B": "gsm8k"}
"""Data set by model; all others run Geometry3K. Source: paper.md, setup."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One point of the paper's evaluation, without policy and split."""

    gpu: str = "A6000"
    model: str = "Qwen3-VL-4B"
    num_gpus: int = 16
    prompts: int = 64
    max_response_tokens: int = 2048
    staleness: str = "1"

    @property
    def name(self) -> str:
        """Return the setting in one line."""
        return (
            f"{self.gpu} x{self.num_gpus} {self.model} {self.prompts} prompts "
            f"{self.max_response_tokens // 1024}K s={self.staleness}"
        )

    @property
    def default_split(self) -> int:
        """Return the rollout GPUs of the default split: half, the one node-aligned split of two nodes."""
        return self.num_gpus // 2

    def job(self, policy: str, rollout_gpus: int, num_steps: int, **choices: Any) -> Job:
        """Return the job of a policy on a split; ``colocated_sync`` ignores split and staleness."""
        network, memory = NETWORKS[self.gpu]
        colocated = policy == "colocated_sync"
        pools = (self.num_gpus, 0) if colocated else (rollout_gpus, self.num_gpus - rollout_gpus)
        placement = Placement.COLOCATED if colocated else Placement.DISAGGREGATED
        return Job(
            cluster=ClusterConfig(
                gpu=self.gpu,
                num_nodes=-(-self.num_gpus // GPUS_PER_NODE),
                gpus_per_node=GPUS_PER_NODE,
                inter_node_gbit_per_s=network,
                host_memory_gib=memory,
            ),
            model=ModelConfig(name=self.model),
            workload=WorkloadConfig(
                prompts_per_step=self.prompts,
                samples_per_prompt=SAMPLES_PER_PROMPT,
                max_response_tokens=self.max_response_tokens,
                lengths=LENGTHS.get(self.model, "geo3k"),
                num_steps=num_steps,
            ),
            partition=Partition(placement, *pools, 1, 1),
            policy=preset(policy, staleness="0" if colocated else self.staleness, **choices),
            engine=EngineConfig(),
            models=ModelsConfig(),
            faults=FaultsConfig(),
            base_dir=Path(),
        )


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation."""

    setting: Setting
    policy: str
    rollout_gpus: int
    trainer_scale: float
    num_steps: int


def scaled_trainer(models: StageModels, scale: float) -> StageModels:
    """Return the models with the trainer's compute seconds per token times ``scale``."""
    trainer = models.trainer
    segments = {
        name: replace(getattr(trainer, name), alpha_s=getattr(trainer, name).alpha_s * scale)
        for name in ("old_logprob", "reference", "update")
    }
    return replace(models, trainer=replace(trainer, **segments))


def splits(setting: Setting) -> tuple[int, ...]:
    """Return the rollout GPUs of the splits that are tried: quarters of the cluster."""
    step = setting.num_gpus // SPLIT_STEP_SHARE
    return tuple(step * share for share in range(1, SPLIT_STEP_SHARE))


def unsupported_reason(policy: str, setting: Setting, rollout_gpus: int) -> str:
    """Return why a baseline cannot run a setting; empty if it can. Source: paper.md, "excluded"."""
    if policy in ("areal", "roll") and "." in setting.staleness:
        return f"{policy}: its staleness is an integer, s = {setting.staleness}"
    if policy == "areal" and setting.prompts % rollout_gpus:
        return f"areal: {setting.prompts} prompts do not divide by {rollout_gpus} rollout replicas"
    return ""


def num_steps(setting: Setting, measured: int) -> int:
    """Return the steps to run so that about ``measured`` remain after the paper's head and tail are cut."""
    ahead = ceil(Decimal(setting.staleness))
    return measured + max(1, ahead) + ahead


@cache
def _plan(cell: Cell) -> Plan:
    job = cell.setting.job(cell.policy, cell.rollout_gpus, cell.num_steps)
    plan = build_plan(job, build_workload(job, SEED))
    return replace(plan, models=scaled_trainer(plan.models, cell.trainer_scale))


@cache
def planned_split(setting: Setting, trainer_scale: float) -> int:
    """Return the rollout GPUs that Algorithm 1 chooses among `splits`: largest ``min(lambda_r, lambda_t)``.

    Source: paper.md, "Static planner".
    """

    def rate(rollout_gpus: int) -> float:
        plan = _plan(Cell(setting, "bidirl", rollout_gpus, trainer_scale, 1))
        predictor = Predictor(plan)
        rollout_s = predictor.rollout_s(plan.groups_per_step, plan.rollout_replicas, 0)
        return 1.0 / max(rollout_s, predictor.train_s(batch_work(plan), plan.train_replicas))

    return max(splits(setting), key=rate)


@cache
def run_cell(cell: Cell) -> dict[str, Any]:
    """Return the summary of one simulation (see docs/reference_summary.md)."""
    job = cell.setting.job(cell.policy, cell.rollout_gpus, cell.num_steps)
    plan = _plan(cell)
    record = Driver(plan, build_workload(job, SEED)).run()
    return summarise(record, alone_decode_s=alone_decode_s(plan))


def rates(
    setting: Setting, policies: Sequence[str], rollout_gpus: int, trainer_scale: float, measured: int
) -> dict[str, float]:
    """Return tokens per second by policy on one split; a policy that cannot run the cell is left out."""
    steps = num_steps(setting, measured)
    found = {}
    for policy in policies:
        if unsupported_reason(policy, setting, rollout_gpus):
            continue
        try:
            summary = run_cell(Cell(setting, policy, rollout_gpus, trainer_scale, steps))
        except InputError:  # does not fit; the excluded configurations list it with its reason
            continue
        found[policy] = float(summary["tokens_per_s"])
    return found
