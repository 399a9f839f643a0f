"""AReaL's traps: two stalenesses, no total, blocks of one step, zeros and nan."""

# ruff: noqa: E501  # lines of logs are as long as they are

import math
import random

import pytest

from bidirl.traces.step_log import Mode
from tests.log_lines_more import fancy_grid, made_text
from tests.test_logs_mutations import parsed


def table(pairs: dict[str, float], step: int = 1) -> str:
    head = f"Epoch 1/10 Step {step}/290 Train step {step}/2900 done."
    return "\n".join([head, "Stats (1/1):", *fancy_grid(pairs)])


def test_the_lag_is_theta_and_follows_from_proximal() -> None:
    (log,) = parsed(
        table({"ppo_actor/update/version_stats/sample_staleness_proximal_avg": 0.5, "timeperf/rollout": 1})
    )
    assert log.column("lag_mean")[0] == 1.5
    assert any("proximal staleness + 1" in note for note in log.notes)
    (log,) = parsed(
        table(
            {
                "version_stats/sample_staleness_theta_avg": 1.25,
                "version_stats/sample_staleness_proximal_avg": 0.25,
                "timeperf/rollout": 1,
            }
        )
    )
    assert log.column("lag_mean")[0] == 1.25


def test_a_step_needs_all_its_timers() -> None:
    (log,) = parsed(table({"timeperf/rollout": 5.0, "timeperf/train_step": 20.0}))
    assert not log.has("step_s")
    (log,) = parsed(
        table(
            {
                "timeperf/rollout": 0.0,
                "timeperf/train_step": 20.0,
                "timeperf/update_weights": 3.0,
                "timeperf/eval": 9.0,
            }
        )
    )
    assert log.column("step_s")[0] == 23.0
    assert log.column("wait_s")[0] == 0.0
    assert log.mode is Mode.ASYNC


def test_switches_of_roles_make_a_run_colocated() -> None:
    timers = {"rollout_onload": 2.0, "rollout_offload": 1.0, "actor_onload": 0.5, "actor_offload": 0.25}
    pairs = {"rollout": 50.0, "train_step": 30.0, "update_weights": 1.0, **timers}
    (log,) = parsed(table({f"timeperf/{name}": value for name, value in pairs.items()}))
    assert log.mode is Mode.COLOCATED
    assert log.column("switch_s")[0] == 3.75
    assert log.column("generation_s")[0] == 50.0
    assert not log.has("wait_s")
    assert log.column("step_s")[0] == 84.75


def test_further_blocks_of_a_step_make_no_further_rows() -> None:
    (log,) = parsed(made_text("areal", random.Random(0), 25))
    assert len(log) == 25
    assert max(log.column("lag_max")) == 3.0


def test_nan_is_absent() -> None:
    (log,) = parsed("│ timeperf/rollout │ nan │ timeperf/train_step │ 2.0000e+01 │")
    assert not log.has("wait_s")
    assert log.column("update_s")[0] == 20.0


def test_a_cut_row_gives_no_value() -> None:
    (log,) = parsed("│ timeperf/train_step │ 2.0000e+01 │ timeperf/rollout │ 8.89")
    assert not log.has("wait_s")


@pytest.mark.parametrize("width", [90, 110, 130])
def test_rows_broken_inside_a_number_are_joined(width: int) -> None:
    row = f"│ {'ppo_actor/update/version_stats/sample_staleness_theta_avg':<60} │  1.2500e+00 │ timeperf/rollout │  3.0000e+00 │"
    (log,) = parsed(f"{row[:width]}\n{row[width:]}")
    known = log.column("wait_s")[0]
    assert known == 3.0 or math.isnan(known)
    assert log.column("lag_mean")[0] in (1.25, pytest.approx(float("nan"), nan_ok=True))
