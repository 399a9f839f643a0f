"""Weights are kept as long as somebody may ask for them, and no longer."""

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any, ClassVar

import numpy as np
import pytest

from bidirl.errors import InvariantBroken
from bidirl.executor.backends import CallFailed, worker
from bidirl.executor.backends.messages import LocalPost, Message, Pull, Role, Snapshot
from bidirl.executor.backends.real import RealBackend
from bidirl.executor.backends.snapshots import Snapshots
from bidirl.executor.backends.stub import StubConfig, StubTrainer
from bidirl.executor.driver import Driver
from bidirl.executor.neutral import pinned_job
from bidirl.executor.roles import Draft, Row
from bidirl.planner.events import Action, Event, SegmentKind
from tests.real_jobs import checked, run_stub, tiny_job


def play(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


class Trainer:
    """Answers when it is told to, and remembers what it was to forget."""

    def __init__(self) -> None:
        self.promises: list[asyncio.Future[Snapshot]] = []
        self.forgotten: list[int] = []
        self.snapshots = Snapshots(self._take, lambda snapshot: self.forgotten.append(snapshot.handle))

    def _take(self) -> asyncio.Future[Snapshot]:
        self.promises.append(asyncio.get_running_loop().create_future())
        return self.promises[-1]

    async def deliver(self, number: int) -> None:
        self.promises[number].set_result(Snapshot(number, "", 0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)


def test_a_version_is_forgotten_when_no_replica_can_ask_for_it() -> None:
    async def story() -> None:
        trainer = Trainer()
        snapshots = trainer.snapshots
        for version in range(3):
            snapshots.publish(version)
            await trainer.deliver(version)
            snapshots.updated()
        await asyncio.sleep(0)
        assert trainer.forgotten == []
        snapshots.forget_before(2)
        await asyncio.sleep(0)
        assert trainer.forgotten == [0, 1]
        assert snapshots.held() == [2]
        with pytest.raises(InvariantBroken):
            snapshots.of(1)

    play(story())


def test_what_is_between_two_versions_is_forgotten_with_the_next_update() -> None:
    async def story() -> None:
        trainer = Trainer()
        assert trainer.snapshots.present() is trainer.snapshots.present()
        await trainer.deliver(0)
        assert trainer.forgotten == []
        trainer.snapshots.updated()
        await asyncio.sleep(0)
        assert trainer.forgotten == [0]

    play(story())


def test_an_unanswered_command_keeps_its_weights() -> None:
    async def story() -> None:
        trainer = Trainer()
        snapshots = trainer.snapshots
        answers = [asyncio.get_running_loop().create_future() for _ in range(3)]
        promise = snapshots.publish(0)
        for answer in answers:
            assert snapshots.carried(promise, answer) is answer
        snapshots.updated()
        snapshots.forget_before(1)
        await trainer.deliver(0)
        answers[0].set_result(None)
        answers[1].set_exception(CallFailed("it did not fit"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert trainer.forgotten == []
        answers[2].cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert trainer.forgotten == [0]

    play(story())


def test_weights_that_nobody_wants_any_more_are_forgotten_when_they_come() -> None:
    async def story() -> None:
        trainer = Trainer()
        trainer.snapshots.publish(0)
        trainer.snapshots.updated()
        trainer.snapshots.forget_before(1)
        await asyncio.sleep(0)
        assert trainer.forgotten == []
        await trainer.deliver(0)
        assert trainer.forgotten == [0]
        trainer.snapshots.publish(1)
        trainer.snapshots.updated()
        trainer.snapshots.forget_before(2)
        trainer.promises[1].cancel()  # the run is over
        await asyncio.sleep(0)
        assert trainer.forgotten == [0]

    play(story())


def test_gradients_that_nobody_fetched_go_with_the_next_segment() -> None:
    """A cancelled merge leaves some; those of the same segment may still be asked for."""
    told: list[str] = []

    class Noting(LocalPost):
        def put(self, value: Any, *, once: bool = False) -> Any:
            told.append("put once" if once else "put")
            return value

        def drop_unclaimed(self) -> None:
            told.append("drop unclaimed")

    done = threading.Event()

    def emit(message: Message) -> None:
        assert message.problem is None
        if message.answer_to == 7:
            done.set()

    config = StubConfig(vocab_size=8)
    made = worker.Worker(Role.TRAIN, None, lambda: StubTrainer(config), emit, post=Noting())
    made.start()
    draft = Draft(0, 0, np.array([1], np.int32), 5, 2, np.array([2, 3], np.int32), np.zeros(2, np.float32))
    rows = (Row(draft, 1.0, 1.0),)
    order = iter(range(8))
    for segment, chunk in ((0, 0), (0, 1), (1, 2)):
        pull = Pull(0, segment, SegmentKind.UPDATE, ((chunk, rows),), 2, 1)
        for name, args in (("run", (pull,)), ("fetch", (0, segment, (chunk,)))):
            number = next(order)
            made.put(number, number + 1, name, args)
    made.put(6, 7, "snapshot", (False,))
    assert done.wait(10)
    made.stop()
    made.thread.join(10)
    assert told == ["drop unclaimed", "put once", "put once", "drop unclaimed", "put once", "put"]


class StrictPost:
    """One place for the values of all workers, which counts, and refuses what was dropped."""

    lock = threading.Lock()
    values: ClassVar[dict[int, tuple[Any, bool]]] = {}
    num_put: ClassVar[list[int]] = [0]
    misses: ClassVar[list[int]] = []
    slow_s: ClassVar[list[float]] = [0.0]

    @classmethod
    def reset(cls, slow_s: float) -> None:
        cls.values.clear()
        cls.misses.clear()
        cls.num_put[0], cls.slow_s[0] = 0, slow_s

    def put(self, value: Any, *, once: bool = False) -> int:
        with self.lock:
            self.num_put[0] += 1
            self.values[self.num_put[0]] = (value, once)
            return self.num_put[0]

    def get(self, handle: int) -> Any:
        time.sleep(self.slow_s[0])
        with self.lock:
            if handle not in self.values:
                self.misses.append(handle)
                raise CallFailed(f"value {handle} was dropped")
            value, once = self.values[handle]
            if once:
                del self.values[handle]
            return value

    def drop(self, handle: int) -> None:
        with self.lock:
            del self.values[handle]  # once is enough

    def drop_unclaimed(self) -> None:
        """Do nothing: values of other workers are here too."""

    def close(self) -> None:
        """Do nothing."""

    @classmethod
    def num_kept(cls, *, once: bool) -> int:
        with cls.lock:
            return sum(kept == once for _, kept in cls.values.values())


@pytest.mark.parametrize("slow_s", [0.0, 0.03])
@pytest.mark.parametrize(
    "settings",
    [
        ("policy.name=opportunistic", "policy.split=eq6", "workload.mini_batches=2"),
        ("policy.name=opportunistic", "policy.split=eq6", "policy.staleness=3"),
        ("pinned",),
    ],
    ids=str,
)
def test_a_long_run_keeps_few_weights_and_a_slow_receiver_gets_its_own(
    monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...], slow_s: float
) -> None:
    monkeypatch.setattr(worker, "LocalPost", StrictPost)
    StrictPost.reset(slow_s)
    steps = 30 if not slow_s else 10
    job = pinned_job(tiny_job(steps=steps), lends=True) if settings == ("pinned",) else None
    excess: list[int] = []
    gradients: list[int] = []
    held: list[int] = []

    def watch(driver: Driver, backend: RealBackend) -> None:
        checked(driver, backend)
        inner = driver.sink

        def sink(now: float, event: Event, actions: list[Action]) -> None:
            if inner is not None:
                inner(now, event, actions)
            needed = len(backend.training.snapshots._uses)
            held.append(len(backend.training.snapshots.held()))
            excess.append(StrictPost.num_kept(once=False) - needed)
            gradients.append(StrictPost.num_kept(once=True))

        driver.sink = sink

    run = run_stub(job or tiny_job(*settings, steps=steps), watch=watch)
    assert len(run.learning) == steps
    assert StrictPost.misses == []
    assert not run.record.notes
    assert StrictPost.num_put[0] > steps
    assert max(excess) <= 2  # told to be forgotten, behind the trainer's other commands
    assert StrictPost.num_kept(once=False) <= held[-1] + 2
    assert gradients[-1] <= 2
