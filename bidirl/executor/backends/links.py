"""How the control plane reaches a worker: commands in order, answers as futures, messages as they come."""

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any, Protocol

from bidirl.executor.backends import CallFailed
from bidirl.executor.backends.messages import Message, Pulse, WorkerLost
from bidirl.executor.backends.worker import Worker

__all__ = ["Link", "ThreadTransport", "Transport"]

STOP_S = 10.0
"""Seconds that a worker's thread gets to end: longer than an iteration."""


class Transport(Protocol):
    """Carries commands to one worker; what comes back goes to the function given to ``open``."""

    def open(self, receive: Callable[[Message], None], broken: Callable[[str], None]) -> None:
        """Start the worker; from then on ``receive`` gets its messages and ``broken`` the news of its end."""
        ...

    def send(self, order: int, number: int, name: str, args: tuple[Any, ...]) -> None:
        """Hand a command over."""
        ...

    async def pulse(self) -> Pulse:
        """Ask past all commands what the worker is at; no answer comes from one that is stopped."""
        ...

    async def close(self) -> None:
        """End the worker and leave nothing of it behind."""
        ...


class Link:
    """One worker as the backend sees it.

    ``call`` queues a command before it returns. An argument may be a future: the command and those behind
    it are then sent when it is done, so that the order holds. A command whose argument fails is not sent,
    and fails with it.
    """

    def __init__(
        self,
        transport: Transport,
        heard: Callable[[Message], None],
        lost: Callable[[str], None],
    ) -> None:
        """Take what to do with messages (before answers are given) and with the worker's end."""
        self._transport = transport
        self._heard = heard
        self._lost = lost
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._queue: deque[tuple[int, str, tuple[Any, ...]]] = deque()
        self._num_calls = self._num_sent = 0
        self.broken: str | None = None
        """Why the worker is of no more use."""
        self.offset_s = 0.0
        """What to add to the worker's clock to get that of this process."""
        self._waiting: asyncio.Future[Any] | None = None

    def open(self) -> None:
        """Start the worker."""
        self._transport.open(self._receive, self.fail)

    def call(self, name: str, *args: Any) -> asyncio.Future[Any]:
        """Queue a command; CallFailed if it fails, WorkerLost if the worker is gone."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_heed)
        if self.broken is not None:
            future.set_exception(WorkerLost(self.broken))
            return future
        self._num_calls += 1
        self._calls[self._num_calls] = future
        self._queue.append((self._num_calls, name, args))
        self._flush()
        return future

    def _flush(self, _: object = None) -> None:
        while self._queue and self.broken is None:
            number, name, args = self._queue[0]
            waiting = next((arg for arg in args if isinstance(arg, asyncio.Future) and not arg.done()), None)
            if waiting is not None:
                if waiting is not self._waiting:
                    self._waiting = waiting
                    waiting.add_done_callback(self._flush)
                return
            self._queue.popleft()
            try:
                plain = tuple(arg.result() if isinstance(arg, asyncio.Future) else arg for arg in args)
            except (Exception, asyncio.CancelledError) as error:
                self._settle(number, error=error if isinstance(error, CallFailed) else CallFailed(str(error)))
                continue
            self._transport.send(self._num_sent, number, name, plain)
            self._num_sent += 1

    def _receive(self, message: Message) -> None:
        if self.broken is not None:
            return
        self._heard(message)
        problem = message.problem
        if problem is not None and problem.is_fatal:
            self.fail(problem.text)
        elif message.answer_to is not None:
            error = None if problem is None else CallFailed(problem.text)
            self._settle(message.answer_to, message.value, error)

    def _settle(self, number: int, value: Any = None, error: BaseException | None = None) -> None:
        future = self._calls.pop(number, None)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def fail(self, reason: str) -> None:
        """Take the worker as lost: every call on its way fails, and so does every later one."""
        if self.broken is not None:
            return
        self.broken = reason
        self._queue.clear()
        for number in list(self._calls):
            self._settle(number, error=WorkerLost(reason))
        self._lost(reason)

    async def greet(self) -> dict[str, Any]:
        """Wait until the worker is there, learn what it is, and how its clock differs from ours."""
        found: dict[str, Any] = await self.call("hello")
        if found["host"] == socket.gethostname():
            return found  # one clock for all processes of a host
        best = float("inf")
        for _ in range(3):
            sent_s = monotonic()
            there_s = (await self.call("hello"))["now_s"]
            took_s = monotonic() - sent_s
            if took_s < best:
                best, self.offset_s = took_s, sent_s + took_s / 2 - there_s
        return found

    async def pulse(self) -> Pulse:
        """Ask what the worker is at."""
        return await self._transport.pulse()

    async def close(self) -> None:
        """End the worker; calls on its way are cancelled."""
        self.broken = self.broken or "closed"
        for future in self._calls.values():
            future.cancel()
        self._calls.clear()
        self._queue.clear()
        await self._transport.close()


def _heed(future: asyncio.Future[Any]) -> None:
    """Look at an answer that nobody may be waiting for, so that asyncio does not complain."""
    if not future.cancelled():
        future.exception()


class ThreadTransport:
    """A worker in a thread of this process."""

    def __init__(self, build: Callable[[Callable[[Message], None]], Worker]) -> None:
        """Take what builds the worker from the function that it gives its messages to."""
        self._build = build
        self.worker: Worker | None = None

    def open(self, receive: Callable[[Message], None], broken: Callable[[str], None]) -> None:
        del broken  # a thread that ends says why in its last message
        loop = asyncio.get_running_loop()
        self.worker = self._build(partial(_hand_over, loop, receive))
        self.worker.start()

    def send(self, order: int, number: int, name: str, args: tuple[Any, ...]) -> None:
        if self.worker is not None:
            self.worker.put(order, number, name, args)

    async def pulse(self) -> Pulse:
        assert self.worker is not None
        return self.worker.pulse()

    async def close(self) -> None:
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.stop()
            await asyncio.to_thread(worker.thread.join, STOP_S)


def _hand_over(loop: asyncio.AbstractEventLoop, receive: Callable[[Message], None], message: Message) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(receive, message)
