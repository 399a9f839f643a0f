"""Files that are one document, not lines of a log: which they are, and readers for them."""

import json
from typing import Protocol, runtime_checkable

from bidirl.traces.logs.bare import bare_lines
from bidirl.traces.logs.journal_steps import JournalSteps, is_journal
from bidirl.traces.logs.own import from_json
from bidirl.traces.logs.rows import Store
from bidirl.traces.logs.tabular import TableReader, header_of
from bidirl.traces.logs.tensorboard import EventReader, is_event_file
from bidirl.traces.step_log import StepLog

__all__ = ["Document", "Reader", "notes_of", "reader_of"]

MAX_JSON_BYTES = 1 << 28
"""A larger JSON document is not ours."""


class Reader(Protocol):
    """What takes the bytes of a file."""

    def feed(self, data: bytes, /) -> None:
        """Take the next bytes."""

    def close(self) -> None:
        """Take what is left."""


@runtime_checkable
class Document(Reader, Protocol):
    """A reader that makes its own tables, instead of rows of a store."""

    def tables(self, source: str, framework: str, /) -> list[StepLog]:
        """Return the tables of what was read."""


class _Csv:
    """A CSV file, line by line; quoted line ends are not supported."""

    def __init__(self, names: list[str], delimiter: str) -> None:
        self._table = TableReader(names, delimiter)
        self._tail = b""

    @property
    def num_rows(self) -> int:
        return self._table.num_rows

    def feed(self, data: bytes) -> None:
        lines = (self._tail + data).split(b"\n")
        self._tail = lines.pop()
        for line in lines:
            self._table.line(line.decode("utf-8", "replace").rstrip("\r"))

    def close(self) -> None:
        tail, self._tail = self._tail, b""
        if tail:
            self._table.line(tail.decode("utf-8", "replace").rstrip("\r"))

    def tables(self, source: str, framework: str) -> list[StepLog]:
        return self._table.tables(source, framework)


class _Json:
    """The JSON of ``bidirl-plan read``."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        if len(self._data) <= MAX_JSON_BYTES:
            self._data += data

    def close(self) -> None:
        pass

    def tables(self, source: str, framework: str) -> list[StepLog]:
        try:
            return from_json(json.loads(self._data), source)
        except (ValueError, RecursionError):
            return []


class _Journal(JournalSteps):
    def tables(self, source: str, framework: str) -> list[StepLog]:
        return self.table(source)


class _Events(EventReader):
    def close(self) -> None:
        pass


def reader_of(head: bytes, store: Store) -> Reader | None:
    """Return the reader for a file that begins so; None for lines of a log."""
    if is_event_file(head):
        return _Events(store)
    if is_journal(head):
        return _Journal()
    text = head.decode("utf-8", "replace").lstrip("\ufeff")
    if text.lstrip().startswith("{") and '"runs"' in text[:200]:
        return _Json()
    lines = [line for line in text.splitlines() if line.strip()]
    first = next((line for line in lines if not line.startswith("#")), "")
    header = header_of(first)
    return None if header is None else _Csv(*header)


def notes_of(head: bytes, source: str) -> list[StepLog]:
    """Search a short text for tables and lines of timers; headers may stand in comments."""
    text = head.decode("utf-8", "replace").removeprefix("\ufeff")
    logs: list[StepLog] = []
    table: TableReader | None = None
    for line in text.splitlines():
        header = header_of(line)
        if header is not None:
            if table is not None:
                logs += table.tables(source, "auto")
            table = TableReader(*header)
        elif table is not None and not line.lstrip().startswith("#"):
            table.line(line)
    if table is not None:
        logs += table.tables(source, "auto")
    return logs or bare_lines(text, source)
