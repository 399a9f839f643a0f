"""Send named tensors from one process to another over gloo, point to point, checked and with deadlines.

One transfer is one pair of processes: a receiver that is lost fails its own transfer, and no other. The
receiver gets every tensor, compares the digest, and only then says that it has them, so a broken transfer
leaves the weights that are in use untouched. Needs torch, not vLLM: the trainer's side imports only this.
"""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from bidirl.errors import RunFault, first_line
from bidirl.executor.roles import NamedTensors

__all__ = ["Address", "Received", "Sender", "Sent", "digest", "receive"]

BUCKET_BYTES = 64 << 20
"""Payload of one message: large against the cost of a message, small against a model."""
ALIGN_BYTES = 16
"""Every tensor starts at a multiple of this in its bucket, so that it can be viewed in its own type."""
DEADLINE_S = 120.0
"""Patience of each step of a transfer; one step moves at most a bucket or one tensor."""
SENDER, RECEIVER = 0, 1
TAG = 0
ACCEPTED, REFUSED = 1, 2


@dataclass(frozen=True, slots=True)
class Address:
    """Where one transfer is to be had."""

    host: str
    port: int
    key: str

    def plain(self) -> dict[str, Any]:
        """Return it as a dict of plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Sent:
    """A transfer that its receiver confirmed."""

    num_tensors: int
    num_bytes: int
    digest: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Received:
    """A whole set of weights, checked against the sender's digest; CPU tensors."""

    version: int
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

    ``host`` is the name or address under which receivers reach this process.
    """

    def __init__(self, host: str = "127.0.0.1", *, deadline_s: float = DEADLINE_S) -> None:
        self._host = host
        self._deadline_s = deadline_s
        self._store: Any = TCPStore(
            host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=deadline_s)
        )
        self._serial = 0

    def address(self, label: str = "") -> Address:
        """Return a new address for one transfer; ``label`` appears in messages."""
        self._serial += 1
        return Address(self._host, self._store.port, f"{label}/{self._serial}")

    def send(self, address: Address, version: int, tensors: NamedTensors) -> Sent:
        """Send all tensors to the receiver that meets at ``address``, and wait for its word.

        Calls from several threads go on side by side.

        Raises:
            RunFault: the receiver did not come, was lost, was late, or refused what it got.
        """
        start = time.monotonic()
        pair = _Pair(address, SENDER, self._host, self._deadline_s)
        total = hashlib.sha256()
        num_tensors = num_bytes = 0
        for bucket in _buckets(tensors):
            entries: list[tuple[str, str, list[int]]] = []
            payload = torch.empty(sum(_padded(data.numel()) for _, _, data in bucket), dtype=torch.uint8)
            at = 0
            for name, tensor, data in bucket:
                payload[at : at + data.numel()] = data
                at += _padded(data.numel())
                _add(total, name, tensor, data)
                entries.append((name, _type_name(tensor), list(tensor.shape)))
                num_bytes += data.numel()
            num_tensors += len(bucket)
            pair.put({"version": version, "tensors": entries}, payload)
        pair.put({"version": version, "digest": total.hexdigest(), "num_tensors": num_tensors}, None)
        answer = pair.number()
        pair.close()
        if answer != ACCEPTED:
            raise RunFault(
                f"weights of version {version} to {address.key}: the receiver refused them: send again"
            )
        return Sent(num_tensors, num_bytes, total.hexdigest(), time.monotonic() - start)

    def send_all(
        self, addresses: Sequence[Address], version: int, tensors: NamedTensors
    ) -> list[Sent | RunFault]:
        """Send to several receivers at once; the answer holds, for each, what became of it."""
        shared = [(name, tensor.detach()) for name, tensor in tensors]

        def one(address: Address) -> Sent | RunFault:
            try:
                return self.send(address, version, iter(shared))
            except RunFault as fault:
                return fault

        if not addresses:
            return []
        with ThreadPoolExecutor(len(addresses)) as pool:
            return list(pool.map(one, addresses))

    def close(self) -> None:
        """Give the meeting point up."""
        self._store = None


def receive(address: Address, *, deadline_s: float = DEADLINE_S) -> Received:
    """Meet the sender at ``address``, take all tensors and confirm them.

    Raises:
        RunFault: the sender did not come, was lost or late, or the digest differs; nothing was changed.
    """
    start = time.monotonic()
    pair = _Pair(address, RECEIVER, _own_host(address), deadline_s)
    total = hashlib.sha256()
    tensors: list[tuple[str, Any]] = []
    while True:
        header, payload = pair.take()
        if "digest" in header:
            break
        at = 0
        for name, kind, shape in header["tensors"]:
            like = torch.empty(shape, dtype=getattr(torch, kind), device="meta")
            size = like.numel() * like.element_size()
            tensor = payload[at : at + size].view(like.dtype).view(shape)
            at += _padded(size)
            _add(total, name, tensor, _bytes_of(tensor))
            tensors.append((name, tensor))
    whole = header["digest"] == total.hexdigest() and header["num_tensors"] == len(tensors)
    pair.say(ACCEPTED if whole else REFUSED)
    pair.close()
    if not whole:
        raise RunFault(
            f"weights of version {header['version']} from {address.key}: digest or count differs from the "
            "sender's: send again"
        )
    return Received(int(header["version"]), tensors, total.hexdigest(), time.monotonic() - start)


class _Pair:
    """A gloo group of two that lives for one transfer."""

    def __init__(self, address: Address, rank: int, own_host: str, deadline_s: float) -> None:
        self._what = f"weights {'to' if rank == SENDER else 'from'} {address.key}"
        self._peer = 1 - rank
        self._deadline = timedelta(seconds=deadline_s)
        try:
            # A client of its own: a store's calls wait for each other, and one meeting may never come about.
            store = TCPStore(address.host, address.port, is_master=False, timeout=self._deadline)
            options = ProcessGroupGloo._Options()
            options._devices = [ProcessGroupGloo.create_device(hostname=own_host)]
            options._timeout = self._deadline
            self._group: Any = ProcessGroupGloo(PrefixStore(address.key, store), rank, 2, options)
        except RuntimeError as error:
            raise self._fault("nobody came", error) from error

    def put(self, header: dict[str, Any], payload: Any) -> None:
        """Send one message; ``payload`` is a flat uint8 tensor, or None."""
        text = json.dumps(header).encode()
        size = 0 if payload is None else payload.numel()
        self._send(torch.tensor([len(text), size], dtype=torch.int64))
        self._send(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        if size:
            self._send(payload)

    def take(self) -> tuple[dict[str, Any], Any]:
        """Receive one message."""
        text_bytes, size = self._receive(torch.empty(2, dtype=torch.int64)).tolist()
        text = self._receive(torch.empty(text_bytes, dtype=torch.uint8))
        payload = torch.empty(size, dtype=torch.uint8)
        if size:
            self._receive(payload)
        header: dict[str, Any] = json.loads(bytes(text.numpy()))
        return header, payload

    def say(self, number: int) -> None:
        """Send one number."""
        self._send(torch.tensor([number], dtype=torch.int64))

    def number(self) -> int:
        """Receive one number."""
        return int(self._receive(torch.empty(1, dtype=torch.int64))[0])

    def close(self) -> None:
        """Drop the group."""
        self._group = None

    def _send(self, tensor: Any) -> None:
        try:
            self._group.send([tensor], self._peer, TAG).wait(self._deadline)
        except RuntimeError as error:
            raise self._fault("the receiver was lost or late", error) from error

    def _receive(self, tensor: Any) -> Any:
        try:
            self._group.recv([tensor], self._peer, TAG).wait(self._deadline)
        except RuntimeError as error:
            raise self._fault("the other side was lost or late", error) from error
        return tensor

    def _fault(self, what: str, error: BaseException) -> RunFault:
        reason = first_line(error)
        return RunFault(
            f"{self._what}: {what} within {self._deadline.total_seconds():g} s ({reason}): try again"
        )


def _buckets(tensors: NamedTensors) -> Iterator[list[tuple[str, Any, Any]]]:
    """Yield (name, tensor, bytes) in messages of at most ``BUCKET_BYTES``, or of one tensor."""
    bucket: list[tuple[str, Any, Any]] = []
    size = 0
    for name, tensor in tensors:
        data = _bytes_of(tensor)
        if bucket and size + data.numel() > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor, data))
        size += data.numel()
    if bucket:
        yield bucket


def _bytes_of(tensor: Any) -> Any:
    """Return a tensor's values as flat uint8 on the host; no copy where they lie there in order."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _add(total: Any, name: str, tensor: Any, data: Any) -> None:
    total.update(f"{name}|{_type_name(tensor)}|{list(tensor.shape)}|".encode())
    total.update(data.numpy())


def _type_name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _padded(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def _own_host(address: Address) -> str:
    """Return this host's address on the way to the sender."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address.host, address.port))
        host: str = probe.getsockname()[0]
    return host
