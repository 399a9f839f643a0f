"""vLLM and torch under Ray: killed workers, and a resume, change no bit of what is learned."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bidirl.errors import RunFault
from bidirl.executor.backends.assemble import Kind
from bidirl.executor.backends.ray_session import children_of, shared_ray
from bidirl.executor.backends.ray_workers import RayTransport
from bidirl.executor.backends.real import RealBackend
from bidirl.executor.checkpoint import Checkpoint, check_journal, newest_checkpoint
from bidirl.executor.driver import Driver
from bidirl.executor.neutral import difference, pinned_job
from bidirl.executor.run import RealRun, run_real
from bidirl.planner.events import SamplesFinished, StartChunks
from bidirl.planner.job import Job, load_job
from bidirl.sim.metrics import summarise
from bidirl.sim.run import Outcome, run_to_folder
from tests.ledger_proof import prove_ledger
from tests.real_jobs import TINY, checked, needs

pytestmark = pytest.mark.engine

SMALL = (
    "model.architecture.num_layers=2",
    "model.architecture.hidden_size=64",
    "model.architecture.num_attention_heads=2",
    "model.architecture.num_kv_heads=1",
    "model.architecture.intermediate_size=128",
    "model.architecture.vocab_size=32",
    "workload.max_response_tokens=40",
    "workload.lengths={p50 = 12, p95 = 36}",
    "workload.num_steps=6",
    "engine.kv_tokens=2048",
    "policy.staleness=1",
    "learn.checkpoint_every=1",
)
WORKERS = {"rollout": 0, "train": 1}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One cluster for all runs; no process is left of it."""
    needs("ray", "vllm")
    before = children_of(os.getpid())
    with shared_ray():
        yield
    assert children_of(os.getpid()) <= before


When = Callable[[Driver, Any, Any], bool]


def kills(**when: When) -> Callable[[Driver, RealBackend], None]:
    """Kill the process of a worker (``rollout`` or ``train``) at the first event and actions that fit."""

    def watch(driver: Driver, backend: RealBackend) -> None:
        checked(driver, backend)
        inner = driver.sink
        left = dict(when)

        def sink(now: float, event: Any, actions: Any) -> None:
            if inner is not None:
                inner(now, event, actions)
            for name in [name for name, fits in left.items() if fits(driver, event, actions)]:
                del left[name]
                transport = backend.links[WORKERS[name]]._transport
                assert isinstance(transport, RayTransport)
                assert transport.pid is not None
                os.kill(transport.pid, signal.SIGKILL)

        driver.sink = sink

    return watch


def run_into(
    folder: Path, job: Job, watch: Callable[[Driver, RealBackend], None], resumed: Checkpoint | None = None
) -> RealRun:
    """Run a job into a folder, as the command does."""
    found: list[RealRun] = []

    def run(job: Job, seed: int, *, sink: Any = None) -> Outcome:
        found.append(
            run_real(
                job,
                seed,
                Kind.VLLM,
                sink=sink,
                digest=True,
                watch=watch,
                checkpoints=folder / "checkpoints",
                resumed=resumed,
                errors=folder / "workers",
            )
        )
        return Outcome(found[0].plan, found[0].record, summarise(found[0].record))

    keep = None if resumed is None else resumed.driver.num_events
    run_to_folder(job, 0, folder, run, flush=True, keep_events=keep)
    prove_ledger(folder)
    return found[0]


def test_killed_workers_and_a_resume_change_no_bit(tmp_path: Path) -> None:
    tiny = load_job(TINY, SMALL)
    job = pinned_job(tiny, lends=True)
    whole = run_into(tmp_path / "whole", pinned_job(tiny, lends=False), checked)  # one engine fewer to start

    def generates(driver: Driver, event: Any, _: Any) -> bool:
        return driver.scheduler.train.step >= 1 and isinstance(event, SamplesFinished)

    def trains(driver: Driver, _: Any, actions: Any) -> bool:
        return driver.scheduler.train.step >= 4 and any(isinstance(it, StartChunks) for it in actions)

    parts = tmp_path / "parts"
    with pytest.raises(
        RunFault,
        match=r"^training worker 1 is gone: process \d+ of worker 1 ended.* after step \d with --resume$",
    ):
        run_into(parts, job, kills(rollout=generates, train=trains))
    found = newest_checkpoint(parts / "checkpoints")
    assert found.step >= 3
    check_journal(parts / "journal.jsonl", found.driver.num_events)
    resumed = run_into(parts, job, checked, found)
    assert any("rollout worker 0 was lost 1 time: process" in note for note in resumed.record.notes)
    assert difference(whole, resumed) is None
    assert resumed.weight_digests[6] == whole.weight_digests[6]
