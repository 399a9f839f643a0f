"""Run independent pieces of work as Ray tasks on a cluster."""

import importlib
import socket
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from bidirl.errors import InputError, RunFault, first_line

__all__ = ["probe", "scatter_over"]

PROBE_S = 5.0
"""Seconds to wait for a connection; across data centres it takes a fraction of one."""

T = TypeVar("T")
R = TypeVar("R")

TASKS_PER_CPU = 2
"""Tasks in flight per processor: one runs, one waits, and a long grid does not flood the cluster's head."""


def scatter_over(address: str) -> Callable[[Callable[[T], R], Sequence[T]], Iterator[R]]:
    """Return a scatter: it runs a function on each item as a Ray task and yields results as they return.

    The workers need the same release of bidirl. A task whose node is lost is run again by Ray.

    Raises:
        InputError: ray is not installed, or no cluster answers at ``address``.
        RunFault: the cluster was lost on the way.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise InputError(
            f"--ray {address}: ray is not installed here: pip install 'bidirl[ray]', or leave --ray out"
        ) from None

    probe(address)

    def scatter(function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        try:
            ray.init(address=address, logging_level="error", log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = first_line(error)
            raise InputError(
                f"--ray {address}: no cluster answers ({reason}): give the address of one"
            ) from None
        try:
            yield from _drain(ray, ray.remote(function), items)
        except ray.exceptions.RayError as error:
            reason = first_line(error)
            raise RunFault(
                f"--ray {address}: {reason}; results that returned are kept, start again"
            ) from None
        finally:
            ray.shutdown()

    return scatter


def probe(address: str) -> None:
    """Ask whether anything listens at ``host:port``: Ray itself would try for minutes before it gives up.

    Raises:
        InputError: nothing does.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # "auto" or "local": Ray knows
    try:
        socket.create_connection((host, int(port)), PROBE_S).close()
    except (OSError, OverflowError) as error:
        raise InputError(
            f"--ray {address}: nothing answers ({error}): give the address of a cluster"
        ) from None


def _drain(ray: Any, remote: Any, items: Sequence[Any]) -> Iterator[Any]:
    """Keep a bounded number of tasks in flight and yield what is ready."""
    limit = max(1, int(TASKS_PER_CPU * ray.cluster_resources().get("CPU", 1.0)))
    waiting = iter(items)
    flying: set[Any] = set()
    while True:
        for item in islice(waiting, limit - len(flying)):
            flying.add(remote.remote(item))
        if not flying:
            return
        ready, _ = ray.wait(list(flying), num_returns=1)
        for reference in ready:
            flying.discard(reference)
            yield ray.get(reference)
