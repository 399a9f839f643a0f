"""Faults of real processes, on stand-ins under Ray: killed, stopped and slow workers, a killed driver."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bidirl.errors import RunFault
from bidirl.executor.backends import ray_workers
from bidirl.executor.backends.assemble import Kind
from bidirl.executor.backends.ray_session import children_of, shared_ray
from bidirl.executor.backends.ray_workers import RayTransport
from bidirl.executor.backends.real import RealBackend
from bidirl.executor.backends.watchdog import Patience
from bidirl.executor.checkpoint import newest_checkpoint, steps_kept
from bidirl.executor.driver import Driver
from bidirl.executor.neutral import pinned_job
from bidirl.executor.run import RealRun, run_real
from bidirl.planner.job import Job
from bidirl.sim.metrics import summarise
from tests.ledger_proof import prove_ledger
from tests.real_jobs import SLOW, checked, needs, run_stub, tiny_job
from tests.test_resume import SETTINGS, started, until

pytestmark = pytest.mark.engine

ROLLOUT, TRAIN = 0, 2
"""Numbers of a rollout worker and of the training worker of a job of 2 + 1."""
STEPS = 12


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One cluster for all tests; no process is left of it, nor of a worker that was stopped."""
    needs("ray")
    before = children_of(os.getpid())
    with shared_ray():
        yield
    assert children_of(os.getpid()) <= before


@cache
def job_of() -> Job:
    """Return a pinned job: its weights do not depend on where and when its samples were generated."""
    return pinned_job(tiny_job("learn.checkpoint_every=1", steps=STEPS, gpus=3), lends=True)


@cache
def undisturbed() -> dict[int, str]:
    """Return the digests of the weights of the job's versions where nothing goes wrong."""
    return run_stub(job_of()).weight_digests


def run_under_ray(watch: Callable[[Driver, RealBackend], None], **more: Any) -> RealRun:
    """Run the job on stand-ins in processes of their own."""
    return run_real(job_of(), 0, Kind.STUB, ray="local", stub=SLOW, digest=True, watch=watch, **more)


def at_event(
    number: int, act: Callable[[int, Driver], None], worker: int, patience: Patience | None = None
) -> Callable[[Driver, RealBackend], None]:
    """Do something to a worker's process when the driver has seen some events."""

    def watch(driver: Driver, backend: RealBackend) -> None:
        checked(driver, backend)
        if patience is not None:
            backend.crew.patience = patience
        inner = driver.sink

        def sink(now: float, event: Any, actions: Any) -> None:
            if inner is not None:
                inner(now, event, actions)
            if driver.num_events == number:
                transport = backend.links[worker]._transport
                assert isinstance(transport, RayTransport)
                assert transport.pid is not None
                act(transport.pid, driver)

        driver.sink = sink

    return watch


def is_as_undisturbed(run: RealRun) -> None:
    """Check a run's ledger, and its weights bit by bit."""
    assert len(run.learning) == STEPS
    assert summarise(run.record)["ledger"]["samples"]["trained"] == STEPS * 6 * 4
    assert run.weight_digests == undisturbed()


def gone(pid: int) -> bool:
    """Return whether a process has ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until_gone(pids: Iterable[int], patience_s: float) -> None:
    """Wait for the end of processes."""
    left = [pid for pid in pids if not gone(pid)]
    deadline_s = time.monotonic() + patience_s
    while left and time.monotonic() < deadline_s:
        time.sleep(0.05)
        left = [pid for pid in left if not gone(pid)]
    assert left == []


# ---------------------------------------------------------------- rollouters

IMPATIENT = Patience(every_s=0.5, silent_s=8.0)


@pytest.fixture
def short_farewell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask a stopped process, which cannot hear it, for a short time only to end by itself."""
    monkeypatch.setattr(ray_workers, "STOP_S", 3.0)
    monkeypatch.setattr(ray_workers, "EXIT_S", 1.0)


def test_a_killed_rollouter_changes_no_weight() -> None:
    run = run_under_ray(at_event(60, lambda pid, _: os.kill(pid, signal.SIGKILL), ROLLOUT))
    is_as_undisturbed(run)
    assert any("rollout worker 0 was lost 1 time: " in note for note in run.record.notes)


@pytest.mark.usefixtures("short_farewell")
def test_a_stopped_rollouter_is_replaced_and_its_process_ended() -> None:
    pids: list[int] = []

    def stop(pid: int, _: Driver) -> None:
        pids.append(pid)
        os.kill(pid, signal.SIGSTOP)

    run = run_under_ray(at_event(60, stop, ROLLOUT, IMPATIENT))
    is_as_undisturbed(run)
    assert "no sign of life for 8 s" in next(note for note in run.record.notes if "was lost" in note)
    wait_until_gone(pids, 10)


def test_a_straggler_is_waited_for() -> None:
    limping: list[threading.Thread] = []

    def slow_down(pid: int, _: Driver) -> None:
        def limp() -> None:
            for _ in range(10):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.2)
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.05)

        limping.append(threading.Thread(target=limp))
        limping[0].start()

    run = run_under_ray(at_event(30, slow_down, ROLLOUT, Patience(every_s=0.5, silent_s=30.0)))
    limping[0].join()
    is_as_undisturbed(run)
    assert run.record.notes == []


# ---------------------------------------------------------------- trainers


def test_after_a_trainer_dies_its_last_words_come_first_and_the_run_goes_on(tmp_path: Path) -> None:
    pids: list[int] = []
    hit_s: list[float] = []

    def shoot(pid: int, _: Driver) -> None:
        pids.append(pid)
        hit_s.append(time.monotonic())
        os.kill(pid, signal.SIGSEGV)

    folders = {"checkpoints": tmp_path / "checkpoints", "errors": tmp_path / "workers"}
    with pytest.raises(RunFault) as caught:
        run_under_ray(at_event(120, shoot, TRAIN), **folders)
    assert time.monotonic() - hit_s[0] < 120
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("training worker 2 is gone: Fatal Python error: Segmentation fault; process")
    assert f"process {pids[0]} of worker 2 ended" in message
    (said,) = (tmp_path / "workers").glob("worker-2-*.err")
    assert f"its error output: {said}; go on after step" in message
    kept = steps_kept(tmp_path / "checkpoints")
    assert message.endswith(f"go on after step {kept[-1]} with --resume")
    wait_until_gone(pids, 10)
    resumed = run_under_ray(checked, resumed=newest_checkpoint(tmp_path / "checkpoints"), **folders)
    is_as_undisturbed(resumed)


@pytest.mark.usefixtures("short_farewell")
def test_a_stopped_trainer_ends_the_run_in_time(tmp_path: Path) -> None:
    pids: list[int] = []
    hit_s: list[float] = []

    def stop(pid: int, _: Driver) -> None:
        pids.append(pid)
        hit_s.append(time.monotonic())
        os.kill(pid, signal.SIGSTOP)

    with pytest.raises(RunFault, match=r"^training worker 2 is gone: no sign of life for 8 s.*--resume$"):
        run_under_ray(at_event(120, stop, TRAIN, IMPATIENT), checkpoints=tmp_path / "checkpoints")
    assert time.monotonic() - hit_s[0] < 120
    wait_until_gone(pids, 10)


# ---------------------------------------------------------------- the driver


AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}
"""Ray's own processes that take a minute to notice that their cluster is gone."""


def command_of(pid: int) -> str:
    """Return the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def test_a_killed_driver_takes_its_cluster_with_it_and_the_run_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = started(folder, "--ray", "local", gpus=3)
    until(lambda: max(steps_kept(folder / "checkpoints"), default=0) >= 3, process)
    cluster = {pid for pid in children_of(process.pid) if not AGENTS & set(command_of(pid).split())}
    assert sum(command_of(pid).startswith("ray::WorkerActor") for pid in cluster) == 3
    process.send_signal(signal.SIGKILL)
    process.communicate()
    last = started(folder, "--ray", "local", "--resume", gpus=3)
    assert last.communicate()[1].startswith("note: going on after step")
    assert last.returncode == 0
    wait_until_gone(cluster, 30)
    prove_ledger(folder)
    learned = json.loads(folder.with_suffix(".json").read_text(encoding="utf-8"))
    whole = run_stub(tiny_job(*SETTINGS, steps=8, gpus=3))
    assert learned["weights"] == {str(version): it for version, it in whole.weight_digests.items()}
