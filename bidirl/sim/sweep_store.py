"""Run the cells of a sweep, each kept on disk when it returns."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bidirl.errors import BidirlError, InputError, first_line
from bidirl.planner.job import Job
from bidirl.sim.run import simulate

__all__ = ["Result", "Scatter", "Store", "Task", "compute", "local", "num_cpus"]

Task = tuple[str, Job, int]
"""(key, job, seed)."""


POOL_START_S = 2.0
"""Seconds until worker processes have started and imported bidirl (two idle cores): saving less time than
this is no reason to start them."""
SAMPLES_PER_S = 40_000.0
"""Rough pace of one process (examples/demo.toml: 36,000 a second); it decides on processes, never on
results."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one cell gave: a summary, or the reason why there is none."""

    key: str
    summary: dict[str, Any] | None
    error: str | None
    is_fault: bool = False
    """The error is a bug or a fault, not a property of the job: it is not kept, the next call tries again."""


Scatter = Callable[[Callable[[Task], Result], Sequence[Task]], Iterator[Result]]
"""Runs a function on tasks wherever it likes and yields the results as they return, in any order."""


def compute(task: Task) -> Result:
    """Simulate one cell; every error becomes a result, so that one cell never stops a sweep."""
    key, job, seed = task
    try:
        return Result(key, simulate(job, seed).summary, None)
    except BidirlError as error:
        return Result(key, None, first_line(error), is_fault=error.exit_code == BidirlError.exit_code)
    except Exception as error:  # a bug in one cell must not cost the others
        return Result(key, None, f"bug in bidirl: {type(error).__name__}: {error}", is_fault=True)


def num_cpus() -> int:
    """Return the processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local(num_jobs: int) -> Scatter:
    """Return a scatter over up to ``num_jobs`` processes of this machine; short work stays in this one."""

    def scatter(function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[Result]:
        processes = min(num_jobs, len(tasks))
        if processes <= 1 or _seconds(tasks) * (1 - 1 / processes) < POOL_START_S:
            yield from map(function, tasks)
            return
        from joblib import Parallel, delayed

        parallel = Parallel(n_jobs=processes, backend="loky", batch_size=1, return_as="generator_unordered")
        yield from parallel(delayed(function)(task) for task in tasks)

    return scatter


def _seconds(tasks: Sequence[Task]) -> float:
    """Estimate the wall seconds of tasks in one process."""
    works = [job.workload for _, job, _ in tasks]
    return sum(w.num_steps * w.prompts_per_step * w.samples_per_prompt for w in works) / SAMPLES_PER_S


class Store:
    """``cells.jsonl``: one line per computed cell, appended when the cell returns.

    An interrupted line is skipped; a key may occur twice, the last one counts.
    """

    def __init__(self, path: Path) -> None:
        """Read what earlier calls have left; ``InputError`` if the file cannot be read."""
        self.path = path
        self.results: dict[str, Result] = {}
        try:
            text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        except OSError as error:
            reason = (error.strerror or "no reason given").lower()
            raise InputError(f"{path}: cannot be read ({reason}): choose another --out") from None
        self._unfinished = bool(text) and not text.endswith("\n")
        for line in text.splitlines():
            result = _parsed(line)
            if result is not None:
                self.results[result.key] = result

    def run(
        self, tasks: Sequence[Task], resolved: Mapping[str, Mapping[str, Any]], scatter: Scatter
    ) -> Iterator[Result]:
        """Compute the tasks and yield each result once it is on disk; ``resolved`` is kept beside it.

        Raises:
            OSError: the file cannot be written.
        """
        seeds = {key: seed for key, _, seed in tasks}
        with self.path.open("a", encoding="utf-8") as file:
            if self._unfinished:
                file.write("\n")
                self._unfinished = False
            for result in scatter(compute, tasks):
                self.results[result.key] = result
                if not result.is_fault:
                    line = {
                        "key": result.key,
                        "seed": seeds[result.key],
                        "job": resolved[result.key],
                        "summary": result.summary,
                        "error": result.error,
                    }
                    file.write(json.dumps(line, separators=(",", ":")) + "\n")
                    file.flush()
                yield result


def _parsed(line: str) -> Result | None:
    """Read a line of ``cells.jsonl``; None for one that was cut off."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    match data:
        case {"key": str() as key, "summary": dict() as summary, "error": None}:
            return Result(key, summary, None)
        case {"key": str() as key, "summary": None, "error": str() as error}:
            return Result(key, None, error)
        case _:
            return None
