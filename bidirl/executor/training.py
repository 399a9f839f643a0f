"""Trainer work of the executor: pulls, merges, optimizer steps, broadcasts and publications."""

from collections.abc import Callable
from typing import Any

from bidirl.executor.backends import Backend
from bidirl.executor.clock import Clock
from bidirl.executor.inbox import Inbox, key_of
from bidirl.executor.leases import SIDE, Leases
from bidirl.executor.spans import OpenSpans
from bidirl.planner import events as ev
from bidirl.planner.events import Event
from bidirl.planner.recorder import ACTIVITY_OF, Recorder
from bidirl.traces.run_record import Activity

__all__ = ["Training"]


class Training:
    """Carries trainer actions out on both sides."""

    def __init__(
        self,
        backend: Backend,
        clock: Clock,
        inbox: Inbox,
        recorder: Recorder,
        spans: OpenSpans,
        leases: Leases,
        deadline_s: float | None,
    ) -> None:
        self.backend = backend
        self.clock = clock
        self.inbox = inbox
        self.recorder = recorder
        self.spans = spans
        self.leases = leases
        self.deadline_s = deadline_s

    def _run(
        self,
        action: Any,
        sides: tuple[int, ...],
        activity: Activity,
        answer: Any,
        done: Event,
        failed: Callable[[BaseException], None] | None = None,
        *,
        owner: int | None = None,
    ) -> None:
        """Wait for trainer work on some sides; ``done`` is its event."""
        lease = self.leases.lease
        lent = () if lease is None else lease.replicas
        units = [unit for side in sides for unit in self.recorder.side_units(side, lent if side else ())]
        self.spans.open(action.serial, units, activity, self.clock.now(), owner=owner)
        num_lent = sum(unit[2] for unit in self.recorder.side_units(1, lent)) if 1 in sides else 0

        def take() -> Event | None:
            if owner == SIDE and action.serial <= self.leases.stale_side:
                return None
            seconds = self.spans.shut(action.serial, self.clock.now())
            if num_lent and lease is not None:
                self.recorder.lease_worked(lease.lease, seconds * num_lent)
            return done

        self.inbox.ask(
            action.serial,
            answer,
            lambda _: self.inbox.put(key_of(type(done), action.serial), take),
            failed,
            deadline_s=self.deadline_s,
            owner=owner,
        )

    def start_chunks(self, action: ev.StartChunks) -> None:
        """Run a pull on a side; one that fails is pulled again by whoever is free."""
        place = action.side, action.step, action.segment, action.first, action.last, action.attempt

        def take() -> Event | None:
            if action.side and action.serial <= self.leases.stale_side:
                return None
            self.spans.shut(action.serial, self.clock.now())
            return ev.ChunkFailed(*place, action.serial)

        self._run(
            action,
            (action.side,),
            ACTIVITY_OF[action.kind],
            self.backend.run_chunks(action),
            ev.ChunkFinished(*place, action.serial),
            lambda _: self.inbox.put(key_of(ev.ChunkFailed, action.serial), take),
            owner=SIDE if action.side else None,
        )

    def merge(self, action: ev.Merge) -> None:
        """Bring the auxiliary side's results home; if that fails, the side is as good as lost."""
        self._run(
            action,
            (1,),
            Activity.MERGE,
            self.backend.merge(action),
            ev.Merged(action.step, action.segment, action.serial),
            lambda _: self.leases.side_lost(),
            owner=SIDE,
        )

    def optimizer_step(self, action: ev.OptimizerStep) -> None:
        """Apply the merged gradient; if that fails, the run ends."""
        done = ev.Updated(action.step, action.update, action.serial)
        self._run(action, (0,), Activity.OPTIMIZER, self.backend.optimizer_step(action), done)

    def broadcast(self, action: ev.Broadcast) -> None:
        """Give the auxiliary side the updated weights; if that fails, it is as good as lost."""
        done = ev.BroadcastDone(action.step, action.update, action.serial)

        def failed(_: BaseException) -> None:
            self.leases.side_lost()  # it has the wrong weights
            self.inbox.put(key_of(ev.BroadcastDone, action.serial), take)

        def take() -> Event:
            self.spans.shut(action.serial, self.clock.now())
            return done

        self._run(action, (0, 1), Activity.BROADCAST, self.backend.broadcast(action), done, failed)

    def publish(self, action: ev.Publish) -> None:
        """Put a version where replicas can take it; if that fails, the run ends."""
        done = ev.Published(action.version, action.serial)
        self._run(action, (0,), Activity.SYNC, self.backend.publish(action), done)
