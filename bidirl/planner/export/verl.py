"""Export to verl: fully asynchronous, with dynamic schedule, V1 separate_async, and the synchronous V1.

Conventions: frameworks.md sections 2.1 and 2.3 to 2.5; the options are those of verl 0.9.1.
"""

from decimal import Decimal
from math import ceil

from bidirl.errors import InputError
from bidirl.planner.export.behaviour import Behaviour, differences
from bidirl.planner.export.plan_file import ExportPlan, Layout, TrainStyle
from bidirl.planner.export.recipe import Recipe, Syntax, Value
from bidirl.planner.export.shapes import PoolShape, pool_shapes, single_shape
from bidirl.planner.export.staleness import age_threshold, verl_float_note
from bidirl.planner.policy import BatchOrder, Expiry, Granularity, InFlight, Lending

__all__ = ["dynamic_schedule", "fully_async", "separate_async", "sync"]

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
V1 = "trainer.v1"
HYBRID_MEMORY_SHARE = Decimal("0.4")
"""Share of GPU memory for an engine that sleeps beside the trainer; verl advises 0.3 to 0.5.

Source: verl 0.9.1 ``fully_async_ppo_trainer.yaml``, comment of ``standalone_gpu_memory_utilization``.
"""
FULLY_ASYNC = Behaviour(
    in_flight=(InFlight.CONTINUE_RECOMPUTE, InFlight.DRAIN),
    batch_order=(BatchOrder.READY_FIRST,),
    granularity=(Granularity.STREAMED, Granularity.FULL),
)
DYNAMIC = Behaviour(
    in_flight=FULLY_ASYNC.in_flight,
    batch_order=FULLY_ASYNC.batch_order,
    granularity=FULLY_ASYNC.granularity,
    lends_to_rollout=True,
)
SEPARATE = Behaviour(
    in_flight=(InFlight.CONTINUE_RECOMPUTE,),
    batch_order=(BatchOrder.OLDEST_FIRST,),
    expiry=(Expiry.NEVER, Expiry.DROP, Expiry.WAIT),
    granularity=(Granularity.STREAMED,),
    lends_to_rollout=True,
)
SYNC = Behaviour(in_flight=(InFlight.DRAIN,), batch_order=(BatchOrder.ISSUE_ORDER,))


def fully_async(plan: ExportPlan) -> Recipe:
    """Return the options of the fully asynchronous trainer; ``staleness_threshold`` is ``s`` itself.

    It is a fraction of the groups between two syncs: with ``require_batches * trigger_parameter_sync_step
    * ppo_mini_batch_size = B`` the rollouter may start ``floor((1 + s) * B)`` less its backlog.

    Raises:
        InputError: the pools have no shape that verl takes, or the plan is colocated.
    """
    return _fully_async(plan, "verl_fully_async", FULLY_ASYNC)


def dynamic_schedule(plan: ExportPlan) -> Recipe:
    """Return the options of the fully asynchronous trainer whose idle trainer GPUs generate.

    Raises:
        InputError: as ``fully_async``.
    """
    return _fully_async(plan, "verl_dynamic_schedule", DYNAMIC)


def _fully_async(plan: ExportPlan, framework: str, behaviour: Behaviour) -> Recipe:
    rollout, train = _two_pools(plan, framework)
    streamed = plan.policy.granularity is Granularity.STREAMED
    batches, syncs = (1, plan.mini_batches) if streamed else (plan.mini_batches, 1)
    per_replica = plan.policy.concurrency_groups_per_replica
    concurrency = per_replica or ceil(plan.engine.max_num_seqs / plan.samples_per_prompt)
    settings: dict[str, Value] = {
        **_pool("trainer", train),
        **_pool("rollout", rollout),
        "actor_rollout_ref.hybrid_engine": False,
        "data.train_batch_size": 0,
        "data.gen_batch_size": 1,
        **_common(plan),
        "async_training.staleness_threshold": plan.staleness,
        "async_training.require_batches": batches,
        "async_training.trigger_parameter_sync_step": syncs,
        "async_training.partial_rollout": plan.policy.in_flight is not InFlight.DRAIN,
        "async_training.concurrent_samples_per_replica": concurrency,
        "algorithm.rollout_correction.bypass_mode": not plan.old_logprob,
    }
    notes = [*verl_float_note(plan.prompts_per_update * batches, plan.staleness, syncs)]
    if plan.staleness > 0:
        notes.append(
            "Differs: verl renews its budget at each sync and takes the backlog off; the plan's bound "
            "counts from the start. The two agree while nothing is dropped or filtered."
        )
    if per_replica is None:
        notes.append(
            f"concurrent_samples_per_replica counts groups, by default 16; {concurrency} fill an engine of "
            f"max_num_seqs {plan.engine.max_num_seqs}, as the plan assumes."
        )
    if behaviour.lends_to_rollout:
        settings |= {
            "async_training.use_dynamic_resource_scheduling": True,
            "async_training.dynamic_schedule_policy": "default",
            "async_training.dynamic_schedule_enable_rebalance": True,
            f"{ROLLOUT}.free_cache_engine": True,
            f"{ROLLOUT}.gpu_memory_utilization": HYBRID_MEMORY_SHARE,
            f"{ROLLOUT}.standalone_gpu_memory_utilization": plan.engine.gpu_memory_utilization,
        }
        notes.append(
            f"gpu_memory_utilization {HYBRID_MEMORY_SHARE} is that of the engines which sleep beside the "
            "trainer (verl advises 0.3 to 0.5); the plan's own goes to the rollout pool."
        )
    config = "fully_async_ppo_megatron_trainer" if _is_megatron(plan) else "fully_async_ppo_trainer"
    command = (
        "python3 -m verl.experimental.fully_async_policy.fully_async_main --config-path=config "
        f"--config-name={config}.yaml"
    )
    notes += [*_layout_notes(plan), *differences(plan, framework, behaviour)]
    return Recipe(framework, Syntax.HYDRA, command, settings, tuple(notes))


def separate_async(plan: ExportPlan) -> Recipe:
    """Return the options of V1's ``separate_async`` trainer.

    Run-ahead is ``num_warmup_batches = s`` (fractions of a batch are taken); the age limit is a second knob.

    Raises:
        InputError: the pools have no shape that verl takes, or the plan is colocated.
    """
    framework = "verl_v1_separate_async"
    rollout, train = _two_pools(plan, framework)
    settings: dict[str, Value] = {
        "trainer.use_v1": True,
        f"{V1}.trainer_mode": "separate_async",
        **_pool("trainer", train),
        **_pool(ROLLOUT, rollout),
        "data.train_batch_size": plan.prompts_per_step,
        "data.gen_batch_size": 1,
        **_common(plan),
        f"{ROLLOUT}.checkpoint_engine.backend": "nccl",
        f"{V1}.separate_async.parameter_sync_step": plan.mini_batches,
        f"{V1}.separate_async.num_warmup_batches": plan.staleness,
        "algorithm.rollout_correction.bypass_mode": not plan.old_logprob,
    }
    match plan.policy.expiry:
        case Expiry.NEVER:
            settings[f"{V1}.sampler.max_off_policy_threshold"] = None
        case expiry:
            settings[f"{V1}.sampler.max_off_policy_threshold"] = age_threshold(plan.staleness)
            settings[f"{V1}.sampler.max_off_policy_strategy"] = "wait" if expiry is Expiry.WAIT else "drop"
    lends = plan.policy.lending in (Lending.ROLLOUT_ON_TRAIN, Lending.BOTH)
    settings["actor_rollout_ref.hybrid_engine"] = lends
    settings[f"{V1}.separate_async.hybrid_rollout.enable_switch"] = lends
    settings |= _engine_choice(plan)
    notes = [*_layout_notes(plan), *differences(plan, framework, SEPARATE)]
    if lends:
        notes.append(
            "gpu_memory_utilization is one number for the rollout pool and for the engines that sleep "
            "beside the trainer, where verl advises 0.3 to 0.5; the plan assumes "
            f"{plan.engine.gpu_memory_utilization}."
        )
    return Recipe(framework, Syntax.HYDRA, "python3 -m verl.trainer.main_ppo", settings, tuple(notes))


def sync(plan: ExportPlan) -> Recipe:
    """Return the options of the synchronous trainer, whose roles take turns on all GPUs.

    Raises:
        InputError: the plan has two pools, or GPUs that cannot be spread evenly.
    """
    framework = "verl_sync"
    if not plan.colocated:
        raise InputError(
            "placement = disaggregated: verl_sync takes turns on all GPUs; export to verl_fully_async"
        )
    settings: dict[str, Value] = {
        "trainer.use_v1": True,
        f"{V1}.trainer_mode": "sync",
        **_pool("trainer", single_shape(plan.train_gpus, plan.train, plan, framework)),
        "data.train_batch_size": plan.prompts_per_step,
        **_common(plan),
        f"{ROLLOUT}.free_cache_engine": True,
        **_engine_choice(plan),
    }
    notes = (*_layout_notes(plan), *differences(plan, framework, SYNC))
    return Recipe(framework, Syntax.HYDRA, "python3 -m verl.trainer.main_ppo", settings, notes)


def _two_pools(plan: ExportPlan, framework: str) -> tuple[PoolShape, PoolShape]:
    if plan.colocated:
        raise InputError(f"placement = colocated: {framework} needs two pools; export to verl_sync")
    return pool_shapes(plan, framework)


def _pool(prefix: str, shape: PoolShape) -> dict[str, Value]:
    return {f"{prefix}.nnodes": shape.num_nodes, f"{prefix}.n_gpus_per_node": shape.gpus_per_node}


def _common(plan: ExportPlan) -> dict[str, Value]:
    return {
        "data.max_response_length": plan.max_response_tokens,
        f"{ACTOR}.ppo_mini_batch_size": plan.prompts_per_update,
        **_train_layout(plan),
        f"{ROLLOUT}.name": "vllm",
        f"{ROLLOUT}.n": plan.samples_per_prompt,
        f"{ROLLOUT}.tensor_model_parallel_size": plan.rollout.tp,
        f"{ROLLOUT}.pipeline_model_parallel_size": plan.rollout.pp,
        f"{ROLLOUT}.expert_parallel_size": _expert_size(plan.rollout),
        **_engine_data(plan.rollout),
        f"{ROLLOUT}.gpu_memory_utilization": plan.engine.gpu_memory_utilization,
        f"{ROLLOUT}.max_num_seqs": plan.engine.max_num_seqs,
        f"{ROLLOUT}.max_num_batched_tokens": plan.engine.max_num_batched_tokens,
        f"{ROLLOUT}.enable_prefix_caching": plan.engine.prefix_caching,
    }


def _is_megatron(plan: ExportPlan) -> bool:
    return plan.train_style is TrainStyle.MEGATRON


def _train_layout(plan: ExportPlan) -> dict[str, Value]:
    """Return the trainer's sizes; FSDP has a sequence size (Ulysses) in place of a tensor size."""
    if not _is_megatron(plan):
        size = plan.train.tp * plan.train.cp
        roles = ("actor", "ref") if plan.reference else ("actor",)
        key = "actor_rollout_ref.{}.fsdp_config.ulysses_sequence_parallel_size"
        return {key.format(role): size for role in roles} if size > 1 else {}
    context = {f"{ACTOR}.megatron.context_parallel_size": plan.train.cp} if plan.train.cp > 1 else {}
    return {
        f"{ACTOR}.megatron.tensor_model_parallel_size": plan.train.tp,
        f"{ACTOR}.megatron.pipeline_model_parallel_size": plan.train.pp,
        f"{ACTOR}.megatron.expert_model_parallel_size": plan.train.ep,
        **context,
    }


def _engine_choice(plan: ExportPlan) -> dict[str, Value]:
    return {"model_engine": "megatron"} if _is_megatron(plan) else {}


def _expert_size(layout: Layout) -> int:
    """Return an expert size that vLLM takes under verl: 1, or all GPUs of the engine.

    Source: verl 0.9.1 ``rollout.yaml``: above 1 it must equal TP x DP.
    """
    return layout.tp * layout.engine_groups if layout.ep > 1 else 1


def _engine_data(layout: Layout) -> dict[str, Value]:
    return {f"{ROLLOUT}.data_parallel_size": layout.engine_groups} if layout.engine_groups > 1 else {}


def _layout_notes(plan: ExportPlan) -> list[str]:
    notes = []
    if plan.train_style is TrainStyle.FSDP and plan.train.tp > 1:
        notes.append(
            f"Differs: train tp {plan.train.tp}. FSDP in verl has no tensor parallelism; the same GPUs share "
            "each sequence instead (Ulysses), with as many ranks and the same states."
        )
    if plan.train_style is TrainStyle.FSDP and plan.train.pp > 1:
        notes.append(f"Not expressed: train layout pp {plan.train.pp}. FSDP in verl has no pipeline.")
    if plan.train_style is TrainStyle.FSDP and plan.train.ep > 1:
        notes.append(
            f"Not expressed: train layout ep {plan.train.ep}. FSDP in verl shards experts like the rest."
        )
    if plan.rollout.ep != _expert_size(plan.rollout):
        notes.append(
            f"Rounded: rollout ep {plan.rollout.ep} became {_expert_size(plan.rollout)}; with vLLM it is 1 "
            "or tensor x data size."
        )
    if plan.reference:
        notes.append(f"The plan counts a reference pass: keep {ACTOR}.use_kl_loss=True.")
    return notes
