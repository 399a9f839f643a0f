"""Checkpoints of a real run: written beside it, atomically, the last two kept.

A checkpoint is a folder: the trainer's files (weights, optimizer), the weights of older versions that pinned
samples still need, and ``state.pkl``: scheduler and record at a position of the journal, and every sample
that is on no replica. It takes its name when all of it, and the journal up to its position, is on disk.
"""

import asyncio
import errno
import os
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bidirl import __version__
from bidirl.errors import InputError, RunFault
from bidirl.executor.backends.messages import WorkerLost
from bidirl.executor.backends.real import BackendState, RealBackend
from bidirl.executor.disk import flush
from bidirl.executor.resume import DriverState, driver_state
from bidirl.executor.unpickle import Refused, load
from bidirl.planner.job import Job, resolved_json
from bidirl.planner.plan import Plan
from bidirl.planner.plan_json import plan_to_json

if TYPE_CHECKING:
    from bidirl.executor.driver import Driver

__all__ = ["Checkpoint", "Keeper", "check_journal", "newest_checkpoint", "resumable", "steps_kept"]

KEPT = 2
"""Checkpoints that stay: the newest, and one more should the newest turn out unreadable."""
PREFIX, PART, STATE, LOCK, JOURNAL = "step-", ".writing-", "state.pkl", ".lock", "journal.jsonl"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of writing that free space would have avoided."""
FREE_KEYS = ("learn.checkpoint_every",)
"""Keys of a job that may change between the parts of a run: they decide nothing of what is learned."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a run goes on."""

    step: int
    """Steps that are done."""
    job: dict[str, Any]
    """The resolved job of the run."""
    seed: int
    driver: DriverState
    backend: BackendState
    notes: tuple[str, ...] = ()
    """What a user should know of how it was found."""

    def check(self, plan: Plan, job: Job, seed: int) -> None:
        """Raise ``InputError`` unless the checkpoint is of this plan, job and seed."""
        old, new = plan_to_json(self.driver.recorder.plan), plan_to_json(plan)
        changed = [name for name in new if new[name] != old.get(name)]
        if changed:
            raise InputError(
                f"--resume: the plan's {', '.join(changed)} changed since step {self.step}: "
                "resume with the job that it was started with"
            )
        was, is_now = dict(_flat(self.job)), dict(_flat(resolved_json(job)))
        names = [
            f"{name} = {is_now.get(name)!r} (was {was.get(name)!r})"
            for name in sorted(was.keys() | is_now.keys())
            if was.get(name) != is_now.get(name) and name not in FREE_KEYS
        ]
        if seed != self.seed:
            names.insert(0, f"--seed {seed} (was {self.seed})")
        if names:
            raise InputError(
                f"--resume: {', '.join(names[:3])}: changed since step {self.step}; "
                "resume with the job and the seed that it was started with"
            )


def _flat(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(data, dict):
        yield prefix, data
        return
    for name, value in data.items():
        yield from _flat(value, f"{prefix}.{name}" if prefix else name)


def steps_kept(folder: Path) -> list[int]:
    """Return the steps after which a folder has a checkpoint, oldest first."""
    return sorted(_step(path) for path in folder.glob(f"{PREFIX}*"))


def newest_checkpoint(folder: Path) -> Checkpoint:
    """Read the newest checkpoint in a folder of checkpoints; an older one if that cannot be read.

    Raises:
        InputError: there is none that can be read, or it is of another release.
    """
    found = steps_kept(folder)
    if not found:
        raise InputError(f"--resume: {folder} has no checkpoint: start without --resume")
    problems: list[str] = []
    for step in reversed(found):
        path = folder / f"{PREFIX}{step}"
        try:
            release, job, seed, driver, backend = load(path / STATE)
        except Refused as error:
            problems.append(f"{path}: {error}")
            continue
        if release != __version__:
            raise InputError(f"--resume: {path} is of release {release}, this is {__version__}: use that one")
        backend.folder = path
        return Checkpoint(
            step, job, seed, driver, backend, tuple(f"{problem}: passed over" for problem in problems)
        )
    raise InputError(f"--resume: {problems[0]}: remove {folder} and start without --resume")


def check_journal(path: Path, num_events: int) -> None:
    """Raise ``InputError`` unless a journal holds the header and so many whole events."""
    try:
        with path.open("rb") as file:
            whole = sum(line.endswith(b"\n") for line in file) - 1
    except OSError as error:
        raise InputError(
            f"--resume: {path} cannot be read ({(error.strerror or 'no reason given').lower()}): "
            "give the folder of the run"
        ) from None
    if whole < num_events:
        raise InputError(
            f"--resume: {path} has {whole} events, its checkpoint was taken after {num_events}: "
            "give the folder of the run, unchanged"
        )


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Keep a folder of checkpoints for this process, and say after a fault how to go on.

    Raises:
        InputError: another process has it, or it cannot be written.
        RunFault: that of the block, or what a full disk did to it, with the remedy.
    """
    with _locked(folder):
        try:
            yield
        except RunFault as error:
            raise RunFault(f"{error}; {_remedy(folder)}") from error
        except OSError as error:
            if error.errno not in FULL:
                raise
            said = f"{folder.parent}: {_reason(error)} while writing: free space there"
            raise RunFault(f"{said}; {_remedy(folder)}") from error


def _remedy(folder: Path) -> str:
    kept = steps_kept(folder)
    return f"go on after step {kept[-1]} with --resume" if kept else "start it again: there is no checkpoint"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make a folder and lock it; the lock goes when the process does."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise InputError(f"{folder}: {_reason(error)}: choose a folder that can be written") from None
    try:
        flock(lock, LOCK_EX | LOCK_NB)
        yield
    except BlockingIOError:
        raise InputError(
            f"{folder}: another process trains into it: wait for its end, or choose another --out"
        ) from None
    finally:
        os.close(lock)


def _step(path: Path) -> int:
    return int(path.name.removeprefix(PREFIX))


class Keeper:
    """Keeps a checkpoint every so many steps; the driver calls it after each."""

    def __init__(self, folder: Path, every: int, backend: RealBackend, job: Job, seed: int) -> None:
        """Take a folder that is locked; the run's journal, if there is one, lies beside it."""
        self.folder = folder
        self.every = every
        self.backend = backend
        self.about = __version__, resolved_json(job), seed
        self.writing: asyncio.Future[None] | None = None
        self.num_skipped = 0
        """Checkpoints that were due while the one before was still being written."""
        for torn in folder.glob(f"{PART}*"):
            shutil.rmtree(torn, ignore_errors=True)

    def __call__(self, driver: "Driver", step: int) -> None:
        """Take the state at once; the files follow while training goes on. One at a time."""
        if step % self.every or driver.scheduler.done:
            return
        if self.writing is not None and not self.writing.done():
            self.num_skipped += 1
            return
        part = self.folder / f"{PART}{step}"
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
        except OSError as error:
            driver.broken(self._fault(step, _reason(error)))
            return
        state, answer = self.backend.save(part, step)
        frozen = pickle.dumps((*self.about, driver_state(driver), state), pickle.HIGHEST_PROTOCOL)
        self.writing = asyncio.ensure_future(self._write(driver, part, step, frozen, answer))

    async def _write(
        self, driver: "Driver", part: Path, step: int, frozen: bytes, answer: "asyncio.Future[Any]"
    ) -> None:
        try:
            await answer
            await asyncio.to_thread(self._finish, part, step, frozen)
        except OSError as error:
            driver.broken(self._fault(step, _reason(error)))
        except WorkerLost:
            pass  # that ends the run, and is told by who noticed it
        except Exception as error:
            driver.broken(self._fault(step, str(error)))
        finally:
            if answer.cancelled() or answer.exception() is not None:  # else a thread may still be at it
                shutil.rmtree(part, ignore_errors=True)

    def _fault(self, step: int, reason: str) -> RunFault:
        return RunFault(
            f"{self.folder}: the checkpoint after step {step} cannot be written ({reason}): free space there"
        )

    def _finish(self, part: Path, step: int, frozen: bytes) -> None:
        """Bring everything to disk, then give the folder its name."""
        try:
            with (part / STATE).open("wb") as file:
                file.write(frozen)
            journal = self.folder.parent / JOURNAL
            for path in [*part.rglob("*"), part, *([journal] if journal.exists() else [])]:
                flush(path)
            final = self.folder / f"{PREFIX}{step}"
            shutil.rmtree(final, ignore_errors=True)
            part.rename(final)
            flush(self.folder)
        except OSError:
            shutil.rmtree(part, ignore_errors=True)
            raise
        for old in steps_kept(self.folder)[:-KEPT]:
            shutil.rmtree(self.folder / f"{PREFIX}{old}", ignore_errors=True)


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
