"""Losses on the simulated clock: replicas and trainer sides that vanish, and replicas that come back.

What is lost, and when, is asked of ``models.faults``; the rules of what a loss takes with it are the same as
in the executor's driver, so that both write the same journal.
"""

from __future__ import annotations

from dataclasses import fields
from math import inf
from typing import TYPE_CHECKING, Any

from bidirl.planner import events as ev
from bidirl.planner.events import RANK, Direction
from bidirl.traces.run_record import Activity

if TYPE_CHECKING:
    from bidirl.sim.driver import Driver

__all__ = ["Losses"]

_RANK_SHIFT = 48


class Losses:
    """The part of a simulated run that injects losses."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.down: dict[int, tuple[float, int]] = {}
        """Lost replicas, with the time and the trainer's step of their loss."""
        self.lives = [0] * len(driver.replicas)
        """Per replica: number of its life; a loss that was set for an earlier one is void."""
        self.lost_entering: set[int] = set()
        """Replicas of the present lease that were lost while it was entered."""
        self.past_row = 0
        """Spans before this row have ended."""

    def live(self, index: int) -> None:
        """Set the end of a primary replica's life, or of an auxiliary one's inside a lease."""
        driver = self.driver
        if driver.faults is None:
            return
        if index < driver.num_primary:
            lifetime_s = driver.faults.replica_lifetime_s(index, self.lives[index])
        else:
            assert driver.lease is not None
            lifetime_s = driver.faults.auxiliary_lifetime_s(index, driver.lease.lease)
        if lifetime_s != inf:
            priority = RANK[ev.ReplicaLost] << _RANK_SHIFT | index
            payload = index, self.lives[index], driver.lease
            driver.env.at(driver.env.now + lifetime_s, priority, self._lose, payload)

    def _lose(self, simpy_event: Any) -> None:
        index, life, lease = simpy_event._value
        driver = self.driver
        released = driver.lease is not lease or driver.lease_released
        if index in self.down or life != self.lives[index] or (index >= driver.num_primary and released):
            return
        now = driver.env.now
        driver.stale[index] = driver.scheduler.core.serial
        self.lives[index] += 1
        self._cut((index,), now)
        driver.lose_engine(index)
        self.down[index] = now, driver.scheduler.train.step
        lent = driver.lease
        if lent is not None and lent.direction is Direction.TRAIN_ON_ROLLOUT and index in lent.replicas:
            if driver.lease_entered:
                self.lose_side(now, lent)
            else:
                unit = driver.recorder.rollout_unit(index)
                driver.recorder.span(*unit, Activity.SWITCH_IN, driver.lease_since, now)
                self.lost_entering.add(index)
                driver.fail_lease(lent, now)
        driver.handle(ev.ReplicaLost(index))

    def lose_side(self, time_s: float, lease: ev.BeginLease) -> None:
        """Let the auxiliary trainer side of a lease vanish at ``time_s``."""
        self.driver.env.at(time_s, RANK[ev.SideLost] << _RANK_SHIFT, self._side_lost, lease)

    def _side_lost(self, simpy_event: Any) -> None:
        driver = self.driver
        if driver.lease is not simpy_event._value or driver.lease_released:
            return
        driver.stale_side = driver.scheduler.core.serial
        self._cut(driver.lease.replicas, driver.env.now, keep=Activity.BROADCAST)
        driver.handle(ev.SideLost(1))

    def restart(self, action: ev.RestartReplica) -> None:
        """Bring a replica back after its restart time."""
        driver = self.driver
        assert driver.faults is not None
        priority = RANK[ev.ReplicaJoined] << _RANK_SHIFT | action.serial
        driver.env.at(driver.env.now + driver.faults.config.restart_s, priority, self._joined, action)

    def _joined(self, simpy_event: Any) -> None:
        action: ev.RestartReplica = simpy_event._value
        driver, index = self.driver, action.replica
        self.close(index)
        driver.versions[index] = driver.newest
        if index < driver.num_primary:
            self.live(index)
        driver.handle(ev.ReplicaJoined(index, driver.newest, action.serial))

    # ------------------------------------------------------------------- spans

    def ended(self, index: int, activity: Activity) -> bool:
        """Return whether a lent replica's part in a switch has been written already, or there is none."""
        if activity is Activity.SWITCH_IN:
            return index in self.lost_entering
        return index in self.down and index < self.driver.num_primary

    def close(self, index: int) -> None:
        """End the down-time of a replica, if it is down.

        An auxiliary rollouter restarts beside the trainer that owns its devices: they are not down.
        """
        if index not in self.down:
            return
        recorder, now = self.driver.recorder, self.driver.env.now
        since_s, step = self.down.pop(index)
        if now > since_s and index < self.driver.num_primary:
            recorder.span(*recorder.rollout_unit(index), Activity.DOWN, since_s, now)
            recorder.record.spans.step[-1] = step

    def release(self, index: int) -> None:
        """End the down-time of a lost auxiliary rollouter: its devices train while the engine restarts."""
        if index in self.down:
            step = self.down[index][1]
            self.close(index)
            self.down[index] = inf, step

    def _cut(self, replicas: tuple[int, ...], now: float, keep: Activity | None = None) -> None:
        """End the spans that replicas are in; an unfinished sync has no start that counts."""
        recorder = self.driver.recorder
        spans = recorder.record.spans
        lost: set[tuple[int, int]] = set()
        for index in replicas:
            owner, first, num_gpus = recorder.rollout_unit(index)
            lost.update((owner, device) for device in range(first, first + num_gpus))
        ends_s = spans.end_s
        while self.past_row < len(ends_s) and ends_s[self.past_row] <= now:
            self.past_row += 1
        for row in range(self.past_row, len(ends_s)):
            if ends_s[row] <= now or spans.activity[row] == keep:
                continue
            first = spans.unit[row]
            devices = range(first, first + spans.num_gpus[row])
            gone = [device for device in devices if (spans.owner[row], device) in lost]
            if gone:
                for device in devices:  # those that stay go on in spans of their own
                    if device not in gone:
                        self._copy(row, device)
                for device in gone[1:]:
                    self._copy(row, device)
                    self._end(-1, now)
                spans.unit[row], spans.num_gpus[row] = gone[0], 1
                self._end(row, now)

    def _copy(self, row: int, device: int) -> None:
        """Append the part that one device has in a span."""
        spans = self.driver.recorder.record.spans
        for column in fields(spans):
            values = getattr(spans, column.name)
            values.append(values[row])
        spans.unit[-1], spans.num_gpus[-1] = device, 1

    def _end(self, row: int, now: float) -> None:
        spans = self.driver.recorder.record.spans
        spans.end_s[row] = spans.start_s[row] if spans.activity[row] == Activity.SYNC else now
