"""Answers on their way, and the inbox of what has arrived: the part of a driver that touches asyncio."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from typing import Any

from bidirl.errors import RunFault
from bidirl.executor.backends import CallFailed
from bidirl.executor.clock import Clock, Timer
from bidirl.planner.events import RANK, Event

__all__ = ["Inbox", "Take", "key_of"]

Take = Callable[[], "Event | None"]
"""What makes the event of an entry when its turn comes; None: it no longer matters."""

_log = logging.getLogger(__name__)

CLOSE_S = 30.0
"""Seconds of the loop's time that cancelled calls get to stop: longer than a device call, short of a user's
patience."""

_RANK_SHIFT = 48
"""Bits for the cause's serial below the event kind's rank."""


def key_of(kind: type[Any], serial: int) -> int:
    """Return the place of an event among those of one instant: by kind, then by cause."""
    return RANK[kind] << _RANK_SHIFT | serial


@dataclass(slots=True)
class _Call:
    """An answer that is on its way."""

    serial: int
    future: asyncio.Future[Any]
    owner: int | None
    """Whose loss makes the answer void: a replica, or the driver's number for a side."""
    timer: Timer | None = None
    late: bool = False


class Inbox:
    """Entries are taken in the order of their keys (virtual clock) or of their arrival (real clock)."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._calls: dict[int, _Call] = {}
        self._entries: list[tuple[int, int, Take]] = []
        self._num_arrived = 0
        self._arrived = asyncio.Event()
        self._error: BaseException | None = None

    # ----------------------------------------------------------------- entries

    def put(self, key: int, take: Take) -> None:
        """Add an entry."""
        self._num_arrived += 1
        heappush(self._entries, (0 if self.clock.arrival_decides else key, self._num_arrived, take))
        self._arrived.set()

    def put_event(self, event: Event) -> None:
        """Add an event that needs nothing more when its turn comes."""
        self.put(key_of(type(event), event.cause), lambda: event)

    async def next(self, stalled: Callable[[], BaseException | None]) -> Take:
        """Wait for the next entry.

        Raises:
            BaseException: the first error of a call, or what ``stalled`` returns when no answer is on its
                way and the inbox is empty.
        """
        while True:
            await self.clock.settle()
            if self._error is not None:
                raise self._error
            if self._entries:
                return heappop(self._entries)[2]
            error = None if self._calls else stalled()
            if error is not None:
                raise error
            self._arrived.clear()
            await self._arrived.wait()

    # ------------------------------------------------------------------- calls

    def ask(
        self,
        serial: int,
        answer: Awaitable[Any],
        then: Callable[[Any], None],
        failed: Callable[[BaseException], None] | None = None,
        *,
        deadline_s: float | None = None,
        owner: int | None = None,
    ) -> None:
        """Wait for an answer: ``then(value)`` or ``failed(error)`` is called and adds its entry.

        Only ``CallFailed``, a timeout and a missed deadline are failures; any other error ends the run, and
        so does a failure without ``failed``.
        """
        future = asyncio.ensure_future(answer)
        call = self._calls[serial] = _Call(serial, future, owner)
        future.add_done_callback(partial(self._answered, call, then, failed))
        if deadline_s is not None:
            call.timer = self.clock.at(self.clock.now() + deadline_s, self._expire, call)

    @staticmethod
    def _expire(call: _Call) -> None:
        call.late = True
        call.future.cancel()

    def _answered(
        self,
        call: _Call,
        then: Callable[[Any], None],
        failed: Callable[[BaseException], None] | None,
        future: asyncio.Future[Any],
    ) -> None:
        if self._calls.get(call.serial) is not call:
            if not future.cancelled():
                future.exception()  # void: nobody waits for it, so nobody need hear of it
            return
        self._forget(call)
        if future.cancelled():
            error: BaseException | None = CallFailed(
                "no answer before the deadline" if call.late else "the backend cancelled it"
            )
        else:
            error = future.exception()
        try:
            if error is None:
                then(future.result())
            elif failed is not None and isinstance(error, CallFailed | TimeoutError):
                failed(error)
            else:
                self.fail(error)
        except Exception as bug:  # a loop would log it, and the run would wait for ever
            self.fail(bug)

    def _forget(self, call: _Call) -> None:
        del self._calls[call.serial]
        if call.timer is not None:
            call.timer.cancel()

    def void(self, *, serial: int | None = None, owner: int | None = None) -> None:
        """Call off the answer to one action, or all answers of one owner."""
        for call in list(self._calls.values()):
            if call.serial == serial or (owner is not None and call.owner == owner):
                self._forget(call)
                call.future.cancel()

    def fail(self, error: BaseException) -> None:
        """End the run with the first error."""
        if self._error is None:
            if isinstance(error, CallFailed | TimeoutError):
                fault = RunFault(f"at {self.clock.now():.3f} s: {error}: training cannot go on without it")
                fault.__cause__ = error
                error = fault
            self._error = error
        self._arrived.set()

    async def close(self) -> None:
        """Call off everything that is on its way and wait until it has stopped, ``CLOSE_S`` at most."""
        calls = list(self._calls.values())
        for call in calls:
            self._forget(call)
            call.future.cancel()
        if calls:
            _, left = await asyncio.wait([call.future for call in calls], timeout=CLOSE_S)
            if left:
                _log.warning("%d calls did not stop within %g s of their cancellation", len(left), CLOSE_S)
