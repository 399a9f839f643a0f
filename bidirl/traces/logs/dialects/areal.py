"""AReaL: one table a step behind ``Train step t/T done.``, in several blocks ``Stats (i/n)``.

Source: inclusionAI/AReaL 0827f56e (``areal/trainer/rl_trainer.py``: the timers, one after the other, no
total; ``areal/trainer/ppo/actor.py``: theta staleness = version - generating version, proximal staleness is
one less) and 0d578942 (``areal/utils/stats_logger.py``, ``tabulate_stats``: pairs in column-major order).
"""

from bidirl.traces.logs.derive import difference, in_turns_if, lag_from_proximal, sum_needs, total_from_mean
from bidirl.traces.logs.table import Dialect, First, Sum, Term
from bidirl.traces.step_log import Mode

__all__ = ["DIALECTS"]

ACTORS = ("ppo_actor/", "grpo_actor/", "actor/")
VERSIONS = tuple(
    f"{area}{part}version_stats/" for area in (*ACTORS, "") for part in ("update/", "") if area or not part
)


def _actor(name: str) -> tuple[str, ...]:
    return tuple(f"{area}{name}" for area in ACTORS)


def _lag(statistic: str) -> First:
    return First(*(f"{prefix}sample_staleness_theta_{statistic}" for prefix in VERSIONS))


def _timer(*names: str) -> First:
    return First(*(f"timeperf/{name}" for name in names))


ROLLOUT_SWITCH = (
    "timeperf/rollout_pause",
    "timeperf/rollout_pause_generation",
    "timeperf/rollout_offload",
    "timeperf/rollout_onload",
    "timeperf/rollout_continue_generation",
    "timeperf/rollout_resume",
)
MODEL_SWITCH = tuple(
    f"timeperf/{role}_{move}"
    for role in ("actor", "ref", "critic", "teacher")
    for move in ("onload", "offload")
)
SWITCH = (*ROLLOUT_SWITCH, *MODEL_SWITCH)
STAGES: tuple[Term, ...] = (
    _timer("rollout"),
    _timer("critic_values"),
    _timer("ref_logp"),
    _timer("teacher_logp"),
    _timer("recompute_logp"),
    _timer("compute_advantage", "compute_advantages"),
    _timer("train_step"),
    _timer("critic_train_step"),
    _timer("update_weights"),
    _timer("clear_batches"),
)

DIALECTS = (
    Dialect(
        framework="areal",
        variant="",
        mode=Mode.ASYNC,
        step_unit="one training step (one batch, all its PPO mini-batches, one weight version)",
        evidence=("timeperf/",),
        columns={
            "step_s": Sum(*STAGES, *SWITCH),
            "wait_s": _timer("rollout"),
            "old_logprob_s": _timer("recompute_logp"),
            "reference_s": _timer("ref_logp"),
            "values_s": _timer("critic_values"),
            "update_s": Sum(_timer("train_step"), _timer("critic_train_step")),
            "weight_sync_s": _timer("update_weights"),
            "switch_s": Sum(*SWITCH),
            "truncated_share": First(*_actor("no_eos_ratios/avg")),
            "lag_mean": _lag("avg"),
            "lag_max": _lag("max"),
            "sample_mean_tokens": First(*_actor("seq_len/avg")),
            "sample_max_tokens": First(*_actor("seq_len/max")),
            "prompt_mean_tokens": First(*_actor("prompt_len/avg")),
            "num_samples": First(*_actor("n_seqs")),
            "advantage_s": _timer("compute_advantage", "compute_advantages"),
            "teacher_logprob_s": _timer("teacher_logp"),
            "data_s": _timer("clear_batches"),
            "checkpoint_s": Sum(_timer("save"), _timer("checkpoint_for_recover")),
            "testing_s": _timer("eval"),
            "reward_mean": First("rollout/reward", *_actor("task_reward/avg")),
        },
        ignored=(
            *ACTORS,
            "ppo_critic/",
            "critic/",
            "rollout/",
            "timeperf/",
            "eval",
            "version_stats/",
            "epoch",
        ),
        notes=(
            "step_s is the sum of the timers without save, checkpoint and eval: AReaL logs no total",
            "timeperf/rollout is the trainer's wait for a batch: 0 means that the trainer is the bottleneck",
        ),
        checks=(
            lag_from_proximal(*VERSIONS),
            difference("response_mean_tokens", _actor("seq_len/avg"), _actor("prompt_len/avg")),
            total_from_mean("sample_mean_tokens", "num_samples"),
            sum_needs("wait_s", "update_s", "weight_sync_s"),
            in_turns_if("timeperf/rollout_offload", "timeperf/rollout_onload"),
        ),
        reads=tuple(
            f"{prefix}sample_staleness_proximal_{statistic}"
            for prefix in VERSIONS
            for statistic in ("avg", "max")
        ),
    ),
)
