"""Weights and gradients from worker to worker: kept where they were made, sent to who asks for them.

The holder listens on a torch store; each request is served by a thread of its own over a pair of processes
(``wire``), so a slow or dead receiver holds up nobody. What travels is JSON and bytes: nothing is unpickled.
torch is imported, and a port opened, with the first value that is put or fetched.
"""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np

from bidirl.errors import RunFault, first_line
from bidirl.executor.backends import CallFailed

if TYPE_CHECKING:
    from bidirl.executor.backends.pair import Carrier
    from bidirl.executor.backends.wire import Sender

__all__ = ["TRANSFER_S", "Handle", "TensorPost"]

TRANSFER_S = 120.0
"""Seconds without news after which data on its way is given up: far above any healthy bucket."""
NCCL_S = 30.0
"""The same for a transfer over NCCL, which gloo repeats: time to connect, and for a bucket."""
CLOSE_S = 2.0
"""Seconds that transfers on their way get at the end."""
FOR_EVER_S = 365 * 24 * 3600.0
"""A holder waits for requests as long as it lives; it is woken to end."""
ASKED = "asked"
"""Queue of requests at a holder's store."""
ARRAY, TENSOR = "a", "t"
"""First letter of a name on the wire: what the value of that name is."""


@dataclass(frozen=True, slots=True)
class Handle:
    """Where a value is to be had; a plain value itself."""

    host: str
    port: int
    post: str
    """Of the holder, by which it is told from a later one at the same port."""
    number: int


@dataclass(frozen=True, slots=True)
class _Kept:
    value: Any
    once: bool


class TensorPost:
    """Keeps arrays and tensors of this process for others, and fetches theirs.

    A value is a NumPy array, a tensor, or a mapping from names to these; nobody writes into it once it was
    put. Arrays come out as writable NumPy arrays and tensors as tensors, in host memory; from the holder
    itself comes the value itself.
    """

    def __init__(self, host: str = "127.0.0.1", *, deadline_s: float = TRANSFER_S) -> None:
        """Take the address of this process's host under which the other workers reach it."""
        self._host = host
        self._deadline_s = deadline_s
        self._name = uuid4().hex
        self._lock = threading.Lock()
        self._values: dict[int, _Kept] = {}
        self._num_put = 0
        self._sender: Sender | None = None
        self._threads: set[threading.Thread] = set()
        self._has_failed_over = False
        """Whether NCCL has failed here once: then gloo carries the rest."""

    def __len__(self) -> int:
        """Return how many values are kept here."""
        return len(self._values)

    def put(self, value: Any, *, once: bool = False) -> Handle:
        """Keep a value, or keep it until it was fetched ``once``; return what it can be fetched by."""
        for array in value.values() if isinstance(value, Mapping) else (value,):
            is_sendable = array.dtype.kind in "biufc" if isinstance(array, np.ndarray) else _is_tensor(array)
            if not is_sendable:
                raise TypeError(f"{type(array).__name__} cannot be sent: put arrays of numbers, or tensors")
        with self._lock:
            sender = self._open()
            self._num_put += 1
            self._values[self._num_put] = _Kept(value, once)
            return Handle(self._host, sender.port, self._name, self._num_put)

    def get(self, handle: Handle) -> Any:
        """Fetch a value.

        Raises:
            CallFailed: it was dropped, or its holder is gone, hangs, or is too late.
        """
        if handle.post == self._name:
            kept = self._values.get(handle.number)
            if kept is None:
                raise CallFailed(_dropped(handle))
            if kept.once:
                self.drop(handle)
            return kept.value
        from bidirl.executor.backends.pair import Carrier, best_carrier

        carrier = Carrier.GLOO if self._has_failed_over else best_carrier()
        try:
            return self._fetch(handle, carrier)
        except RunFault as fault:
            if carrier is Carrier.GLOO or not self._has_failed_over:
                raise CallFailed(first_line(fault)) from None
        try:
            return self._fetch(handle, Carrier.GLOO)
        except RunFault as fault:
            raise CallFailed(first_line(fault)) from None

    def drop(self, handle: Handle) -> None:
        """Keep a value of this process no longer; transfers on their way go on."""
        if handle.post == self._name:
            with self._lock:
                self._values.pop(handle.number, None)

    def drop_unclaimed(self) -> None:
        """Drop what was put to be fetched once and was not."""
        with self._lock:
            for number in [number for number, kept in self._values.items() if kept.once]:
                del self._values[number]

    def close(self) -> None:
        """Drop everything, and end the threads; transfers on their way get a few seconds."""
        with self._lock:
            sender, self._sender = self._sender, None
            self._values.clear()
            threads = list(self._threads)
        if sender is not None:
            sender.store.queue_push(ASKED, json.dumps(None))
        _join(threads, CLOSE_S)
        if sender is not None:
            sender.close()  # who still waits for a receiver is told so
            _join(threads, CLOSE_S)

    # ---------------------------------------------------------------- holder

    def _open(self) -> "Sender":
        if self._sender is None:
            from bidirl.executor.backends.pair import meet
            from bidirl.executor.backends.wire import Sender

            self._sender = Sender(self._host, deadline_s=self._deadline_s)
            requests = meet(self._host, self._sender.port, deadline_s=FOR_EVER_S)
            self._start(self._serve, self._sender, requests)
        return self._sender

    def _start(self, work: Any, *args: Any) -> None:
        thread = threading.Thread(target=work, args=args, name="tensor-post", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _serve(self, sender: "Sender", requests: Any) -> None:
        """Wait for requests and start a thread for each, until the end is asked for."""
        while (request := json.loads(requests.queue_pop(ASKED))) is not None:
            with self._lock:
                self._threads = {thread for thread in self._threads if thread.is_alive()}
                self._start(self._answer, sender, request)

    def _answer(self, sender: "Sender", request: dict[str, Any]) -> None:
        from bidirl.executor.backends.pair import Carrier, best_carrier

        number = request["number"]
        kept = self._values.get(number) if request["post"] == self._name else None
        if kept is None:
            sender.store.set(request["reply"], json.dumps({}))
            return
        address = sender.address(f"value {number}")
        carrier = Carrier(request["carrier"]) if best_carrier() is Carrier.NCCL else Carrier.GLOO
        sender.store.set(request["reply"], json.dumps({"key": address.key, "carrier": carrier}))
        try:
            sender.send(address, number, _named(kept.value), carrier)
        except RunFault:
            return  # the receiver hears of it by itself, and asks again if it is there
        if kept.once:
            with self._lock:
                self._values.pop(number, None)

    # ---------------------------------------------------------------- receiver

    def _fetch(self, handle: Handle, carrier: "Carrier") -> Any:
        """Fetch a value over a carrier if the holder has it too, else over gloo."""
        from bidirl.executor.backends.pair import Address, Carrier, within
        from bidirl.executor.backends.wire import receive

        start_s, deadline_s = monotonic(), self._deadline_s
        what = f"data of {handle.host}:{handle.port}"
        try:
            reply = within(deadline_s, lambda: _ask(handle, deadline_s, carrier))
        except TimeoutError:
            raise RunFault(f"{what} did not arrive within {deadline_s:.3g} s: ask again") from None
        except RuntimeError as error:
            raise RunFault(f"{what}: its holder is gone ({first_line(error)}): ask again") from None
        if not reply:
            raise CallFailed(_dropped(handle))
        address = Address(handle.host, handle.port, reply["key"])
        left_s = max(1.0, deadline_s - (monotonic() - start_s))
        if reply["carrier"] == Carrier.GLOO:
            return _value(receive(address, deadline_s=left_s).tensors)
        try:
            received = receive(address, deadline_s=min(left_s, NCCL_S), carrier=Carrier.NCCL)
        except RunFault:
            self._has_failed_over = True
            raise
        return _value(received.tensors)


def _ask(handle: Handle, deadline_s: float, carrier: "Carrier") -> dict[str, Any]:
    """Ask the holder for a value; return where it sends it, or nothing if it has it no more."""
    from bidirl.executor.backends.pair import meet

    store = meet(handle.host, handle.port, deadline_s=deadline_s)
    reply = f"reply/{uuid4().hex}"
    request = {"post": handle.post, "number": handle.number, "carrier": carrier, "reply": reply}
    store.queue_push(ASKED, json.dumps(request))
    found: dict[str, Any] = json.loads(store.get(reply))
    store.delete_key(reply)
    return found


def _join(threads: Sequence[threading.Thread], patience_s: float) -> None:
    deadline_s = monotonic() + patience_s
    for thread in threads:
        thread.join(max(0.0, deadline_s - monotonic()))


def _dropped(handle: Handle) -> str:
    return f"value {handle.number} of {handle.host}:{handle.port} was dropped: ask for a newer one"


def _named(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a value as the wire carries it: each name with a letter for its kind before it."""
    if not isinstance(value, Mapping):
        yield _letter(value), value
        return
    for name, array in value.items():
        yield f"{_letter(array)}/{name}", array


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "detach")


def _letter(value: Any) -> str:
    return ARRAY if isinstance(value, np.ndarray) else TENSOR


def _value(tensors: Sequence[tuple[str, Any]]) -> Any:
    """Return what ``_named`` had."""
    found = {name: tensor.numpy() if name[0] == ARRAY else tensor for name, tensor in tensors}
    if list(found) in ([ARRAY], [TENSOR]):
        return next(iter(found.values()))
    return {name[2:]: value for name, value in found.items()}
