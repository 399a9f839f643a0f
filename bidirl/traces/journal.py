"""The journal of a run: one header line, then one line per event with the actions that it led to.

JSON lines. Simulated and real runs write the same format; what an event or action holds is the business of
the planner, here they are plain JSON data. Floats are written so that they read back to the same bits.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bidirl.errors import InputError

__all__ = ["SCHEMA", "VERSION", "Entry", "JournalReader", "JournalWriter", "line_of"]

SCHEMA = "bidirl-journal"
VERSION = 1

Json = dict[str, Any]

line_of = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
"""Write JSON data on one line; one encoder for all lines, 30 % faster than ``json.dumps`` with options."""


class JournalWriter:
    """Appends the lines of one run; what a killed process had written stays readable up to its last line.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        *,
        provenance: Mapping[str, Any],
        plan: Mapping[str, Any],
        keep_events: int | None = None,
    ) -> None:
        """Start the file anew with its header: ``plan`` is what a scheduler is built from.

        With ``keep_events`` the file is there already: what follows its first so many events is cut off, and
        new ones are appended.
        """
        if keep_events is not None:
            self._file = path.open("r+", encoding="utf-8", newline="\n")
            for _ in range(1 + keep_events):
                self._file.readline()
            self._file.seek(self._file.tell())
            self._file.truncate()
            return
        self._file = path.open("w", encoding="utf-8", newline="\n")
        header = {"schema": SCHEMA, "version": VERSION, "provenance": dict(provenance), "plan": dict(plan)}
        self._file.write(line_of(header) + "\n")

    def write(self, time_s: float, event: Json, actions: Sequence[Json]) -> None:
        """Append an event that was handled at ``time_s``, and its actions in order."""
        self._file.write(line_of({"t": time_s, "event": event, "actions": actions}) + "\n")

    def flush(self) -> None:
        """Hand all lines to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Finish the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except OSError:
            if kind is None:  # else the first error tells more
                raise


@dataclass(frozen=True, slots=True)
class Entry:
    """One event of a journal."""

    line: int
    """Line in the file, from 1; the header is line 1."""
    time_s: float
    event: Json
    actions: list[Json]


class JournalReader:
    """Reads a journal line by line, so that one of any length fits in memory.

    ``header`` is there at once. ``cut_line`` is the number of a last line that a killed run left
    unfinished: known once ``entries`` has been read to its end, None if the file is whole.

    Raises:
        InputError: the file cannot be read, or a line (the last one aside) is not what a run writes.
    """

    def __init__(self, path: Path) -> None:
        """Read and check the header."""
        self.path = path
        self.cut_line: int | None = None
        first = next(self._lines(), (1, ""))[1]
        header = _parsed(first)
        if not isinstance(header, dict) or header.get("schema") != SCHEMA:
            raise InputError(
                f"{path}:1: is not the header of a journal: give a journal.jsonl that a run wrote"
            )
        if header.get("version") != VERSION:
            raise InputError(
                f"{path}:1: version = {header.get('version')!r}: this release reads {VERSION}; "
                "replay it with the release that wrote it"
            )
        for key in ("provenance", "plan"):
            if not isinstance(header.get(key), dict):
                raise InputError(f"{path}:1: {key} is missing or no table: give a whole journal.jsonl")
        self.provenance: Json = header["provenance"]
        self.plan: Json = header["plan"]

    def entries(self) -> Iterator[Entry]:
        """Yield the events in order; stop before an unfinished last line."""
        lines = self._lines()
        next(lines)
        for number, text in lines:
            entry = _entry(number, _parsed(text))
            if entry is not None:
                yield entry
            elif text.endswith("\n"):
                raise InputError(
                    f"{self.path}:{number}: is not an event with its actions: give an unchanged journal.jsonl"
                )
            else:
                self.cut_line = number

    def _lines(self) -> Iterator[tuple[int, str]]:
        try:
            with self.path.open(encoding="utf-8", errors="replace", newline="\n") as file:
                yield from enumerate(file, start=1)
        except OSError as error:
            reason = (error.strerror or "no reason given").lower()
            raise InputError(f"{self.path}: cannot be read ({reason}): give a journal.jsonl") from None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _entry(line: int, data: Any) -> Entry | None:
    match data:
        case {
            "t": float() | int() as time_s,
            "event": {"kind_of": str()} as event,
            "actions": list() as actions,
        }:
            if all(isinstance(action, dict) for action in actions) and not isinstance(time_s, bool):
                return Entry(line, float(time_s), event, actions)
    return None
