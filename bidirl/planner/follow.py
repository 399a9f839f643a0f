"""Read a growing file from where one left off, whatever happens to it: rotation, truncation, a new start."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO

__all__ = ["Follower", "News"]

CHUNK_BYTES = 1 << 20
"""Bytes of one read: a first look at a long log is taken in pieces."""


@dataclass(frozen=True, slots=True)
class News:
    """What a file gained since the last look."""

    data: bytes
    is_new_file: bool
    """Whether ``data`` begins another file (rotated, truncated, or appeared)."""


class Follower:
    """Follows a path, not a file: what is renamed away is read to its end, then the new file from its start.

    Raises:
        OSError: the file exists and cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None
        self._offset = 0
        self._head = b""
        self._is_new = False
        """Whether the open file has given nothing yet: it may stay empty for several looks."""

    def poll(self) -> list[News]:
        """Return what is new, in order; empty if nothing is."""
        found: list[News] = []
        if self._file is not None and self._is_cut():
            self._close()
        if self._file is not None:
            self._take(found)
            if self._is_replaced():
                self._close()
        if self._file is None and self._open():
            self._take(found)
        return found

    def close(self) -> None:
        """Let go of the file."""
        self._close()

    def _open(self) -> bool:
        try:
            self._file = self.path.open("rb")
        except FileNotFoundError:
            return False
        self._offset = 0
        self._head = b""
        self._is_new = True
        return True

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _take(self, found: list[News]) -> None:
        assert self._file is not None
        self._file.seek(self._offset)
        while data := self._file.read(CHUNK_BYTES):
            if len(self._head) < HEAD_BYTES:
                self._head += data[: HEAD_BYTES - len(self._head)]
            self._offset += len(data)
            found.append(News(data, self._is_new))
            self._is_new = False

    def _is_cut(self) -> bool:
        """Return whether the open file was truncated, or rewritten in place and is as long again."""
        assert self._file is not None
        if os.fstat(self._file.fileno()).st_size < self._offset:
            return True
        self._file.seek(0)
        return self._file.read(len(self._head)) != self._head

    def _is_replaced(self) -> bool:
        """Return whether the path now names another file; a missing one may come back."""
        assert self._file is not None
        mine = os.fstat(self._file.fileno())
        try:
            there = self.path.stat()
        except FileNotFoundError:
            return False
        return (mine.st_dev, mine.st_ino) != (there.st_dev, there.st_ino)


HEAD_BYTES = 256
"""Bytes by which a file that was rewritten in place is recognised: its first line."""
