"""The public re-implementation's job (16 devices, 4R:12T, 60 prompts, 2K) under assumed parameters.

Source of what is stated: verl-project/verl-recipe issue #129. Everything else is a field of `ParameterSet`
or a named assumption below, and is counted.
"""

from dataclasses import asdict, dataclass, fields, replace
from decimal import Decimal
from functools import cache, lru_cache
from math import ceil
from pathlib import Path
from typing import Any

from bidirl.models.architecture import ModelConfig
from bidirl.models.cluster import ClusterConfig
from bidirl.models.estimate import Estimate, Source
from bidirl.models.stages import StageModels, WorkloadSizes, predict_stage_models
from bidirl.models.trainer import SegmentCost
from bidirl.models.transfer import SwitchCosts, SyncModel
from bidirl.planner.plan import Plan
from bidirl.planner.policy import AdmissionRule, preset
from bidirl.planner.sections import EngineConfig
from bidirl.sim.driver import Driver
from bidirl.sim.metrics import summarise
from bidirl.sim.reality.table import published
from bidirl.traces.workload import Workload, WorkloadConfig
from bidirl.traces.workload_config import LengthTable

__all__ = [
    "GROUPS_PER_REPLICA",
    "POLICIES",
    "PROMPT_TOKENS",
    "STALENESS",
    "ParameterSet",
    "measured_rates",
    "rfc_models",
    "rfc_plan",
    "rfc_summary",
    "rfc_workload",
]

ROLLOUT_GPUS, TRAIN_GPUS, PROMPTS, MAX_RESPONSE_TOKENS = 4, 12, 60, 2048
"""Source: verl-project/verl-recipe#129."""
SAMPLES_PER_PROMPT = 8
"""Not stated; the paper's n."""
PROMPT_TOKENS = 384
"""Not stated; 128 text and 256 image tokens as our packaged geo3k law assumes. Only its sum with the
response enters the absolute rate, so it is no parameter of its own."""
GROUPS_PER_REPLICA = 16
"""Groups that a rollout replica holds. Source: verl fully_async ``concurrent_samples_per_replica``."""
POLICIES = ("no_borrow", "opportunistic", "bidirl")
STALENESS = ("0", "1", "4")
MEASURED_STEPS = 10
"""Steps measured per simulation, beside the head and tail that the paper's rule drops."""
SEED = 20260804
NOTE = "one of many parameter sets that fit verl-project/verl-recipe#129; not measured"


@dataclass(frozen=True, slots=True)
class ParameterSet:
    """What the source does not print: six numbers and, once, a factor on the switch costs."""

    response_tokens: float
    """Mean response after the cut at 2K."""
    sigma: float
    """Standard deviation of log length (log-normal, cut at 2K)."""
    sync_s: float
    """Seconds of one weight sync."""
    fixed_factor: float
    """Factor on the fixed seconds of an engine iteration, against a 4B decoder on an A6000: small values
    make a rollout replica's time proportional to its samples, large ones a matter of the longest."""
    rollout_factor: float
    """Factor on all engine iteration times, same reference."""
    train_factor: float
    """Factor on all trainer times, same reference."""
    switch_factor: float = 1.0
    """Factor on the paper's switch costs of its 4B model (not fitted)."""


@cache
def measured_rates() -> dict[tuple[str, str], float]:
    """Return the published tokens/s by (policy, staleness)."""
    rows = published("bidirl_ablation_rfc")
    return {
        (policy, f"{float(row['staleness']):g}"): float(row[policy]) for row in rows for policy in POLICIES
    }


@cache
def _reference() -> StageModels:
    """Return the stage models that the factors multiply: Qwen3-VL-4B on A6000, priors only."""
    cluster = ClusterConfig(gpu="A6000", num_nodes=2, gpus_per_node=8, inter_node_gbit_per_s=200.0)
    return predict_stage_models(
        cluster,
        ModelConfig(name="Qwen3-VL-4B").resolve(Path()),
        EngineConfig(),
        rollout_tp=1,
        train_tp=1,
        rollout_gpus=ROLLOUT_GPUS,
        train_gpus=TRAIN_GPUS,
        workload=WorkloadSizes(PROMPT_TOKENS, 1000.0, PROMPT_TOKENS + MAX_RESPONSE_TOKENS),
    )


def rfc_models(chosen: ParameterSet) -> StageModels:
    """Return the stage models of a parameter set; the trainer's communication is in its compute."""
    base = _reference()
    iteration: Any = base.iteration
    times = {one.name: getattr(iteration, one.name) * chosen.rollout_factor for one in fields(iteration)}
    for name in ("tau_pre_s", "tau_dec_s"):
        times[name] *= chosen.fixed_factor
    trainer = base.trainer

    def slower(cost: SegmentCost) -> SegmentCost:
        return replace(
            cost, tau_s=cost.tau_s * chosen.train_factor, alpha_s=cost.alpha_s * chosen.train_factor
        )

    switch = {one.name: getattr(base.switch, one.name) * chosen.switch_factor for one in fields(SwitchCosts)}
    return StageModels(
        iteration=replace(iteration, **times),
        limits=base.limits,
        trainer=replace(
            trainer,
            old_logprob=slower(trainer.old_logprob),
            reference=slower(trainer.reference),
            update=slower(trainer.update),
            alpha_comm_s=0.0,
            beta_comm_s_per_byte=0.0,
            beta_inter_s_per_byte=0.0,
        ),
        sync=SyncModel(chosen.sync_s, 0.0, 0.0, 0.0, 1, 0.0, 0.0),
        switch=SwitchCosts(**switch),
        sources={
            f"{part}.{name}": Estimate.exact(value, Source.ASSUMED, NOTE)
            for part, values in (
                ("iteration", times),
                ("switch", switch),
                ("sync", {"fixed_s": chosen.sync_s}),
            )
            for name, value in values.items()
        },
        provenance={"what": NOTE, "set": ", ".join(f"{k} = {v:.6g}" for k, v in asdict(chosen).items())},
    )


def _num_steps(staleness: str) -> int:
    """Return the steps to simulate under a staleness bound."""
    ahead = ceil(Decimal(staleness))
    return MEASURED_STEPS + max(1, ahead) + ahead


@lru_cache(maxsize=8)
def rfc_workload(response_tokens: float, sigma: float, steps: int) -> Workload:
    """Return the samples; equal for all sets of the same length law (common random numbers).

    Raises:
        InputError: no log-normal with this spread has this mean under the cap.
    """
    config = WorkloadConfig(
        prompts_per_step=PROMPTS,
        samples_per_prompt=SAMPLES_PER_PROMPT,
        max_response_tokens=MAX_RESPONSE_TOKENS,
        lengths=LengthTable(mean=response_tokens, sigma=sigma),
        num_steps=steps,
        prompt_tokens=PROMPT_TOKENS,
        image_tokens=0,
    )
    return Workload(config, Path(), SEED)


def rfc_plan(
    chosen: ParameterSet, policy: str, staleness: str, admission: AdmissionRule = AdmissionRule.COUNTING
) -> tuple[Plan, Workload]:
    """Return plan and samples of one cell of the published table."""
    steps = _num_steps(staleness)
    workload = rfc_workload(chosen.response_tokens, chosen.sigma, steps)
    choices = preset(
        policy,
        staleness=Decimal(staleness),
        admission=admission,
        concurrency_groups_per_replica=GROUPS_PER_REPLICA,
    )
    plan = Plan(
        num_steps=steps,
        groups_per_step=PROMPTS,
        samples_per_group=SAMPLES_PER_PROMPT,
        mini_batches=1,
        rollout_gpus=ROLLOUT_GPUS,
        train_gpus=TRAIN_GPUS,
        rollout_replica_gpus=1,
        train_replica_gpus=1,
        policy=choices,
        models=rfc_models(chosen),
        priors=(workload.prior(0),),
        old_logprob=True,
        reference=False,
    )
    return plan, workload


def rfc_summary(
    chosen: ParameterSet, policy: str, staleness: str, admission: AdmissionRule = AdmissionRule.COUNTING
) -> dict[str, Any]:
    """Return the summary of one simulated cell (see docs/reference_summary.md)."""
    plan, workload = rfc_plan(chosen, policy, staleness, admission)
    return summarise(Driver(plan, workload).run())
