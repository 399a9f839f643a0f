"""A worker's commands: taken in the order of their numbers, each when its weights have arrived."""

import queue
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from bidirl.executor.backends.messages import Post, Snapshot

__all__ = ["Arriving", "Commands"]

Arriving = Future[Any]
"""Weights on their way; done when a command that has them as an argument is taken."""

Command = tuple[int, str, tuple[Any, ...]]
"""Number, name, arguments."""


class Commands:
    """Filled by any thread, emptied by one.

    Weights are fetched as soon as a command that needs them arrives: meanwhile the engine goes on, and only
    loading them stops it.
    """

    def __init__(self, post: Post) -> None:
        self._post = post
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="worker-fetch")
        self._queue: queue.SimpleQueue[tuple[int, Command] | bool] = queue.SimpleQueue()
        """Commands by order; True: weights have arrived; False: the end."""
        self._early: dict[int, Command] = {}
        self._next = 0

    def put(self, order: int, number: int, name: str, args: tuple[Any, ...]) -> None:
        """Add a command; ``order`` counts those of a worker from 0, and they may arrive in any order."""
        self._queue.put((order, (number, name, tuple(map(self._fetched, args)))))

    def _fetched(self, arg: Any) -> Any:
        if not isinstance(arg, Snapshot):
            return arg
        weights: Arriving = self._fetcher.submit(self._post.get, arg.handle)
        weights.add_done_callback(lambda _: self._queue.put(True))
        return weights

    def end(self) -> None:
        """Let a waiting ``take`` return, and fetch nothing more."""
        self._fetcher.shutdown(wait=False, cancel_futures=True)
        self._queue.put(False)

    def take(self, *, block: bool) -> Command | None:
        """Return the next command; None at the end, or if it is not there and ``block`` is not set."""
        while True:
            command = self._early.get(self._next)
            if command is not None and not any(
                isinstance(arg, Future) and not arg.done() for arg in command[2]
            ):
                del self._early[self._next]
                self._next += 1
                return command
            try:
                item = self._queue.get(block=block)
            except queue.Empty:
                return None
            if item is False:
                return None
            if isinstance(item, tuple):
                self._early[item[0]] = item[1]
