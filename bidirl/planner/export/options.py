"""The options that exports may write, each with the file and version in which it was looked up.

A framework's options change between releases: check the version that runs against the one named here. Those
of packages were checked by their own parser or schema (``tests/test_export_frameworks.py``); those of
repositories by reading the named file at the named commit.
"""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["OPTIONS", "VERSIONS", "Source", "unknown_options"]


@dataclass(frozen=True, slots=True)
class Source:
    """A file of a framework, and the version in which it has an option."""

    project: str
    version: str
    """A release of the package registry, or the first digits of a commit."""
    path: str


def _all(source: Source, *names: str) -> dict[str, Source]:
    return dict.fromkeys(names, source)


VERL = "verl-project/verl"
_VERL_PPO = Source(VERL, "0.9.1", "verl/trainer/config/ppo_trainer.yaml")
_VERL_ASYNC = Source(
    VERL, "0.9.1", "verl/experimental/fully_async_policy/config/fully_async_ppo_trainer.yaml"
)
_VERL_ROLLOUT = Source(VERL, "0.9.1", "verl/trainer/config/rollout/rollout.yaml")
_VERL_ACTOR = Source(VERL, "0.9.1", "verl/trainer/config/actor/actor.yaml")
_VERL_MEGATRON = Source(VERL, "0.9.1", "verl/trainer/config/engine/megatron.yaml")
_VERL_FSDP = Source(VERL, "0.9.1", "verl/trainer/config/engine/fsdp.yaml")
_VERL_DATA = Source(VERL, "0.9.1", "verl/trainer/config/data/legacy_data.yaml")
_VERL_CORRECTION = Source(VERL, "0.9.1", "verl/trainer/config/algorithm/rollout_correction.yaml")

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"

_VERL_SHARED: Mapping[str, Source] = {
    **_all(_VERL_PPO, "trainer.nnodes", "trainer.n_gpus_per_node", "actor_rollout_ref.hybrid_engine"),
    **_all(_VERL_DATA, "data.train_batch_size", "data.gen_batch_size", "data.max_response_length"),
    **_all(_VERL_ACTOR, f"{_ACTOR}.ppo_mini_batch_size"),
    **_all(
        _VERL_MEGATRON,
        f"{_ACTOR}.megatron.tensor_model_parallel_size",
        f"{_ACTOR}.megatron.pipeline_model_parallel_size",
        f"{_ACTOR}.megatron.expert_model_parallel_size",
        f"{_ACTOR}.megatron.context_parallel_size",
    ),
    **_all(
        _VERL_FSDP,
        f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
        "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size",
    ),
    **_all(
        _VERL_ROLLOUT,
        f"{_ROLLOUT}.name",
        f"{_ROLLOUT}.n",
        f"{_ROLLOUT}.tensor_model_parallel_size",
        f"{_ROLLOUT}.pipeline_model_parallel_size",
        f"{_ROLLOUT}.expert_parallel_size",
        f"{_ROLLOUT}.data_parallel_size",
        f"{_ROLLOUT}.gpu_memory_utilization",
        f"{_ROLLOUT}.max_num_seqs",
        f"{_ROLLOUT}.max_num_batched_tokens",
        f"{_ROLLOUT}.enable_prefix_caching",
        f"{_ROLLOUT}.free_cache_engine",
        f"{_ROLLOUT}.checkpoint_engine.backend",
        f"{_ROLLOUT}.nnodes",
        f"{_ROLLOUT}.n_gpus_per_node",
    ),
    **_all(_VERL_CORRECTION, "algorithm.rollout_correction.bypass_mode"),
}
_VERL_FULLY_ASYNC: Mapping[str, Source] = {
    **_VERL_SHARED,
    **_all(
        _VERL_ASYNC,
        "rollout.nnodes",
        "rollout.n_gpus_per_node",
        "async_training.staleness_threshold",
        "async_training.trigger_parameter_sync_step",
        "async_training.require_batches",
        "async_training.partial_rollout",
        "async_training.concurrent_samples_per_replica",
        "async_training.use_dynamic_resource_scheduling",
        "async_training.dynamic_schedule_policy",
        "async_training.dynamic_schedule_enable_rebalance",
        f"{_ROLLOUT}.standalone_gpu_memory_utilization",
    ),
}
_V1 = "trainer.v1"
_VERL_V1: Mapping[str, Source] = {
    **_VERL_SHARED,
    **_all(
        _VERL_PPO,
        "model_engine",
        "trainer.use_v1",
        f"{_V1}.trainer_mode",
        f"{_V1}.separate_async.parameter_sync_step",
        f"{_V1}.separate_async.num_warmup_batches",
        f"{_V1}.separate_async.hybrid_rollout.enable_switch",
        f"{_V1}.sampler.max_off_policy_threshold",
        f"{_V1}.sampler.max_off_policy_strategy",
    ),
}

_AREAL = Source("areal-project/AReaL", "1.0.4", "areal/api/cli_args.py")
_AREAL_OPTIONS = _all(
    _AREAL,
    "cluster.n_nodes",
    "cluster.n_gpus_per_node",
    "rollout.backend",
    "rollout.consumer_batch_size",
    "rollout.max_head_offpolicyness",
    "rollout.max_concurrent_rollouts",
    "rollout.scheduling_strategy.type",
    "rollout.scheduling_strategy.target",
    "actor.backend",
    "actor.ppo_n_minibatches",
    "actor.recompute_logprob",
    "enable_offload",
    "gconfig.n_samples",
    "gconfig.max_new_tokens",
    "train_dataset.batch_size",
    "vllm.gpu_memory_utilization",
    "vllm.max_num_seqs",
)

_ROLL_BASE = Source("alibaba/ROLL", "0a6a47e5", "roll/configs/base_config.py")
_ROLL_RLVR = Source("alibaba/ROLL", "2f732c04", "roll/pipeline/rlvr/rlvr_config.py")
_ROLL_WORKER = Source("alibaba/ROLL", "044104da", "roll/configs/worker_config.py")
_ROLL_EXAMPLE = Source(
    "alibaba/ROLL", "044104da", "examples/qwen3-vl-4B-rlvr_megatron/rlvr_megatron_80G.yaml"
)
_TRAIN_STRATEGY = "actor_train.strategy_args"
_INFER_STRATEGY = "actor_infer.strategy_args"
_ROLL_OPTIONS: Mapping[str, Source] = {
    **_all(
        _ROLL_BASE,
        "num_gpus_per_node",
        "rollout_batch_size",
        "response_length",
        "async_generation_ratio",
        "is_num_return_sequences_expand",
        "enable_old_logprobs_recompute",
    ),
    **_all(_ROLL_RLVR, "num_return_sequences_in_group"),
    **_all(
        _ROLL_WORKER,
        "actor_train.device_mapping",
        "actor_infer.device_mapping",
        "reference.device_mapping",
        f"{_TRAIN_STRATEGY}.strategy_name",
        f"{_INFER_STRATEGY}.strategy_name",
        f"{_INFER_STRATEGY}.strategy_config.tensor_parallel_size",
        f"{_INFER_STRATEGY}.strategy_config.pipeline_parallel_size",
    ),
    **_all(
        _ROLL_EXAMPLE,
        f"{_TRAIN_STRATEGY}.strategy_config.tensor_model_parallel_size",
        f"{_TRAIN_STRATEGY}.strategy_config.pipeline_model_parallel_size",
        f"{_TRAIN_STRATEGY}.strategy_config.expert_model_parallel_size",
        f"{_INFER_STRATEGY}.strategy_config.gpu_memory_utilization",
        "actor_train.training_args.per_device_train_batch_size",
        "actor_train.training_args.gradient_accumulation_steps",
    ),
}

_SLIME = Source("THUDM/slime", "002fa9d6", "slime/utils/arguments.py")
_SLIME_SCRIPT = Source("THUDM/slime", "05a07529", "scripts/run-qwen3-4B.sh")
_SLIME_OPTIONS: Mapping[str, Source] = {
    **_all(
        _SLIME,
        "--actor-num-nodes",
        "--actor-num-gpus-per-node",
        "--rollout-num-gpus",
        "--rollout-num-gpus-per-engine",
        "--num-gpus-per-node",
        "--colocate",
        "--rollout-batch-size",
        "--n-samples-per-prompt",
        "--num-steps-per-rollout",
        "--rollout-max-response-len",
        "--use-rollout-logprobs",
    ),
    **_all(
        _SLIME_SCRIPT,
        "--tensor-model-parallel-size",
        "--pipeline-model-parallel-size",
        "--expert-model-parallel-size",
        "--context-parallel-size",
        "--sglang-mem-fraction-static",
    ),
}

_NEMO = Source("NVIDIA-NeMo/RL", "b26cfeb3", "examples/configs/grpo_math_1B.yaml")
_GENERATION = "policy.generation"
_NEMO_OPTIONS = _all(
    _NEMO,
    "grpo.num_prompts_per_step",
    "grpo.num_generations_per_prompt",
    "grpo.async_grpo.enabled",
    "grpo.async_grpo.max_trajectory_age_steps",
    "grpo.async_grpo.in_flight_weight_updates",
    "grpo.async_grpo.recompute_kv_cache_after_weight_updates",
    "loss_fn.use_importance_sampling_correction",
    "policy.train_global_batch_size",
    "policy.dtensor_cfg.enabled",
    "policy.dtensor_cfg.tensor_parallel_size",
    "policy.dtensor_cfg.context_parallel_size",
    "policy.megatron_cfg.enabled",
    "policy.megatron_cfg.tensor_model_parallel_size",
    "policy.megatron_cfg.pipeline_model_parallel_size",
    "policy.megatron_cfg.expert_model_parallel_size",
    "policy.megatron_cfg.context_parallel_size",
    f"{_GENERATION}.max_new_tokens",
    f"{_GENERATION}.vllm_cfg.async_engine",
    f"{_GENERATION}.vllm_cfg.tensor_parallel_size",
    f"{_GENERATION}.vllm_cfg.pipeline_parallel_size",
    f"{_GENERATION}.vllm_cfg.expert_parallel_size",
    f"{_GENERATION}.vllm_cfg.gpu_memory_utilization",
    f"{_GENERATION}.colocated.enabled",
    f"{_GENERATION}.colocated.resources.gpus_per_node",
    f"{_GENERATION}.colocated.resources.num_nodes",
    "cluster.gpus_per_node",
    "cluster.num_nodes",
)

_SKYRL = Source("NovaSky-AI/SkyRL", "0.3.0", "skyrl/train/config/config.py")
_MEGATRON = "trainer.policy.megatron_config"
_ENGINE = "generator.inference_engine"
_SKYRL_OPTIONS = _all(
    _SKYRL,
    "trainer.strategy",
    "trainer.train_batch_size",
    "trainer.policy_mini_batch_size",
    "trainer.placement.colocate_all",
    "trainer.placement.policy_num_nodes",
    "trainer.placement.policy_num_gpus_per_node",
    "trainer.placement.ref_num_nodes",
    "trainer.placement.ref_num_gpus_per_node",
    "trainer.fully_async.enabled",
    "trainer.fully_async.max_staleness_steps",
    "trainer.fully_async.num_parallel_generation_workers",
    "trainer.fully_async.clear_kv_cache_on_weight_sync",
    f"{_MEGATRON}.tensor_model_parallel_size",
    f"{_MEGATRON}.pipeline_model_parallel_size",
    f"{_MEGATRON}.expert_model_parallel_size",
    f"{_MEGATRON}.context_parallel_size",
    "trainer.policy.sequence_parallel_size",
    "trainer.ref.sequence_parallel_size",
    "generator.n_samples_per_prompt",
    "generator.sampling_params.max_generate_length",
    f"{_ENGINE}.num_engines",
    f"{_ENGINE}.tensor_parallel_size",
    f"{_ENGINE}.pipeline_parallel_size",
    f"{_ENGINE}.expert_parallel_size",
    f"{_ENGINE}.gpu_memory_utilization",
    f"{_ENGINE}.max_num_seqs",
    f"{_ENGINE}.max_num_batched_tokens",
    f"{_ENGINE}.enable_prefix_caching",
)

_PRIME = "PrimeIntellect-ai/prime-rl"
_CONFIGS = "packages/prime-rl-configs/src/prime_rl/configs"
_PRIME_OPTIONS: Mapping[str, Source] = {
    **_all(
        Source(_PRIME, "004274ec", f"{_CONFIGS}/rl.py"),
        "deployment.type",
        "deployment.gpus_per_node",
        "deployment.num_train_gpus",
        "deployment.num_infer_gpus",
        "deployment.num_train_nodes",
        "deployment.num_infer_nodes",
        "deployment.num_infer_replicas",
    ),
    **_all(
        Source(_PRIME, "004274ec", f"{_CONFIGS}/orchestrator.py"),
        "orchestrator.batch_size",
        "orchestrator.group_size",
        "orchestrator.max_off_policy_steps",
        "orchestrator.max_inflight_rollouts",
        "orchestrator.train.sampling.max_completion_tokens",
    ),
    **_all(Source(_PRIME, "004274ec", f"{_CONFIGS}/trainer.py"), "trainer.model.ep"),
    **_all(Source(_PRIME, "0081765e", "src/prime_rl/configs/trainer.py"), "trainer.model.cp"),
    **_all(
        Source(_PRIME, "0d79bdd6", f"{_CONFIGS}/inference.py"),
        "inference.parallel.tp",
        "inference.parallel.dp",
        "inference.gpu_memory_utilization",
        "inference.enable_expert_parallel",
        "inference.enable_prefix_caching",
    ),
}

_OPENRLHF = Source("OpenRLHF/OpenRLHF", "0.11.2", "openrlhf/cli/train_ppo_ray.py")
_OPENRLHF_OPTIONS = _all(
    _OPENRLHF,
    "--actor.num_nodes",
    "--actor.num_gpus_per_node",
    "--ref.num_nodes",
    "--ref.num_gpus_per_node",
    "--train.colocate_actor_ref",
    "--train.colocate_all",
    "--train.async_enable",
    "--train.async_queue_size",
    "--train.partial_rollout_enable",
    "--train.batch_size",
    "--rollout.batch_size",
    "--rollout.n_samples_per_prompt",
    "--rollout.max_new_tokens",
    "--vllm.num_engines",
    "--vllm.tensor_parallel_size",
    "--vllm.gpu_memory_utilization",
    "--vllm.enable_prefix_caching",
    "--vllm.enable_sleep",
    "--ds.tensor_parallel_size",
    "--ds.ring_attn_size",
    "--ds.enable_sleep",
)

OPTIONS: Mapping[str, Mapping[str, Source]] = {
    "areal": _AREAL_OPTIONS,
    "nemo_rl": _NEMO_OPTIONS,
    "openrlhf": _OPENRLHF_OPTIONS,
    "prime_rl": _PRIME_OPTIONS,
    "roll": _ROLL_OPTIONS,
    "skyrl": _SKYRL_OPTIONS,
    "slime": _SLIME_OPTIONS,
    "verl_dynamic_schedule": _VERL_FULLY_ASYNC,
    "verl_fully_async": _VERL_FULLY_ASYNC,
    "verl_sync": _VERL_V1,
    "verl_v1_separate_async": _VERL_V1,
}
"""Framework -> option -> where it was looked up."""

VERSIONS: Mapping[str, str] = {
    name: f"{next(iter(table.values())).project} "
    + ", ".join(dict.fromkeys(source.version for source in table.values()))
    for name, table in OPTIONS.items()
}
"""Framework -> the repository, and the releases or commits that were read."""


def unknown_options(framework: str, names: set[str]) -> list[str]:
    """Return the names that the table of a framework does not have."""
    return sorted(names - OPTIONS[framework].keys())
