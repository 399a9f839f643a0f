"""The scheduler: a pure state machine, event in, actions out.

No clock, no I/O, no randomness: the same plan and the same events give the same actions, whether the
driver simulates or runs real engines. (Models: dask/distributed's worker state machine; h11.)
"""

from collections.abc import Callable
from typing import Any, assert_never

from bidirl.planner import events as ev
from bidirl.planner.core import Core
from bidirl.planner.events import Action, Event
from bidirl.planner.lending import Lender
from bidirl.planner.plan import Plan
from bidirl.planner.rollout import RolloutSide
from bidirl.planner.train import Phase, TrainSide

__all__ = ["Scheduler"]


class Scheduler:
    """All run-time decisions of one job."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.core = Core(plan)
        self.rollout = RolloutSide(self.core)
        self.train = TrainSide(self.core, self.rollout)
        self.lender = Lender(self.core, self.rollout, self.train)
        self.started = False
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            ev.RunStarted: self._on_run_started,
            ev.SamplesFinished: self.rollout.on_samples_finished,
            ev.Preempted: self.rollout.on_preempted,
            ev.Progress: self.lender.on_progress,
            ev.Rewarded: self.rollout.on_scored,
            ev.Filtered: self.rollout.on_scored,
            ev.LeaseEntered: self.lender.on_entered,
            ev.LeaseReturned: self.lender.on_returned,
            ev.LeaseFailed: self.lender.on_failed,
            ev.ChunkFinished: self.train.on_chunk_finished,
            ev.ChunkFailed: self.train.on_chunk_failed,
            ev.Merged: self.train.on_merged,
            ev.Updated: self.train.on_updated,
            ev.BroadcastDone: self.train.on_broadcast_done,
            ev.Published: self.rollout.on_published,
            ev.SyncApplied: self.rollout.on_sync_applied,
            ev.SyncFailed: self.rollout.on_sync_failed,
            ev.TimerFired: self.lender.on_timer,
            ev.ReplicaLost: self._on_lost,
            ev.ReplicaJoined: self._on_joined,
            ev.SideLost: self._on_side_lost,
            ev.CoefficientsUpdated: self._on_coefficients,
        }

    @property
    def done(self) -> bool:
        """Whether the last step has been trained and its weights published."""
        return self.train.phase is Phase.DONE

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take an event at time ``now`` (seconds, not before the last one) and return what to do."""
        core = self.core
        core.now = now
        core.actions = []
        self._handlers[type(event)](event)
        if self.started:
            self._settle()
        return core.actions

    def resume(self) -> list[Action]:
        """Go on in a copy that was made while a lease was being weighed; return what to do."""
        self.core.gate_due = True
        self._settle()
        return self.core.actions

    def _settle(self) -> None:
        """Carry every consequence of the event through, in a fixed order, until nothing is left to do."""
        core = self.core
        while True:
            self._pass()
            if not core.gate_due or self.done:
                return

    def _pass(self) -> None:
        core, rollout, train, lender = self.core, self.rollout, self.train, self.lender
        if train.phase is Phase.PUBLISHING and not self._trainer_owes_devices():
            rollout.publish(train.step + 1)
            train.end_step()
        rollout.advance()
        if lender.lease is not None:
            lender.settle()
        if train.step == self.plan.num_steps and not rollout.trainer_blocked and train.phase is Phase.WAITING:
            train.phase = Phase.DONE
            return
        train.settle()
        if core.gate_due or lender.time_shared:
            core.gate_due = False
            lender.consider()
        rollout.fill()
        if lender.lease is not None and not lender.time_shared:
            lender.settle()

    def _trainer_owes_devices(self) -> bool:
        """Return whether, colocated, the trainer still sits on the devices that must take the weights."""
        return self.lender.time_shared and self.lender.lease is not None

    def trainer_state(self) -> str:
        """Return what the primary trainer's time goes to now: the names of ``parts_s``."""
        train, rollout, lease = self.train, self.rollout, self.lender.lease
        match train.phase:
            case Phase.SEGMENT:
                return train.segments[train.at].kind.value
            case Phase.MERGING:
                return "merge"
            case Phase.OPTIMIZING:
                return "optimizer"
            case Phase.BROADCASTING:
                return "broadcast"
            case Phase.PUBLISHING:
                return "switch"
            case Phase.DONE:
                return "done"
            case Phase.WAITING:
                pass
            case _:
                assert_never(train.phase)
        if rollout.trainer_blocked:
            if rollout.num_syncing or not (rollout.round_open or rollout.drains):
                return "sync"
            return "switch" if rollout.round_open else "drain"
        if lease is not None and train.batch_ready():
            return "switch"
        if not rollout.groups_in_flight() and len(rollout.groups):
            return "reward"
        return "wait"

    # ------------------------------------------------------------------ events

    def _on_run_started(self, _: ev.RunStarted) -> None:
        self.started = True
        self.core.gate_due = True

    def _on_lost(self, event: ev.ReplicaLost) -> None:
        self.rollout.on_lost(event.replica)
        self.lender.on_replica_lost(event.replica)

    def _on_joined(self, event: ev.ReplicaJoined) -> None:
        lent = self.lender.has_lent(event.replica)
        self.rollout.on_joined(event.replica, event.version, lent=lent)

    def _on_side_lost(self, _: ev.SideLost) -> None:
        self.train.on_side_lost()
        self.lender.on_side_lost()

    def _on_coefficients(self, event: ev.CoefficientsUpdated) -> None:
        self.lender.gatekeeper.predictor.recalibrate(event.rollout_factor, event.train_factor)
