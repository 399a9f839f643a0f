"""Write what ``--out`` names; a place that cannot be written is the user's mistake, not a fault."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bidirl.errors import InputError

__all__ = ["writing"]


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the system says against writing ``path`` into one line.

    Raises:
        InputError: the path cannot be written.
    """
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InputError(f"--out {path}: cannot be written ({reason}): choose another path") from None
