"""tinker-cookbook: ``metrics.jsonl`` and a table a step on the console (two columns, ``Step N`` above it).

Source: thinking-machines-lab/tinker-cookbook 19bdd471 (``tinker_cookbook/utils/ml_log.py``) and
``tinker_cookbook/rl/train.py``, ``metrics.py`` (2026): ``time/total`` is wall time of an iteration;
``time/<span>`` of a span that runs once is wall time, of concurrent ones a sum over tasks (``:total``) or a
mean; ``time/sampling_time_*`` are the times of the groups' own rollouts; ``sampling_client/step_*`` say which
version generated a batch (the sampler of batch i is the policy after i updates).
"""

from bidirl.traces.logs.checks import nested_outside
from bidirl.traces.logs.derive import async_if_lagged, difference
from bidirl.traces.logs.table import Dialect, First, Less, Mean, Periodic
from bidirl.traces.step_log import Mode

__all__ = ["DIALECTS"]

EVALS, SAVING = First("time/run_evals", "time/evals"), First("time/save_checkpoint")

DIALECTS = (
    Dialect(
        framework="tinker",
        variant="",
        mode=Mode.UNKNOWN,
        step_unit="one iteration (one batch of groups, all optimizer substeps on it)",
        evidence=(
            "time/assemble_training_data",
            "time/save_checkpoint_and_get_sampling_client",
            "time/sampling_time_max",
            "time/sampling_time_mean",
            "time/trajectory_group_worker_loop/",
            "time/do_group_rollout_and_filter_constant_reward",
            "sampling_client/",
            "progress/done_frac",
        ),
        columns={
            "step_s": Less("time/total", Periodic(EVALS), Periodic(SAVING)),
            "generation_s": First("time/sampling", "time/sample"),
            "update_s": "time/train",
            "weight_sync_s": "time/save_checkpoint_and_get_sampling_client",
            "response_mean_tokens": Mean("env/all/total_ac_tokens", "env/all/total_episodes"),
            "truncated_share": "env/all/truncated",
            "testing_s": EVALS,
            "checkpoint_s": SAVING,
            "data_s": "time/assemble_training_data",
            "kl_s": "time/compute_kl_sample_train",
            "response_total_tokens": "env/all/total_ac_tokens",
            "num_samples": "env/all/total_episodes",
            "turns_mean": "env/all/turns_per_episode",
            "group_mean_s": "time/sampling_time_mean",
            "group_max_s": "time/sampling_time_max",
            "group_min_s": "time/sampling_time_min",
        },
        ignored=(
            "time/",
            "env/",
            "optim/",
            "progress/",
            "sampling_client/",
            "async/",
            "train/",
            "test/",
            "eval",
            "entropy",
            "kl_",
            "teacher_kl",
            "reward",
            "step",
            "by_group",
            "stream",
            "num_",
            "learning_rate",
            "error",
        ),
        notes=(
            "spans of concurrent rollouts are sums or means over tasks, no wall time: left out",
            "group_*_s are the rollouts of single groups",
        ),
        step_keys=("progress/batch",),
        checks=(
            difference("lag_mean", ("progress/batch",), ("sampling_client/step_mean",)),
            difference("lag_max", ("progress/batch",), ("sampling_client/step_min",)),
            async_if_lagged,
            nested_outside,
        ),
        reads=("sampling_client/step_mean", "sampling_client/step_min"),
    ),
)
