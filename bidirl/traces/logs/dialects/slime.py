"""slime and its forks (miles, vime, Relax): one rollout prints a line of the manager and one of the trainer.

Source: THUDM/slime 624b824a (``slime/utils/train_metric_utils.py``, ``slime/ray/rollout.py``): ``train_wait``
runs from the end of one training block to the start of the next, so ``sleep``, ``update_weights``,
``wake_up``, ``data_preprocess`` and ``save_model`` run inside it; ``step_time`` = ``train_wait`` + ``train``.
"""

from bidirl.traces.logs.checks import colocated_if, update_from_train, waits_not_negative
from bidirl.traces.logs.table import Dialect, First, Less, Periodic, Sum, Term
from bidirl.traces.step_log import Mode

__all__ = ["DIALECTS"]

SAVING, EVAL = First("perf/save_model_time", "perf/save_time"), First("perf/eval_time")
OLD, REFERENCE = First("perf/log_probs_time", "perf/log_prob_time"), "perf/ref_log_probs_time"
NESTED: tuple[Term, ...] = (
    "perf/sleep_time",
    "perf/update_weights_time",
    "perf/wake_up_time",
    "perf/data_preprocess_time",
    Periodic(SAVING),
    Periodic(EVAL),
)

COLUMNS: dict[str, Term] = {
    "step_s": Less("perf/step_time", Periodic(SAVING), Periodic(EVAL)),
    "generation_s": First("perf/rollout_time", "perf/total_rollout_time"),
    "wait_s": Less("perf/train_wait_time", *NESTED),
    "old_logprob_s": OLD,
    "reference_s": REFERENCE,
    "values_s": "perf/values_time",
    "update_s": First("perf/actor_train_time"),
    "weight_sync_s": "perf/update_weights_time",
    "switch_s": Sum("perf/sleep_time", "perf/wake_up_time"),
    "response_mean_tokens": First("rollout/response_len/mean", "rollout/response_lengths"),
    "response_max_tokens": "rollout/response_len/max",
    "response_min_tokens": "rollout/response_len/min",
    "truncated_share": First("rollout/truncated_ratio", "rollout/truncated"),
    "prompt_mean_tokens": Less(First("rollout/total_lengths"), First("rollout/response_lengths")),
    "train_s": "perf/train_time",
    "train_wait_s": "perf/train_wait_time",
    "sleep_s": "perf/sleep_time",
    "wake_up_s": "perf/wake_up_time",
    "data_s": "perf/data_preprocess_time",
    "checkpoint_s": SAVING,
    "testing_s": EVAL,
    "sync_pause_s": "perf/update_weights_pause_time",
    "rollout_tokens_per_s_per_gpu": "perf/tokens_per_gpu_per_sec",
    "longest_sample_tokens_per_s": "perf/longest_sample_tokens_per_sec",
    "response_median_tokens": "rollout/response_len/median",
    "train_tokens_per_s": "perf/actor_train_tok_per_s",
    "tool_mean_s": "perf/non_generation_time/mean",
    "tool_max_s": "perf/non_generation_time/max",
}

DIALECTS = (
    Dialect(
        framework="slime",
        variant="",
        mode=Mode.ASYNC,
        step_unit="one rollout and its training (all optimizer steps on it)",
        evidence=(
            "perf/train_wait_time",
            "perf/train_time",
            "perf/actor_train_time",
            "perf/rollout_time",
            "perf/wait_time_ratio",
            "perf/step_time",
        ),
        columns=COLUMNS,
        ignored=("perf/", "rollout/", "train/", "eval/", "step", "rollout_id", "passrate"),
        notes=(
            (
                "wait_s is the exposed rollout: perf/train_wait_time without the sleep, weight sync, wake-"
                "up, data and checkpoint timers that run inside it"
            ),
        ),
        step_keys=("rollout/step",),
        checks=(
            colocated_if("perf/sleep_time", "perf/wake_up_time"),
            update_from_train,
            waits_not_negative,
        ),
    ),
)
