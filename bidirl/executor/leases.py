"""Leases as the executor carries them out: entering, returning, and the losses that break them."""

from functools import partial
from typing import Protocol

from bidirl.executor.backends import Backend, CallFailed
from bidirl.executor.clock import Clock
from bidirl.executor.inbox import Inbox, key_of
from bidirl.executor.spans import OpenSpans, Unit
from bidirl.planner import events as ev
from bidirl.planner.events import Direction, Event
from bidirl.planner.recorder import Recorder
from bidirl.traces.run_record import Activity

__all__ = ["SIDE", "Crew", "Leases"]

SIDE = -1
"""Owner of the calls that the loss of the auxiliary trainer side makes void."""


class Crew(Protocol):
    """What leases ask of the driver's rollout half."""

    down: set[int]

    def lost(self, replica: int) -> None:
        """Take a replica as lost."""
        ...

    def generated(self, replica: int) -> None:
        """Write down what a replica has generated."""
        ...


class Leases:
    """The lease in force, if any; there is one at a time."""

    def __init__(
        self,
        backend: Backend,
        clock: Clock,
        inbox: Inbox,
        recorder: Recorder,
        spans: OpenSpans,
        crew: Crew,
        deadline_s: float | None,
    ) -> None:
        self.backend = backend
        self.clock = clock
        self.inbox = inbox
        self.recorder = recorder
        self.spans = spans
        self.crew = crew
        self.deadline_s = deadline_s
        self.num_primary = recorder.plan.rollout_replicas
        self.lease: ev.BeginLease | None = None
        self.entered = False
        self.released = False
        self.broken = False
        """Whether a device of the lease was lost while it entered."""
        self.stale_side = 0
        """Pulls and merges of the auxiliary side up to this serial are void; it was lost since."""

    def _units(self, lease: ev.BeginLease) -> list[Unit]:
        num_primary = self.num_primary
        up = [
            replica for replica in lease.replicas if replica >= num_primary or replica not in self.crew.down
        ]
        return [self.recorder.rollout_unit(replica) for replica in up]

    def begin(self, action: ev.BeginLease) -> None:
        """Let the devices of a lease take the other role."""
        now = self.clock.now()
        self.lease = action
        self.entered = self.released = self.broken = False
        self.recorder.lease_began(action, now)
        self.spans.open(action.serial, self._units(action), Activity.SWITCH_IN, now)

        def then(_: None) -> None:
            self.inbox.put(key_of(ev.LeaseEntered, action.serial), partial(self._enter, action))

        self.inbox.ask(
            action.serial,
            self.backend.enter(action),
            then,
            partial(self.not_entered, action),
            deadline_s=self.deadline_s,
        )

    def _enter(self, action: ev.BeginLease) -> Event | None:
        if self.lease is not action or self.released or self.broken:
            return None  # revoked or failed while it was entering
        now = self.clock.now()
        self.entered = True
        self.spans.shut(action.serial, now)
        event = ev.LeaseEntered(action.lease, action.serial)
        self.recorder.lease_changed(event, now)
        return event

    def not_entered(self, action: ev.BeginLease, _: BaseException) -> None:
        """Take a role change as failed."""
        self.inbox.put(key_of(ev.LeaseFailed, action.serial), partial(self._failed, action))

    def _failed(self, action: ev.BeginLease) -> Event | None:
        if self.lease is not action or self.released:
            return None
        now = self.clock.now()
        self.spans.shut(action.serial, now)
        self.recorder.lease_changed(ev.LeaseReturned(action.lease, action.serial), now)
        self.lease = None
        return ev.LeaseFailed(action.lease, action.serial)

    def end(self, action: ev.EndLease) -> None:
        """Give the devices of a lease back, entered or not."""
        now, lease = self.clock.now(), self.lease
        assert lease is not None
        self.released = True
        if not self.entered:
            self.inbox.void(serial=lease.serial)
            self.spans.shut(lease.serial, now)
        self.recorder.lease_changed(action, now)
        self.spans.open(action.serial, self._units(lease), Activity.SWITCH_OUT, now)

        def then(_: None) -> None:
            self.inbox.put(key_of(ev.LeaseReturned, action.serial), partial(self.returned, action, lease))

        def failed(error: BaseException) -> None:
            if lease.direction is not Direction.TRAIN_ON_ROLLOUT:
                self.inbox.fail(error)  # the primary trainer does not come back
                return
            for replica in lease.replicas:
                self.crew.lost(replica)
            then(None)

        self.inbox.ask(
            action.serial,
            self.backend.leave(action, entered=self.entered),
            then,
            failed,
            deadline_s=self.deadline_s,
        )

    def returned(self, action: ev.EndLease, lease: ev.BeginLease) -> Event:
        """Take the devices of a lease as back."""
        now = self.clock.now()
        self.spans.shut(action.serial, now)
        if lease.direction is Direction.ROLLOUT_ON_TRAIN:
            for replica in lease.replicas:
                self.crew.generated(replica)
        event = ev.LeaseReturned(action.lease, action.serial)
        self.recorder.lease_changed(event, now)
        self.lease = None
        return event

    # ------------------------------------------------------------------- losses

    def replica_lost(self, replica: int) -> None:
        """Draw the consequences of the loss of a replica for the lease that it is in, as a trainer."""
        lease = self.lease
        if (
            lease is None
            or lease.direction is not Direction.TRAIN_ON_ROLLOUT
            or replica not in lease.replicas
        ):
            return
        if self.entered:
            self.side_lost()
        elif not self.broken:
            self._break(lease)

    def _break(self, lease: ev.BeginLease) -> None:
        """Let a lease fail that loses a device while it enters."""
        self.broken = True
        self.inbox.void(serial=lease.serial)
        self.not_entered(lease, CallFailed("a device was lost"))

    def side_lost(self) -> None:
        """Take the backend's word that the auxiliary trainer side is gone."""
        if self.lease is not None:
            self.inbox.put(key_of(ev.SideLost, 0), partial(self._bury_side, self.lease))

    def _bury_side(self, lease: ev.BeginLease) -> Event | None:
        if self.lease is not lease or self.released or self.broken:
            return None
        if not self.entered:  # arrived before the word that it is there
            self._break(lease)
            return None
        self.stale_side = self.recorder.scheduler.core.serial
        self.inbox.void(owner=SIDE)
        self.spans.cut_owner(SIDE, self.clock.now())
        return ev.SideLost(1)
