"""A training replica over several devices of one host: a process a rank, the calling one being rank 0.

Every call is made by all ranks in the same order, as FSDP2 needs it. Gradients stay where they were computed
until somebody outside the replica wants them. A rank that fails says why and ends, so that the others' wait
for it ends too; where it does not (a collective on a GPU), this process ends with the cause as its last word.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import queue
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import TCPStore
from torch.distributed.device_mesh import init_device_mesh

from bidirl.errors import BidirlError, RunFault, first_line
from bidirl.executor.backends.messages import out_of_memory
from bidirl.executor.backends.torch.merge import as_array
from bidirl.executor.backends.torch.settings import TrainerConfig
from bidirl.executor.backends.torch.states import as_tensor
from bidirl.executor.backends.torch.trainer import TorchTrainer
from bidirl.executor.roles import NamedTensors, Piece, Row
from bidirl.planner.events import SegmentKind

__all__ = ["RankedTrainer", "Shards"]

HOST = "127.0.0.1"
START_S = 300.0
"""Patience with the start of the ranks, which load the model."""
COLLECTIVE_S = 1800.0
"""Patience of a collective. Source: PyTorch, torch/distributed/constants.py, ``default_pg_timeout``."""
GRACE_S = 15.0
"""Seconds that rank 0 gets to leave a collective after another rank has failed, before its process ends."""
CLOSE_S = 10.0
"""Seconds that a rank gets to end."""
LOCAL = frozenset({"sleep", "wake", "part"})
"""Calls in which no rank waits for another: one that fails alone leaves the replica as usable as before."""
EXIT_CODE = 70


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a rank could not do what it was asked to."""

    text: str
    out_of_memory: bool


class Shards:
    """A gradient in parts, one on each rank; what is added to it must be of the same replica."""

    def __init__(self, number: int, trainer: RankedTrainer) -> None:
        self.number = number
        self._trainer = trainer
        weakref.finalize(self, trainer.dropped.append, number)

    def __iadd__(self, other: Shards) -> Shards:
        """Add another gradient, rank by rank."""
        self._trainer.add(self.number, other.number)
        return self

    def whole(self) -> NDArray[np.float32]:
        """Return all parts in the order of the ranks, in host memory."""
        return self._trainer.whole(self.number)


class _Rank:
    """What one rank does; all ranks do the same."""

    def __init__(self, trainer: TorchTrainer) -> None:
        self.trainer = trainer
        self.gradients: dict[int, Any] = {}

    def run(self, number: int, kind: SegmentKind, chunk: int, rows: Sequence[Row], counts: Any) -> Piece:
        piece = self.trainer.run(kind, chunk, rows, num_tokens=counts[0], num_sequences=counts[1])
        if piece.gradient is not None:
            self.gradients[number], piece.gradient = piece.gradient, None
        return piece

    def add(self, into: int, other: int) -> None:
        self.gradients[into] += self.gradients[other]

    def part(self, number: int) -> Any:
        return torch.from_numpy(as_array(self.gradients[number]))

    def forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.gradients.pop(number, None)

    def apply(self, parts: Sequence[Any]) -> dict[str, float]:
        held = [self.gradients[part] if isinstance(part, int) else part for part in parts]
        return self.trainer.apply(held)

    def logprobs(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        return self.trainer.logprobs(rows)

    def gather(self) -> None:
        for _ in self.trainer.tensors():
            pass

    def load(self, tensors: dict[str, Any]) -> None:
        self.trainer.load(iter(tensors.items()))

    def digest(self) -> str:
        return self.trainer.digest()

    def save(self, folder: str) -> None:
        self.trainer.save(folder)

    def restore(self, folder: str) -> None:
        self.trainer.restore(folder)

    def sleep(self) -> None:
        self.trainer.sleep()

    def wake(self) -> None:
        self.trainer.wake()


class RankedTrainer:
    """The ``Trainer`` protocol over ``num_ranks`` processes; one per process: it owns torch's default group.

    Takes and gives whole weights and whole log-probabilities; a gradient is a ``Shards`` until it leaves.
    """

    def __init__(self, folder: Path, config: TrainerConfig, num_ranks: int) -> None:
        self.dropped: list[int] = []
        """Gradients that nobody holds any more; told to the ranks with the next call."""
        self.config = config
        self.num_ranks = num_ranks
        self._serial = 0
        self._failed = ""
        self._told = threading.Event()
        self._left = threading.Event()
        """Set while rank 0 is in no call."""
        self._left.set()
        self._answers: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(1, num_ranks)]
        store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=START_S))
        context = torch.multiprocessing.get_context("spawn")
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        for rank in range(1, num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_follow,
                args=(theirs, store.port, rank, num_ranks, folder, config),
                name=f"trainer-rank-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._listener = threading.Thread(target=self._listen, name="trainer-ranks", daemon=True)
        self._listener.start()
        try:
            self._rank = _Rank(_join(store, 0, num_ranks, folder, config))
            own = self._rank.trainer.num_params
            self._sizes = [own, *self._answered(START_S)]
        except BaseException as error:
            self._failed = self._failed or first_line(error)
            self.close()
            raise
        self.num_params = sum(self._sizes)

    # ------------------------------------------------------------------ calls

    def _all(self, name: str, *args: Any) -> list[Any]:
        """Have every rank make a call; return what each says, by rank."""
        return self._each(name, [args] * self.num_ranks)

    def _each(self, name: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        with self._together(name, args[1:]) as answers:
            own = getattr(self._rank, name)(*args[0])
        return [own, *answers]

    @contextmanager
    def _together(self, name: str, args: Sequence[tuple[Any, ...]]) -> Iterator[list[Any]]:
        """Have the other ranks make a call that rank 0 makes inside the block; they answer at its end."""
        self._begin(name, args)
        answers: list[Any] = []
        try:
            yield answers
        except BaseException as error:
            self._left.set()
            self._own_failure(name, error)
            raise
        self._left.set()
        answers += self._answered(COLLECTIVE_S)

    def _begin(self, name: str, args: Sequence[tuple[Any, ...]]) -> None:
        if self._failed:
            raise RunFault(self._failed)
        gone, self.dropped[:] = tuple(self.dropped), []
        self._rank.forget(gone)
        self._left.clear()
        for pipe, own in zip(self._pipes, args, strict=True):
            with suppress(OSError):  # it has ended: the listener says why
                pipe.send((name, own, gone))

    def _own_failure(self, name: str, error: BaseException) -> None:
        """Bring the ranks together again after a failure of rank 0, or give the replica up."""
        if name in LOCAL or isinstance(error, BidirlError | GeneratorExit):
            self._collect(COLLECTIVE_S)
            return
        if self._told.wait(1.0):  # what was noticed here was another rank's end
            raise RunFault(self._failed) from None
        self._failed = first_line(error)

    def _answered(self, patience_s: float) -> list[Any]:
        """Return what the other ranks answer; raise what stopped one of them."""
        found = self._collect(patience_s)
        for answer in found:
            if isinstance(answer, _Failure):
                raise (MemoryError if answer.out_of_memory else RunFault)(answer.text)
        return found

    def _collect(self, patience_s: float) -> list[Any]:
        found: list[Any] = []
        for rank, answers in enumerate(self._answers, start=1):
            try:
                found.append(answers.get(timeout=patience_s))
            except queue.Empty:
                self._failed = f"rank {rank} does not answer within {patience_s:g} s: restart the worker"
                raise RunFault(self._failed) from None
        return found

    def _listen(self) -> None:
        """Take what the ranks say; end this process if one is lost and rank 0 waits for it for ever."""
        open_pipes: dict[Any, int] = {pipe: place for place, pipe in enumerate(self._pipes)}
        while open_pipes:
            pipe: Any
            for pipe in multiprocessing.connection.wait(list(open_pipes)):
                place = open_pipes[pipe]
                said: Any
                try:
                    is_last, said = pipe.recv()
                except (EOFError, OSError):
                    is_last, said = True, _Failure(f"rank {place + 1} ended without a word", False)
                if is_last:
                    del open_pipes[pipe]
                    self._lost(said)
                self._answers[place].put(said)

    def _lost(self, said: _Failure) -> None:
        if self._failed:
            return
        self._failed = said.text
        self._told.set()
        threading.Thread(target=self._give_up, daemon=True).start()

    def _give_up(self) -> None:
        if not self._left.wait(GRACE_S):
            sys.stderr.write(f"RunFault: {self._failed}\n")
            sys.stderr.flush()
            os._exit(EXIT_CODE)

    # --------------------------------------------------------------- segments

    def run(
        self, kind: SegmentKind, chunk: int, rows: Sequence[Row], *, num_tokens: int, num_sequences: int
    ) -> Piece:
        """Run one chunk of a segment on all ranks."""
        self._serial += 1
        number = self._serial
        piece: Piece = self._all("run", number, kind, chunk, rows, (num_tokens, num_sequences))[0]
        if kind is SegmentKind.UPDATE:
            piece.gradient = Shards(number, self)
        return piece

    def logprobs(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """Return the log-probabilities of the response tokens under the present weights."""
        found: list[NDArray[np.float32]] = self._all("logprobs", rows)[0]
        return found

    def add(self, into: int, other: int) -> None:
        """Add one gradient to another on every rank."""
        self._all("add", into, other)

    def whole(self, number: int) -> NDArray[np.float32]:
        """Return a gradient, the ranks' parts one after the other."""
        parts = self._all("part", number)
        return np.concatenate([part.numpy() for part in parts])

    def apply(self, gradients: Sequence[Any]) -> dict[str, float]:
        """Add gradients in the given order, this replica's own or whole ones, and take an optimizer step."""
        ends = np.cumsum(self._sizes)[:-1]
        by_rank: list[list[Any]] = [[] for _ in range(self.num_ranks)]
        for gradient in gradients:
            own = isinstance(gradient, Shards)
            parts = [gradient.number] * self.num_ranks if own else map(as_tensor, np.split(gradient, ends))
            for held, part in zip(by_rank, parts, strict=True):
                held.append(part)
        found: dict[str, float] = self._each("apply", [(held,) for held in by_rank])[0]
        return found

    # ---------------------------------------------------------------- weights

    def tensors(self) -> NamedTensors:
        """Return the whole weights under their checkpoint names, gathered one by one."""
        with self._together("gather", [()] * (self.num_ranks - 1)):
            rest = self._rank.trainer.tensors()
            try:
                while (named := next(rest, None)) is not None:  # ``yield from`` would end with its reader
                    yield named
            finally:  # the other ranks go through all of them
                for _ in rest:
                    pass

    def load(self, tensors: NamedTensors) -> None:
        """Replace the weights, not the optimizer's state; every rank is shown the whole."""
        shared = {name: _shared(tensor) for name, tensor in tensors}
        self._all("load", shared)

    def digest(self) -> str:
        """Return the SHA-256 of the weights."""
        return str(self._all("digest")[0])

    def save(self, folder: str) -> None:
        """Write weights and optimizer, atomically."""
        self._all("save", folder)

    def restore(self, folder: str) -> None:
        """Read what ``save`` wrote."""
        self._all("restore", folder)

    # ------------------------------------------------------------------- role

    def sleep(self) -> None:
        """Give device memory up on all ranks."""
        self._all("sleep")

    def wake(self) -> None:
        """Take it back."""
        self._all("wake")

    def close(self) -> None:
        """End the ranks; again is harmless."""
        if not self._processes:
            return
        is_whole = not self._failed
        self._failed = self._failed or "the trainer is closed"
        self._left.set()
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
        if dist.is_initialized() and is_whole:
            dist.destroy_process_group()  # all ranks do so now
        for process in self._processes:
            process.join(CLOSE_S if is_whole else 0.0)
            if process.is_alive():
                process.kill()
                process.join()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._listener.join(CLOSE_S)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


def _shared(tensor: Any) -> Any:
    """Return a tensor in memory that other processes are shown and not sent."""
    host = torch.tensor(tensor) if isinstance(tensor, np.ndarray) else tensor.detach().cpu().clone()
    return host.share_memory_()


def _join(store: Any, rank: int, num_ranks: int, folder: Path, config: TrainerConfig) -> TorchTrainer:
    """Enter the replica's group and build a rank of its trainer."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on one host
    kind = torch.device(config.device).type
    if kind == "cuda":
        torch.cuda.set_device(rank)
        config = replace(config, device=f"cuda:{rank}")
    dist.init_process_group(
        "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl",
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=COLLECTIVE_S),
    )
    return TorchTrainer(folder, config, mesh=init_device_mesh(kind, (num_ranks,)))


def _follow(pipe: Any, port: int, rank: int, num_ranks: int, folder: Path, config: TrainerConfig) -> None:
    """Be another rank: do what rank 0 does until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        store = TCPStore(HOST, port, is_master=False, timeout=timedelta(seconds=START_S))
        own = _Rank(_join(store, rank, num_ranks, folder, config))
    except BaseException as error:
        pipe.send((True, _failure(rank, error)))
        raise
    pipe.send((False, own.trainer.num_params))
    for name, args, gone in _calls(pipe):
        own.forget(gone)
        try:
            answer = getattr(own, name)(*args)
            pipe.send((False, answer if name == "part" else None))
        except Exception as error:
            is_last = name not in LOCAL and not isinstance(error, BidirlError)
            pipe.send((is_last, _failure(rank, error)))
            if is_last:
                pipe.close()
                os._exit(EXIT_CODE)  # the others wait for it in a collective: this ends their wait
    dist.destroy_process_group()


def _calls(pipe: Any) -> Iterator[tuple[str, tuple[Any, ...], tuple[int, ...]]]:
    receive: Callable[[], Any] = partial(_received, pipe)
    return iter(receive, None)


def _received(pipe: Any) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return None


def _failure(rank: int, error: BaseException) -> _Failure:
    return _Failure(f"rank {rank}: {type(error).__name__}: {first_line(error)}", out_of_memory(error))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(EXIT_CODE)
