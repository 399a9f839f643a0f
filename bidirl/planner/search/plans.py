"""From a candidate to a plan that the scheduler, the simulator and the executor carry out."""

from dataclasses import replace

from bidirl.models.estimate import Source, worst
from bidirl.planner.build import build_plan, build_workload, stage_models
from bidirl.planner.job import Job
from bidirl.planner.plan import Plan
from bidirl.planner.policy import Gate, Lending, Placement, PolicyConfig, preset
from bidirl.planner.search.candidates import Candidate, Search
from bidirl.planner.search.layouts import Style
from bidirl.planner.search.question import Question
from bidirl.planner.sections import Partition
from bidirl.traces.workload import Workload

__all__ = ["job_of", "plan_of", "policy_of", "question_of", "with_steps"]


def question_of(job: Job, workload: Workload) -> Question:
    """Return the search's question; models of the job's file replace the priors."""
    if job.models.file is None:
        return Question.of(job, workload)
    written = job.partition or Partition(Placement.DISAGGREGATED, 1, 1, 1, 1)
    return Question.of(job, workload, stage_models(job, workload, written))


def policy_of(job: Job, candidate: Candidate) -> PolicyConfig:
    """Return the job's policy with the candidate's lending; a colocated candidate takes turns on-policy."""
    policy = job.policy
    if candidate.placement is Placement.COLOCATED:
        return preset("colocated_sync")
    if policy.name == "colocated_sync":
        policy = preset("no_borrow", staleness=policy.staleness)
    gate = policy.gate
    if candidate.lending is not Lending.NONE and gate is Gate.NONE and policy.lending is Lending.NONE:
        gate = Gate.MODELS
    return policy.model_copy(update={"lending": candidate.lending, "gate": gate})


def with_steps(job: Job, num_steps: int) -> Job:
    """Return the job cut to, or stretched over, ``num_steps`` steps."""
    return replace(job, workload=job.workload.model_copy(update={"num_steps": num_steps}))


def job_of(job: Job, search: Search, candidate: Candidate) -> Job:
    """Return the job with the candidate's pools and policy.

    Replica sizes stand for layouts here: `plan_of` puts the layout's models in place of those of a pure
    tensor-parallel one. KV memory is that of the layout, so that no other layout's limits are asked for.
    """
    pool = next(pool for pool in search.rollouts if pool.layout == candidate.rollout)
    engine = job.engine
    if not _is_plain(candidate):
        limits = pool.limits
        engine = engine.model_copy(
            update={
                "kv_tokens": limits.kv_tokens,
                "max_num_seqs": limits.max_num_seqs,
                "max_num_batched_tokens": limits.max_num_batched_tokens,
            }
        )
    partition = Partition(
        candidate.placement,
        candidate.rollout_gpus,
        candidate.train_gpus,
        candidate.rollout.tp,
        candidate.train.tp,
    )
    return replace(job, partition=partition, policy=policy_of(job, candidate), engine=engine)


def _is_plain(candidate: Candidate) -> bool:
    """Return whether [partition] can say the layouts: tensor parallelism and full sharding alone."""
    rollout, train = candidate.rollout, candidate.train
    return rollout.gpus == rollout.tp and train.style is Style.FSDP and train.cp == 1


def plan_of(job: Job, search: Search, candidate: Candidate, workload: Workload | None = None) -> Plan:
    """Return the candidate's plan; for layouts that [partition] can say, the one that it gives.

    Raises:
        InputError: the job's policy and the candidate do not go together.
    """
    seed_free = workload or build_workload(job, 0)
    mine = job_of(job, search, candidate)
    plan = build_plan(mine, seed_free)
    if search.question.measured is not None:
        return _moved(plan, search, candidate)
    if _is_plain(candidate):
        return plan
    pool = next(pool for pool in search.rollouts if pool.layout == candidate.rollout)
    train = next(pool for pool in search.trains if pool.layout == candidate.train)
    gpus = candidate.train_gpus or candidate.rollout_gpus
    micro = next(
        (tokens for tokens in train.rungs() if train.budget(gpus, tokens).fits),
        search.question.longest_tokens,
    )
    trainer = train.trainer_of(gpus, micro)
    models = replace(
        plan.models,
        iteration=pool.iteration,
        limits=pool.limits,
        trainer=trainer,
        sources={**plan.models.sources, **train.sources, **pool.sources},
        provenance={
            **plan.models.provenance,
            "rollout": f"{candidate.rollout_gpus} GPUs, {candidate.rollout.label}",
            "train": f"{gpus} GPUs, {candidate.train.label}",
        },
    )
    return replace(
        plan,
        rollout_replica_gpus=candidate.rollout.gpus,
        train_replica_gpus=candidate.train.gpus,
        models=models,
    )


def _moved(plan: Plan, search: Search, candidate: Candidate) -> Plan:
    """Return a plan on the models of a file with those of the candidate's tensor sizes."""
    question, sizes = search.question, (candidate.rollout.tp, candidate.train.tp)
    if sizes == question.measured_tp:
        return plan
    pool = next(pool for pool in search.rollouts if pool.layout == candidate.rollout)
    train = next(pool for pool in search.trains if pool.layout == candidate.train)
    gpus = candidate.train_gpus or candidate.rollout_gpus
    trainer = train.trainer_of(gpus, question.longest_tokens)
    moved = tuple(
        part
        for part, new, old in zip(("iteration.", "trainer."), sizes, question.measured_tp, strict=True)
        if new != old
    )
    sources = {
        name: replace(each, source=worst([each.source, Source.TRANSFERRED]))
        if name.startswith(moved)
        else each
        for name, each in plan.models.sources.items()
    }
    models = replace(
        plan.models, iteration=pool.iteration, limits=pool.limits, trainer=trainer, sources=sources
    )
    return replace(plan, models=models)
