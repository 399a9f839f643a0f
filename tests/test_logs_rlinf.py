"""RLinf's traps: names without their area, roles beside phases, cells that were cut."""

import random

from bidirl.traces.step_log import Mode
from tests.log_lines_more import made_text
from tests.test_logs_mutations import parsed

TIME = "├──────────── Time ────────────┤"


def test_a_name_means_what_its_section_says() -> None:
    (log,) = parsed(
        "│ Global Step:    3/100 │ Progress: ██░░ │   3.0% │\n"
        f"{TIME}\n│recv_rollout_trajectories=4.500 │step=50.250 │actor_training=40.125│\n"
        "├──────────── Environment ────────────┤\n│step=7.000 │success=0.500 │episode_len=80.0│\n"
        "├──────────── Training/Actor ────────────┤\n│actor_training=9.000 │ │ │\n"
    )
    assert list(log.column("step")) == [3]
    assert log.column("step_s")[0] == 50.25
    assert log.column("update_s")[0] == 40.125
    assert log.mode is Mode.ASYNC


def test_cut_cells_are_no_values() -> None:
    (log,) = parsed(
        f"│ Global Step: 3/100 │ x │\n{TIME}\n│step=50.2… │actor_training=40.125│cal_adv_and_returns=1.0"
    )
    assert not log.has("step_s")
    assert not log.has("advantage_s")


def test_roles_beside_phases_are_no_part_of_a_step() -> None:
    (log,) = parsed(made_text("rlinf_async", random.Random(0), 20))
    assert log.unknown_keys == ()
    assert abs(log.facts["unexplained_share"]) < 0.2
    assert not log.has("generation_s")


def test_pipelined_phases_are_told() -> None:
    text = str(
        {
            "_step": 4,
            "time/step": 100.0,
            "time/sync_weights": 5.0,
            "time/rollout": 90.0,
            "time/actor/inference": 60.0,
            "time/actor/training": 80.0,
            "time/prepare_data": 0.5,
            "rollout/response_length": 9000.5,
            "rollout/prompt_length": 100.5,
        }
    )
    (log,) = parsed(text)
    assert log.mode is Mode.UNKNOWN
    assert (log.column("generation_s")[0], log.column("update_s")[0]) == (90.0, 80.0)
    assert log.column("response_mean_tokens")[0] == 9000.5
    assert any("exceed the step" in note for note in log.notes)
