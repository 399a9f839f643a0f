"""SkyRL and its forks: ``Step N:`` with a dict, ``key = value`` lines, or the lines of its timers.

Source: NovaSky-AI/SkyRL 06a734ea (``skyrl/train/fully_async_trainer.py``: evaluation, checkpoints and saved
models run outside of ``step``), 0e0416b6 (``skyrl/train/utils/tracking.py``: the console prints each dict
with floats as text of four decimals, metrics and timings one after the other), the trainer in turns (2025:
checkpoints run inside of ``step``, evaluation outside). Nested: ``run_training`` holds the forward passes,
advantages and ``train_critic_and_policy``, which holds ``policy_train`` and ``critic_train``.
"""

from bidirl.traces.logs.table import Dialect, First, Less, Periodic, Sum, Term
from bidirl.traces.step_log import Mode

__all__ = ["DIALECTS"]

SAVING = (Periodic("timing/save_checkpoints"), Periodic("timing/save_hf_model"))

COMMON: dict[str, Term] = {
    "old_logprob_s": "timing/fwd_logprobs_values_reward",
    "update_s": First("timing/train_critic_and_policy", "timing/policy_train"),
    "weight_sync_s": First("timing/sync_weights", "timing/sync_weights_to_inference_engines"),
    "response_mean_tokens": "generate/avg_num_tokens",
    "response_max_tokens": "generate/max_num_tokens",
    "response_min_tokens": "generate/min_num_tokens",
    "testing_s": "timing/eval",
    "checkpoint_s": Sum(*SAVING),
    "advantage_s": "timing/compute_advantages_and_returns",
    "data_s": Sum(
        "timing/convert_to_training_input",
        "timing/postprocess_generator_output",
        "timing/apply_reward_kl_penalty",
    ),
    "policy_train_s": "timing/policy_train",
    "critic_train_s": "timing/critic_train",
}

IGNORED = (
    "async/",
    "timing/",
    "generate/",
    "policy/",
    "critic/",
    "reward/",
    "loss/",
    "trainer/",
    "environment/",
    "eval/",
    "progress/",
    "ray/",
    "vllm/",
    "gpu",
    "error/",
    "Step",
    "step",
)
NOTES = ("old_logprob_s is fwd_logprobs_values_reward: policy, reference and values in one timer",)

DIALECTS = (
    Dialect(
        framework="skyrl",
        variant="fully async",
        mode=Mode.ASYNC,
        step_unit="one training step (one mini-batch of groups, one weight version)",
        evidence=("timing/wait_for_generation_buffer", "async/staleness_*"),
        columns=COMMON
        | {
            "step_s": "timing/step",
            "wait_s": "timing/wait_for_generation_buffer",
            "lag_mean": "async/staleness_mean",
            "lag_max": "async/staleness_max",
            "staleness_violations": "async/staleness_violation_count",
            "dropped_groups": "async/num_groups_dropped",
            "kept_share": "async/keep_rate",
            "buffered_groups": "async/gen_buffer_qsize_at_wait_start",
        },
        ignored=IGNORED,
        notes=(
            *NOTES,
            (
                "max_staleness_steps is a rule of capacity: lag_max may exceed it, staleness_violations "
                "counts the groups"
            ),
        ),
        step_keys=("trainer/global_step",),
    ),
    Dialect(
        framework="skyrl",
        variant="in turns",
        mode=Mode.COLOCATED,
        step_unit="one training step (one batch, all its mini-batches)",
        evidence=(
            "timing/fwd_logprobs_values_reward",
            "timing/train_critic_and_policy",
            "timing/policy_train",
            "timing/sync_weights",
            "timing/convert_to_training_input",
            "timing/generate",
        ),
        columns=COMMON
        | {
            "step_s": Less("timing/step", *SAVING),
            "generation_s": "timing/generate",
        },
        ignored=IGNORED,
        notes=NOTES,
        step_keys=("trainer/global_step",),
    ),
)
