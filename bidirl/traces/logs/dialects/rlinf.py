"""RLinf: a box of metrics a step on the console (names without their area), ``time/...`` in the trackers.

Source: RLinf/RLinf 06b5f20c (``rlinf/utils/metric_utils.py``: the box), 01a96607
(``rlinf/runners/async_ppo_embodied_runner.py``), 081670e9 (``rlinf/runners/reasoning_runner.py``):
``time/<phase>`` are wall time of the runner, nested in ``time/step``; ``time/{actor,rollout,env}/<call>`` are
sums over calls and the maximum over ranks of a role, which run side by side with the phases.
"""

from bidirl.traces.logs.table import Dialect, First, Periodic, Sum, Term
from bidirl.traces.step_log import Mode

__all__ = ["DIALECTS"]

COMMON: dict[str, Term] = {
    "step_s": "time/step",
    "response_mean_tokens": "rollout/response_length",
    "prompt_mean_tokens": "rollout/prompt_length",
    "sample_mean_tokens": "rollout/total_length",
    "num_samples": "rollout/total_num_sequence",
    "ended_share": "rollout/fraction_of_samples_properly_ended",
    "advantage_s": "time/cal_adv_and_returns",
    "data_s": "time/prepare_data",
    "testing_s": "time/eval",
}

IGNORED = (
    "time/",
    "train/",
    "rollout/",
    "env/",
    "eval/",
    "replay_buffer/",
    "reward/",
    "flops/",
    "actor/",
    "critic/",
    "training/",
)
ROLES = "time/actor, time/rollout and time/env are sums and maxima of roles that run side by side: left out"

DIALECTS = (
    Dialect(
        framework="rlinf",
        variant="async",
        mode=Mode.ASYNC,
        step_unit="one global step of the runner",
        evidence=("time/recv_rollout_trajectories", "time/update_rollout_weights"),
        columns=COMMON
        | {
            "wait_s": "time/recv_rollout_trajectories",
            "old_logprob_s": "time/recompute_logprobs",
            "update_s": "time/actor_training",
            "weight_sync_s": First("time/update_rollout_weights", "time/sync_weights"),
        },
        ignored=IGNORED,
        notes=(ROLES,),
    ),
    Dialect(
        framework="rlinf",
        variant="in turns",
        mode=Mode.COLOCATED,
        step_unit="one global step of the runner",
        evidence=("time/generate_rollouts", "time/actor_training", "time/cal_adv_and_returns"),
        columns=COMMON
        | {
            "generation_s": "time/generate_rollouts",
            "old_logprob_s": First("time/recompute_logprobs", "time/inference"),
            "update_s": "time/actor_training",
            "weight_sync_s": "time/sync_weights",
        },
        ignored=IGNORED,
        notes=(ROLES,),
    ),
    Dialect(
        framework="rlinf",
        variant="reasoning",
        mode=Mode.UNKNOWN,
        step_unit="one global step of the runner",
        evidence=("time/actor/training", "time/actor/inference", "time/training", "time/prepare_data"),
        columns=COMMON
        | {
            "generation_s": "time/rollout",
            "old_logprob_s": First("time/actor/inference", "time/inference"),
            "values_s": "time/critic/inference",
            "update_s": Sum(First("time/actor/training", "time/training"), Periodic("time/critic/training")),
            "weight_sync_s": "time/sync_weights",
            "reward_s": "time/reward",
        },
        ignored=IGNORED,
        notes=("phases may be pipelined: then rollout, inference and training overlap and exceed time/step",),
    ),
)
