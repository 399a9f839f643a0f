"""OpenRLHF: ``Global step N: {dict}``, with or without a spark; W&B and TensorBoard add ``train/``.

Source: OpenRLHF/OpenRLHF (``openrlhf/trainer/ppo_trainer.py``, ``ppo_trainer_async.py``, 2026): in turns
``timing/step_total`` is the sum of the phases; asynchronous it is wall time and holds the wait in the queue,
while ``timing/generation`` is the time that the generator took for the batch. Evaluation and checkpoints run
outside of it. ``make_experience`` holds all forward passes: log-probabilities, reference, values, rewards.
"""

from bidirl.traces.logs.derive import async_if_sum_is_short, difference, total_from_mean
from bidirl.traces.logs.table import Dialect, First, Sum
from bidirl.traces.step_log import Mode

__all__ = ["DIALECTS"]


def _both(*names: str) -> tuple[str, ...]:
    return tuple(prefix + name for name in names for prefix in ("", "train/"))


def _key(*names: str) -> First:
    return First(*_both(*names))


ASYNC_MARKS = _both("timing/actor_idle_wait", "timing/vllm_idle_wait", "timing/broadcast_lock_wait")

DIALECTS = (
    Dialect(
        framework="openrlhf",
        variant="",
        mode=Mode.UNKNOWN,
        step_unit="one global step (one rollout batch, all PPO updates on it)",
        evidence=_both("timing/make_experience", "timing/ppo_train", "timing/broadcast", "timing/step_total"),
        columns={
            "step_s": _key("timing/step_total"),
            "generation_s": _key("timing/generation"),
            "old_logprob_s": _key("timing/make_experience"),
            "update_s": _key("timing/ppo_train", "timing/policy_train"),
            "weight_sync_s": _key("timing/broadcast"),
            "response_mean_tokens": _key("rollout/response_length_mean", "response_length"),
            "truncated_share": _key("rollout/truncated_rate", "truncated"),
            "sample_mean_tokens": _key("total_length"),
            "num_samples": _key("rollout/num_samples"),
            "filter_pass_percent": _key("dynamic_filtering_pass_rate"),
            "sync_lock_wait_s": _key("timing/broadcast_lock_wait"),
            "sync_transfer_s": _key("timing/broadcast_transfer"),
            "data_s": Sum(_key("timing/mm_reprocess")),
        },
        ignored=(
            *_both(
                "timing/", "rollout/", "policy_loss", "ptx_loss", "aux_loss", "entropy", "actor_", "critic_"
            ),
            *_both(
                "reward", "return", "kl", "values", "vllm_kl", "ppo_", "logprobs_diff", "loss", "global_step"
            ),
            *_both(
                "group_reward", "advantage", "clip", "eval", "response", "total", "generated_samples", "act_"
            ),
        ),
        notes=(
            "old_logprob_s is make_experience: log-probabilities, reference, values and rewards in one timer",
        ),
        checks=(
            async_if_sum_is_short("step_s", ("old_logprob_s", "update_s", "weight_sync_s"), ASYNC_MARKS[:4]),
            difference(
                "prompt_mean_tokens",
                _both("total_length"),
                _both("response_length", "rollout/response_length_mean"),
            ),
            total_from_mean("sample_mean_tokens", "num_samples"),
        ),
        reads=ASYNC_MARKS,
    ),
)
