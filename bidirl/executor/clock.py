"""Two clocks for one driver: virtual time, which jumps, and real time, which may be sped up.

The virtual loop is a complete, small asyncio loop without I/O. What it adds to asyncio: when nothing is
ready and no timer is due, the instant is *settled*; only then is a waiter of ``settle`` woken, and only when
nobody waits does time jump to the next timer. A driver that settles before it takes its next event sees all
events of an instant, however they were produced, and can take them in an order of its own.
"""

import asyncio
import contextvars
import logging
import random
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from heapq import heappop, heappush
from typing import Any, Protocol, TypeVar, TypeVarTuple

from bidirl.errors import InvariantBroken

__all__ = ["Clock", "RealClock", "Timer", "VirtualClock", "VirtualLoop", "run_virtual"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_log = logging.getLogger(__name__)


class Timer(Protocol):
    """What can be called off."""

    def cancel(self) -> None:
        """Call it off; nothing happens if it is too late."""
        ...


class Clock(Protocol):
    """Time as a driver and a backend see it: seconds from the start of the run."""

    arrival_decides: bool
    """Whether the order of events is that of their arrival (real), not that of their keys (virtual)."""

    def now(self) -> float:
        """Return the seconds since the start."""
        ...

    def at(self, time_s: float, call: Callable[..., None], *args: Any) -> Timer:
        """Call ``call(*args)`` at ``time_s``, at once if that has passed."""
        ...

    async def settle(self) -> None:
        """Wait until nothing more can happen at this instant (real time: do not wait)."""
        ...


class VirtualLoop(asyncio.AbstractEventLoop):
    """An event loop whose time jumps to the next timer when nothing else is to be done.

    Timers of one instant run in the order (deadline, serial), ready callbacks in the order in which they
    became ready; ``shuffle`` permutes both, which must change no result and is for tests. There is no I/O:
    waiting for something that no timer brings raises InvariantBroken instead of hanging.
    """

    def __init__(self, *, shuffle: random.Random | None = None) -> None:
        self._shuffle = shuffle
        self._now = 0.0
        self._serial = 0
        self._soon: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, float, int, asyncio.TimerHandle]] = []
        self._settling: list[asyncio.Future[None]] = []
        self._running = False
        self._closed = False
        self._error: BaseException | None = None

    # ------------------------------------------------------------ what asyncio needs

    def time(self) -> float:
        return self._now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True
        self._soon.clear()
        self._timers.clear()

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._soon.append(handle)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._serial += 1
        tie = 0.0 if self._shuffle is None else self._shuffle.random()
        heappush(self._timers, (when, tie, self._serial, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Leave a cancelled timer in the heap; it is passed over when its time comes."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep the first error of a callback; the loop raises it."""
        error = context.get("exception")
        if self._error is None and isinstance(error, BaseException):
            self._error = error
        else:
            _log.error("%s", context.get("message"))

    # ------------------------------------------------------------------ the loop

    def settled(self) -> asyncio.Future[None]:
        """Return a future that is done when nothing more can happen at this instant."""
        future = self.create_future()
        self._settling.append(future)
        return future

    def run_until_complete(self, future: Any) -> Any:
        """Run until a future or coroutine is done and return its result.

        Raises:
            InvariantBroken: everything waits and no timer is left.
            BaseException: what a callback raised.
        """
        task = asyncio.ensure_future(future, loop=self)
        self._running = True
        events._set_running_loop(self)
        try:
            while not task.done():
                self._run_once()
        finally:
            events._set_running_loop(None)
            self._running = False
        return task.result()

    def _run_once(self) -> None:
        soon = self._soon
        if not soon and not self._due() and not self._wake_settled():
            self._jump()
        if self._shuffle is not None:
            self._shuffle.shuffle(soon)
        for _ in range(len(soon)):
            handle = soon.popleft()
            if not handle.cancelled():
                handle._run()
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error

    def _due(self) -> bool:
        """Make the timers of this instant ready; return whether there were any."""
        timers, found = self._timers, False
        while timers and (timers[0][0] <= self._now or timers[0][3].cancelled()):
            handle = heappop(timers)[3]
            if not handle.cancelled():
                self._soon.append(handle)
                found = True
        return found

    def _wake_settled(self) -> bool:
        waiting, self._settling = self._settling, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
        return bool(waiting)

    def _jump(self) -> None:
        if not self._timers:
            raise InvariantBroken(f"at {self._now} s: everything waits and no timer is left")
        self._now = self._timers[0][0]
        self._due()


class VirtualClock:
    """The clock of a ``VirtualLoop``; simultaneous events are ordered by their keys."""

    arrival_decides = False

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        return self._loop.time()

    def at(self, time_s: float, call: Callable[..., None], *args: Any) -> Timer:
        return self._loop.call_at(time_s, call, *args)

    async def settle(self) -> None:
        await self._loop.settled()


class RealClock:
    """The running loop's own time, ``speed`` model seconds a second, from construction (or ``start``) on."""

    arrival_decides = True

    def __init__(self, *, speed: float = 1.0) -> None:
        self._loop = asyncio.get_running_loop()
        self._start_s = self._loop.time()
        self._speed = speed

    def start(self, at_s: float = 0.0) -> None:
        """Let it be ``at_s`` now: what a backend needs to start is no part of a run."""
        self._start_s = self._loop.time() - at_s / self._speed

    def now(self) -> float:
        return (self._loop.time() - self._start_s) * self._speed

    def at(self, time_s: float, call: Callable[..., None], *args: Any) -> Timer:
        return self._loop.call_at(self._start_s + time_s / self._speed, call, *args)

    async def settle(self) -> None:
        await asyncio.sleep(0)


def run_virtual(
    main: Callable[[VirtualClock], Coroutine[Any, Any, T]], *, shuffle: random.Random | None = None
) -> T:
    """Run ``main(clock)`` to its end in virtual time; tasks that it leaves behind are cancelled.

    Raises:
        InvariantBroken: everything waits and nothing will happen, or a task outlived ``main``.
    """
    loop = VirtualLoop(shuffle=shuffle)  # type: ignore[abstract]  # what is left out is I/O
    task = loop.create_task(main(VirtualClock(loop)))
    try:
        result = loop.run_until_complete(task)
        left = asyncio.all_tasks(loop)
        if left:
            raise InvariantBroken(f"left behind: {sorted(task.get_name() for task in left)}")
        return result  # type: ignore[no-any-return]
    finally:
        for other in asyncio.all_tasks(loop):
            other.cancel()
            loop.run_until_complete(asyncio.wait([other]))
        loop.close()
