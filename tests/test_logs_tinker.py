"""tinker-cookbook's traps: sums over tasks, evaluations inside an iteration, versions of samplers."""

import json

import numpy as np

from bidirl.traces.step_log import Mode
from tests.test_logs_mutations import parsed

BASE = {"time/total": 100.0, "time/train": 60.0, "time/save_checkpoint_and_get_sampling_client": 8.0}


def rows(*more: dict[str, float]) -> str:
    return "\n".join(
        json.dumps({"step": n, "progress/batch": n} | BASE | extra) for n, extra in enumerate(more, 4)
    )


def test_the_lag_is_the_batch_less_the_version_that_sampled_it() -> None:
    (log,) = parsed(rows(*[{"sampling_client/step_mean": 3.25, "sampling_client/step_min": 2.0}] * 2))
    np.testing.assert_array_equal(log.column("lag_mean"), [0.75, 1.75])
    np.testing.assert_array_equal(log.column("lag_max"), [2.0, 3.0])
    assert log.mode is Mode.ASYNC


def test_sums_over_tasks_are_no_time_of_a_step() -> None:
    (log,) = parsed(rows(*[{"time/policy_sample:total": 9000.0, "time/sampling_time_max": 300.0}] * 2))
    assert not log.has("generation_s")
    assert log.column("group_max_s")[0] == 300.0
    assert log.unknown_keys == ()


def test_evaluations_leave_the_iteration() -> None:
    (log,) = parsed(rows({"time/run_evals": 20.0, "time/sampling": 5.0}, {"time/sampling": 25.0}))
    np.testing.assert_array_equal(log.column("step_s"), [80.0, 100.0])


def test_evaluations_that_ran_outside_stay() -> None:
    (log,) = parsed(rows(*[{"time/run_evals": 50.0, "time/sampling": 30.0}] * 2))
    np.testing.assert_array_equal(log.column("step_s"), [100.0, 100.0])


def test_lines_of_evaluations_alone_are_no_steps() -> None:
    assert parsed(json.dumps({"step": 3, "test/env/all/reward/total": 0.5})) == []
