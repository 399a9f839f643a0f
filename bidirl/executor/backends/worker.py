"""One worker: the two roles of one replica's devices, driven by one loop in one thread.

The loop takes commands in the order of their numbers, and between them lets the engine run one iteration at
a time, so every command takes effect at an iteration boundary. Whatever it has to say goes out as messages
in the order in which it happened.
"""

import os
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from bidirl.executor.backends import CallFailed
from bidirl.executor.backends.commands import Arriving, Commands
from bidirl.executor.backends.host_memory import digest_of, host_copy, plain
from bidirl.executor.backends.messages import (
    LocalPost,
    Message,
    Post,
    Problem,
    Pull,
    Pulse,
    Role,
    Snapshot,
    one_line,
    out_of_memory,
)
from bidirl.executor.backends.residue import Residue
from bidirl.executor.backends.torch.merge import Gathered, Gradient, MergeKind, arrange, as_array
from bidirl.executor.backends.vllm.meter import KEPT_ITERATIONS, Iteration
from bidirl.executor.roles import Draft, Engine, Piece, Trainer
from bidirl.planner.events import SegmentKind

__all__ = ["OPEN", "STEP", "Worker"]

TRAINER = "trainer"
"""Folder of the trainer's state inside a checkpoint."""
GAP_S = 1e-3
"""Shorter gaps between two iterations are the loop's own work, and count as generation."""
FLUSH_S = 0.05
"""Longest time between the end of an iteration and the report of the time that it took."""
OPEN, STEP = "start", "generation"
"""What a worker does that is no command."""
FRAMES = 3
"""Innermost calls that a pulse names: enough to tell a hung transfer from a hung kernel."""


class Worker:
    """Builds its roles in its own thread and runs them there until ``stop``."""

    def __init__(
        self,
        role: Role,
        build_engine: Callable[[], Engine] | None,
        build_trainer: Callable[[], Trainer] | None,
        emit: Callable[[Message], None],
        *,
        post: Post | None = None,
        merge: str = MergeKind.ACCUMULATED,
        devices: Callable[[], tuple[str, ...]] | None = None,
        residue: Residue | None = None,
    ) -> None:
        """Take the builders of the roles that this worker may play, ``role`` being its pool's own."""
        self.own = role
        self.role = role
        self._build = build_engine, build_trainer
        self._engine: Engine | None = None
        self._trainer: Trainer | None = None
        self._emit = emit
        self._post: Post = post or LocalPost()
        self._merge = MergeKind(merge)
        self._devices = devices or _no_devices
        self._residue = residue
        self._commands = Commands(self._post)
        self._running = True
        self._paused = False
        self._ended: list[Draft] = []
        self._busy: list[tuple[float, float]] = []
        self._doing: tuple[str, float] = ("", monotonic())
        self._flushed_s = 0.0
        self._stepped_s: float | None = None
        """End of the last iteration; None: nothing was to be generated since."""
        self._iterations: deque[Iteration] = deque(maxlen=KEPT_ITERATIONS)
        self._gathered: dict[tuple[int, int], Gathered] = {}
        """(step, segment) -> gradients of the chunks that ran here."""
        self._results: dict[tuple[int, int], list[Piece]] = {}
        """(step, segment) -> results of forward-only chunks."""
        self._handed_over = (-1, -1)
        """(step, segment) of the gradients that were fetched last."""
        self._do: Mapping[str, Callable[..., Any]] = {
            "hello": self._hello,
            "submit": self._submit,
            "preempt": self._preempt,
            "progress": self._progress,
            "sync": self._sync,
            "resume": self._resume,
            "iterations": self._take_iterations,
            "enter": self._enter,
            "leave": self._leave,
            "run": self._run_chunks,
            "fetch": self._fetch,
            "apply": self._apply,
            "snapshot": self._snapshot,
            "load_trainer": self._load_trainer,
            "save": self._save,
            "restore": self._restore,
            "read_snapshot": self._read_snapshot,
            "forget": self._forget,
        }
        self.thread = threading.Thread(target=self._loop, name=f"worker-{role}", daemon=True)

    # ---------------------------------------------------------------- other threads

    def start(self) -> None:
        """Start the loop."""
        self.thread.start()

    def put(self, order: int, number: int, name: str, args: tuple[Any, ...]) -> None:
        """Queue a command; ``order`` counts the commands of a worker from 0; they may arrive in any order."""
        self._commands.put(order, number, name, args)

    def stop(self) -> None:
        """Let the loop end after the iteration that it is in."""
        self._running = False
        self._commands.end()

    def pulse(self) -> Pulse:
        """Return what the loop is at."""
        doing, since_s = self._doing
        frame = sys._current_frames().get(self.thread.ident or 0)
        calls = [] if frame is None else traceback.extract_stack(frame)[-FRAMES:]
        where = " > ".join(f"{call.name} ({Path(call.filename).name}:{call.lineno})" for call in calls)
        return Pulse(doing, monotonic() - since_s, where)

    # ---------------------------------------------------------------- loop

    def _at(self, doing: str) -> None:
        self._doing = doing, monotonic()

    def _loop(self) -> None:
        try:
            self._open()
            while self._running:
                self._take_commands()
                if self._running and self._may_step():
                    self._step()
        except BaseException as error:  # what ends the loop ends the worker, and must be told
            self._emit(Message(problem=Problem(one_line(error), is_fatal=True)))
        finally:
            self._close()

    def _open(self) -> None:
        self._at(OPEN)
        build_engine, build_trainer = self._build
        if build_engine is not None:
            self._engine = build_engine()
            if self.own is Role.TRAIN:
                self._engine.sleep(2)
        if build_trainer is not None:
            self._trainer = build_trainer()
            if self.own is Role.ROLLOUT:
                self._trainer.sleep()

    def _close(self) -> None:
        for role in (self._engine, self._trainer):
            if role is not None:
                try:
                    role.close()
                except Exception as error:  # it is leaving anyway
                    self._emit(Message(problem=Problem(one_line(error), is_fatal=True)))
        self._post.close()

    def _may_step(self) -> bool:
        engine = self._engine
        return (
            engine is not None
            and self.role is Role.ROLLOUT
            and not self._paused
            and engine.num_unfinished > 0
        )

    def _take_commands(self) -> None:
        """Carry out what has arrived; wait for a command if there is nothing to generate."""
        block = not self._may_step()
        if block:
            self._flush()
            self._stepped_s = None
        self._at("")
        while (command := self._commands.take(block=block)) is not None and self._running:
            number, name, args = command
            self._at(name)
            self._carry_out(number, name, args)
            self._at("")
            block = False

    def _carry_out(self, number: int, name: str, args: tuple[Any, ...]) -> None:
        try:
            value = self._do[name](*args)
        except (CallFailed, TimeoutError) as error:
            self._say(Message(number, problem=Problem(one_line(error), is_fatal=False)))
        except Exception as error:
            self._say(Message(number, problem=Problem(one_line(error), is_fatal=True)))
            raise
        else:
            self._say(Message(number, value))

    def _say(self, message: Message) -> None:
        message.ended, self._ended = self._ended, []
        message.busy, self._busy = self._busy, []
        self._flushed_s = monotonic()
        self._emit(message)

    def _flush(self) -> None:
        if self._ended or self._busy:
            self._say(Message())

    def _step(self) -> None:
        assert self._engine is not None
        start_s = monotonic()
        self._doing = STEP, start_s
        ended = self._engine.step()
        end_s = monotonic()
        self._measure(end_s - (self._stepped_s or start_s))
        self._stepped_s = end_s
        if self._busy and start_s - self._busy[-1][1] < GAP_S:
            self._busy[-1] = (self._busy[-1][0], end_s)
        else:
            self._busy.append((start_s, end_s))
        for draft in ended:
            draft.finish_s = end_s
        self._ended += ended
        if ended or end_s - self._flushed_s > FLUSH_S:
            self._flush()

    def _measure(self, seconds: float) -> None:
        """Keep what the iteration did, with the time since the last one: the loop's own work is in it."""
        meter = getattr(self._engine, "meter", None)
        if meter is not None:
            self._iterations.extend(replace(iteration, seconds=seconds) for iteration in meter.take())

    def _take_iterations(self) -> list[Iteration]:
        """Return and forget the iterations since the last call."""
        found = list(self._iterations)
        self._iterations.clear()
        return found

    # ---------------------------------------------------------------- rollout role

    def _hello(self) -> dict[str, Any]:
        engine = self._engine
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "devices": self._devices(),
            "now_s": monotonic(),
            "capabilities": None if engine is None else engine.capabilities,
            "role": self.own,
        }

    def _rollouter(self) -> Engine:
        if self._engine is None or self.role is not Role.ROLLOUT:
            raise RuntimeError(f"a command for the rollout role while the worker plays {self.role}")
        return self._engine

    def _submit(self, drafts: tuple[Draft, ...]) -> None:
        self._rollouter().submit(drafts)

    def _preempt(self, groups: tuple[int, ...]) -> list[Draft]:
        return self._rollouter().preempt(groups)

    def _progress(self) -> list[tuple[int, int, int]]:
        return self._rollouter().progress()

    def _sync(self, version: int, arrived: Arriving, recompute: bool) -> float:
        """Pause, and load a version; the replica goes on when ``resume`` comes. Return when it had paused."""
        engine = self._rollouter()
        self._paused = True
        paused_s = monotonic()
        weights = arrived.result()
        held = engine.preempt(_groups(engine)) if recompute and engine.num_unfinished else []
        try:
            engine.load(version, iter(weights.items()))
        except (CallFailed, TimeoutError):
            engine.submit(held)  # they go on under the old version
            raise
        engine.submit(held)
        return paused_s

    def _resume(self) -> None:
        self._paused = False

    # ---------------------------------------------------------------- role changes

    def _enter(self, role: Role, version: int, arrived: Arriving | None) -> float:
        """Play the other role; return the seconds that it took.

        ``arrived`` has its weights; without them a trainer goes on with its own.
        """
        start_s = monotonic()
        weights = {} if arrived is None else arrived.result()
        engine, trainer = self._engine, self._trainer
        assert engine is not None
        assert trainer is not None
        if role is Role.TRAIN and engine.num_unfinished:
            raise RuntimeError(f"{engine.num_unfinished} samples are left in an engine that is lent")
        try:
            self._change(engine, trainer, role, version, weights)
        except Exception as error:
            if not out_of_memory(error):
                raise
            try:
                self._change_back(engine, trainer)
            except Exception as worse:
                raise worse from error
            raise CallFailed("the other role does not fit") from error
        self.role = role
        return monotonic() - start_s

    def _change(
        self, engine: Engine, trainer: Trainer, role: Role, version: int, weights: Mapping[str, Any]
    ) -> None:
        if role is Role.ROLLOUT:
            trainer.sleep()
            self._check_residue()
            engine.wake()
            engine.load(version, iter(weights.items()))
            self._paused = False
        else:
            engine.sleep(1)
            self._check_residue()
            trainer.wake()
            if weights:
                trainer.load(iter(weights.items()))

    def _check_residue(self) -> None:
        if self._residue is not None:
            self._residue.check()

    def _change_back(self, engine: Engine, trainer: Trainer) -> None:
        """Give the devices back to the pool's own role."""
        if self.own is Role.TRAIN:
            engine.sleep(2)
            trainer.wake()
        else:
            trainer.sleep()
            engine.wake()

    def _leave(self) -> float:
        """Play the pool's own role again, whatever was before; return the seconds that it took.

        What an auxiliary trainer has not handed over is forgotten: it will be run again.
        """
        start_s = monotonic()
        engine, trainer = self._engine, self._trainer
        if self.role is not self.own and engine is not None and trainer is not None:
            if self.own is Role.TRAIN and engine.num_unfinished:
                engine.preempt(_groups(engine))
            self._change_back(engine, trainer)
        if self.own is Role.ROLLOUT:
            self._gathered.clear()
            self._results.clear()
        self.role = self.own
        return monotonic() - start_s

    # ---------------------------------------------------------------- training role

    def _train_role(self) -> Trainer:
        if self._trainer is None or self.role is not Role.TRAIN:
            raise RuntimeError(f"a command for the training role while the worker plays {self.role}")
        return self._trainer

    def _run_chunks(self, pull: Pull) -> list[dict[str, float]]:
        trainer, kind = self._train_role(), SegmentKind(pull.kind)
        key = pull.step, pull.segment
        stats = []
        for chunk, rows in pull.chunks:
            self._at("run")  # patience is for one chunk
            try:
                piece = trainer.run(
                    kind, chunk, rows, num_tokens=pull.num_tokens, num_sequences=pull.num_sequences
                )
            except (CallFailed, TimeoutError) as error:
                raise RuntimeError("a pull broke off, and part of it is added already") from error
            stats.append(dict(piece.stats))
            if kind is SegmentKind.UPDATE:
                gathered = self._gathered.get(key)
                if gathered is None:
                    gathered = self._gathered[key] = Gathered(self._merge)
                gathered.add(piece)
            else:
                self._results.setdefault(key, []).append(piece)
        return stats

    def _fetch(self, step: int, segment: int, chunks: tuple[int, ...]) -> list[Any]:
        """Hand over what chunks gave here: pieces with log-probabilities, or handles of gradients."""
        key = step, segment
        wanted = set(chunks)
        if key in self._results:
            found = [piece for piece in self._results.pop(key) if piece.chunk in wanted]
            if {piece.chunk for piece in found} != wanted:
                raise RuntimeError(f"chunks {sorted(wanted)} were asked for, {found} are here")
            return found
        gradients = self._gathered.pop(key, Gathered(self._merge)).gradients
        held = {chunk for gradient in gradients for chunk in gradient.chunks}
        if held != wanted:
            raise RuntimeError(f"chunks {sorted(wanted)} were asked for, {sorted(held)} are here")
        if key != self._handed_over:  # an earlier segment's update is done: nobody comes for its gradients
            self._post.drop_unclaimed()
            self._handed_over = key
        return [
            replace(gradient, values=self._post.put(as_array(gradient.values), once=True))
            for gradient in gradients
        ]

    def _apply(
        self, step: int, segment: int, others: list[Gradient], chunks: tuple[int, ...]
    ) -> dict[str, float]:
        """Add this worker's gradients and those of others, and take an optimizer step."""
        mine = self._gathered.pop((step, segment), Gathered(self._merge)).gradients
        theirs = [replace(gradient, values=self._post.get(gradient.values)) for gradient in others]
        return self._train_role().apply(arrange(self._merge, mine, theirs, chunks))

    def _snapshot(self, digest: bool) -> Snapshot:
        assert self._trainer is not None
        weights = {name: host_copy(tensor) for name, tensor in self._trainer.tensors()}
        num_bytes = sum(int(array.nbytes) for array in weights.values())
        return Snapshot(self._post.put(weights), digest_of(weights) if digest else "", num_bytes)

    def _forget(self, handle: Any) -> None:
        """Drop a snapshot that nobody can ask for any more."""
        self._post.drop(handle)

    def _load_trainer(self, arrived: Arriving) -> None:
        assert self._trainer is not None
        self._trainer.load(iter(arrived.result().items()))

    def _save(self, folder: str, snapshots: dict[int, Snapshot]) -> None:
        """Write the trainer, and the weights of versions that replicas may still ask for."""
        assert self._trainer is not None
        try:
            self._trainer.save(str(Path(folder, TRAINER)))
            for version, snapshot in snapshots.items():
                weights = self._post.get(snapshot.handle)
                with Path(folder, f"version-{version}.npz").open("wb") as file:
                    np.savez(file, **{name: plain(array) for name, array in weights.items()})
        except Exception as error:  # the trainer is as it was: the worker goes on
            raise CallFailed("the trainer cannot be saved") from error

    def _restore(self, folder: str) -> None:
        assert self._trainer is not None
        self._trainer.restore(str(Path(folder, TRAINER)))

    def _read_snapshot(self, folder: str, version: int, digest: bool) -> Snapshot:
        with np.load(Path(folder, f"version-{version}.npz")) as found:
            weights = {name: found[name] for name in found.files}
        num_bytes = sum(int(array.nbytes) for array in weights.values())
        return Snapshot(self._post.put(weights), digest_of(weights) if digest else "", num_bytes)


def _no_devices() -> tuple[str, ...]:
    return (f"{socket.gethostname()}/{os.getpid()}/{threading.get_ident()}",)


def _groups(engine: Engine) -> tuple[int, ...]:
    return tuple(dict.fromkeys(group for group, _, _ in engine.progress()))
