"""What a run shows of its stage times: answers timed from the journal, iterations reported by the engines.

A time is that of the control plane: from an action to the event that answers it. The same holds for a
simulated journal, so that predicted and measured times mean the same.
"""

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from bidirl.executor.backends.real import RealBackend
from bidirl.executor.backends.vllm.meter import Iteration
from bidirl.executor.driver import Driver, Sink
from bidirl.planner import events as ev
from bidirl.planner.events import Action, Event

__all__ = ["Generation", "Observer", "Stopwatch", "Timing"]


@dataclass(frozen=True, slots=True)
class Timing:
    """One answered action."""

    stage: str
    """``update``, ``old_logprob``, ``reference``, ``optimizer``, ``merge``, ``broadcast``, ``publish``,
    ``sync``, ``<direction>_in`` or ``<direction>_out``."""
    step: int
    """Step of the trainer when the action was given."""
    unit: int
    """Side of a pull, replica of a sync, number of a lease, else 0."""
    start_s: float
    seconds: float
    work: float = 0.0
    """Of a pull: effective tokens, those of its longest sample, and the replicas that share them."""
    longest: float = 0.0
    num_replicas: int = 1


@dataclass(frozen=True, slots=True)
class Generation:
    """The iterations of one engine between two updates."""

    step: int
    replica: int
    iterations: tuple[Iteration, ...]

    @property
    def seconds(self) -> float:
        """Return the time that they took, the loop's own work included."""
        return sum(iteration.seconds for iteration in self.iterations)


class Stopwatch:
    """A journal's sink that times answers; hands everything on to another sink."""

    def __init__(self, inner: Sink | None = None) -> None:
        self.inner = inner
        self.timings: list[Timing] = []
        self.step = 0
        self._open: dict[int, Timing] = {}
        self._leases: dict[int, ev.BeginLease] = {}

    def __call__(self, now: float, event: Event, actions: list[Action]) -> None:
        """Take an event with its actions."""
        if self.inner is not None:
            self.inner(now, event, actions)
        begun = self._open.pop(event.cause, None)
        failed = isinstance(event, ev.ChunkFailed | ev.SyncFailed | ev.LeaseFailed)
        if begun is not None and not failed:
            self.timings.append(replace(begun, seconds=now - begun.start_s))
        for action in actions:
            opened = self._opened(action, now)
            if opened is not None:
                self._open[action.serial] = opened

    def _opened(self, action: Action, now: float) -> Timing | None:
        match action:
            case ev.StartChunks():
                self.step = action.step
                return Timing(
                    action.kind.value,
                    action.step,
                    action.side,
                    now,
                    0.0,
                    action.work,
                    action.longest,
                    action.num_replicas,
                )
            case ev.OptimizerStep():
                return Timing("optimizer", action.step, 0, now, 0.0)
            case ev.Merge():
                return Timing("merge", action.step, 0, now, 0.0)
            case ev.Broadcast():
                return Timing("broadcast", action.step, 0, now, 0.0)
            case ev.Publish():
                return Timing("publish", self.step, 0, now, 0.0)
            case ev.SyncReplica():
                return Timing("sync", action.version - 1, action.replica, now, 0.0)
            case ev.BeginLease():
                self._leases[action.lease] = action
                return Timing(f"{action.direction}_in", self.step, action.lease, now, 0.0)
            case ev.EndLease():
                lease = self._leases[action.lease]
                return Timing(f"{lease.direction}_out", self.step, action.lease, now, 0.0)
            case _:
                return None


class Observer:
    """Watches a real run: a stopwatch on its journal, and the engines' iterations after each step."""

    def __init__(self) -> None:
        self.watch_ = Stopwatch()
        self._asked: list[tuple[int, int, asyncio.Future[Any]]] = []

    def watch(self, driver: Driver, backend: RealBackend) -> None:
        """Be told of everything; give it to ``run_real``."""
        self.watch_.inner = driver.sink
        driver.sink = self.watch_
        kept = driver.keep

        def keep(driver: Driver, num_done: int) -> None:
            if kept is not None:
                kept(driver, num_done)
            for replica in range(len(backend.links)):
                if backend.links[replica].broken is None:
                    answer = backend.links[replica].call("iterations")
                    self._asked.append((num_done - 1, replica, answer))

        driver.keep = keep

    @property
    def timings(self) -> list[Timing]:
        """Return the answered actions, in the order of their answers."""
        return self.watch_.timings

    def generations(self) -> list[Generation]:
        """Return what the engines reported, after the run; only those that generated."""
        found = []
        for step, replica, answer in self._asked:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                iterations = tuple(answer.result())
                if iterations:
                    found.append(Generation(step, replica, iterations))
        return found
