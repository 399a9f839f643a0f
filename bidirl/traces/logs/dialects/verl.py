"""verl: colocated, one step off, fully asynchronous, V1 separate; new, old and oldest names of keys.

Source: verl-project/verl 1dda039b (``verl/trainer/ppo``, ``verl/experimental/fully_async_policy``,
``verl/experimental/one_step_off_policy``); names of 2024 and 2025 from public logs of those years.
"""

from bidirl.traces.logs.checks import (
    dp_ranks,
    gpus_from_rate,
    nested_outside,
    ratios_within_one,
    tokens_from_rates,
)
from bidirl.traces.logs.table import Dialect, First, Less, Periodic, Sum, Term
from bidirl.traces.step_log import Mode

__all__ = ["DIALECTS"]


def _timer(*names: str) -> First:
    """Return a timer by its names, with the prefix of today and that of 2024."""
    return First(*(prefix + name for name in names for prefix in ("timing_s/", "timing/")))


TESTING, SAVING = _timer("testing"), _timer("save_checkpoint")
STEP = First("timing_s/step", "timing/step", "perf/time_per_step")
GEN = _timer("gen", "generate_sequences")

LENGTHS: dict[str, Term] = {
    "response_mean_tokens": "response_length/mean",
    "response_max_tokens": "response_length/max",
    "response_min_tokens": "response_length/min",
    "truncated_share": "response_length/clip_ratio",
    "prompt_mean_tokens": "prompt_length/mean",
    "prompt_max_tokens": "prompt_length/max",
    "aborted_share": "response/aborted_ratio",
}

COMMON: dict[str, Term] = {
    "step_s": Less(STEP, Periodic(TESTING), Periodic(SAVING)),
    "old_logprob_s": _timer("old_log_prob", "old_log_probs", "recompute_log_prob"),
    "reference_s": _timer("ref", "ref_log_prob", "RefPolicy"),
    "values_s": _timer("values"),
    "update_s": Sum(_timer("update_actor"), _timer("update_critic")),
    **LENGTHS,
    "total_tokens": "perf/total_num_tokens",
    "tokens_per_s_per_gpu": "perf/throughput",
    "testing_s": TESTING,
    "checkpoint_s": SAVING,
    "reward_s": _timer("reward", "rm"),
    "advantage_s": _timer("adv"),
    "update_actor_s": _timer("update_actor"),
    "update_critic_s": _timer("update_critic"),
    "mfu": First("perf/mfu/actor", "mfu/actor"),
    "tokens_per_rank_mean": "global_seqlen/mean",
    "tokens_per_rank_min": "global_seqlen/min",
    "tokens_per_rank_max": "global_seqlen/max",
    "request_mean_s": "timing_s/agent_loop/generate_sequences/mean",
    "request_max_s": "timing_s/agent_loop/generate_sequences/max",
    "request_min_s": "timing_s/agent_loop/generate_sequences/min",
    "tool_mean_s": "timing_s/agent_loop/tool_calls/mean",
    "tool_max_s": "timing_s/agent_loop/tool_calls/max",
    "slowest_response_tokens": "timing_s/agent_loop/slowest/response_length",
    "memory_reserved_gib": "perf/max_memory_reserved_gb",
    "epoch": "training/epoch",
}

ASYNC_LAG: dict[str, Term] = {
    "lag_mean": First("training/off_policy/trajectory_staleness/mean", "fully_async/staleness/mean"),
    "lag_max": First(
        "training/off_policy/trajectory_staleness_worst/max",
        "training/off_policy/trajectory_staleness/max",
    ),
    "span_mean": "training/off_policy/trajectory_spans/mean",
    "span_max": First("training/off_policy/trajectory_spans/max", "fully_async/partial/max_partial_span"),
    "evicted_samples": "training/off_policy/evicted_samples",
}

IGNORED = (
    "actor/",
    "critic/",
    "val",
    "rollout_corr/",
    "rollout_probs_diff",
    "response_length",
    "prompt_length",
    "response/",
    "num_turns",
    "tool_call_counts",
    "timing_per_token_ms/",
    "global_seqlen/",
    "perf/",
    "mfu/",
    "training/",
    "timing_s/start_profile",
    "timing_s/stop_profile",
    "timing_s/agent_loop/",
    "timing_s/gen/",
    "timing_s/reshard",
    "timing_s/generation_timing/",
    "timing_s/dump_rollout_generations",
    "timing_s/timing_s/wait_last_valid",
    "timing_s/wait_last_valid",
    "fully_async/",
    "dynamic_resource/",
    "separate_async/",
    "reward",
    "acc",
    "epoch",
)

READS = ("timing_per_token_ms/update_actor", "timing_per_token_ms/gen", "timing_per_token_ms/ref")
CHECKS = (nested_outside, tokens_from_rates, dp_ranks, gpus_from_rate, ratios_within_one)

DIALECTS = (
    Dialect(
        framework="verl",
        variant="fully async",
        mode=Mode.ASYNC,
        step_unit="one parameter version (trigger_parameter_sync_step local updates, timers summed)",
        evidence=(
            "fully_async/",
            "timing_s/timing_s/param_sync",
            "timing_s/param_sync",
            "print/param_sync_s",
        ),
        columns=COMMON
        | ASYNC_LAG
        | {
            "wait_s": GEN,
            "weight_sync_s": First(
                "timing_s/timing_s/param_sync",
                "timing_s/param_sync",
                "print/param_sync_s",
                "timing_s/update_weights",
            ),
            "sample_latency_mean_s": "fully_async/processing_time/avg",
            "sample_latency_p95_s": "fully_async/processing_time/tp95",
            "sample_latency_max_s": "fully_async/processing_time/max",
            "queue_samples": First("fully_async/monitor/queue/mq_queue_size", "dynamic_resource/mq_size"),
            "active_samples": "fully_async/monitor/active_tasks_size",
            "stale_samples_total": "fully_async/count/stale_samples_processed",
            "dropped_samples_total": "fully_async/count/dropped_stale_samples",
            "generated_samples_total": "fully_async/count/total_generated_samples",
            "rollouter_active_s": "fully_async/rollouter/active_time",
            "rollouter_version_s": "fully_async/rollouter/version_time",
            "partial_share": "fully_async/partial/partial_ratio",
            "span_max": "fully_async/partial/max_partial_span",
            "enough_samples_wait_s": "timing_s/wait_for_enough_samples",
        },
        ignored=IGNORED,
        notes=(
            "timing_s/gen is the trainer's wait for samples, not generation: it is in wait_s",
            "idle ratios of the framework are not used: they miss drains and earlier pauses of a version",
        ),
        step_keys=("fully_async/count/current_param_version", "training/global_step"),
        checks=CHECKS,
        reads=READS,
    ),
    Dialect(
        framework="verl",
        variant="V1 separate async",
        mode=Mode.ASYNC,
        step_unit="one training step",
        evidence=(
            "separate_async/",
            "timing_s/switch_wait",
            "timing_s/switch_to_trainer",
            "timing_s/switch_to_rollout",
            "training/off_policy/",
        ),
        columns=COMMON
        | ASYNC_LAG
        | {
            "wait_s": Sum("timing_s/gen", Periodic("timing_s/switch_wait")),
            "weight_sync_s": First("timing_s/update_weights", "timing_s/sync_rollout_weights"),
            "switch_s": Sum(Periodic("timing_s/switch_to_trainer"), Periodic("timing_s/switch_to_rollout")),
            "switch_to_trainer_s": "timing_s/switch_to_trainer",
            "switch_to_rollout_s": "timing_s/switch_to_rollout",
        },
        ignored=IGNORED,
        notes=("timing_s/gen is the trainer's wait for samples, not generation: it is in wait_s",),
        step_keys=("training/global_step",),
        checks=CHECKS,
        reads=READS,
    ),
    Dialect(
        framework="verl",
        variant="one step off",
        mode=Mode.ASYNC,
        step_unit="one training step (one batch)",
        evidence=("timing_s/wait_prev_gen", "timing_s/sync_rollout_weights"),
        columns=COMMON
        | ASYNC_LAG
        | {
            "wait_s": "timing_s/wait_prev_gen",
            "generation_s": First("timing_s/gen", "timing_s/generate_sequences"),
            "weight_sync_s": First("timing_s/sync_rollout_weights", "timing_s/update_weights"),
        },
        ignored=IGNORED,
        notes=("generation of the next batch overlaps training: generation_s is no part of step_s",),
        step_keys=("training/global_step",),
        checks=CHECKS,
        reads=READS,
    ),
    Dialect(
        framework="verl",
        variant="colocated",
        mode=Mode.COLOCATED,
        step_unit="one training step (one batch, all PPO mini-batches)",
        evidence=(
            "timing_s/gen",
            "timing/gen",
            "timing_s/update_actor",
            "timing/update_actor",
            "timing_s/",
            "global_seqlen/",
            "mfu/actor",
        ),
        columns=COMMON
        | {
            "generation_s": GEN,
            "weight_sync_s": _timer("update_weights", "sync_rollout_weights"),
            "switch_s": First("timing_s/reshard"),
        },
        ignored=IGNORED,
        step_keys=("training/global_step",),
        checks=CHECKS,
        reads=READS,
    ),
)
