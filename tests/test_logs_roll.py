"""ROLL's traps: totals one step late, validation inside a step, two lines a step, domains."""

import json

import numpy as np

from bidirl.traces.step_log import Mode
from tests.test_logs_mutations import parsed

PARTS = {
    "time/step_stop_server": 0.0001,
    "time/step_model_update": 4.0,
    "time/step_generate": 60.0,
    "time/old_log_probs": 8.0,
    "time/ref_log_probs_values": 7.0,
    "time/step_train": 30.0,
}


def lines(totals: list[float], more: list[dict[str, float]] | None = None, first: int = 0) -> str:
    rows = []
    for index, total in enumerate(totals):
        metrics = PARTS | {"time/step_total": total} | (more[index] if more else {})
        rows.append("[INFO] metrics_tag: " + json.dumps({"step": first + index, "metrics": metrics}))
    return "\n".join(rows)


def test_a_total_of_the_step_before_is_moved() -> None:
    (log,) = parsed(lines([0, 110.0, 111.0, 112.0]))
    np.testing.assert_array_equal(log.column("step_s"), [110.0, 111.0, 112.0, np.nan])
    assert any("moved by one" in note for note in log.notes)


def test_a_late_total_is_known_by_the_parts_too() -> None:
    more = [{"time/step_train": train} for train in (30.0, 90.0, 30.0, 90.0, 30.0, 90.0)]
    late = [170.0, 110.0, 170.0, 110.0, 170.0, 110.0]
    (log,) = parsed(lines(late, more, first=40))
    np.testing.assert_array_equal(log.column("step_s"), [110.0, 170.0, 110.0, 170.0, 110.0, np.nan])


def test_an_own_total_stays() -> None:
    (log,) = parsed(lines([110.0, 111.0, 112.0]))
    np.testing.assert_array_equal(log.column("step_s"), [110.0, 111.0, 112.0])
    assert log.mode is Mode.COLOCATED
    assert log.column("generation_s")[0] == 60.0


def test_validation_and_checkpoints_leave_the_step() -> None:
    more = [{"time/val_step": 50.0}, {}, {"time/actor_train/do_checkpoint/total": 20.0}]
    (log,) = parsed(lines([160.0, 110.0, 130.0], more))
    np.testing.assert_array_equal(log.column("step_s"), [110.0, 110.0, 110.0])
    (log,) = parsed(lines([0.0, 160.0, 110.0, 130.0], [*more, {}]))
    np.testing.assert_array_equal(log.column("step_s"), [110.0, 110.0, 110.0, np.nan])


def test_stopped_servers_mean_that_generation_is_waited_for() -> None:
    (log,) = parsed(lines([110.0, 111.0], [{"time/step_stop_server": 0.75}] * 2))
    assert log.mode is Mode.ASYNC
    assert log.column("wait_s")[0] == 60.0
    assert not log.has("generation_s")


def test_timers_of_domains_are_known_but_no_wall_time() -> None:
    (log,) = parsed(lines([110.0, 111.0], [{"scheduler/math/time/generate/mean": 300.0}] * 2))
    assert log.unknown_keys == ()
    assert log.column("generation_s")[0] == 60.0
