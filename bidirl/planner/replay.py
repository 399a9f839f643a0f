"""Feed a journal through a fresh scheduler: the same events must give the same actions.

Journal floats read back to the same bits, so on one build the comparison is exact. Between builds (another
machine, another numpy) sums may round differently: floats then may differ by ``CLOSE``, and each event where
they did is counted.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from math import isclose
from pathlib import Path
from typing import Any

from bidirl.errors import InputError
from bidirl.planner.events import from_json, to_json
from bidirl.planner.plan_json import plan_from_json
from bidirl.planner.scheduler import Scheduler
from bidirl.traces.journal import Entry, JournalReader, line_of

__all__ = ["CLOSE", "Difference", "Replay", "replay"]

CLOSE = 1e-9
"""Relative difference of floats that two builds may show. Source: design.md section 3, replay."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first action that is not the recorded one."""

    line: int
    """Line of the journal, from 1."""
    time_s: float
    event: dict[str, Any]
    index: int
    """Place of the action among those of its event, from 0."""
    expected: dict[str, Any] | None
    """What the journal holds; None: nothing more."""
    got: dict[str, Any] | str | None
    """What the scheduler asks for; None: nothing more; a text: why it refused the event."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay found."""

    num_events: int
    """Events whose actions agree, before the first difference."""
    num_actions: int
    num_close: int
    """Events among them whose floats differ in the last digits (only between builds)."""
    is_complete: bool
    """Whether the run in the journal came to its end."""
    cut_line: int | None
    """An unfinished last line that was left out."""
    difference: Difference | None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        first = self.difference
        return {
            "agrees": first is None,
            "num_events": self.num_events,
            "num_actions": self.num_actions,
            "num_close": self.num_close,
            "is_complete": self.is_complete,
            "cut_line": self.cut_line,
            "difference": None
            if first is None
            else {name: getattr(first, name) for name in Difference.__slots__},
        }


def replay(path: Path, build: Mapping[str, str] | None = None) -> Replay:
    """Replay a journal up to the first difference.

    ``build`` is the provenance of the present build: where the journal's differs from it in any of these
    keys, floats may differ by ``CLOSE``.

    Raises:
        InputError: the file is no journal, its plan cannot be read, or it holds an unknown kind of event.
    """
    journal = JournalReader(path)
    try:
        plan = plan_from_json(journal.plan)
    except InputError as error:
        raise InputError(f"{path}:1: {error}") from None
    same_build = build is None or all(journal.provenance.get(key) == build[key] for key in build)
    scheduler = Scheduler(plan)
    num_events = num_actions = num_close = 0
    for entry in journal.entries():
        got = _handle(scheduler, path, entry)
        if isinstance(got, str):
            refused = Difference(
                entry.line, entry.time_s, entry.event, 0, next(iter(entry.actions), None), got
            )
            return Replay(num_events, num_actions, num_close, False, None, refused)
        if _text(got) != _text(entry.actions):
            if same_build or not _close(got, entry.actions):
                first = _first_difference(entry, got, exact=same_build)
                return Replay(num_events, num_actions, num_close, False, None, first)
            num_close += 1
        num_events += 1
        num_actions += len(got)
    return Replay(num_events, num_actions, num_close, scheduler.done, journal.cut_line, None)


def _handle(scheduler: Scheduler, path: Path, entry: Entry) -> list[dict[str, Any]] | str:
    """Return the actions as JSON data, or why the scheduler cannot take the event in its state."""
    try:
        event = from_json(entry.event)
    except (KeyError, TypeError, ValueError) as error:
        kind = entry.event["kind_of"]
        raise InputError(
            f"{path}:{entry.line}: event {kind} is not of this release ({error}): replay it with "
            "the release that wrote it"
        ) from None
    try:
        return [to_json(action) for action in scheduler.handle(event, entry.time_s)]
    except Exception as error:  # an event that no run gives: the state it meets is arbitrary
        return f"the scheduler cannot take this event: {type(error).__name__}: {error}"


_sorted = json.JSONEncoder(separators=(",", ":"), sort_keys=True).encode


def _text(actions: list[dict[str, Any]]) -> str:
    return _sorted(actions)


def _close(one: Any, other: Any) -> bool:
    """Compare JSON data with a tolerance on floats; tuples are lists here."""
    match one, other:
        case dict(), dict():
            return one.keys() == other.keys() and all(_close(one[key], other[key]) for key in one)
        case ((list() | tuple()), (list() | tuple())):
            return len(one) == len(other) and all(map(_close, one, other))
        case float(), float():
            return one == other or isclose(one, other, rel_tol=CLOSE, abs_tol=CLOSE)
        case _:
            return bool(one == other)


def _first_difference(entry: Entry, got: list[dict[str, Any]], *, exact: bool) -> Difference:
    for index, (expected, found) in enumerate(zip_longest(entry.actions, got)):
        same = _sorted(expected) == _sorted(found)
        if not same and (exact or not _close(found, expected)):
            plain = None if found is None else json.loads(line_of(found))
            return Difference(entry.line, entry.time_s, entry.event, index, expected, plain)
    raise AssertionError("the actions agree")
