"""Feed a log or journal, growing or whole, to the shadow scheduler; restarts of the job are kept apart."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bidirl.errors import InputError
from bidirl.planner.build import build_plan, build_workload
from bidirl.planner.follow import Follower, News
from bidirl.planner.job import Job
from bidirl.planner.shadow import Shadow
from bidirl.planner.shadow_journal import JournalIdle, journal_plan
from bidirl.traces.logs import LogParser
from bidirl.traces.step_log import StepLog

__all__ = ["ShadowRun"]


class ShadowRun:
    """Reads what is new, judges the steps that are complete.

    A new file (rotation, truncation, a new start) has a parser of its own; what was judged stays.

    Raises:
        InputError: the log has no job, or a journal's header is not one of this release.
    """

    def __init__(self, path: Path, job: Job | None, format_: str) -> None:
        if not path.exists():
            raise InputError(f"{path}: no such file: give the log or journal of the job")
        self._path = path
        self._format = format_
        self._follower = Follower(path)
        self._shadow = None if job is None else Shadow(build_plan(job, build_workload(job, 0)))
        self._idle: JournalIdle | None = None
        self._parser = LogParser(format_, str(path))
        self._head: bytes | None = b""
        self._taken: dict[int, int] = {}
        self.num_files = 0
        self.num_rows = 0
        """Rows of the log that were looked at, usable or not."""
        self.notes: list[str] = []

    @property
    def shadow(self) -> Shadow:
        """Return the judge.

        Raises:
            InputError: neither a job nor a journal's header has told the plan.
        """
        if self._shadow is None:
            raise InputError(f"{self._path}: a log does not tell its split and policy: add --job")
        return self._shadow

    def poll(self, *, is_last: bool = False) -> bool:
        """Take what is new; return whether a step was judged. ``is_last``: take the last row too."""
        before = 0 if self._shadow is None else self._shadow.num_steps
        for news in self._news():
            if news.is_new_file:
                self._begin_file()
            self._feed(news.data)
        if is_last:
            self._parser.close()
        if self._shadow is None and self._head is not None and not is_last:
            return False  # the first line is still being written: it may be a journal's header
        self._take(is_last=is_last)
        return self.shadow.num_steps > before

    def _news(self) -> list[News]:
        try:
            return self._follower.poll()
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise InputError(f"{self._path}: cannot be read ({reason}): give a log file") from None

    def _begin_file(self) -> None:
        if self.num_files:
            self._parser.close()
            self._take(is_last=True)
            self.notes.append("the log was rotated, truncated or begun anew: its steps are counted on")
        self.num_files += 1
        self._parser = LogParser(self._format, str(self._path))
        self._head = b""
        self._idle = None
        self._taken = {}

    def _feed(self, data: bytes) -> None:
        if self._head is not None:
            self._head += data
            if b"\n" not in self._head:
                self._parser.feed(data)
                return
            data, self._head = self._head, None
            self._read_header(data.split(b"\n", 1)[0])
            self._parser = LogParser(self._format, str(self._path))
        self._parser.feed(data)
        if self._idle is not None:
            self._idle.feed(data)

    def _read_header(self, line: bytes) -> None:
        """Take the plan of a journal; a job given by hand goes first."""
        try:
            plan = journal_plan(line)
        except InputError as error:
            raise InputError(f"{self._path}: {error}") from None
        if plan is None:
            return
        self._idle = JournalIdle(plan)
        if self._shadow is None:
            self._shadow = Shadow(plan)

    def _take(self, *, is_last: bool) -> None:
        """Judge complete rows: the last one of the last run may still grow."""
        logs = self._parser.steps()
        for place, log in enumerate(logs):
            is_growing = place == len(logs) - 1 and not is_last
            end = len(log) - is_growing
            first = self._taken.get(place, 0)
            if end > first:
                self.shadow.take(self._with_idle(log), first, end)
                self.num_rows += end - first
                self._taken[place] = end

    def _with_idle(self, log: StepLog) -> StepLog:
        """Return the table of a journal with the rollout pool's idle time and what the trainer lacked."""
        if self._idle is None:
            return log
        ends = np.cumsum(log.column("step_s"))
        starts = np.concatenate([[0.0], ends[:-1]])
        spans = [self._idle.idle_s(start, end) for start, end in zip(starts, ends, strict=True)]
        idle = np.array([np.nan if span is None else span for span in spans])
        lacked = [self._idle.missing(start, end) for start, end in zip(starts, ends, strict=True)]
        missing = np.array([np.nan if groups is None else groups for groups in lacked])
        return replace(log, columns={**log.columns, "rollout_wait_s": idle, "missing_groups": missing})

    def verdict(self) -> str:
        """Return the totals as one sentence."""
        return self.shadow.verdict()

    def shadow_line(self) -> str:
        """Return the totals so far as a short line."""
        return self.verdict()

    def to_json(self) -> dict[str, Any]:
        """Return the totals as plain JSON data."""
        return {
            "verdict": self.verdict(),
            **self.shadow.summary(),
            "files": self.num_files,
            "notes": list(self.notes),
        }
