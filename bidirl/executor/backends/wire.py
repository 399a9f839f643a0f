"""Send named tensors from one process to another, point to point, checked and with deadlines.

One transfer is one pair of processes: a receiver that is lost fails its own transfer, and no other. The
receiver gets every tensor into host memory, compares the digest, and only then says that it has them, so a
broken transfer changes nothing that is in use. Needs torch, not vLLM.

Words go over gloo, tensors over gloo or NCCL. vLLM's own ``nccl`` transfer is not used: it loads while it
receives, so a lost sender leaves a mixed model, and its group has all receivers in it, so one that is lost
takes the others along. Its ``ipc`` transfer needs both roles awake on one device, which a worker never has.
"""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import TCPStore

from bidirl.errors import RunFault
from bidirl.executor.backends.pair import DEADLINE_S, Address, Carrier, End, Pair
from bidirl.executor.roles import NamedTensors

__all__ = ["Received", "Sender", "Sent", "digest", "receive"]

BUCKET_BYTES = 64 << 20
"""Payload of one message: large against the cost of a message, small against a model and a device."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A transfer that its receiver confirmed."""

    num_tensors: int
    num_bytes: int
    digest: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Received:
    """All tensors of a transfer, checked against the sender's digest; in host memory, each in its own."""

    number: int
    tensors: list[tuple[str, Any]]
    digest: str
    seconds: float


def digest(tensors: NamedTensors) -> str:
    """Return SHA-256 over names, types, shapes and bytes in the given order."""
    total = hashlib.sha256()
    for name, tensor in tensors:
        _add(total, name, tensor, _bytes_of(tensor))
    return total.hexdigest()


class Sender:
    """The sending half: one meeting point for any number of transfers, each to one receiver.

    ``host`` is the name or address of this host under which receivers reach it; nobody else can.
    """

    def __init__(self, host: str = "127.0.0.1", *, deadline_s: float = DEADLINE_S) -> None:
        self._host = host
        self._deadline_s = deadline_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=128)
        port = listener.getsockname()[1]
        self.store: Any = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=deadline_s),
            master_listen_fd=listener.detach(),
        )
        self.port: int = port
        self._serial = 0
        self._lock = threading.Lock()

    def address(self, label: str = "") -> Address:
        """Return a new address for one transfer; ``label`` appears in messages."""
        with self._lock:
            self._serial += 1
            return Address(self._host, self.port, f"{label}/{self._serial}")

    def send(
        self, address: Address, number: int, tensors: NamedTensors, carrier: Carrier = Carrier.GLOO
    ) -> Sent:
        """Send tensors or arrays to the receiver that meets at ``address``, and wait for its word.

        ``number`` (a version, for one) tells the receiver what it got. Calls from several threads go on side
        by side.

        Raises:
            RunFault: the receiver did not come, was lost, was late, or refused what it got.
        """
        start = time.monotonic()
        held = list(tensors)
        total = hashlib.sha256()
        num_bytes = 0

        def parts() -> Iterator[NDArray[np.uint8]]:
            nonlocal num_bytes
            for name, tensor in held:
                data = _bytes_of(tensor)
                _add(total, name, tensor, data)
                num_bytes += data.size
                yield data

        pair = Pair(address, End.SENDER, self._deadline_s, carrier)
        try:
            entries = [(name, _type_name(tensor), list(tensor.shape)) for name, tensor in held]
            pair.say({"number": number, "bucket_bytes": BUCKET_BYTES, "tensors": entries})
            bucket = torch.empty(BUCKET_BYTES, dtype=torch.uint8)
            for size in _filled(parts(), bucket.numpy()):
                pair.put(bucket[:size])
            pair.say({"digest": total.hexdigest()})
            is_accepted = pair.hear()["accepted"]
        finally:
            pair.close()
            self._clear(address)
        if not is_accepted:
            raise RunFault(f"data to {address.key}: the receiver refused it: send again")
        return Sent(len(held), num_bytes, total.hexdigest(), time.monotonic() - start)

    def _clear(self, address: Address) -> None:
        """Take away what a pair has left at the meeting point."""
        store = self.store
        with suppress(RuntimeError):
            for key in store.list_keys() if store is not None else ():
                if key.strip("/").startswith(f"{address.key}/"):
                    store.delete_key(key)

    def send_all(
        self, addresses: Sequence[Address], number: int, tensors: NamedTensors
    ) -> list[Sent | RunFault]:
        """Send to several receivers at once; the answer holds, for each, what became of it."""
        shared = list(tensors)

        def one(address: Address) -> Sent | RunFault:
            try:
                return self.send(address, number, iter(shared))
            except RunFault as fault:
                return fault

        if not addresses:
            return []
        with ThreadPoolExecutor(len(addresses)) as pool:
            return list(pool.map(one, addresses))

    def close(self) -> None:
        """Give the meeting point up; transfers that are on their way go on."""
        self.store = None


def receive(address: Address, *, deadline_s: float = DEADLINE_S, carrier: Carrier = Carrier.GLOO) -> Received:
    """Meet the sender at ``address``, take all tensors and confirm them.

    Raises:
        RunFault: the sender did not come, was lost or late, or the digest differs; nothing was changed.
    """
    start = time.monotonic()
    pair = Pair(address, End.RECEIVER, deadline_s, carrier)
    try:
        header = pair.hear()
        tensors, found = _taken(pair, header["tensors"], header["bucket_bytes"])
        is_whole: bool = pair.hear()["digest"] == found
        pair.say({"accepted": is_whole})
    finally:
        pair.close()
    if not is_whole:
        raise RunFault(f"data from {address.key}: its digest differs from the sender's: ask again")
    return Received(int(header["number"]), tensors, found, time.monotonic() - start)


def _filled(parts: Iterable[NDArray[np.uint8]], bucket: NDArray[np.uint8]) -> Iterator[int]:
    """Copy parts one behind the other into a bucket; yield its size when it is full, and at the end."""
    at = 0
    for part in parts:
        start = 0
        while start < part.size:
            size = min(part.size - start, bucket.size - at)
            bucket[at : at + size] = part[start : start + size]
            at, start = at + size, start + size
            if at == bucket.size:
                yield at
                at = 0
    if at:
        yield at


def _taken(
    pair: Pair, entries: Sequence[tuple[str, str, list[int]]], bucket_bytes: int
) -> tuple[list[tuple[str, Any]], str]:
    """Receive what a header has announced, and return it with its digest."""
    tensors = [(name, torch.empty(shape, dtype=getattr(torch, kind))) for name, kind, shape in entries]
    targets = [_bytes_of(tensor) for _, tensor in tensors]
    left = sum(target.size for target in targets)
    bucket = torch.empty(min(left, bucket_bytes), dtype=torch.uint8)
    data = bucket.numpy()
    total = hashlib.sha256()
    at = held = 0
    for (name, tensor), target in zip(tensors, targets, strict=True):
        start = 0
        while start < target.size:
            if at == held:
                held = min(left, data.size)
                pair.take(bucket[:held])
                at, left = 0, left - held
            size = min(target.size - start, held - at)
            target[start : start + size] = data[at : at + size]
            at, start = at + size, start + size
        _add(total, name, tensor, target)
    return tensors, total.hexdigest()


def _bytes_of(value: Any) -> NDArray[np.uint8]:
    """Return the values of a tensor or an array as flat bytes in host memory, a copy where need be."""
    if isinstance(value, np.ndarray):
        native = np.ascontiguousarray(value.astype(value.dtype.newbyteorder("="), copy=False))
        return native.reshape(-1).view(np.uint8)
    found: NDArray[np.uint8] = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return found


def _add(total: Any, name: str, tensor: Any, data: NDArray[np.uint8]) -> None:
    total.update(f"{name}|{_type_name(tensor)}|{list(tensor.shape)}|".encode())
    total.update(data)


def _type_name(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.") if not isinstance(value, np.ndarray) else value.dtype.name
