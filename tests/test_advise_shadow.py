"""Shadow mode: what the gates would have lent, whatever happens to the log that they read."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.errors import InputError
from bidirl.planner.build import build_plan, build_workload
from bidirl.planner.cli import app
from bidirl.planner.follow import Follower
from bidirl.planner.job import load_job
from bidirl.planner.shadow import Shadow
from bidirl.planner.shadow_run import ShadowRun
from bidirl.shell import guarded
from bidirl.sim.run import run_to_folder, simulate
from bidirl.traces.step_log import Mode, StepLog

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "examples" / "demo.toml"
NUM_STEPS = "workload.num_steps=10"


def line(step: int, wait: float = 30.0, update: float = 60.0) -> str:
    return (
        f"step:{step} - timing_s/gen:{wait} - timing_s/update_actor:{update} - "
        f"timing_s/step:{wait + update} - fully_async/count/current_param_version:{step}\n"
    )


def shadow_of(*settings: str) -> Shadow:
    job = load_job(DEMO, ["policy.name=no_borrow", NUM_STEPS, *settings])
    return Shadow(build_plan(job, build_workload(job, 0)))


def log_of(num: int, **columns: float) -> StepLog:
    return StepLog("verl", Mode.ASYNC, "step", {name: np.full(num, value) for name, value in columns.items()})


# ------------------------------------------------------------------------------------------------ follower


def test_follower_reads_what_is_new(tmp_path: Path) -> None:
    path = tmp_path / "log"
    follower = Follower(path)
    assert follower.poll() == []
    path.write_bytes(b"one\n")
    [news] = follower.poll()
    assert (news.data, news.is_new_file) == (b"one\n", True)
    with path.open("ab") as file:
        file.write(b"two\n")
    [news] = follower.poll()
    assert (news.data, news.is_new_file) == (b"two\n", False)
    assert follower.poll() == []
    follower.close()


def test_follower_survives_rotation(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\n")
    follower = Follower(path)
    follower.poll()
    with path.open("ab") as file:
        file.write(b"last\n")
    path.rename(tmp_path / "log.1")
    path.write_bytes(b"new\n")
    assert [(news.data, news.is_new_file) for news in follower.poll()] == [
        (b"last\n", False),
        (b"new\n", True),
    ]
    follower.close()


def test_follower_survives_a_gap_between_files(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\n")
    follower = Follower(path)
    follower.poll()
    path.rename(tmp_path / "log.1")
    assert follower.poll() == []
    path.write_bytes(b"new\n")
    assert [news.data for news in follower.poll()] == [b"new\n"]
    follower.close()


def test_follower_says_that_a_file_is_new_when_its_first_bytes_come(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"")
    follower = Follower(path)
    assert follower.poll() == []
    path.write_bytes(b"one\n")
    assert [news.is_new_file for news in follower.poll()] == [True]
    path.rename(tmp_path / "log.1")
    path.write_bytes(b"")
    assert follower.poll() == []
    path.write_bytes(b"new\n")
    assert [news.is_new_file for news in follower.poll()] == [True]
    follower.close()


@pytest.mark.parametrize("text", [b"", b"new\n", b"much longer than what was there before\n"])
def test_follower_survives_truncation(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\n")
    follower = Follower(path)
    follower.poll()
    path.write_bytes(text)
    assert b"".join(news.data for news in follower.poll()) == text
    follower.close()


# ------------------------------------------------------------------------------------------------ judging


def test_waiting_trainers_are_lent() -> None:
    shadow = shadow_of("partition.rollout_gpus=2")
    shadow.take(log_of(10, step_s=300.0, wait_s=200.0, update_s=95.0), 0, 10)
    found = shadow.summary()
    assert found["rollout_on_train"]["leases"] > 0  # type: ignore[index]
    assert found["train_on_rollout"]["saved_s"] is None  # type: ignore[index]
    assert "cannot be judged" in shadow.verdict()


def test_a_journal_that_has_not_begun_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"schema":"bidirl-jour')
    run = ShadowRun(path, None, "auto")
    assert not run.poll()
    with pytest.raises(InputError, match="add --job"):
        run.poll(is_last=True)


def test_nothing_is_counted_where_nothing_can_be_lent() -> None:
    shadow = shadow_of("partition.rollout_gpus=2", "policy.name=bidirl")
    shadow.take(log_of(10, step_s=300.0, wait_s=200.0, update_s=95.0), 0, 10)
    assert shadow.verdict().startswith("Nothing would have been lent")
    assert shadow.summary()["rollout_on_train"]["judged"] == 0  # type: ignore[index]


def test_short_waits_are_not_lent() -> None:
    """Needs C62: no lease for windows below the switch costs."""
    shadow = shadow_of("partition.rollout_gpus=2")
    shadow.take(log_of(10, step_s=100.0, wait_s=8.0, update_s=90.0), 0, 10)
    assert not any(step.lends for step in shadow.steps)


def test_too_few_steps_tell_nothing() -> None:
    shadow = shadow_of()
    shadow.take(log_of(2, step_s=100.0, wait_s=50.0, update_s=45.0), 0, 2)
    assert shadow.verdict().startswith("Cannot tell yet")


def test_colocated_and_lending_runs_have_nothing_to_lend() -> None:
    assert "take turns" in shadow_of("policy.name=colocated_sync").verdict()
    assert "both ways already" in shadow_of("policy.name=bidirl").verdict()


@given(
    wait=st.floats(0.0, 500.0),
    update=st.floats(1.0, 500.0),
    idle=st.floats(0.0, 500.0),
    gpus=st.integers(1, 15),
)
def test_never_saves_more_than_was_idle(wait: float, update: float, idle: float, gpus: int) -> None:
    shadow = shadow_of(f"partition.rollout_gpus={gpus}")
    step = wait + update
    shadow.take(log_of(6, step_s=step, wait_s=wait, update_s=update, rollout_wait_s=min(idle, step)), 0, 6)
    for each in shadow.steps:
        assert 0.0 <= each.saved_s <= each.idle_s + 1e-9
        assert each.saved_s <= each.most_s + 1e-9


@pytest.mark.parametrize("gpus", [4, 8])
def test_agrees_with_the_run_that_lends(gpus: int, tmp_path: Path) -> None:
    """Of a run without lending the shadow tells what the same run with lending then saves, or less."""
    settings = [f"partition.rollout_gpus={gpus}", NUM_STEPS]
    plain = load_job(DEMO, [*settings, "policy.name=no_borrow"])
    before = run_to_folder(plain, 0, tmp_path / "run").summary["step_time_s"]["mean"]
    after = simulate(load_job(DEMO, settings), 0).summary["step_time_s"]["mean"]
    run = ShadowRun(tmp_path / "run" / "journal.jsonl", None, "auto")
    run.poll(is_last=True)
    predicted = sum(step.saved_s for step in run.shadow.steps) / run.shadow.wall_s
    bound = sum(step.most_s for step in run.shadow.steps) / run.shadow.wall_s
    measured = 1.0 - after / before
    assert 0.3 * measured <= predicted <= measured + 0.03
    assert measured <= bound + 0.03


# ------------------------------------------------------------------------------------------------ following


def shadow_run(path: Path) -> ShadowRun:
    job = load_job(DEMO, ["policy.name=no_borrow", "partition.rollout_gpus=2", NUM_STEPS])
    return ShadowRun(path, job, "auto")


def test_growing_log_gives_what_the_whole_log_gives(tmp_path: Path) -> None:
    text = "".join(line(step, wait=150.0 + step) for step in range(12)).encode()
    whole = tmp_path / "whole"
    whole.write_bytes(text)
    once = shadow_run(whole)
    once.poll(is_last=True)
    path = tmp_path / "log"
    path.write_bytes(b"")
    run = shadow_run(path)
    for start in range(0, len(text), 37):
        with path.open("ab") as file:
            file.write(text[start : start + 37])
        run.poll()
    run.poll(is_last=True)
    assert run.shadow.steps == once.shadow.steps
    assert run.shadow.num_steps == 12


def test_rotation_truncation_and_restart_lose_no_step(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(map(line, range(5))))
    run = shadow_run(path)
    run.poll()
    path.rename(tmp_path / "log.1")
    path.write_text("".join(map(line, range(5, 9))))
    run.poll()
    path.write_text("".join(map(line, range(9, 12))))
    run.poll()
    with path.open("a") as file:  # the job starts again from its checkpoint
        file.write("".join(map(line, range(10, 14))))
    run.poll(is_last=True)
    assert run.shadow.num_steps == 14  # steps that are done again count once
    assert run.num_files == 3
    assert len(run.notes) == 2


def test_log_without_a_job_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(line(1))
    with pytest.raises(InputError, match="add --job"):
        ShadowRun(path, None, "auto").poll(is_last=True)
    with pytest.raises(InputError, match="no such file"):
        ShadowRun(tmp_path / "none", None, "auto")


def test_command_touches_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log"
    path.write_text("".join(map(line, range(6))))
    job = str(tmp_path / "job.toml")
    Path(job).write_text(DEMO.read_text())
    before = {each: each.read_bytes() for each in tmp_path.iterdir()}
    arguments = ["--job", job, "--set", "policy.name=no_borrow", "--json"]
    assert guarded(app, ["advise", "--shadow", str(path), *arguments]) == 0
    data = json.loads(capfd.readouterr().out)
    assert data["num_steps"] == 6
    assert {each: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_following_ends_with_the_totals(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(map(line, range(6))))
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "  # may be ignored
    program += "from bidirl.planner.cli import main; main()"
    command = [sys.executable, "-c", program, "advise", "--shadow", str(path), "--follow"]
    command += ["--job", str(DEMO), "--set", "policy.name=no_borrow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while not process.stderr.readline().startswith("Over"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert out.startswith("Over 6 steps")
