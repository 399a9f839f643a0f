"""prime-rl: lines of the orchestrator and of the trainer, both formats, and the metrics of both.

Source: PrimeIntellect-ai/prime-rl 559b4477 (``src/prime_rl/orchestrator``, ``src/prime_rl/trainer/rl``) and
releases of 2025. ``Time`` of an orchestrator line runs from the start of one step to the next and holds its
waits; its throughput divides a batch by the time in which that batch was collected, so a batch that lay
ready in a buffer shows any rate. ``Seq. Length`` counts prompt and response.
"""

from bidirl.traces.logs.checks import buffered_without_rate
from bidirl.traces.logs.table import Dialect, First, Term
from bidirl.traces.step_log import Mode

__all__ = ["DIALECTS"]

CHECKPOINT = First("time/save_ckpt")

COLUMNS: dict[str, Term] = {
    "step_s": First("trainer:time", "orchestrator:time", "time/step"),
    "wait_s": First("time/wait_for_batch"),
    "update_s": First("time/forward_backward"),
    "weight_sync_s": First("time/broadcast_weights"),
    "generation_s": First("time/generate_completions"),
    "response_mean_tokens": First("decode_len/mean", "decode_len/all/mean"),
    "prompt_mean_tokens": First("prefill_len/mean", "prefill_len/all/mean"),
    "total_tokens": First("progress/tokens"),
    "truncated_share": First("is_truncated/mean", "is_truncated/all/mean", "orchestrator:truncation"),
    "lag_mean": First("off_policy/mean"),
    "lag_max": First(
        "off_policy/max",
        "orchestrator:max off-policy",
        "orchestrator:max. off-policy level",
        "orchestrator:off-policy level",
    ),
    "tokens_per_s_per_gpu": First("perf/throughput_per_gpu"),
    "sample_mean_tokens": First("orchestrator:seq. length", "seq_len/mean", "seq_len/all/mean"),
    "tokens_per_s": First("orchestrator:throughput"),
    "train_tokens_per_s": First("trainer:throughput", "perf/throughput"),
    "orchestrator_s": "orchestrator:time",
    "trainer_s": "trainer:time",
    "rollout_wait_s": First("orchestrator:paused", "time/wait_for_policy"),
    "filtered_share": "orchestrator:filtered",
    "checkpoint_s": CHECKPOINT,
    "mfu_percent": First("trainer:mfu", "perf/mfu"),
    "async_level": "orchestrator:async level",
}

DIALECTS = (
    Dialect(
        framework="prime_rl",
        variant="",
        mode=Mode.ASYNC,
        step_unit="one training step",
        evidence=(
            "orchestrator:time",
            "trainer:time",
            "time/wait_for_batch",
            "time/broadcast_weights",
            "time/wait_for_policy",
            "time/wait_for_ckpt",
            "time/generate_completions",
            "perf/throughput_per_gpu",
        ),
        columns=COLUMNS,
        ignored=(
            "orchestrator:",
            "trainer:",
            "time/",
            "perf/",
            "progress/",
            "reward/",
            "off_policy/",
            "inference/",
            "seq_len/",
            "prefill_len/",
            "decode_len/",
            "is_truncated/",
            "error/",
            "batch/",
            "metrics/",
            "val_",
            "eval/",
            "loss/",
            "optim/",
            "entropy/",
            "mismatch_kl/",
            "event_loop_lag/",
            "step",
            "env/",
            "solve",
            "effective_batch_size",
        ),
        notes=("sample_mean_tokens counts prompt and response; responses alone are not printed",),
        checks=(buffered_without_rate,),
        split_files=True,
    ),
)
