"""The control plane of real runs, on numpy stand-ins in threads: the same code that drives vLLM and torch."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bidirl.errors import InputError, RunFault
from bidirl.executor.backends import CallFailed
from bidirl.executor.backends.links import Link
from bidirl.executor.backends.messages import (
    LocalPost,
    Message,
    Pulse,
    Role,
    Snapshot,
    WorkerLost,
    one_line,
)
from bidirl.executor.backends.real import RealBackend
from bidirl.executor.backends.stub import StubConfig, StubEngine, StubTrainer
from bidirl.executor.backends.worker import Worker
from bidirl.executor.checkpoint import newest_checkpoint
from bidirl.executor.driver import Driver
from bidirl.executor.neutral import difference, pinned_job
from bidirl.executor.roles import Draft
from bidirl.planner.events import Direction
from bidirl.planner.job import Job
from bidirl.planner.replay import replay
from bidirl.sim.metrics import summarise
from tests.real_jobs import checked, run_stub, tiny_job

LENDING = ("policy.name=opportunistic", "policy.split=eq6")


@pytest.mark.parametrize(
    "settings",
    [
        ("policy.name=no_borrow", "policy.staleness=0"),
        ("policy.name=no_borrow", "policy.staleness=1.5", "workload.reference=on"),
        LENDING,
        (*LENDING, "workload.mini_batches=3", "policy.granularity=streamed"),
        (*LENDING, "policy.version_mode=pinned", "policy.batch_order=issue_order", "policy.merge=ordered"),
        (*LENDING, "policy.in_flight=continue_stale", "policy.split=length_aware"),
        (*LENDING, "policy.in_flight=restart"),
        (*LENDING, "policy.in_flight=drain", "workload.mini_batches=2"),
        ("policy.name=roll", "policy.staleness=0.5", "policy.lending=both"),
        ("policy.name=opportunistic", "learn.filtering=on", "workload.samples_per_prompt=2"),
    ],
    ids=str,
)
def test_every_policy_runs_to_its_end(settings: tuple[str, ...]) -> None:
    job = tiny_job(*settings)
    run = run_stub(job)
    summary = summarise(run.record)
    trained = summary["ledger"]["samples"]["trained"]
    assert trained == job.workload.num_steps * job.workload.prompts_per_step * job.workload.samples_per_prompt
    assert len(run.learning) == job.workload.num_steps
    assert len(set(run.weight_digests.values())) == job.workload.num_steps + 1


def test_colocated_roles_take_turns() -> None:
    job = tiny_job("policy.name=colocated_sync", 'partition.placement="colocated"', gpus=2)
    run = run_stub(job)
    assert summarise(run.record)["lag"]["max"] == 0
    assert len(run.learning) == job.workload.num_steps
    assert len(run.costs["time_share_in"]) == job.workload.num_steps


def test_the_policy_learns_with_borrowing_on() -> None:
    """Without staleness, so that what is learned does not hang on how fast this machine is at the moment."""
    short = ("model.architecture.vocab_size=4", "workload.lengths={p50 = 5, p95 = 12}", "policy.staleness=0")
    run = run_stub(tiny_job(*LENDING, *short, steps=60), stub=StubConfig(learning_rate=4.0, step_s=2e-4))
    assert run.record.leases.direction
    rewards = [step.reward for step in run.learning]
    assert np.mean(rewards[:4]) < 0.45
    assert np.mean(rewards[-4:]) > 0.8


def test_engine_and_trainer_agree_where_no_lag_can_hide_it() -> None:
    run = run_stub(tiny_job("policy.name=no_borrow", "policy.staleness=0"))
    assert max(step.mismatch_max for step in run.learning) < 1e-5
    assert max(step.lag_max for step in run.learning) == 0


def test_the_journal_replays(tmp_path: Path) -> None:
    from bidirl.sim.run import Outcome, build, run_to_folder

    def run(job: Any, seed: int, *, sink: Any = None) -> Outcome:
        done = run_stub(job, seed, sink=sink)
        return Outcome(done.plan, done.record, summarise(done.record))

    run_to_folder(tiny_job(*LENDING), 0, tmp_path, run, flush=True)
    found = replay(tmp_path / "journal.jsonl", build())
    assert found.difference is None
    assert found.is_complete
    assert "reward_mean" in (tmp_path / "steps.csv").read_text(encoding="utf-8").splitlines()[0]


def test_versions_are_kept_only_while_a_replica_may_need_them() -> None:
    held: list[int] = []

    def watch(driver: Driver, backend: RealBackend) -> None:
        checked(driver, backend)
        inner = driver.sink

        def sink(now: float, event: Any, actions: Any) -> None:
            held.append(len(backend.training.snapshots.held()))
            if inner is not None:
                inner(now, event, actions)

        driver.sink = sink

    run_stub(
        tiny_job(
            *LENDING,
            "policy.version_mode=pinned",
            "policy.batch_order=issue_order",
            "policy.staleness=2",
            steps=12,
        ),
        watch=watch,
    )
    assert 2 <= max(held) <= 4


def test_nothing_is_left_of_a_run() -> None:
    before = set(threading.enumerate())
    run_stub(tiny_job(*LENDING))
    assert [
        thread for thread in set(threading.enumerate()) - before if thread.name.startswith("worker")
    ] == []


# ---------------------------------------------------------------- losses


def dies_at(worker: int, event: int) -> Callable[[Driver, RealBackend], None]:
    """Let a worker vanish when the driver has seen some events."""

    def watch(driver: Driver, backend: RealBackend) -> None:
        checked(driver, backend)
        inner = driver.sink

        def sink(now: float, seen: Any, actions: Any) -> None:
            if inner is not None:
                inner(now, seen, actions)
            if driver.num_events == event:
                backend.links[worker].fail("CUDA error: it went away")

        driver.sink = sink

    return watch


@pytest.mark.parametrize("event", [3, 40, 77, 120])
def test_a_lost_rollouter_is_replaced_and_every_sample_is_trained(event: int) -> None:
    job = tiny_job(*LENDING, steps=8)
    run = run_stub(job, watch=dies_at(0, event))
    assert len(run.learning) == 8
    summary = summarise(run.record)
    assert summary["ledger"]["samples"]["trained"] == 8 * 6 * 4


def test_pinned_samples_are_the_same_after_a_loss() -> None:
    pinned = ("policy.version_mode=pinned", "policy.batch_order=issue_order", "policy.merge=ordered")
    job = tiny_job(*LENDING, *pinned, steps=8)
    whole, hit = run_stub(job), run_stub(job, watch=dies_at(1, 60))
    assert {key: digest for key, (digest, _) in whole.sample_digests.items()} == {
        key: digest for key, (digest, _) in hit.sample_digests.items()
    }
    assert whole.weight_digests == hit.weight_digests


def test_a_lost_trainer_ends_the_run_with_the_root_cause() -> None:
    with pytest.raises(RunFault, match=r"training worker 2 is gone: CUDA error: it went away"):
        run_stub(tiny_job(*LENDING), watch=dies_at(2, 30))


def test_a_rollouter_that_keeps_dying_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: StubEngine) -> list[Draft]:
        raise ValueError("head_dim 16 is not supported")

    monkeypatch.setattr(StubEngine, "step", broken)
    with pytest.raises(RunFault, match=r"rollout worker \d was lost too often: ValueError: head_dim 16"):
        run_stub(tiny_job("policy.name=no_borrow"))


def test_two_workers_on_one_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bidirl.executor.backends.worker._no_devices", lambda: ("GPU-1",))
    with pytest.raises(RunFault, match="both use device GPU-1"):
        run_stub(tiny_job(*LENDING))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("partition.rollout_tp=2", "policy.name=no_borrow"), "make them equal"),
        (("workload.image_tokens=3",), "are text"),
        (("workload.turns={mean=2, max=3, tool_s=1, tool_tokens=2}",), "one turn"),
        (("policy.name=oracle",), "only a simulation knows"),
        (('learn.task="chess"',), "no packaged task"),
    ],
)
def test_what_a_real_run_cannot_do_is_refused(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run_stub(tiny_job(*settings))


# ---------------------------------------------------------------- checkpoints


class Stopped(Exception):
    """Stands for whatever ends a process in the middle of a run."""


def stops_in(step: int) -> Callable[[Driver, RealBackend], None]:
    def watch(driver: Driver, backend: RealBackend) -> None:
        checked(driver, backend)
        inner = driver.sink

        def sink(now: float, event: Any, actions: Any) -> None:
            if inner is not None:
                inner(now, event, actions)
            if driver.scheduler.train.step == step:
                raise Stopped

        driver.sink = sink

    return watch


@pytest.mark.parametrize("staleness", ["0", "1", "2"])
def test_a_resumed_run_learns_the_same_to_the_bit(staleness: str, tmp_path: Path) -> None:
    settings = (f"policy.staleness={staleness}", "learn.checkpoint_every=2")
    job = pinned_job(tiny_job(*settings, steps=9), lends=True)
    whole = run_stub(job)
    with pytest.raises(Stopped):
        run_stub(job, watch=stops_in(7), checkpoints=tmp_path)
    found = newest_checkpoint(tmp_path)
    assert found.step in {4, 6}
    assert len(list(tmp_path.glob("step-*"))) == 2
    resumed = run_stub(job, resumed=found, checkpoints=tmp_path)
    assert resumed.weight_digests == whole.weight_digests
    assert resumed.sample_digests.keys() == whole.sample_digests.keys()
    assert difference(whole, resumed) is None
    assert len(resumed.learning) == 9
    assert summarise(resumed.record)["ledger"]["samples"]["trained"] == 9 * 6 * 4


def test_a_resumed_journal_replays_as_a_whole(tmp_path: Path) -> None:
    from bidirl.sim.run import Outcome, build, run_to_folder

    job = tiny_job(*LENDING, "learn.checkpoint_every=2", steps=8)
    checkpoints = tmp_path / "checkpoints"
    more: dict[str, Any] = {"watch": stops_in(5), "checkpoints": checkpoints}

    def run(job: Job, seed: int, *, sink: Any = None) -> Outcome:
        done = run_stub(job, seed, sink=sink, **more)
        return Outcome(done.plan, done.record, summarise(done.record))

    with pytest.raises(Stopped):
        run_to_folder(job, 0, tmp_path, run, flush=True)
    found = newest_checkpoint(checkpoints)
    more = {"watch": checked, "resumed": found, "checkpoints": checkpoints}
    run_to_folder(job, 0, tmp_path, run, flush=True, keep_events=found.driver.num_events)
    journal = replay(tmp_path / "journal.jsonl", build())
    assert journal.difference is None
    assert journal.is_complete
    assert len((tmp_path / "steps.csv").read_text(encoding="utf-8").splitlines()) == 9


def test_a_checkpoint_of_another_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no checkpoint"):
        newest_checkpoint(tmp_path)
    with pytest.raises(Stopped):
        run_stub(tiny_job(*LENDING, "learn.checkpoint_every=1"), watch=stops_in(4), checkpoints=tmp_path)
    with pytest.raises(InputError, match=r"the plan's .*mini_batches.* changed"):
        run_stub(tiny_job(*LENDING, "workload.mini_batches=2"), resumed=newest_checkpoint(tmp_path))


# ---------------------------------------------------------------- links and workers


class Wire:
    """A transport that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int, str, tuple[Any, ...]]] = []
        self.receive: Callable[[Message], None] = lambda _: None

    def open(self, receive: Callable[[Message], None], broken: Callable[[str], None]) -> None:
        self.receive = receive

    def send(self, order: int, number: int, name: str, args: tuple[Any, ...]) -> None:
        self.sent.append((order, number, name, args))

    async def pulse(self) -> Pulse:
        return Pulse("", 0.0, "")

    async def close(self) -> None:
        """Keep nothing."""


def linked(test: Callable[[Link, Wire, list[str]], Any]) -> None:
    async def main() -> None:
        wire, lost = Wire(), list[str]()
        link = Link(wire, lambda _: None, lost.append)
        link.open()
        await test(link, wire, lost)
        await link.close()

    asyncio.run(main())


def test_commands_wait_behind_one_whose_argument_is_on_its_way() -> None:
    async def check_order(link: Link, wire: Wire, _: list[str]) -> None:
        weights: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        link.call("submit", 1)
        link.call("sync", 7, weights)
        link.call("submit", 2)
        assert [name for _, _, name, _ in wire.sent] == ["submit"]
        weights.set_result("w7")
        await asyncio.sleep(0)
        assert [(order, name, args) for order, _, name, args in wire.sent] == [
            (0, "submit", (1,)),
            (1, "sync", (7, "w7")),
            (2, "submit", (2,)),
        ]

    linked(check_order)


def test_a_command_whose_argument_fails_is_not_sent() -> None:
    async def check_failure(link: Link, wire: Wire, _: list[str]) -> None:
        weights: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        answer = link.call("sync", 7, weights)
        link.call("submit", 2)
        weights.set_exception(CallFailed("no snapshot"))
        with pytest.raises(CallFailed, match="no snapshot"):
            await answer
        assert [(order, name) for order, _, name, _ in wire.sent] == [(0, "submit")]

    linked(check_failure)


def test_a_broken_link_fails_every_call_with_the_cause() -> None:
    async def check_loss(link: Link, wire: Wire, lost: list[str]) -> None:
        first = link.call("preempt", (1,))
        link.fail("OutOfMemoryError: 3 GiB")
        for call in (first, link.call("progress")):
            with pytest.raises(WorkerLost, match="OutOfMemoryError"):
                await call
        assert lost == ["OutOfMemoryError: 3 GiB"]

    linked(check_loss)


def test_a_worker_takes_commands_by_number_not_by_arrival() -> None:
    heard: list[Message] = []
    done = threading.Event()

    def emit(message: Message) -> None:
        heard.append(message)
        if message.answer_to == 3:
            done.set()

    config = StubConfig(vocab_size=8)
    worker = Worker(Role.ROLLOUT, lambda: StubEngine(config), None, emit)
    worker.start()
    draft = Draft(0, 0, np.array([1], np.int32), 5, 1000)
    worker.put(2, 3, "preempt", ((0,),))
    worker.put(1, 2, "progress", ())
    worker.put(0, 1, "submit", ((draft,),))
    assert done.wait(10)
    worker.stop()
    worker.thread.join(10)
    assert [message.answer_to for message in heard if message.answer_to] == [1, 2, 3]
    assert [taken.group for taken in heard[-1].value] == [0]


class SlowPost(LocalPost):
    """Weights that arrive when ``gate`` opens."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def get(self, handle: Any) -> Any:
        assert self.gate.wait(10)
        if isinstance(handle, Exception):
            raise handle
        return handle


def test_the_engine_goes_on_while_weights_are_on_their_way() -> None:
    post, config = SlowPost(), StubConfig(vocab_size=8)
    heard: list[Message] = []
    ended, done = threading.Event(), threading.Event()

    def emit(message: Message) -> None:
        heard.append(message)
        if message.ended:
            ended.set()
        if message.answer_to == 3:
            done.set()

    worker = Worker(Role.ROLLOUT, lambda: StubEngine(config), None, emit, post=post)
    worker.start()
    weights = {"bigram.weight": np.zeros((8, 8), np.float32)}
    worker.put(0, 1, "submit", ((Draft(0, 0, np.array([1], np.int32), 5, 30),),))
    worker.put(1, 2, "sync", (7, Snapshot(weights, "", 256), True))
    worker.put(2, 3, "resume", ())
    assert ended.wait(10)  # 30 tokens were generated by the old version
    assert [message.answer_to for message in heard if message.answer_to] == [1]
    post.gate.set()
    assert done.wait(10)
    worker.stop()
    worker.thread.join(10)
    assert [message.answer_to for message in heard if message.answer_to] == [1, 2, 3]


def test_weights_that_do_not_arrive_fail_the_sync_and_nothing_else() -> None:
    post, config = SlowPost(), StubConfig(vocab_size=8)
    post.gate.set()
    heard: list[Message] = []
    done = threading.Event()

    def emit(message: Message) -> None:
        heard.append(message)
        if message.answer_to == 2:
            done.set()

    worker = Worker(Role.ROLLOUT, lambda: StubEngine(config), None, emit, post=post)
    worker.start()
    worker.put(0, 1, "sync", (7, Snapshot(CallFailed("not within 120 s"), "", 0), True))
    worker.put(1, 2, "resume", ())
    assert done.wait(10)
    worker.stop()
    worker.thread.join(10)
    assert heard[0].problem is not None
    assert not heard[0].problem.is_fatal
    assert "not within 120 s" in heard[0].problem.text
    assert heard[1].problem is None


def test_a_command_for_the_other_role_is_a_fault_of_ours() -> None:
    heard: list[Message] = []
    config = StubConfig(vocab_size=8)
    worker = Worker(Role.TRAIN, lambda: StubEngine(config), lambda: StubTrainer(config), heard.append)
    worker.start()
    worker.put(0, 1, "progress", ())
    worker.thread.join(10)
    assert heard[0].problem is not None
    assert heard[0].problem.is_fatal
    assert "while the worker plays train" in heard[0].problem.text


def test_the_root_cause_comes_first() -> None:
    def fail() -> None:
        try:
            raise MemoryError("CUDA out of memory\nlong story")
        except MemoryError as error:
            raise TypeError("cannot pickle") from error

    with pytest.raises(TypeError) as caught:
        fail()
    assert one_line(caught.value).startswith("MemoryError: CUDA out of memory (")


def test_leases_in_both_directions_are_timed() -> None:
    run = run_stub(tiny_job(*LENDING, "policy.staleness=0", steps=10))
    leases = Counter(run.record.leases.direction)
    assert set(leases) == {Direction.ROLLOUT_ON_TRAIN, Direction.TRAIN_ON_ROLLOUT}
    for direction in leases:
        assert 0 < len(run.costs[f"{direction}_in"]) <= leases[direction]
    assert run.costs["merge"]
    published = run.record.steps.published_s
    assert all(first < second for first, second in pairwise(published))
