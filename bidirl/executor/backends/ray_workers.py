"""Workers as Ray actors: commands and messages through the actor, bulk data from worker to worker."""

import asyncio
import itertools
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from bidirl.executor.backends import CallFailed
from bidirl.executor.backends.blueprint import Blueprint, build_worker
from bidirl.executor.backends.messages import Message, Pulse
from bidirl.executor.backends.ray_session import RaySession, is_alive
from bidirl.executor.backends.tensor_post import TensorPost

__all__ = ["RayTransport", "WorkerActor"]

QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""torch warns of a lost peer with a whole stack; what matters of it is told in a call's answer."""
STOP_S = 15.0
"""Seconds that a worker gets to close its roles."""
EXIT_S = 5.0
"""Seconds that a process gets to end after its roles have."""
CAUSE_MARKS = ("Error", "ERROR", "Exception", "Killed", "Fatal", "terminate called", "Aborted", "CUDA")
"""Words that make a line of error output a cause; without one, a warning of long ago would look like it."""
NO_CAUSE_MARKS = ("Warning", "frame #", "Exception raised from")
"""Words of lines that are none: torch logs the stack of every lost connection."""

Command = tuple[int, int, str, tuple[Any, ...]]


class WorkerActor:
    """A worker in a process of its own; its asyncio loop only carries messages."""

    def __init__(self, blueprint: Blueprint, errors: str, host: str | None) -> None:
        """Take where other workers reach this process (None: its node's address in the cluster).

        Error output goes to the file ``errors`` if its folder is on this host.
        """
        if Path(errors).parent.is_dir():
            target = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            sys.stderr.flush()
            os.dup2(target, 2)
        import ray

        self._loop: asyncio.AbstractEventLoop | None = None
        self._out: asyncio.Queue[Message] = asyncio.Queue()
        post = TensorPost(ray.util.get_node_ip_address() if host is None else host)
        self._worker = build_worker(blueprint, self._emit, post)

    def _emit(self, message: Message) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._out.put_nowait, message)

    async def start(self) -> tuple[str, int]:
        """Let the worker build its roles; return host and process id."""
        self._loop = asyncio.get_running_loop()
        self._worker.start()
        return socket.gethostname(), os.getpid()

    async def send(self, commands: list[Command]) -> None:
        """Queue commands."""
        for command in commands:
            self._worker.put(*command)

    async def take(self) -> list[Message]:
        """Wait for messages and return all that there are."""
        found = [await self._out.get()]
        while not self._out.empty():
            found.append(self._out.get_nowait())
        return found

    async def pulse(self) -> Pulse:
        """Return what the worker's loop is at."""
        return self._worker.pulse()

    async def stop(self) -> None:
        """End the worker's loop, close its roles, and end the process."""
        self._worker.stop()
        if self._worker.thread.is_alive():
            await asyncio.to_thread(self._worker.thread.join, STOP_S)
        import ray

        self._out.put_nowait(Message())  # a call that waits for messages would hold up the end
        await asyncio.sleep(0)
        ray.actor.exit_actor()


class RayTransport:
    """Reaches one worker actor."""

    def __init__(
        self,
        session: RaySession,
        blueprint: Blueprint,
        number: int,
        *,
        num_gpus: int,
        env: dict[str, str],
        errors: Path | None = None,
    ) -> None:
        """Take a worker's roles and number, and the folder for its error output (None: a passing one)."""
        self._ray = session.ray
        self._blueprint = blueprint
        self._number = number
        self._num_gpus = num_gpus
        self._env = QUIET | env
        self._host = session.host
        self._errors = _new_file(errors or session.folder, f"worker-{number}")
        self._is_kept = errors is not None
        self._actor: Any = None
        self._pump: asyncio.Task[None] | None = None
        self._commands: list[Command] = []
        self._broken: Callable[[str], None] | None = None
        self.host: str | None = None
        self.pid: int | None = None

    def open(self, receive: Callable[[Message], None], broken: Callable[[str], None]) -> None:
        remote = self._ray.remote(
            num_cpus=1, num_gpus=self._num_gpus, max_restarts=0, runtime_env={"env_vars": self._env}
        )
        self._actor = remote(WorkerActor).remote(self._blueprint, str(self._errors), self._host)
        self._broken = broken
        self._pump = asyncio.get_running_loop().create_task(self._run(receive, broken))

    async def _run(self, receive: Callable[[Message], None], broken: Callable[[str], None]) -> None:
        actor = self._actor
        try:
            self.host, self.pid = await actor.start.remote()
            while True:
                for message in await actor.take.remote():
                    receive(message)
        except self._ray.exceptions.RayError as error:
            broken(self._cause(error))

    def _cause(self, error: BaseException) -> str:
        """Return why the actor is gone: what it said last, then what Ray says of it."""
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = lines[0] if lines else type(error).__name__
        try:
            own = [line.strip() for line in self._errors.read_text(errors="replace").splitlines()]
        except OSError:
            own = []
        own = [line for line in own if line]
        marked = [line for line in own if any(mark in line for mark in CAUSE_MARKS)]
        root = [line for line in marked if not any(mark in line for mark in NO_CAUSE_MARKS)][-1:]
        kept = [f"its error output: {self._errors}"] if own and self._is_kept else []
        return "; ".join([*root, f"process {self.pid} of worker {self._number} ended ({said})", *kept])

    def send(self, order: int, number: int, name: str, args: tuple[Any, ...]) -> None:
        if not self._commands:
            asyncio.get_running_loop().call_soon(self._flush)
        self._commands.append((order, number, name, args))

    def _flush(self) -> None:
        commands, self._commands = self._commands, []
        if self._actor is not None and commands:
            self._actor.send.remote(commands)

    async def pulse(self) -> Pulse:
        if self._actor is None:
            raise CallFailed("it is closed")
        try:
            found: Pulse = await _answer(self._actor.pulse.remote())
        except self._ray.exceptions.RayError as error:
            raise CallFailed(str(error).splitlines()[0]) from None
        return found

    async def close(self) -> None:
        actor, self._actor = self._actor, None
        pump, self._pump = self._pump, None
        if pump is not None:
            pump.cancel()
            await asyncio.wait([pump])
        if actor is None:
            return
        with suppress(TimeoutError, self._ray.exceptions.RayError):  # it has ended, as it was asked to
            await asyncio.wait_for(_answer(actor.stop.remote()), STOP_S)
        pid = self.pid if self.host == socket.gethostname() else None
        if pid is None or not await _ends(pid):
            self._ray.kill(actor)
            if pid is not None:
                with suppress(ProcessLookupError):  # a stopped process hears no request to end
                    os.kill(pid, signal.SIGKILL)
        _drop_empty(self._errors)


def _new_file(folder: Path, name: str) -> Path:
    """Return a new, empty file: the error output of earlier workers of that number stays."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    path = next(path for count in itertools.count() if not (path := folder / f"{name}-{count}.err").exists())
    path.touch()
    return path


def _drop_empty(path: Path) -> None:
    with suppress(FileNotFoundError):
        if not path.stat().st_size:
            path.unlink()


async def _ends(pid: int) -> bool:
    """Wait for the end of a process that was asked to end; return whether it came."""
    deadline_s = monotonic() + EXIT_S
    while is_alive(pid):
        if monotonic() > deadline_s:
            return False
        await asyncio.sleep(0.02)
    return True


async def _answer(reference: Any) -> Any:
    return await reference
