"""Checkpoint and resume: whatever ends a run wherever, nothing is lost, nothing is trained twice."""

import asyncio
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bidirl.errors import InputError, RunFault
from bidirl.executor.backends.crew import Crew
from bidirl.executor.backends.real import RealBackend
from bidirl.executor.backends.stub import StubConfig, StubTrainer
from bidirl.executor.checkpoint import (
    Checkpoint,
    Keeper,
    check_journal,
    newest_checkpoint,
    resumable,
    steps_kept,
)
from bidirl.executor.cli import app
from bidirl.executor.driver import Driver
from bidirl.executor.neutral import pinned_job
from bidirl.executor.run import RealRun
from bidirl.executor.unpickle import Refused, load
from bidirl.planner.events import StartChunks, Updated
from bidirl.planner.job import Job
from bidirl.planner.train import Phase
from bidirl.shell import guarded
from bidirl.sim.metrics import summarise
from bidirl.sim.run import Outcome, run_to_folder
from bidirl.traces.journal import JournalWriter
from tests.ledger_proof import prove_ledger
from tests.real_jobs import TINY, checked, run_stub, tiny_job, tiny_settings

LENDING = ("policy.name=opportunistic", "policy.split=eq6")
OFTEN = "learn.checkpoint_every=1"
Watch = Callable[[Driver, RealBackend], None]


class Stopped(Exception):
    """Stands for whatever ends a process in the middle of a run."""


def stops_after(events: int) -> Watch:
    """End the run after so many events of its present part."""

    def watch(driver: Driver, backend: RealBackend) -> None:
        checked(driver, backend)
        inner = driver.sink
        first = driver.num_events if driver.resumed is None else driver.resumed.num_events

        def sink(now: float, event: Any, actions: Any) -> None:
            if inner is not None:
                inner(now, event, actions)
            if driver.num_events - first == events:
                raise Stopped

        driver.sink = sink

    return watch


def run_parts(job: Job, folder: Path, stops: list[int]) -> RealRun:
    """Run a job in parts into a folder: each of ``stops`` ends a part, the last one runs to the end."""
    found: list[RealRun] = []
    for stop in [*stops, None]:
        kept = steps_kept(folder / "checkpoints")
        resumed = newest_checkpoint(folder / "checkpoints") if kept else None
        if resumed is not None:
            check_journal(folder / "journal.jsonl", resumed.driver.num_events)
        more = {"watch": checked if stop is None else stops_after(stop)}

        def run(
            job: Job, seed: int, *, sink: Any = None, more: Any = more, resumed: Any = resumed
        ) -> Outcome:
            found.append(
                run_stub(job, seed, sink=sink, resumed=resumed, checkpoints=folder / "checkpoints", **more)
            )
            return Outcome(found[-1].plan, found[-1].record, summarise(found[-1].record))

        keep = None if resumed is None else resumed.driver.num_events
        try:
            run_to_folder(job, 0, folder, run, flush=True, keep_events=keep)
        except Stopped:
            assert stop is not None
        if found:
            break
    return found[-1]


@pytest.mark.parametrize(
    "settings",
    [
        ("policy.name=no_borrow", "policy.staleness=0"),
        ("policy.name=bidirl", "policy.staleness=1.5"),
        (*LENDING, "workload.mini_batches=3", "policy.granularity=streamed"),
        (*LENDING, "policy.in_flight=continue_stale", "policy.staleness=2"),
        (*LENDING, "policy.in_flight=restart", "workload.reference=on"),
        (*LENDING, "policy.expiry=drop", "policy.staleness=2"),
        (*LENDING, "learn.filtering=on", "workload.samples_per_prompt=2"),
    ],
    ids=str,
)
def test_a_run_in_parts_keeps_its_ledger(settings: tuple[str, ...], tmp_path: Path) -> None:
    job = tiny_job(*settings, OFTEN, steps=6)
    run = run_parts(job, tmp_path, [90, 60, 35])
    counted = prove_ledger(tmp_path)
    samples = summarise(run.record)["ledger"]["samples"]
    n = job.workload.samples_per_prompt
    assert samples["issued"] == samples["trained"] + samples["dropped"] + samples["unfinished"]
    assert samples["trained"] == counted["trained"] * n == 6 * 6 * n
    assert samples["issued"] == counted["issued"] * n
    assert len(run.learning) == 6


def test_colocated_roles_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    job = tiny_job("policy.name=colocated_sync", 'partition.placement="colocated"', OFTEN, gpus=2)
    run_parts(job, tmp_path, [70, 30])
    assert prove_ledger(tmp_path)["unfinished"] == 0


@pytest.mark.parametrize("stops", [[31], [64, 5, 47], [120, 1, 2, 90]], ids=str)
def test_pinned_and_ordered_a_run_in_parts_learns_the_same_to_the_bit(
    stops: list[int], tmp_path: Path
) -> None:
    job = pinned_job(tiny_job("policy.staleness=2", OFTEN, steps=7), lends=True)
    whole, parts = run_stub(job), run_parts(job, tmp_path, stops)
    prove_ledger(tmp_path)
    assert parts.weight_digests == whole.weight_digests
    assert {key: digest for key, (digest, _) in parts.sample_digests.items()} == {
        key: digest for key, (digest, _) in whole.sample_digests.items()
    }


def test_a_step_that_begins_in_the_moment_of_the_checkpoint_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no rollouter there, nobody has to take a version, and the next step begins at once."""
    checkpoints = tmp_path / "checkpoints"
    replace = Crew.replace

    async def slowly(self: Crew, number: int) -> None:
        if number not in self.fresh:
            await asyncio.sleep(0.5)
        await replace(self, number)

    monkeypatch.setattr(Crew, "replace", slowly)
    began: list[int] = []

    def watch(driver: Driver, backend: RealBackend) -> None:
        checked(driver, backend)
        inner = driver.sink

        def sink(now: float, event: Any, actions: Any) -> None:
            assert inner is not None
            inner(now, event, actions)
            scheduler = driver.scheduler
            if not began and scheduler.train.phase is Phase.OPTIMIZING and len(scheduler.rollout.ready) >= 6:
                backend.links[0].fail("it went away")
            if isinstance(event, Updated) and any(isinstance(action, StartChunks) for action in actions):
                began.append(scheduler.train.step)
            if began and began[0] in steps_kept(checkpoints):
                raise Stopped

        driver.sink = sink

    job = tiny_job(
        *("policy.name=no_borrow", "policy.staleness=3", "learn.checkpoint_every=1"),
        steps=8,
        rollout_gpus=1,
        gpus=2,
    )
    slow_trainer = StubConfig(step_s=2e-4, token_s=2e-4, max_num_seqs=64)

    def part(resumed: Checkpoint | None) -> None:
        def run(job: Job, seed: int, *, sink: Any = None) -> Outcome:
            watching = watch if resumed is None else checked
            done = run_stub(
                job,
                seed,
                sink=sink,
                checkpoints=checkpoints,
                stub=slow_trainer,
                watch=watching,
                resumed=resumed,
            )
            return Outcome(done.plan, done.record, summarise(done.record))

        keep = None if resumed is None else resumed.driver.num_events
        run_to_folder(job, 0, tmp_path, run, flush=True, keep_events=keep)

    with pytest.raises(Stopped):
        part(None)
    found = newest_checkpoint(checkpoints)
    while found.step > began[0]:
        shutil.rmtree(checkpoints / f"step-{found.step}")
        found = newest_checkpoint(checkpoints)
    assert any(isinstance(action, StartChunks) for action in found.driver.unanswered.values())
    part(found)
    prove_ledger(tmp_path)


# ---------------------------------------------------------------- a process that is killed


SETTINGS = (
    "policy.name=bidirl",
    "policy.staleness=1",
    "policy.version_mode=pinned",
    "policy.batch_order=issue_order",
    "policy.merge=ordered",
    OFTEN,
)


def started(folder: Path, *more: str, checkpoint_s: float = 0.0, gpus: int = 4) -> "subprocess.Popen[str]":
    """Start a run on stand-ins in a process of its own."""
    settings = (*tiny_settings(steps=8, gpus=gpus), *SETTINGS)
    options = [part for setting in settings for part in ("--set", setting)]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.resume_driver", "train", str(TINY)),
            *("--out", str(folder), *more, *options),
        ],
        cwd=TINY.parents[1],
        env={
            **os.environ,
            "BIDIRL_LEARNED": str(folder.with_suffix(".json")),
            "BIDIRL_CHECKPOINT_S": str(checkpoint_s),
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def until(condition: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    """Wait until something holds or a process has ended."""
    while not condition() and process.poll() is None:
        time.sleep(0.01)


def test_a_driver_that_is_killed_loses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    checkpoints = folder / "checkpoints"

    def killed(when: Callable[[], bool], *more: str, checkpoint_s: float = 0.0) -> None:
        process = started(folder, *more, checkpoint_s=checkpoint_s)
        until(when, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL

    killed(lambda: max(steps_kept(checkpoints), default=0) >= 2)
    kept = steps_kept(checkpoints)
    killed(lambda: any(checkpoints.glob(".writing-*")), "--resume", checkpoint_s=5.0)
    assert steps_kept(checkpoints) == kept
    last = started(folder, "--resume")
    assert last.communicate()[1].splitlines()[0] == f"note: going on after step {kept[-1]}"
    assert last.returncode == 0
    assert list(checkpoints.glob(".writing-*")) == []
    prove_ledger(folder)
    learned = json.loads(folder.with_suffix(".json").read_text(encoding="utf-8"))
    whole = run_stub(tiny_job(*SETTINGS, steps=8))
    assert learned["weights"] == {str(version): it for version, it in whole.weight_digests.items()}
    assert learned["samples"] == {f"{key[0]}/{key[1]}": it for key, (it, _) in whole.sample_digests.items()}


# ---------------------------------------------------------------- what is refused


def interrupted(folder: Path, *settings: str, after: int = 80) -> None:
    """Leave an interrupted run with checkpoints in a folder."""
    with pytest.raises(Stopped):
        run_stub(
            tiny_job(*LENDING, OFTEN, *settings), watch=stops_after(after), checkpoints=folder / "checkpoints"
        )


def test_another_seed_or_learning_rate_is_refused(tmp_path: Path) -> None:
    interrupted(tmp_path)
    found = newest_checkpoint(tmp_path / "checkpoints")
    with pytest.raises(InputError, match=r"--seed 1 \(was 0\)"):
        run_stub(tiny_job(*LENDING, OFTEN), 1, resumed=found)
    with pytest.raises(InputError, match=r"learn.learning_rate = 0.5 \(was 0.003\)"):
        run_stub(tiny_job(*LENDING, OFTEN, "learn.learning_rate=0.5"), resumed=found)
    found.check(found.driver.recorder.plan, tiny_job(*LENDING, "learn.checkpoint_every=3"), 0)


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    interrupted(tmp_path)
    folder = tmp_path / "checkpoints"
    older, newest = steps_kept(folder)
    state = folder / f"step-{newest}" / "state.pkl"
    state.write_bytes(state.read_bytes()[:-100])
    found = newest_checkpoint(folder)
    assert found.step == older
    assert "cannot be read" in found.notes[0]
    (folder / f"step-{older}" / "state.pkl").unlink()
    with pytest.raises(InputError, match="cannot be read"):
        newest_checkpoint(folder)


class Harmful:
    """Pickles as a call of os.system."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("true",)


@pytest.mark.parametrize("value", [Harmful(), Path.read_text, "".join, summarise])
def test_a_checkpoint_calls_nothing_foreign(value: Any, tmp_path: Path) -> None:
    path = tmp_path / "state.pkl"
    path.write_bytes(pickle.dumps(value))
    with pytest.raises(Refused):
        load(path)


def test_the_journal_must_be_that_of_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with pytest.raises(InputError, match="cannot be read"):
        check_journal(path, 1)
    path.write_text('{"header": 1}\n{"event": 1}\n{"event": 2', encoding="utf-8")
    check_journal(path, 1)
    with pytest.raises(InputError, match="has 1 events, its checkpoint was taken after 2"):
        check_journal(path, 2)
    with JournalWriter(path, provenance={}, plan={}, keep_events=1) as writer:
        writer.write(1.0, {"kind_of": "New"}, [])
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[:2] == ['{"header": 1}', '{"event": 1}']
    assert json.loads(lines[2])["event"] == {"kind_of": "New"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            [],
            "has a checkpoint after step 3: go on with --resume, remove the folder, or choose another --out",
        ),
        (["--resume"], "cannot be read"),
    ],
)
def test_a_new_run_does_not_bury_old_checkpoints(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints" / "step-3").mkdir(parents=True)
    assert guarded(app, ["train", str(TINY), "--out", str(tmp_path), *options], "bidirl-run") == 2
    said = capsys.readouterr().err.strip()
    assert message in said
    assert "\n" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    with resumable(tmp_path), pytest.raises(InputError, match="another process trains into it"):
        run_stub(tiny_job(*LENDING, OFTEN), checkpoints=tmp_path)


def test_a_torn_checkpoint_is_cleared_away(tmp_path: Path) -> None:
    torn = tmp_path / "checkpoints" / ".writing-3"
    torn.mkdir(parents=True)
    (torn / "state.pkl").write_bytes(b"half")
    interrupted(tmp_path, after=20)
    assert not torn.exists()


# ---------------------------------------------------------------- full disks


def full(*_: object) -> None:
    """Write to a device that is always full."""
    Path("/dev/full").write_bytes(b"x")


def test_a_full_disk_at_a_checkpoint_stops_the_run_and_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = StubTrainer.save
    calls: list[str] = []

    def fills_up(self: StubTrainer, folder: str) -> None:
        calls.append(folder)
        if len(calls) > 2:
            full()
        save(self, folder)

    monkeypatch.setattr(StubTrainer, "save", fills_up)
    job = pinned_job(tiny_job(OFTEN, steps=8), lends=True)
    with pytest.raises(RunFault) as caught:
        run_stub(job, checkpoints=tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    assert "cannot be written (OSError: [Errno 28] No space left on device" in message
    kept = steps_kept(tmp_path)
    assert message.endswith(f"free space there; go on after step {kept[-1]} with --resume")
    assert len(kept) == 2
    assert list(tmp_path.glob(".writing*")) == []
    monkeypatch.undo()
    resumed = run_stub(job, resumed=newest_checkpoint(tmp_path), checkpoints=tmp_path)
    assert resumed.weight_digests == run_stub(job).weight_digests


def test_a_full_disk_while_the_state_is_written_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = Keeper._finish

    def fills_up(self: Keeper, part: Path, step: int, frozen: bytes) -> None:
        if step > 2:
            (part / "state.pkl").symlink_to("/dev/full")
        finish(self, part, step, frozen)

    monkeypatch.setattr(Keeper, "_finish", fills_up)
    with pytest.raises(RunFault, match=r"after step 3 cannot be written \(no space left on device\): free"):
        run_stub(tiny_job(*LENDING, OFTEN, steps=8), checkpoints=tmp_path)
    assert steps_kept(tmp_path)[-1] < 3
    assert list(tmp_path.glob(".writing*")) == []


def test_a_full_disk_at_the_journal_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flush = JournalWriter.flush
    num_lines: list[int] = []

    def fills_up(self: JournalWriter) -> None:
        num_lines.append(1)
        flush(self)
        if len(num_lines) > 150:
            full()

    monkeypatch.setattr(JournalWriter, "flush", fills_up)
    job = pinned_job(tiny_job(OFTEN, steps=8), lends=True)
    with pytest.raises(RunFault, match=r"no space left on device while writing.*after step \d with --resume"):
        run_parts(job, tmp_path, [])
    monkeypatch.undo()
    parts = run_parts(job, tmp_path, [])
    prove_ledger(tmp_path)
    assert parts.weight_digests == run_stub(job).weight_digests
