"""Idle time of the rollout pool in a journal: its events through a scheduler that acts on nothing."""

import json
from bisect import bisect_left, bisect_right
from typing import Any

from bidirl.planner.events import from_json
from bidirl.planner.plan import Plan
from bidirl.planner.plan_json import plan_from_json
from bidirl.planner.scheduler import Scheduler

__all__ = ["JournalIdle", "journal_plan"]

JOURNAL = b'{"schema":"bidirl-journal"'


def journal_plan(line: bytes) -> Plan | None:
    """Return the plan of a journal's header line, None if the line is none.

    Raises:
        InputError: the plan is not one of this release.
    """
    if not line.startswith(JOURNAL):
        return None
    try:
        header = json.loads(line)
    except ValueError:
        return None
    return plan_from_json(header.get("plan"))


class JournalIdle:
    """Follows who works: feed lines, ask for idle seconds between two times.

    An event that the scheduler refuses (a journal cut in the middle, another release) ends the account:
    what follows is not known.
    """

    def __init__(self, plan: Plan) -> None:
        self._scheduler: Scheduler | None = Scheduler(plan)
        self._times = [0.0]
        self._idle = [0.0]
        self._share = 0.0
        self._tail = b""
        self._missing: list[tuple[float, int]] = []
        """Times at which the trainer begins to wait, and the groups that it lacks then."""
        self._waited = False

    def feed(self, data: bytes) -> None:
        """Take the next bytes, cut anywhere."""
        lines = (self._tail + data).split(b"\n")
        self._tail = lines.pop()
        for line in lines:
            self._line(line)

    def _line(self, line: bytes) -> None:
        if self._scheduler is None or line.startswith(JOURNAL) or not line.strip():
            return
        try:
            data: dict[str, Any] = json.loads(line)
            now = float(data["t"])
            self._scheduler.handle(from_json(data["event"]), now)
        except Exception:  # whatever a foreign line holds: the account ends, the job is not ours to stop
            self._scheduler = None
            return
        self._idle.append(self._idle[-1] + self._share * (now - self._times[-1]))
        self._times.append(now)
        rollout, train = self._scheduler.rollout, self._scheduler.train
        self._share = 0.0 if rollout.num_busy_primary else 1.0
        waits = train.waits()
        if waits and not self._waited:
            self._missing.append((now, train.missing()))
        self._waited = waits

    def missing(self, start: float, end: float) -> int | None:
        """Return the most groups that the trainer lacked when it began to wait; None beyond what is known."""
        if self._scheduler is None and end > self._times[-1]:
            return None
        first = bisect_left(self._missing, (start, 0))
        last = bisect_left(self._missing, (end, 0))
        return max((groups for _, groups in self._missing[first:last]), default=0)

    def idle_s(self, start: float, end: float) -> float | None:
        """Return the seconds between two times in which no rollout replica works; None beyond what is known.

        That is when the gate may lend them.
        """
        if self._scheduler is None and end > self._times[-1]:
            return None
        return max(0.0, self._at(end) - self._at(start))

    def _at(self, time: float) -> float:
        place = min(bisect_right(self._times, time), len(self._times)) - 1
        rate = self._share
        if place < len(self._times) - 1:
            span = self._times[place + 1] - self._times[place]
            rate = (self._idle[place + 1] - self._idle[place]) / span if span > 0.0 else 0.0
        return self._idle[place] + rate * (time - self._times[place])
