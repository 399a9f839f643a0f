"""The virtual loop jumps to the next deadline, settles each instant and never hangs; the real one scales."""

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.errors import InvariantBroken
from bidirl.executor.clock import RealClock, VirtualClock, run_virtual


def test_time_jumps_to_exact_deadlines() -> None:
    times = [0.1 + 0.2, 1e9 / 3, 7.0, 1e-300]
    seen: list[float] = []

    async def main(clock: VirtualClock) -> None:
        for time_s in times:
            clock.at(time_s, lambda: seen.append(clock.now()))
        await asyncio.sleep(2e9)

    run_virtual(main)
    assert seen == sorted(times)


@given(st.lists(st.integers(0, 3), max_size=20), st.integers(0, 99))
def test_an_instant_is_settled_when_its_timers_and_their_consequences_have_run(
    times: list[int], seed: int
) -> None:
    """Each timer leads to a chain of callbacks of the same instant; ``settle`` waits for all of them."""

    async def main(clock: VirtualClock) -> None:
        loop = asyncio.get_running_loop()
        done: dict[int, int] = {}

        def step(time_s: int, left: int) -> None:
            assert clock.now() == time_s
            if left:
                loop.call_soon(step, time_s, left - 1)
            elif time_s not in done:
                clock.at(time_s, step, time_s, 1)  # a timer of zero seconds belongs to the instant
                done[time_s] = 0
            else:
                done[time_s] += 1

        for time_s in times:
            clock.at(time_s, step, time_s, time_s)
        for time_s in sorted(set(times)):
            await asyncio.sleep(time_s - clock.now())
            await clock.settle()
            assert clock.now() == time_s
            assert done[time_s] == times.count(time_s)

    run_virtual(main, shuffle=random.Random(seed))


def test_timers_of_one_instant_run_in_the_order_of_their_making() -> None:
    seen: list[int] = []

    async def main(clock: VirtualClock) -> None:
        for number in range(20):
            clock.at(1.0, seen.append, number)
        await asyncio.sleep(2.0)

    run_virtual(main)
    assert seen == list(range(20))
    seen.clear()
    run_virtual(main, shuffle=random.Random(1))
    assert sorted(seen) == list(range(20)) != seen


def test_a_cancelled_timer_neither_runs_nor_moves_time() -> None:
    async def main(clock: VirtualClock) -> float:
        clock.at(5.0, pytest.fail, "cancelled").cancel()
        clock.at(50.0, pytest.fail, "cancelled").cancel()
        await asyncio.sleep(1.0)
        await clock.settle()
        return clock.now()

    assert run_virtual(main) == 1.0


def test_waiting_for_nothing_is_an_error_not_a_hang() -> None:
    async def main(clock: VirtualClock) -> None:
        await asyncio.sleep(3.0)
        await asyncio.Event().wait()

    with pytest.raises(InvariantBroken, match=r"at 3\.0 s: everything waits"):
        run_virtual(main)


def test_a_task_that_outlives_main_is_an_error() -> None:
    async def main(clock: VirtualClock) -> None:
        task = asyncio.create_task(asyncio.sleep(9.0), name="leftover")
        await asyncio.sleep(0)
        tasks.append(task)

    tasks: list[Any] = []
    with pytest.raises(InvariantBroken, match="leftover"):
        run_virtual(main)
    assert tasks[0].cancelled()


def test_an_error_of_a_callback_surfaces() -> None:
    async def main(clock: VirtualClock) -> None:
        clock.at(1.0, {}.__getitem__, "missing")
        await asyncio.sleep(5.0)

    with pytest.raises(KeyError, match="missing"):
        run_virtual(main)


def test_asyncio_works_on_the_virtual_loop() -> None:
    async def main(clock: VirtualClock) -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await asyncio.Event().wait()
        queue: asyncio.Queue[int] = asyncio.Queue()
        async with asyncio.TaskGroup() as group:
            group.create_task(queue.put(3))
            group.create_task(asyncio.sleep(1.0))
        assert list(await asyncio.gather(queue.get(), asyncio.sleep(0.5, 7))) == [3, 7]
        return clock.now()

    assert run_virtual(main) == 4.0


def test_the_real_clock_runs_at_its_speed() -> None:
    async def main() -> list[float]:
        clock = RealClock(speed=1e4)
        seen: list[float] = []
        done = asyncio.Event()
        for time_s in (30.0, 10.0, 20.0, -1.0):
            clock.at(time_s, seen.append, time_s)
        clock.at(40.0, done.set)
        await done.wait()
        assert clock.now() >= 40.0
        return seen

    assert asyncio.run(main()) == [-1.0, 10.0, 20.0, 30.0]
