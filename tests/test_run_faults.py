"""Faults of workers in threads: memory that runs out, calls that hang, replicas that are slow."""

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bidirl.errors import RunFault
from bidirl.executor.backends import CallFailed, links
from bidirl.executor.backends.messages import out_of_memory
from bidirl.executor.backends.real import RealBackend
from bidirl.executor.backends.scratch import scratch
from bidirl.executor.backends.stub import StubConfig, StubEngine, StubTrainer
from bidirl.executor.backends.watchdog import ENGINE, Patience
from bidirl.executor.backends.worker import STEP, Worker
from bidirl.executor.checkpoint import newest_checkpoint, steps_kept
from bidirl.executor.driver import Driver
from bidirl.executor.neutral import pinned_job
from bidirl.executor.roles import Draft, Piece
from bidirl.planner.events import Direction, LeaseFailed, SyncFailed
from bidirl.sim.metrics import summarise
from tests.real_jobs import checked, run_stub, tiny_job

LENDING = ("policy.name=opportunistic", "policy.split=eq6")
BOTH = (Direction.ROLLOUT_ON_TRAIN, Direction.TRAIN_ON_ROLLOUT)


def all_trained(run: Any, steps: int) -> None:
    """Check that a run of four-sample groups, six a step, has trained all that it should."""
    samples = summarise(run.record)["ledger"]["samples"]
    assert samples["trained"] == steps * 6 * 4
    assert samples["issued"] == samples["trained"] + samples["dropped"] + samples["unfinished"]
    assert len(run.learning) == steps


def seen(events: list[Any], patience: Patience | None = None) -> Callable[[Driver, RealBackend], None]:
    """Keep the events of a run, and give its watchdog less patience."""

    def watch(driver: Driver, backend: RealBackend) -> None:
        checked(driver, backend)
        if patience is not None:
            backend.crew.patience = patience
        inner = driver.sink

        def sink(now: float, event: Any, actions: Any) -> None:
            if inner is not None:
                inner(now, event, actions)
            events.append(event)

        driver.sink = sink

    return watch


# ---------------------------------------------------------------- memory that runs out


@pytest.mark.parametrize("role", [StubEngine, StubTrainer])
@pytest.mark.parametrize("times", [1, 10**6], ids=["once", "always"])
def test_a_role_that_does_not_fit_is_not_borrowed(
    role: type[Any], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def wake(self: Any) -> None:
        # a lender wakes its other role before its own has ever slept: only that one fails
        if threading.current_thread().name == ("worker-train" if role is StubEngine else "worker-rollout"):
            tries.append(1)
            if len(tries) <= times:
                raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(role, "wake", wake)
    events: list[Any] = []
    run = run_stub(tiny_job(*LENDING, "policy.staleness=0", steps=8), watch=seen(events))
    all_trained(run, 8)
    assert tries
    failed = sum(isinstance(event, LeaseFailed) for event in events)
    assert failed <= len(tries)
    direction = BOTH[0] if role is StubEngine else BOTH[1]
    note = next(note for note in run.record.notes if f"of kind {direction} was not entered" in note)
    assert "RuntimeError: CUDA out of memory. Tried to allocate 20.00 GiB (wake:" in note
    if times == 1:
        assert len(tries) > 1, "it is tried again"


def test_a_trainer_that_never_gets_its_turn_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wake(self: StubTrainer) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(StubTrainer, "wake", wake)
    monkeypatch.setattr("bidirl.executor.backends.real.RETRY_S", 0.01)
    job = tiny_job("policy.name=colocated_sync", 'partition.placement="colocated"', gpus=2)
    with pytest.raises(
        RunFault, match=r"did not get its turn 4 times in a row: MemoryError: no room \(wake:"
    ):
        run_stub(job, checkpoints=tmp_path)


def test_an_owner_that_cannot_wake_again_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def wake(self: StubTrainer) -> None:
        if threading.current_thread().name == "worker-train":
            raise MemoryError("no room for the optimizer")

    monkeypatch.setattr(StubTrainer, "wake", wake)
    with pytest.raises(RunFault, match=r"training worker \d is gone: MemoryError: no room for the optimizer"):
        run_stub(tiny_job(*LENDING, "policy.staleness=0", steps=8))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (type("OutOfMemoryError", (RuntimeError,), {})("Tried to allocate"), True),
        (RuntimeError("device-side assert triggered"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: BaseException, expected: bool) -> None:
    assert out_of_memory(error) is expected


# ---------------------------------------------------------------- calls that hang

SOON = Patience(every_s=0.1, silent_s=20.0, step_s=3.0, train_s=3.0)
"""Long enough for a machine under load not to look hung."""


class Trap:
    """Something that one caller hangs in, until it is let go."""

    def __init__(self, at_call: int) -> None:
        self._left = at_call
        self._lock = threading.Lock()
        self.free = threading.Event()
        self.caught = threading.Event()

    def pass_by(self) -> None:
        with self._lock:
            self._left -= 1
            is_mine = self._left == 0
        if is_mine:
            self.caught.set()
            self.free.wait(30)


@pytest.fixture
def trap(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Hang the 40th caller; nobody waits long for its thread."""
    monkeypatch.setattr(links, "STOP_S", 0.2)
    found = Trap(40)
    yield found
    found.free.set()


def test_a_rollouter_that_hangs_is_replaced(trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    step = StubEngine.step

    def hangs(self: StubEngine) -> list[Draft]:
        trap.pass_by()
        return step(self)

    monkeypatch.setattr(StubEngine, "step", hangs)
    job = pinned_job(tiny_job(steps=8), lends=False)
    run = run_stub(job, watch=seen([], SOON))
    assert trap.caught.is_set()
    all_trained(run, 8)
    assert any(
        "was lost 1 time: hangs in generation for" in note and "pass_by (test_run_faults.py:" in note
        for note in run.record.notes
    )
    monkeypatch.undo()
    assert run.weight_digests == run_stub(job).weight_digests


def test_a_trainer_that_hangs_ends_the_run_and_it_goes_on_from_there(
    trap: Trap, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_chunk = StubTrainer.run

    def hangs(self: StubTrainer, *args: Any, **more: Any) -> Piece:
        trap.pass_by()
        return run_chunk(self, *args, **more)

    monkeypatch.setattr(StubTrainer, "run", hangs)
    job = pinned_job(tiny_job("learn.checkpoint_every=1", steps=8), lends=False)
    start_s = time.monotonic()
    with pytest.raises(RunFault) as caught:
        run_stub(job, watch=seen([], SOON), checkpoints=tmp_path)
    assert time.monotonic() - start_s < 25, "the trap holds for 30 s"
    message = str(caught.value)
    assert message.startswith("training worker ")
    assert " is gone: hangs in run for" in message
    assert "pass_by (test_run_faults.py:" in message
    assert message.endswith(f"go on after step {steps_kept(tmp_path)[-1]} with --resume")
    monkeypatch.undo()
    resumed = run_stub(job, resumed=newest_checkpoint(tmp_path), checkpoints=tmp_path)
    assert resumed.weight_digests == run_stub(job).weight_digests


def test_a_slow_replica_is_no_lost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    step = StubEngine.step
    slow: list[StubEngine] = []

    def limps(self: StubEngine) -> list[Draft]:
        if not slow:
            slow.append(self)
        if slow[0] is self:
            time.sleep(0.02)
        return step(self)

    monkeypatch.setattr(StubEngine, "step", limps)
    run = run_stub(tiny_job(*LENDING, steps=5), watch=seen([], replace(SOON, step_s=15.0)))
    all_trained(run, 5)
    assert not any("was lost" in note for note in run.record.notes)


def test_patience_is_short_for_engines_and_long_for_trainers() -> None:
    patience = Patience()
    commands = set(Worker(None, None, None, print)._do)  # type: ignore[arg-type]
    assert commands | {STEP} >= ENGINE
    assert patience.limit_s(STEP) == patience.step_s < patience.train_s == patience.limit_s("apply")
    assert patience.every_s < patience.silent_s < patience.step_s


def test_a_pulse_tells_where_the_thread_is() -> None:
    async def main() -> None:
        found = Trap(1)
        worker = Worker("rollout", lambda: StubEngine(StubConfig()), None, print)  # type: ignore[arg-type]
        worker._do = {"hello": found.pass_by}
        worker.start()
        worker.put(0, 1, "hello", ())
        assert await asyncio.to_thread(found.caught.wait, 10)
        pulse = worker.pulse()
        assert pulse.doing == "hello"
        assert "pass_by" in pulse.where
        found.free.set()
        worker.stop()
        await asyncio.to_thread(worker.thread.join, 10)

    asyncio.run(main())


# ---------------------------------------------------------------- data that does not arrive


def test_weights_that_do_not_arrive_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    load = StubEngine.load
    calls: list[int] = []

    def stumbles(self: StubEngine, version: int, tensors: Any) -> float:
        calls.append(version)
        if len(calls) in {2, 3, 7}:
            raise CallFailed("data did not arrive within 120 s")
        return load(self, version, tensors)

    monkeypatch.setattr(StubEngine, "load", stumbles)
    events: list[Any] = []
    run = run_stub(tiny_job("policy.name=no_borrow", "policy.staleness=0", steps=6), watch=seen(events))
    all_trained(run, 6)
    assert sum(isinstance(event, SyncFailed) for event in events) == 3
    assert max(step.mismatch_max for step in run.learning) < 1e-5, "no sample under the wrong weights"


@pytest.mark.parametrize("in_flight", ["continue_recompute", "continue_stale"])
def test_running_samples_outlive_weights_that_do_not_arrive(
    in_flight: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = StubEngine.load
    held: list[int] = []

    def stumbles(self: StubEngine, version: int, tensors: Any) -> float:
        if threading.current_thread().name == "worker-rollout":
            held.append(version)
            if len(held) % 2:
                raise CallFailed("data did not arrive within 120 s")
        return load(self, version, tensors)

    monkeypatch.setattr(StubEngine, "load", stumbles)
    events: list[Any] = []
    job = tiny_job("policy.name=no_borrow", "policy.staleness=2", f"policy.in_flight={in_flight}", steps=6)
    run = run_stub(job, watch=seen(events))
    all_trained(run, 6)
    assert sum(isinstance(event, SyncFailed) for event in events) > 3


def test_a_side_without_the_right_weights_trains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    load = StubTrainer.load
    calls: list[int] = []

    def stumbles(self: StubTrainer, tensors: Any) -> None:
        calls.extend([1] * (threading.current_thread().name == "worker-rollout"))
        if len(calls) % 3 == 1 and threading.current_thread().name == "worker-rollout":
            raise CallFailed("data did not arrive within 120 s")
        load(self, tensors)

    job = pinned_job(tiny_job("policy.staleness=0", "workload.mini_batches=3", steps=8), lends=True)
    whole = run_stub(job)
    monkeypatch.setattr(StubTrainer, "load", stumbles)
    run = run_stub(job)
    assert len(calls) >= 3
    all_trained(run, 8)
    assert run.weight_digests == whole.weight_digests


def test_a_new_worker_without_weights_is_replaced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    load = StubEngine.load
    new: list[StubEngine] = []

    def stumbles(self: StubEngine, version: int, tensors: Any) -> float:
        if self.version == 0 and version > 1 and self not in new:  # its first weights since it was replaced
            new.append(self)
            if len(new) < 3:
                raise CallFailed("data did not arrive within 120 s")
        return load(self, version, tensors)

    monkeypatch.setattr(StubEngine, "load", stumbles)

    def watch(driver: Driver, backend: RealBackend) -> None:
        checked(driver, backend)
        inner = driver.sink

        def sink(now: float, event: Any, actions: Any) -> None:
            if inner is not None:
                inner(now, event, actions)
            if driver.num_events == 90:
                backend.links[0].fail("it went away")

        driver.sink = sink

    job = pinned_job(tiny_job(steps=8), lends=False)
    run = run_stub(job, watch=watch)
    all_trained(run, 8)
    assert len(new) == 3
    assert any("lost 3 times: it did not get its weights" in note for note in run.record.notes)
    monkeypatch.undo()
    assert run.weight_digests == run_stub(job).weight_digests


# ---------------------------------------------------------------- what killed processes leave


def test_the_folders_of_dead_processes_are_cleared_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    foreign = tmp_path / "bd-foreign"
    foreign.mkdir()
    with scratch("bd-") as living:
        (living / "file").touch()
        dead = tmp_path / "bd-dead"
        dead.mkdir()
        (dead / ".lock").touch()
        with scratch("bd-") as other:
            assert sorted(tmp_path.iterdir()) == sorted([foreign, living, other])
        assert sorted(tmp_path.iterdir()) == sorted([foreign, living])
    assert list(tmp_path.iterdir()) == [foreign]
