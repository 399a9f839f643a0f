"""ROLL: JSON behind ``metrics_tag:`` and as a line of its own; RLVR and agentic pipelines.

Source: alibaba/ROLL e25f5fa5 (``roll/utils/tracking.py``: ``metrics_tag: {"step": N, "metrics": {...}}``),
e2244534 (``roll/utils/metrics/metrics_manager.py``) and the pipelines of 2026 (``roll/pipeline/rlvr``,
``roll/pipeline/agentic``): RLVR logs at each step the total of the step before it (0 at the first); in
asynchronous mode ``step_stop_server`` pauses the servers and ``step_generate`` is the wait for the batch;
validation and checkpoints run inside ``step_total``; ``system/*tps*`` are means over a window of steps.
"""

from bidirl.traces.logs.derive import async_if_above, total_from_mean, whole_one_step_late
from bidirl.traces.logs.table import Dialect, First, Less, Periodic, Sum
from bidirl.traces.step_log import Mode

__all__ = ["DIALECTS"]

VALIDATION = First("time/val_step", "time/step_val")
CHECKPOINT = First(
    "time/actor_train/do_checkpoint/total", "time/pipeline/do_checkpoint/total", "time/step_checkpoint"
)

STOPPED_S = 0.05
"""Stopping no server takes no time; stopping real ones takes tenths of a second at least."""


def _lengths(name: str) -> First:
    return First(*(f"{area}/{name}" for area in ("token", "tokens", "rollout")))


DIALECTS = (
    Dialect(
        framework="roll",
        variant="",
        mode=Mode.COLOCATED,
        step_unit="one pipeline step (one rollout batch and all updates on it)",
        evidence=(
            "time/step_generate",
            "time/step_rollout",
            "time/step_train",
            "time/step_model_update",
            "time/step_total",
            "time/step_stop_server",
            "time/ref_log_probs_values",
        ),
        columns={
            "step_s": Less("time/step_total", Periodic(VALIDATION), Periodic(CHECKPOINT)),
            "generation_s": First("time/step_generate", "time/step_rollout", "time/rollout"),
            "old_logprob_s": First(
                "time/old_log_probs", "time/old_log_probs_values", "time/step_old_log_probs_values"
            ),
            "reference_s": First(
                "time/ref_log_probs_values", "time/ref_log_probs", "time/step_ref_log_probs_values_reward"
            ),
            "update_s": First("time/step_train", "time/train"),
            "weight_sync_s": "time/step_model_update",
            "switch_s": Sum("time/step_stop_server", "time/step_shrink"),
            "response_mean_tokens": _lengths("response_length/mean"),
            "response_max_tokens": _lengths("response_length/max"),
            "response_min_tokens": _lengths("response_length/min"),
            "prompt_mean_tokens": _lengths("prompt_length/mean"),
            "tokens_per_s_per_gpu": "system/tps_gpu",
            "sample_mean_tokens": _lengths("total_length/mean"),
            "num_samples": "system/batch_size",
            "generation_tokens_per_s_per_gpu": "system/actor_infer/response/tps_gpu",
            "train_tokens_per_s_per_gpu": "system/actor_train/tps_gpu",
            "testing_s": VALIDATION,
            "checkpoint_s": CHECKPOINT,
            "advantage_s": First("time/step_adv", "time/compute_advantage"),
            "reward_s": Sum("time/step_cal_norm_rewards", "time/step_cal_token_reward"),
            "off_policy_share": "scheduler/off_policy_ratio",
            "collected_prompts": "scheduler/collect_query_count",
            "used_prompts": "scheduler/query_use_count",
            "filtered_prompts": "scheduler/query_filter_count",
        },
        ignored=(
            "time/",
            "system/",
            "scheduler/",
            "critic/",
            "actor",
            "actor_train/",
            "actor_infer/",
            "reference/",
            "reward",
            "rollout/",
            "token/",
            "tokens/",
            "group/",
            "val",
            "env/",
            "mask/",
            "global_seqlen/",
            "train_infer",
            "step",
            "memory/",
            "shrink/",
            "score",
        ),
        notes=("tokens_per_s_per_gpu is a mean over a window of steps, as the framework logs it",),
        checks=(
            whole_one_step_late("time/step_total", "testing_s", "checkpoint_s"),
            async_if_above("time/step_stop_server", STOPPED_S),
            total_from_mean("sample_mean_tokens", "num_samples"),
        ),
    ),
)
