"""A Ray cluster for one run: joined, or started here and taken down without a trace."""

import importlib
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bidirl.errors import InputError, first_line
from bidirl.executor.backends.ray_tasks import probe
from bidirl.executor.backends.scratch import scratch

__all__ = ["RaySession", "children_of", "is_alive", "ray_session", "shared_ray"]

LOCAL_ENV: Mapping[str, str] = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""For a cluster of our own: nobody else reaches it, so no token is written into the home folder (Ray 2.60
writes ~/.ray/auth_token otherwise). Ray gives its workers the lowest priority but four; here they are all the
work there is."""
END_S = 15.0
"""Seconds that Ray's own processes get to end before they are told to."""
LOOPBACK = "127.0.0.1"
STORE_BYTES = 200 << 20
"""Room for samples on their way, which are arguments of calls: 16 bytes a token and mini-batch. Ray refuses
stores that are much smaller, and writes to disk what does not fit."""


@dataclass(frozen=True, slots=True)
class RaySession:
    """A cluster that is up."""

    ray: Any
    folder: Path
    """Where workers of this host leave their error output."""
    host: str | None
    """Where its workers reach each other; None: each at its node's own address."""


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise InputError(
            "Ray is not installed here: use the engine environment (docs/engine_environment.md), or "
            "--backend fake"
        ) from None


_shared: list[ExitStack] = []
_sessions: list[RaySession] = []
"""The cluster of ``shared_ray``, once a run has started it."""


@contextmanager
def shared_ray() -> Iterator[None]:
    """Let the runs inside the block use one cluster: the first starts it, the end of the block stops it."""
    with ExitStack() as stack:
        _shared.append(stack)
        try:
            yield
        finally:
            _shared.clear()
            _sessions.clear()


@contextmanager
def ray_session(address: str | None, *, num_workers: int, num_gpus: int = 0) -> Iterator[RaySession]:
    """Join the cluster at ``address``, or start one on this host; end what was started.

    Raises:
        InputError: Ray is not installed, or nothing answers at ``address``.
    """
    started = _started(address, num_workers, num_gpus)
    if not _shared:
        with started as session:
            yield session
        return
    if not _sessions:
        _sessions.append(_shared[0].enter_context(started))
    yield _sessions[0]


@contextmanager
def _started(address: str | None, num_workers: int, num_gpus: int) -> Iterator[RaySession]:
    before = dict(os.environ)
    if address is None:
        os.environ.update(LOCAL_ENV)
    try:
        ray = _import_ray()
        if address is not None:
            probe(address)
        with scratch("bd-") as folder:  # socket paths below it must stay under 107 bytes
            old = children_of(os.getpid())
            started: set[int] = set()
            try:
                _init(ray, address, folder, num_workers, num_gpus)
                started = children_of(os.getpid()) - old
                yield RaySession(ray, folder, LOOPBACK if address is None else None)
            finally:
                started |= children_of(os.getpid()) - old
                ray.shutdown()
                if address is None:
                    _end(started)
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def _init(ray: Any, address: str | None, folder: Path, num_workers: int, num_gpus: int) -> None:
    quiet = {"logging_level": "error", "log_to_driver": False, "configure_logging": False}
    try:
        if address is not None:
            ray.init(address=address, **quiet)
            return
        ray.init(
            num_cpus=num_workers + 1,  # logical: more workers than processors take turns
            num_gpus=num_gpus or None,
            include_dashboard=False,
            object_store_memory=STORE_BYTES,
            _temp_dir=str(folder),
            **quiet,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = first_line(error)
        raise InputError(f"Ray did not start ({reason}): give --ray ADDRESS of a running cluster") from None


def children_of(pid: int) -> set[int]:
    """Return the processes that descend from a process, by Linux's /proc; empty where there is none."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(entry.name)] = int(fields[1])
    found: set[int] = set()
    last = {pid}
    while last:
        last = {child for child, parent in parents.items() if parent in last} - found
        found |= last
    return found


def _end(pids: set[int]) -> None:
    """Wait for processes that we started; end those that do not go by themselves, by their numbers."""
    for number, patience_s in ((None, END_S), (signal.SIGTERM, END_S), (signal.SIGKILL, 2.0)):
        if number is not None:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            pids = {pid for pid in pids if is_alive(pid)}
            if not pids:
                return
            time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """Return whether a process of this host runs; one that has ended and waits for its parent does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
