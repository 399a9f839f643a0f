"""What must be on disk before anybody relies on it."""

import os
from pathlib import Path

__all__ = ["flush"]


def flush(path: Path) -> None:
    """Make a file, or a folder's list of names, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
