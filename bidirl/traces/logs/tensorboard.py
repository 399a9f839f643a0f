"""Read the scalars of TensorBoard event files: record framing and the four protobuf fields that hold them.

Source: tensorflow/tensorboard (``tensorboard/compat/proto/{event,summary,tensor}.proto``; framing in
``tensorboard/compat/tensorflow_stub/pywrap_tensorflow.py``): a record is length (8 bytes), its checksum (4),
data, checksum (4), little endian. Checksums are not verified; a damaged length ends the reading.
"""

import math
import struct
from collections.abc import Iterator
from typing import NamedTuple

from bidirl.traces.logs.dialects import WANTED
from bidirl.traces.logs.rows import Store

__all__ = ["EventReader", "is_event_file"]

_MAX_RECORD = 256 << 20
_VERSION_MARK = b"brain.Event:"
_FLOAT_TYPES = {1: "f", 2: "d", 3: "i", 9: "q"}


class _Field(NamedTuple):
    number: int
    value: int | bytes


def is_event_file(head: bytes) -> bool:
    """Say whether bytes begin an event file: its first record names the format's version."""
    return _VERSION_MARK in head[:64]


class EventReader:
    """Brings the scalars of an event file to the rows of a store, step by step."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tail = b""
        self._is_broken = False
        self.num_scalars = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes, cut anywhere."""
        buffer = self._tail + data
        position = 0
        while not self._is_broken and position + 12 <= len(buffer):
            (length,) = struct.unpack_from("<Q", buffer, position)
            if length > _MAX_RECORD:
                self._is_broken = True
                break
            end = position + 12 + length + 4
            if end > len(buffer):
                break
            self._event(buffer[position + 12 : end - 4])
            position = end
        self._tail = b"" if self._is_broken else buffer[position:]

    def _event(self, record: bytes) -> None:
        step, summaries = 0, []
        for field in _fields(record):
            if field.number == 2 and isinstance(field.value, int):
                step = field.value
            elif field.number == 5 and isinstance(field.value, bytes):
                summaries.append(field.value)
        values: dict[str, float] = {}
        for summary in summaries:
            for field in _fields(summary):
                if field.number == 1 and isinstance(field.value, bytes):
                    values.update(_scalar(field.value))
        kept = {key: value for key, value in values.items() if key in WANTED and math.isfinite(value)}
        self.num_scalars += len(values)
        if kept:
            self._store.add(step, kept)
        if values:
            self._store.current.see(values)


def _scalar(data: bytes) -> Iterator[tuple[str, float]]:
    tag, value = "", None
    for field in _fields(data):
        if field.number == 1 and isinstance(field.value, bytes):
            tag = field.value.decode("utf-8", "replace")
        elif field.number == 2 and isinstance(field.value, bytes) and len(field.value) == 4:
            value = struct.unpack("<f", field.value)[0]
        elif field.number == 8 and isinstance(field.value, bytes):
            value = _tensor(field.value)
    if tag and value is not None:
        yield tag, float(value)


def _tensor(data: bytes) -> float | None:
    """Return the value of a tensor that holds one number, None for any other."""
    kind = 0
    for field in _fields(data):
        if field.number == 1 and isinstance(field.value, int):
            kind = field.value
        elif isinstance(field.value, bytes) and (
            (field.number == 4 and kind in _FLOAT_TYPES) or (field.number in (5, 6) and kind in (1, 2))
        ):
            code = "<" + _FLOAT_TYPES[kind]
            if len(field.value) == struct.calcsize(code):
                return float(struct.unpack(code, field.value)[0])
    return None


def _fields(data: bytes) -> Iterator[_Field]:
    """Yield the fields of a protobuf message; stop at what is no message."""
    position, size = 0, len(data)
    while position < size:
        key, position = _varint(data, position)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, position = _varint(data, position)
            yield _Field(number, value)
        elif wire in (1, 5):
            width = 8 if wire == 1 else 4
            yield _Field(number, data[position : position + width])
            position += width
        elif wire == 2:
            length, position = _varint(data, position)
            yield _Field(number, data[position : position + length])
            position += length
        else:
            return


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(data) and shift < 70:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    return value, position
