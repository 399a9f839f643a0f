"""Backends fail: what training can get over it gets over, what not ends the run with its cause."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from bidirl.errors import InputError, InvariantBroken, RunFault
from bidirl.executor.backends import CallFailed, Listener, Taken
from bidirl.executor.backends.fake import FakeBackend
from bidirl.executor.clock import RealClock, VirtualClock, run_virtual
from bidirl.executor.driver import Deadlines, Driver
from bidirl.planner import events as ev
from bidirl.planner.invariants import check
from bidirl.planner.plan import Plan
from bidirl.planner.policy import Gate
from bidirl.traces.run_record import RunRecord
from bidirl.traces.workload import Workload
from tests.job_strategies import MAX_EVENTS
from tests.test_losses import small

DEADLINES = Deadlines(replica_s=40.0, train_s=40.0, lease_s=2.0, score_s=40.0)


def never() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


def _given(answer: Any, _: object) -> Any:
    return answer


def broken(error: Exception) -> asyncio.Future[Any]:
    future = never()
    future.set_exception(error)
    return future


class Flaky(FakeBackend):
    """A backend that answers some calls of one kind with what ``answer`` makes, the rest as it should."""

    def __init__(
        self,
        plan: Plan,
        workload: Workload,
        clock: VirtualClock | RealClock,
        kind: str = "",
        answer: Callable[[], Any] = never,
        calls: Sequence[int] = (0,),
    ) -> None:
        super().__init__(plan, workload, clock)
        self.kind, self.answer, self.wrong = kind, answer, calls
        self.num_calls = 0
        self.closed = False

    def _flaky(self, kind: str, right: Callable[[Any], Awaitable[Any]], action: Any) -> Awaitable[Any]:
        answer = right(action)
        if kind == self.kind:
            self.num_calls += 1
            if self.num_calls - 1 in self.wrong:
                return self.answer()  # type: ignore[no-any-return]
        return answer

    def preempt(self, action: ev.Preempt) -> Awaitable[Taken]:
        return self._flaky("preempt", super().preempt, action)

    def run_chunks(self, action: ev.StartChunks) -> Awaitable[None]:
        return self._flaky(f"run_chunks {action.side}", super().run_chunks, action)

    def merge(self, action: ev.Merge) -> Awaitable[None]:
        return self._flaky("merge", super().merge, action)

    def broadcast(self, action: ev.Broadcast) -> Awaitable[None]:
        return self._flaky("broadcast", super().broadcast, action)

    def optimizer_step(self, action: ev.OptimizerStep) -> Awaitable[None]:
        return self._flaky("optimizer_step", super().optimizer_step, action)

    def enter(self, action: ev.BeginLease) -> Awaitable[None]:
        return self._flaky("enter", super().enter, action)

    def leave(self, action: ev.EndLease, *, entered: bool) -> Awaitable[None]:
        def right(action: ev.EndLease) -> Awaitable[None]:
            return FakeBackend.leave(self, action, entered=entered)

        return self._flaky("leave", right, action)

    def restart(self, action: ev.RestartReplica) -> Awaitable[None]:
        return self._flaky("restart", super().restart, action)

    def sync(self, actions: Sequence[ev.SyncReplica]) -> Sequence[Awaitable[float]]:
        answers = super().sync(actions)
        return [self._flaky("sync", partial(_given, answer), None) for answer in answers]

    async def close(self) -> None:
        await super().close()
        self.closed = True


def run(
    policy: str, kind: str, answer: Callable[[], Any] = never, calls: Sequence[int] = (0,)
) -> tuple[RunRecord, Counter[str]]:
    """Run in virtual time under every invariant; return the record and the kinds of events."""
    plan, workload = small(policy)
    kinds: Counter[str] = Counter()

    async def main(clock: VirtualClock) -> RunRecord:
        backend = Flaky(plan, workload, clock, kind, answer, calls)

        def sink(now: float, event: ev.Event, actions: list[ev.Action]) -> None:
            kinds[type(event).__name__] += 1
            assert kinds.total() < MAX_EVENTS
            check(driver.scheduler)

        driver = Driver(plan, backend, clock, sink=sink, deadlines=DEADLINES)
        try:
            return await driver.run()
        finally:
            assert backend.closed
            assert asyncio.all_tasks() == {asyncio.current_task()}

    record = run_virtual(main)
    per_step = plan.groups_per_step * plan.samples_per_group
    assert Counter(record.samples.step) == dict.fromkeys(range(plan.num_steps), per_step)
    return record, kinds


def refuse() -> asyncio.Future[Any]:
    return broken(CallFailed("the device said no"))


@pytest.mark.parametrize("answer", [never, refuse])
@pytest.mark.parametrize(
    ("kind", "event"),
    [
        ("run_chunks 0", "ChunkFailed"),
        ("run_chunks 1", "ChunkFailed"),
        ("merge", "SideLost"),
        ("broadcast", "SideLost"),
        ("enter", "LeaseFailed"),
        ("sync", "SyncFailed"),
        ("preempt", "ReplicaLost"),
    ],
)
def test_training_gets_over_a_call_that_fails_or_never_answers(
    kind: str, event: str, answer: Callable[[], Any]
) -> None:
    policy = "opportunistic" if kind == "preempt" else "train_on_rollout"
    _, kinds = run(policy, kind, answer, calls=(0, 2))
    assert kinds[event] >= 1


@pytest.mark.parametrize("answer", [never, refuse])
def test_rollouters_that_do_not_come_back_from_a_lease_are_lost_and_restarted(
    answer: Callable[[], Any],
) -> None:
    _, kinds = run("train_on_rollout", "leave", answer)
    assert kinds["ReplicaLost"] == kinds["ReplicaJoined"] == 4
    assert kinds["LeaseReturned"] >= 1


def test_a_restart_may_fail_a_few_times() -> None:
    _, kinds = run("train_on_rollout", "leave")
    with pytest.raises(RunFault, match="the device said no") as caught:
        run_with_two_failures(range(1000))
    assert isinstance(caught.value.__cause__, CallFailed)
    assert kinds["ReplicaJoined"]
    assert run_with_two_failures(range(5))["ReplicaJoined"] == 4


def run_with_two_failures(restarts: Sequence[int]) -> Counter[str]:
    """Let four replicas be lost by a lease that does not return, and their restarts fail."""
    plan, workload = small("train_on_rollout")
    kinds: Counter[str] = Counter()

    class Twice(Flaky):
        def leave(self, action: ev.EndLease, *, entered: bool) -> Awaitable[None]:
            first, self.left = not getattr(self, "left", False), True
            return refuse() if first else super().leave(action, entered=entered)

    async def main(clock: VirtualClock) -> RunRecord:
        backend = Twice(plan, workload, clock, "restart", refuse, restarts)
        return await Driver(
            plan, backend, clock, sink=lambda _, event, __: kinds.update([type(event).__name__])
        ).run()

    run_virtual(main)
    return kinds


@pytest.mark.parametrize("answer", [never, refuse])
def test_without_an_optimizer_step_the_run_ends_with_the_cause(answer: Callable[[], Any]) -> None:
    with pytest.raises(RunFault, match="training cannot go on without it") as caught:
        run("bidirl", "optimizer_step", answer)
    assert isinstance(caught.value.__cause__, CallFailed)
    assert "\n" not in str(caught.value)


def test_a_trainer_that_does_not_come_back_from_a_lease_ends_the_run() -> None:
    with pytest.raises(RunFault):
        run("opportunistic", "leave", refuse, calls=range(100))


@pytest.mark.parametrize("kind", ["run_chunks 0", "sync", "enter", "optimizer_step"])
def test_a_bug_of_a_backend_is_not_taken_for_a_fault(kind: str) -> None:
    with pytest.raises(KeyError, match="a bug"):
        run("opportunistic", kind, lambda: broken(KeyError("a bug")))


def test_a_bug_in_an_answer_surfaces() -> None:
    async def nonsense() -> str:
        return "not what was asked for"

    with pytest.raises(AttributeError):
        run("opportunistic", "preempt", nonsense)


def test_a_backend_that_does_not_open_is_closed() -> None:
    plan, workload = small("bidirl")
    backends: list[Flaky] = []

    class Shut(Flaky):
        async def open(self, listener: Listener) -> None:
            raise RunFault("no device")

    async def main(clock: VirtualClock) -> None:
        backends.append(Shut(plan, workload, clock))
        await Driver(plan, backends[0], clock).run()

    with pytest.raises(RunFault, match="no device"):
        run_virtual(main)
    assert backends[0].closed


def test_an_engine_that_never_ends_is_a_stall_not_a_hang() -> None:
    plan, workload = small("bidirl")

    class Mute(Flaky):
        def _announce(self, replica: int) -> None:
            pass

    async def main(clock: VirtualClock) -> None:
        await Driver(plan, Mute(plan, workload, clock), clock).run()

    with pytest.raises(InvariantBroken, match="everything waits"):
        run_virtual(main)


def test_a_scheduler_that_asks_for_nothing_is_a_stall_not_a_hang() -> None:
    plan, workload = small("bidirl")

    async def main(clock: VirtualClock) -> None:
        driver = Driver(plan, Flaky(plan, workload, clock), clock)
        driver.scheduler.handle = lambda event, now: []  # type: ignore[method-assign]
        await driver.run()

    with pytest.raises(InvariantBroken, match=r"stall at 0\.0 s"):
        run_virtual(main)


def test_cancelling_a_run_leaves_nothing_behind() -> None:
    plan, workload = small("opportunistic")

    async def main() -> None:
        clock = RealClock(speed=20.0)
        backend = Flaky(plan, workload, clock)
        task = asyncio.create_task(Driver(plan, backend, clock).run())
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert backend.closed
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_new_coefficients_are_an_event_like_any_other() -> None:
    plan, workload = small("bidirl")
    seen: list[ev.Event] = []

    async def main(clock: VirtualClock) -> None:
        driver = Driver(
            plan, Flaky(plan, workload, clock), clock, sink=lambda _, event, __: seen.append(event)
        )
        clock.at(3.0, driver.recalibrate, 1.5, 0.5)
        await driver.run()

    run_virtual(main)
    assert ev.CoefficientsUpdated(1.5, 0.5) in seen


def test_the_oracle_is_refused_on_a_real_clock() -> None:
    plan, workload = small("bidirl")
    oracle = replace(plan, policy=plan.policy.model_copy(update={"gate": Gate.ORACLE}))

    async def build() -> None:
        clock = RealClock()
        Driver(oracle, FakeBackend(oracle, workload, clock), clock)

    with pytest.raises(InputError, match="oracle"):
        asyncio.run(build())
