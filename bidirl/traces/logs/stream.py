"""Read files of any size in blocks, compressed or not."""

from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from bidirl.errors import InputError

__all__ = ["BLOCK_BYTES", "blocks"]

BLOCK_BYTES = 4 << 20
"""Bytes read at once: large enough that searching dominates, small beside the memory limit."""

_GZIP, _BZIP2, _XZ = b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00"


def blocks(path: Path) -> Iterator[bytes]:
    """Yield the content of a file, decompressed by its first bytes (gzip, bzip2, xz), not by its name.

    A compressed file that ends early yields what could be read before the damage.

    Raises:
        InputError: the file cannot be opened.
    """
    try:
        with path.open("rb") as raw:
            head = raw.peek(6)[:6]  # not read and sought back: a pipe cannot
            with _opened(raw, head) as file:
                yield from _read(file)
    except OSError as error:
        reason = (error.strerror or str(error) or "no reason given").lower()
        raise InputError(f"{path}: cannot be read ({reason}): give a log file") from None


def _opened(raw: IO[bytes], head: bytes) -> IO[bytes]:
    if head.startswith(_GZIP):
        import gzip

        return cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
    if head.startswith(_BZIP2):
        import bz2

        return bz2.BZ2File(raw)
    if head.startswith(_XZ):
        import lzma

        return lzma.LZMAFile(raw)
    return raw


def _read(file: IO[bytes]) -> Iterator[bytes]:
    """Yield blocks; pieces read before damage are not lost."""
    pieces: list[bytes] = []
    size = 0
    for piece in _pieces(file):
        pieces.append(piece)
        size += len(piece)
        if size >= BLOCK_BYTES:
            yield b"".join(pieces)
            pieces, size = [], 0
    if pieces:
        yield b"".join(pieces)


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    """Yield what one call of the decompressor gives (plain files: a block), up to the end or the damage."""
    import zlib

    read = getattr(file, "read1", file.read)
    while True:
        try:
            piece = read(BLOCK_BYTES)
        except (EOFError, zlib.error, ValueError):
            return
        except OSError as error:
            if error.errno is None:  # the decompressors' word for damage
                return
            raise
        except Exception as error:
            if type(error).__name__ != "LZMAError":
                raise
            return
        if not piece:
            return
        yield piece
