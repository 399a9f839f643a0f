"""What a checkpoint holds of a driver, and how a run goes on from it.

The cut lies right after a step's last update. Trainer, scheduler and every complete group are as they were;
workers are new, so to the scheduler each replica was lost at that moment: what it had in flight starts again,
by the same events and actions as after any loss. The journal of the resumed run therefore replays as a whole.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from bidirl.executor.backends import CallFailed
from bidirl.executor.inbox import key_of
from bidirl.planner import events as ev
from bidirl.planner.events import Action, Direction
from bidirl.planner.recorder import Recorder

if TYPE_CHECKING:
    from bidirl.executor.driver import Driver

__all__ = ["AGAIN", "DriverState", "driver_state", "resume"]

AGAIN = (ev.ScoreGroup, ev.SetTimer, ev.Publish, ev.RestartReplica, ev.EndLease, ev.StartChunks)
"""Actions whose answer is still owed after a restart; all others are void with the replica that had them.

Of the pulls only the primary side's is owed: the next step's first, where it begins with the last one's end.
"""


@dataclass(slots=True)
class DriverState:
    """All that a driver knows beside its scheduler and record, which ``recorder`` holds."""

    recorder: Recorder
    now_s: float
    num_events: int
    num_started: int
    newest: int
    down: set[int]
    causes: list[dict[int, int]]
    unanswered: dict[int, Action]
    lease: ev.BeginLease | None
    entered: bool
    released: bool
    spans: dict[int, Any]


def driver_state(driver: "Driver") -> DriverState:
    """Return a driver's state; the caller copies it before the next event."""
    return DriverState(
        driver.recorder,
        driver.clock.now(),
        driver.num_events,
        driver.num_started,
        driver.newest,
        driver.down,
        driver.causes,
        driver.unanswered,
        driver.leases.lease,
        driver.leases.entered,
        driver.leases.released,
        driver.spans.open_spans,
    )


def resume(driver: "Driver", state: DriverState) -> None:
    """Take over what a checkpoint holds, and report as lost what has gone with the workers of that time."""
    driver.num_events, driver.num_started = state.num_events, state.num_started
    driver.newest = state.newest
    driver.down.update(state.down)
    driver.causes[:] = state.causes
    driver.spans.open_spans.update(state.spans)
    leases, lease = driver.leases, state.lease
    leases.lease, leases.entered, leases.released = lease, state.entered, state.released
    ends = [action for action in state.unanswered.values() if isinstance(action, ev.EndLease)]
    if lease is not None and ends:
        key = key_of(ev.LeaseReturned, ends[-1].serial)
        driver.inbox.put(key, partial(leases.returned, ends[-1], lease))
    elif lease is not None and not state.entered:
        leases.not_entered(lease, CallFailed("the run was interrupted"))
    elif lease is not None and lease.direction is Direction.TRAIN_ON_ROLLOUT:
        leases.side_lost()
    for replica in driver.scheduler.rollout.replicas:
        if replica.id not in state.down and (replica.active or not replica.auxiliary):
            driver.lost(replica.id)
    for action in state.unanswered.values():
        if not isinstance(action, ev.EndLease) and not (isinstance(action, ev.StartChunks) and action.side):
            driver.unanswered[action.serial] = action
            driver.again(action)
