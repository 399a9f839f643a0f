"""OpenRLHF's traps: a sum in turns, wall time when asynchronous, no key for the wait."""

import pytest

from bidirl.traces.step_log import Mode
from tests.test_logs_mutations import parsed


def line(step: int, values: dict[str, float], mark: str = "") -> str:
    return f"(TrainingActor pid=5) INFO x.py:1] {mark}Global step {step}: {values}"


PHASES = {"timing/make_experience": 12.5, "timing/ppo_train": 40.0, "timing/broadcast": 2.5}


@pytest.mark.parametrize("mark", ["", "✨ "])
def test_in_turns_the_step_is_the_sum_and_nothing_waits(mark: str) -> None:
    values = PHASES | {"timing/generation": 60.0, "timing/step_total": 115.0}
    (log,) = parsed(line(7, values, mark))
    assert log.mode is Mode.COLOCATED
    assert list(log.column("step")) == [7]
    assert log.column("generation_s")[0] == 60.0
    assert not log.has("wait_s")


@pytest.mark.parametrize(("total", "wait"), [(75.0, 20.0), (55.0, 0.0), (54.9, 0.0)])
def test_asynchronous_the_wait_is_what_is_left(total: float, wait: float) -> None:
    (log,) = parsed(line(7, PHASES | {"timing/generation": 70.0, "timing/step_total": total}))
    assert log.mode is Mode.ASYNC
    assert log.column("wait_s")[0] == pytest.approx(wait)
    assert log.column("generation_s")[0] == 70.0


def test_asynchronous_without_generation() -> None:
    (log,) = parsed(line(7, PHASES | {"timing/step_total": 75.0}))
    assert log.column("wait_s")[0] == 20.0
    assert not log.has("generation_s")


def test_timers_beyond_the_step_give_no_wait() -> None:
    (log,) = parsed(line(7, PHASES | {"timing/generation": 70.0, "timing/step_total": 45.0}))
    assert not log.has("wait_s")
    assert any("exceed the step" in note for note in log.notes)


def test_trackers_put_train_before_the_keys() -> None:
    values = PHASES | {"timing/generation": 60.0, "timing/step_total": 115.0, "rollout/num_samples": 64}
    text = "\n".join(
        str({f"train/{key}": value for key, value in (values | {"global_step": n}).items()}) for n in (1, 2)
    )
    (log,) = parsed(text)
    assert log.framework == "openrlhf"
    assert len(log) == 2
    assert log.column("update_s")[0] == 40.0


def test_old_versions_without_timers_are_no_steps() -> None:
    assert parsed("Global step 3: {'policy_loss': 0.1, 'reward': 0.5}") == []
