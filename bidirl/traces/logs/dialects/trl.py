"""TRL: printed dicts of the Hugging Face trainer, GRPO and AsyncGRPO; the timers of DeepSpeed beside them.

Source: huggingface/trl f2cd5773 (``trl/trainer/grpo_trainer.py``, ``trl/experimental/async_grpo``) and its
main branch of 2026 (``perf/*`` and ``batch/*``: each value is the mean over the steps between two logs).
``queue_wait_time_s`` is taken once a sample and averaged. DeepSpeed: microsoft/DeepSpeed
(``deepspeed/runtime/engine.py``, ``wall_clock_breakdown``), milliseconds.
"""

from bidirl.traces.logs.table import Dialect, First, Scaled, Sum, Term
from bidirl.traces.step_log import Mode

__all__ = ["DIALECTS"]


def _both(*names: str) -> tuple[str, ...]:
    return tuple(prefix + name for name in names for prefix in ("", "train/"))


def _key(*names: str) -> First:
    return First(*_both(*names))


def _profiled(*names: str) -> First:
    return First(*(f"profiling/Time taken: GRPOTrainer.{name}" for name in names))


LENGTHS: dict[str, Term] = {
    "response_mean_tokens": _key("completions/mean_length", "completion_length"),
    "response_max_tokens": _key("completions/max_length"),
    "response_min_tokens": _key("completions/min_length"),
    "truncated_share": _key("completions/clipped_ratio"),
    "tokens_seen_total": _key("num_tokens"),
    "epoch": _key("epoch"),
}

IGNORED = (
    *_both(
        "loss", "grad_norm", "learning_rate", "reward", "kl", "entropy", "ratio", "clip_ratio", "sampling/"
    ),
    *_both(
        "completions/", "tools/", "frac_reward", "sample/", "batch/", "perf/", "num_", "aux_loss", "epoch"
    ),
    *_both(
        "step_time",
        "wait_",
        "scoring_",
        "buffer_",
        "generation_",
        "training_",
        "forward_",
        "train_",
        "rollout/",
    ),
    *_both(
        "objective/",
        "policy/",
        "val/",
        "advantage",
        "dropped_",
        "stale",
        "mean_token_accuracy",
        "global_step",
    ),
    "eval",
    "total_flos",
    "profiling/",
    "deepspeed/",
)

INTERVAL = "values are means over the steps between two logs (logging_steps, which the log does not tell)"

DIALECTS = (
    Dialect(
        framework="trl",
        variant="AsyncGRPO",
        mode=Mode.ASYNC,
        step_unit="one line of the log: the mean step of a logging interval",
        evidence=_both("perf/rollout_wait_s", "perf/fwd_bwd_s", "batch/trained_tokens_per_step"),
        columns=LENGTHS
        | {
            "step_s": _key("perf/step_s", "step_time"),
            "wait_s": _key("perf/rollout_wait_s"),
            "update_s": Sum(_key("perf/fwd_bwd_s"), _key("perf/optimizer_s")),
            "weight_sync_s": _key("perf/weight_sync_s"),
            "total_tokens": _key("batch/forwarded_tokens_per_step"),
            "trained_tokens": _key("batch/trained_tokens_per_step"),
            "num_samples": _key("batch/samples_per_step"),
            "optimizer_s": _key("perf/optimizer_s"),
            "sync_pause_s": _key("perf/weight_sync_pause_s"),
            "sync_transfer_s": _key("perf/weight_sync_transfer_s"),
            "forwarded_tokens_per_s": _key("perf/forwarded_tok_s_wall_clock"),
            "trained_tokens_per_s": _key("perf/trained_tok_s_wall_clock"),
            "mfu": _key("perf/mfu_wall_clock"),
            "generation_tokens_per_s": _key("generation_tok_per_s"),
        },
        ignored=IGNORED,
        notes=(
            INTERVAL,
            "weight_sync_s is the mean over the syncs of an interval: steps without one are not in it",
            "the first versions log optimizer_s one step late",
        ),
    ),
    Dialect(
        framework="trl",
        variant="AsyncGRPO of 2026H1",
        mode=Mode.ASYNC,
        step_unit="one line of the log: the mean step of a logging interval",
        evidence=_both("queue_wait_time_s", "weight_sync_time_s", "generation_tok_per_s", "training_tok/s"),
        columns=LENGTHS
        | {
            "step_s": _key("step_time"),
            "wait_s": _key("queue_wait_time_s"),
            "weight_sync_s": _key("weight_sync_time_s"),
            "forward_s": _key("forward_time_s"),
            "generation_tokens_per_s": _key("generation_tok_per_s"),
            "trained_tokens_per_s": _key("training_tok/s"),
            "scoring_s": Scaled(_key("scoring_time_ms"), 1e-3),
            "scoring_wait_s": Scaled(_key("wait_scoring_ms"), 1e-3),
            "queue_samples": _key("buffer_qsize"),
            "train_sequence_tokens": _key("train_seq_len"),
        },
        ignored=IGNORED,
        notes=(
            INTERVAL,
            "wait_s is the mean wait for one sample: a step of n samples waits up to n times as long",
            "trained_tokens_per_s counts tokens consumed since the last step: no rate of production",
        ),
    ),
    Dialect(
        framework="trl",
        variant="GRPO",
        mode=Mode.COLOCATED,
        step_unit="one line of the log: the mean step of a logging interval",
        evidence=_both(
            "step_time", "completions/mean_length", "completions/clipped_ratio", "completion_length"
        ),
        columns=LENGTHS
        | {
            "step_s": _key("step_time"),
            "generation_s": _profiled("vLLM.generate", "transformers.generate", "_generate"),
            "weight_sync_s": _profiled("sync_weights", "_move_model_to_vllm"),
            "reward_s": _profiled("_calculate_rewards"),
        },
        ignored=IGNORED,
        notes=(INTERVAL, "step_time leaves out the optimizer and what runs between two steps (TRL#6490)"),
    ),
    Dialect(
        framework="trl",
        variant="DeepSpeed timers",
        mode=Mode.UNKNOWN,
        step_unit="one optimizer step of DeepSpeed (forward and backward of all micro-batches)",
        evidence=("deepspeed/fwd", "deepspeed/bwd"),
        columns={
            "update_s": Scaled(Sum("deepspeed/fwd", "deepspeed/bwd", "deepspeed/step"), 1e-3),
            "forward_s": Scaled("deepspeed/fwd", 1e-3),
            "backward_s": Scaled("deepspeed/bwd", 1e-3),
            "optimizer_s": Scaled("deepspeed/step", 1e-3),
            "allreduce_s": Scaled("deepspeed/bwd_allreduce", 1e-3),
        },
        ignored=IGNORED,
        notes=(
            "DeepSpeed prints milliseconds; its timers hold training only: no generation, no step",
            "bwd_inner and bwd_allreduce are nested in bwd, the micro-step timers in the others",
        ),
    ),
)
