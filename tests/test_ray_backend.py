"""Workers under Ray: stand-ins that are killed, then real engines and trainers that must agree bit by bit."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bidirl.executor.backends.assemble import Kind
from bidirl.executor.backends.ray_session import children_of, shared_ray
from bidirl.executor.backends.ray_workers import RayTransport
from bidirl.executor.backends.real import RealBackend
from bidirl.executor.driver import Driver
from bidirl.executor.neutral import neutrality, pinned_job
from bidirl.executor.run import RealRun, run_real
from bidirl.planner.job import Job, load_job
from bidirl.planner.replay import replay
from bidirl.sim.metrics import summarise
from tests.real_jobs import SLOW, TINY, checked, needs, tiny_job

pytestmark = pytest.mark.engine

TOKEN = Path.home() / ".ray" / "auth_token"


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cluster for all tests; at its end, no process, file or token is left of it."""
    needs("ray")
    before = children_of(os.getpid())
    token = TOKEN.read_bytes() if TOKEN.exists() else None
    tmp_path_factory.getbasetemp()  # stays where it is
    with (
        # A short name: the paths of sockets below it have a limit.
        tempfile.TemporaryDirectory(prefix="t", ignore_cleanup_errors=True) as room,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(tempfile, "tempdir", room)
        with shared_ray():
            yield
        assert [path.name for path in Path(room).iterdir() if path.name.startswith(("bd-", "bidirl-"))] == []
    assert children_of(os.getpid()) <= before
    assert (TOKEN.read_bytes() if TOKEN.exists() else None) == token


def test_a_killed_worker_is_replaced_and_training_goes_on() -> None:
    killed: list[int] = []

    def watch(driver: Driver, backend: RealBackend) -> None:
        checked(driver, backend)
        inner = driver.sink

        def sink(now: float, event: Any, actions: Any) -> None:
            if inner is not None:
                inner(now, event, actions)
            if driver.num_events == 40:
                transport = backend.links[0]._transport
                assert isinstance(transport, RayTransport)
                assert transport.pid is not None
                killed.append(transport.pid)
                os.kill(transport.pid, signal.SIGKILL)

        driver.sink = sink

    # One rollouter and no lending: the run cannot end before the new worker is there.
    job = tiny_job("policy.name=no_borrow", "partition.rollout_gpus=1", steps=14)
    run = run_real(job, 0, Kind.STUB, ray="local", stub=SLOW, watch=watch)
    assert killed
    assert summarise(run.record)["ledger"]["samples"]["trained"] == 14 * 6 * 4
    assert run.workers[0]["pid"] != killed[0]


SMALL = (
    "model.architecture.num_layers=2",
    "model.architecture.hidden_size=64",
    "model.architecture.num_attention_heads=2",
    "model.architecture.num_kv_heads=1",
    "model.architecture.intermediate_size=128",
    "model.architecture.vocab_size=32",
    "workload.max_response_tokens=40",
    "workload.lengths={p50 = 12, p95 = 36}",
    "engine.kv_tokens=2048",
    "policy.staleness=0",
)


BURSTS = (
    "workload.num_steps=5",
    "workload.prompts_per_step=4",
    "workload.max_response_tokens=36",
    "workload.lengths={p50 = 3, p95 = 5}",
    "workload.prompt_tokens=3",
    "workload.old_logprob=off",
    "workload.drift=[12, 1, 1, 1, 12]",
    "learn.pace={iteration_s = 0.010, token_s = 0.0008}",
    "policy.staleness=1",
)
"""Both pools idle in turn although rollout runs ahead: benchmarks/neutral.py has the same in long."""


def test_borrowing_changes_no_bit_of_a_real_run(tmp_path: Path) -> None:
    from bidirl.sim.run import Outcome, build, run_to_folder

    needs("vllm")
    job = load_job(TINY, [*SMALL, *BURSTS])
    runs: dict[str, RealRun] = {}

    def run(job: Job, seed: int, *, sink: Any = None) -> Outcome:
        found = runs[name] = run_real(job, seed, Kind.VLLM, sink=sink, digest=True, watch=checked)
        return Outcome(found.plan, found.record, summarise(found.record))

    for name, variant in (
        ("pinned, alone", pinned_job(job, lends=False)),
        ("pinned, lending", pinned_job(job, lends=True)),
    ):
        run_to_folder(variant, 0, tmp_path / name, run, flush=True)
        journal = replay(tmp_path / name / "journal.jsonl", build())
        assert journal.difference is None
        assert journal.is_complete
    found = neutrality(runs, lambda record: record.end_s)
    assert found.difference is None, found.verdict()
    assert not found.missing
    for each in runs.values():
        assert each.learning[0].mismatch_max < 1e-4  # later steps have the drift of the weights in it
        assert len({device for about in each.workers for device in about["devices"]}) == 2
