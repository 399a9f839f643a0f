"""NeMo-RL: blocks of bullets on the console, and the same timers in TensorBoard and W&B.

Source: NVIDIA-NeMo/RL 7ea279ab (``nemo_rl/algorithms/grpo.py``, ``nemo_rl/algorithms/utils.py``): the
printed idle ratio is 0 whenever the trainer waited more than 0.1 s; ``idle/buffer_full_backoff``,
``idle/generation_limit_pause``, ``idle/refit_event_wait`` and ``wasted/failed_trajectory`` are summed over
threads; in asynchronous mode the rate of the generation workers divides by exposed generation + training.
"""

from bidirl.traces.logs.checks import gpus_from_two_rates, idle_recomputed, tokens_from_group_rate
from bidirl.traces.logs.table import Dialect, First, Less, Periodic, Sum, Term
from bidirl.traces.step_log import Mode

__all__ = ["DIALECTS"]


def _timer(*names: str) -> First:
    return First(*(prefix + name for name in names for prefix in ("• ", "timing/train/", "timing/")))


CHECKPOINT, VALIDATION = _timer("checkpointing"), _timer("idle/validation", "validation")
RATE = "(Tokens/sec/gpu)"

COMMON: dict[str, Term] = {
    "step_s": Less(
        First("• Total step time", "timing/train/total_step_time"), Periodic(CHECKPOINT), Periodic(VALIDATION)
    ),
    "old_logprob_s": _timer("policy_and_reference_logprobs", "policy_logprobs", "logprobs"),
    "reference_s": _timer("reference_logprobs", "reference_policy_logprobs"),
    "update_s": _timer("policy_training"),
    "weight_sync_s": _timer("weight_sync", "prepare_for_generation/total", "prepare_for_generation"),
    "response_mean_tokens": First("• Mean Generation Length", "train/mean_gen_tokens_per_sample"),
    "sample_mean_tokens": First("• Mean Total Tokens per Sample", "performance/mean_total_tokens_per_sample"),
    "truncated_share": First("train/truncation_rate"),
    "tokens_per_s_per_gpu": First(f"• E2E {RATE}", "performance/tokens_per_sec_per_gpu"),
    "total_tokens": First("train/total_num_tokens"),
    "train_tokens_per_s_per_gpu": f"• Policy Training {RATE}",
    "e2e_tokens_per_s": "• E2E (Tokens/sec)",
    "checkpoint_s": CHECKPOINT,
    "testing_s": VALIDATION,
    "reward_s": _timer("reward_calculation"),
    "advantage_s": _timer("advantage_calculation"),
    "data_s": Sum(_timer("data_processing"), _timer("buffer_sampling")),
    "training_prep_s": _timer("training_prep"),
    "logprob_prep_s": _timer("logprob_inference_prep"),
    "buffer_groups": First("• Buffer Size", "train/buffer_size"),
    "weight_transfer_s": _timer("prepare_for_generation/transfer_and_update_weights"),
}

IGNORED = (
    "• Loss",
    "• Generation KL Error",
    "• Avg",
    "• E2E",
    "• Policy",
    "• Training",
    "• Generation Worker",
    "• Throughputs",
    "• Mean",
    "• Reward",
    "• idle/",
    "• wasted/",
    "• Buffer",
    "• reward_calculation",
    "train/",
    "performance/",
    "timing/",
    "validation/",
    "ray/",
)

DIALECTS = (
    Dialect(
        framework="nemo_rl",
        variant="async",
        mode=Mode.ASYNC,
        step_unit="one training step",
        evidence=("• exposed_generation", "timing/train/exposed_generation", "timing/exposed_generation"),
        columns=COMMON
        | {
            "wait_s": _timer("exposed_generation"),
            "lag_mean": First("• Avg Trajectory Age", "train/avg_trajectory_age"),
        },
        ignored=IGNORED,
        notes=(
            "the printed Training Worker Idle Time Ratio is not used: it is 0 exactly when the trainer waits",
            "idle/buffer_full_backoff and the like are sums over threads, not wall time: left out",
        ),
        checks=(idle_recomputed, gpus_from_two_rates, tokens_from_group_rate),
    ),
    Dialect(
        framework="nemo_rl",
        variant="synchronous",
        mode=Mode.COLOCATED,
        step_unit="one training step",
        evidence=(
            "• Total step time",
            "• policy_training",
            "timing/train/total_step_time",
            "timing/train/policy_training",
        ),
        columns=COMMON | {"generation_s": _timer("generation")},
        ignored=IGNORED,
        checks=(gpus_from_two_rates, tokens_from_group_rate),
    ),
)
