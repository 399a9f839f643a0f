"""Two processes that meet for one transfer: words over gloo, bytes over gloo or NCCL, all with deadlines.

NCCL is written to PyTorch's documented interface; only its fall-back has been run.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import IntEnum, StrEnum
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from bidirl.errors import RunFault, first_line

__all__ = ["DEADLINE_S", "Address", "Carrier", "End", "Pair", "best_carrier", "meet", "within"]

T = TypeVar("T")

DEADLINE_S = 120.0
"""Patience of each step of a transfer, which moves at most a bucket; far above any healthy step."""
NEVER_S = 7 * 24 * 3600.0
"""NCCL's own limit, at which it ends the whole process; ours comes first and fails one transfer."""
LOST = "the other side was lost or late"
TAG = 0


class End(IntEnum):
    """The rank of a side in its pair."""

    SENDER = 0
    RECEIVER = 1


class Carrier(StrEnum):
    """What moves the tensors of a transfer."""

    GLOO = "gloo"
    """From host memory to host memory."""
    NCCL = "nccl"
    """From device to device, a bucket at a time; both ends stage in host memory. Needs CUDA."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where one transfer is to be had."""

    host: str
    port: int
    key: str

    def plain(self) -> dict[str, Any]:
        """Return it as a dict of plain values."""
        return asdict(self)


def best_carrier() -> Carrier:
    """Return NCCL where torch has it and sees a GPU, else gloo."""
    return Carrier.NCCL if dist.is_nccl_available() and torch.cuda.is_available() else Carrier.GLOO


def meet(host: str, port: int, *, deadline_s: float = DEADLINE_S) -> Any:
    """Return a client of its own of a sender's meeting point: a store's calls wait for each other.

    Against a process that is stopped its calls may never return, whatever their limits: put them into
    ``within``. Raises RunFault at once if nothing listens there.
    """
    _reach(host, port, deadline_s)
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=deadline_s))


def within(deadline_s: float, work: Callable[[], T]) -> T:
    """Return what ``work`` returns; TimeoutError if it takes longer.

    Its thread is then given up: it ends when the process that it waits for does.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001, RUF100 - it is raised in the caller's thread
            done.set_exception(error)

    threading.Thread(target=run, name="wire-within", daemon=True).start()
    return done.result(deadline_s)


class Pair:
    """Groups of two that live for one transfer; words go over gloo, bytes over the carrier.

    Raises:
        RunFault: the other side did not come; of every call: it was lost or late.
    """

    def __init__(self, address: Address, end: End, deadline_s: float, carrier: Carrier) -> None:
        self._what = f"data {'to' if end is End.SENDER else 'from'} {address.key}"
        self._peer = 1 - end
        self._deadline = timedelta(seconds=deadline_s)
        self._bulk: Any = None
        own_host = address.host if end is End.SENDER else _reach(address.host, address.port, deadline_s)

        def form() -> Any:
            store = meet(address.host, address.port, deadline_s=deadline_s)
            if carrier is Carrier.NCCL:
                self._bulk = _nccl(PrefixStore(f"{address.key}/nccl", store), end)
            options = ProcessGroupGloo._Options()
            options._devices = [ProcessGroupGloo.create_device(hostname=own_host)]
            options._timeout = self._deadline
            return ProcessGroupGloo(PrefixStore(address.key, store), end, 2, options)

        self._words: Any = self._try("nobody came", lambda: within(deadline_s, form))

    def say(self, message: dict[str, Any]) -> None:
        """Send a message."""
        text = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        self._send(torch.tensor([text.numel()], dtype=torch.int64))
        self._send(text)

    def hear(self) -> dict[str, Any]:
        """Receive a message."""
        size = torch.empty(1, dtype=torch.int64)
        self._receive(size)
        text = torch.empty(int(size[0]), dtype=torch.uint8)
        self._receive(text)
        found: dict[str, Any] = json.loads(bytes(text.numpy()))
        return found

    def put(self, data: Any) -> None:
        """Send bytes: a flat uint8 tensor in host memory."""
        if self._bulk is None:
            self._send(data)
            return
        there = data.cuda()
        self._on_device(lambda: self._bulk.send([there], self._peer, TAG))

    def take(self, data: Any) -> None:
        """Receive bytes into a flat uint8 tensor in host memory."""
        if self._bulk is None:
            self._receive(data)
            return
        there = torch.empty(data.numel(), dtype=torch.uint8, device="cuda")
        self._on_device(lambda: self._bulk.recv([there], self._peer, TAG))
        data.copy_(there)

    def close(self) -> None:
        """Drop the groups."""
        bulk, self._bulk, self._words = self._bulk, None, None
        if bulk is not None:
            with suppress(RuntimeError):
                bulk.abort()

    def _send(self, tensor: Any) -> None:
        self._try(LOST, lambda: self._words.send([tensor], self._peer, TAG).wait(self._deadline))

    def _receive(self, tensor: Any) -> None:
        self._try(LOST, lambda: self._words.recv([tensor], self._peer, TAG).wait(self._deadline))

    def _on_device(self, start: Callable[[], Any]) -> None:
        """Let NCCL do something; its first call also connects, and knows no limit for that."""

        def run() -> None:
            start().wait(self._deadline)
            torch.cuda.current_stream().synchronize()

        self._try(LOST, lambda: within(self._deadline.total_seconds(), run))

    def _try(self, fault: str, work: Callable[[], T]) -> T:
        try:
            return work()
        except (RuntimeError, TimeoutError) as error:
            reason = first_line(error) if str(error) else "no answer"
            limit_s = self._deadline.total_seconds()
            raise RunFault(f"{self._what}: {fault} within {limit_s:g} s ({reason}): try again") from error


def _nccl(store: Any, rank: int) -> Any:
    """Return an NCCL group of two whose failures are this transfer's and not the process's."""
    if not dist.is_nccl_available():
        raise RuntimeError("there is no NCCL here")
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # read when a group is made; its default ends the process
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        kind: Any = dist.ProcessGroupNCCL  # type: ignore[attr-defined,unused-ignore]
        options = kind.Options()
        options._timeout = timedelta(seconds=NEVER_S)
        return kind(store, rank, 2, options)
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _reach(host: str, port: int, deadline_s: float) -> str:
    """Return this host's address on the way to a meeting point; RunFault if nothing listens there."""
    try:
        with socket.create_connection((host, port), deadline_s) as probe:
            own_host: str = probe.getsockname()[0]
    except OSError as error:
        raise RunFault(f"{host}:{port} does not answer ({error}): its process has ended") from error
    return own_host
