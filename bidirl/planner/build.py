"""From a job to a plan: stage models, priors, layouts, and the partition where the job leaves it open."""

from dataclasses import replace
from math import ceil
from pathlib import Path

from bidirl.errors import InputError
from bidirl.models.architecture import Architecture
from bidirl.models.estimate import Estimate, Source
from bidirl.models.stages import StageModels, WorkloadSizes, predict_stage_models
from bidirl.planner.job import Job
from bidirl.planner.partition import best_partition
from bidirl.planner.plan import Plan
from bidirl.planner.policy import Placement
from bidirl.planner.sections import Partition
from bidirl.traces.workload import Workload

__all__ = ["build_plan", "build_workload", "stage_models"]


def build_workload(job: Job, seed: int) -> Workload:
    """Return the random side of a job under a seed."""
    return Workload(job.workload, job.base_dir, seed)


def stage_models(job: Job, workload: Workload, partition: Partition) -> StageModels:
    """Return the stage models of a job: its file where it names one, else priors; overrides on top."""
    config = job.models
    if config.file is not None:
        models = StageModels.load(Path(job.base_dir, config.file))
    else:
        prior = workload.prior(0)
        architecture: Architecture = job.model.resolve(job.base_dir)
        models = predict_stage_models(
            job.cluster,
            architecture,
            job.engine,
            rollout_tp=partition.rollout_tp,
            train_tp=partition.train_tp,
            rollout_gpus=partition.rollout_gpus,
            train_gpus=partition.train_gpus or partition.rollout_gpus,
            workload=WorkloadSizes(
                prior.prompt_mean_tokens, prior.mean_tokens, ceil(prior.prompt_mean_tokens) + prior.max_tokens
            ),
        )
    sources = dict(models.sources)
    switch, sync = models.switch, models.sync
    if config.switch is not None:
        given = config.switch.model_dump(exclude_none=True)
        switch = replace(switch, **given)
        for name, value in given.items():
            sources[f"switch.{name}"] = Estimate.exact(value, Source.MEASURED, "given in the job")
    if config.sync_s is not None:
        sync = replace(
            sync, fixed_s=config.sync_s, s_per_byte=0.0, per_tensor_s=0.0, per_hop_s=0.0, apply_s=0.0
        )
        sources["sync.fixed_s"] = Estimate.exact(config.sync_s, Source.MEASURED, "given in the job")
    return replace(models, switch=switch, sync=sync, sources=sources)


def build_plan(job: Job, workload: Workload) -> Plan:
    """Return the plan of a job; without a [partition] section Algorithm 1 chooses the pools.

    Raises:
        InputError: numbers that a model needs are missing, or a rule is broken.
        NoFeasiblePlan: no partition of the cluster fits.
    """
    if job.partition is not None:
        return _plan(job, workload, job.partition)
    return best_partition(job, lambda partition: _plan(job, workload, partition))


def _plan(job: Job, workload: Workload, partition: Partition) -> Plan:
    config = job.workload
    models = stage_models(job, workload, partition)
    priors = tuple(workload.prior(step) for step in range(config.num_steps))
    if all(prior == priors[0] for prior in priors):
        priors = priors[:1]
    prior = priors[0]
    longest = ceil(prior.prompt_mean_tokens) + prior.max_tokens
    capacity = models.limits.kv_tokens // models.limits.block_size - 1
    if longest > capacity * models.limits.block_size:
        raise InputError(
            f"a sample of {longest} tokens exceeds the engine's {models.limits.kv_tokens} KV tokens: lower "
            "max_response_tokens, raise partition.rollout_tp or use a larger GPU"
        )
    resident = min(
        models.limits.max_num_seqs,
        models.limits.kv_tokens / (prior.prompt_mean_tokens + prior.mean_tokens),
    )
    return Plan(
        num_steps=config.num_steps,
        groups_per_step=config.prompts_per_step,
        samples_per_group=config.samples_per_prompt,
        mini_batches=config.mini_batches,
        rollout_gpus=partition.rollout_gpus,
        train_gpus=0 if partition.placement is Placement.COLOCATED else partition.train_gpus,
        rollout_replica_gpus=partition.rollout_tp,
        train_replica_gpus=partition.train_tp,
        policy=job.policy,
        models=models,
        priors=priors,
        old_logprob=config.old_logprob == "on",
        reference=config.reference == "on",
        scoring=config.filter_rate > 0.0 or config.reward_s != 0.0,
        reward_capacity=config.reward_capacity,
        group_slots=max(1, ceil(resident / config.samples_per_prompt)),
        notes=(*job.notices, *workload.notes),
    )
