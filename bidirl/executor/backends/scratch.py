"""Folders for passing files: gone at the end of the block, or cleared later if the process was killed."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

__all__ = ["scratch"]

LOCK = ".lock"


@contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """Make a folder under the system's temporary one; folders of that prefix whose maker is dead go first.

    The maker holds a lock on a file in its folder, and a lock ends with its process, on whatever machine of a
    shared folder, and in whatever container, that runs.
    """
    for old in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        _clear(old)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        flock(lock, LOCK_EX)
        (folder / "lock").rename(folder / LOCK)  # held before anybody finds it
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _clear(folder: Path) -> None:
    """Remove a folder if nobody holds its lock; leave it if it has none, or is not ours."""
    try:
        lock = os.open(folder / LOCK, os.O_RDWR)
    except OSError:
        return
    try:
        flock(lock, LOCK_EX | LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass
    finally:
        os.close(lock)
