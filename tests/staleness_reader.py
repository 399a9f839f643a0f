"""Check the staleness of a finished run from ``samples.csv`` and ``steps.csv`` alone.

Shares no code with the scheduler: the standard library, whole numbers and fractions. A run's *version* is the
number of publications so far; a publication at the same instant as a start comes first.
"""

import csv
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, inf
from pathlib import Path

__all__ = ["Group", "Run", "problems", "read_run"]


@dataclass(frozen=True)
class Group:
    """One prompt's samples."""

    number: int
    start_s: float
    finish_s: float
    """End of its last sample; inf while one is unfinished."""
    versions: tuple[int, ...]
    last_versions: tuple[int, ...]
    steps: frozenset[int]
    chunks: frozenset[int]
    dropped: frozenset[str]

    @property
    def key(self) -> tuple[int, tuple[int, ...], int, int]:
        """Return what decides what is learned: (group, versions of its samples, step, chunk)."""
        return self.number, self.versions, max(self.steps), max(self.chunks)


@dataclass(frozen=True)
class Run:
    """Both tables, by group."""

    published_s: tuple[float, ...]
    train_start_s: tuple[float, ...]
    groups: tuple[Group, ...]

    def version_at(self, time_s: float) -> int:
        """Return how many versions were out at a time, that instant's included."""
        return bisect_right(self.published_s, time_s)


def read_run(folder: Path) -> Run:
    """Read the two tables of a run's folder."""
    with (folder / "steps.csv").open(newline="") as file:
        steps = list(csv.DictReader(file))
    rows: dict[int, list[dict[str, str]]] = {}
    with (folder / "samples.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            rows.setdefault(int(row["group"]), []).append(row)
    groups = [
        Group(
            number=number,
            start_s=min(float(row["start_s"]) for row in samples),
            finish_s=max(float(row["finish_s"] or inf) for row in samples),
            versions=tuple(int(row["version"]) for row in samples),
            last_versions=tuple(int(row["last_version"]) for row in samples),
            steps=frozenset(int(row["step"]) for row in samples),
            chunks=frozenset(int(row["chunk"]) for row in samples),
            dropped=frozenset(row["dropped"] for row in samples),
        )
        for number, samples in sorted(rows.items())
    ]
    published, started = (
        tuple(float(row[name]) for row in steps) for name in ("published_s", "train_start_s")
    )
    return Run(published, started, tuple(groups))


def problems(
    run: Run,
    batch: int,
    staleness: str,
    *,
    pinned: bool = False,
    issue_order: bool = False,
    reward_s: float = 0.0,
    saturated: bool = False,
) -> list[str]:
    """Return every breach of the bound ``staleness`` (a decimal as written) on ``batch`` groups a step.

    ``reward_s``: least seconds from a group's last sample to the news that it is filtered. ``saturated``: the
    run is known to wait for credit before each publication, so the bound must also be reached, not only kept.
    """
    bound = Fraction(staleness)
    return [
        *_admission(run, batch, bound, reward_s),
        *_batches(run, batch, issue_order),
        *_lag(run, bound, pinned, issue_order),
        *(_pinned(run, batch, bound) if pinned else ()),
        *(_reached(run, batch, bound) if saturated else ()),
    ]


def _allowed(version: int, batch: int, bound: Fraction) -> int:
    return floor((version + 1 + bound) * batch)


def _admission(run: Run, batch: int, bound: Fraction, reward_s: float) -> Iterator[str]:
    refunds = sorted(group.finish_s + reward_s for group in run.groups if group.dropped == {"filtered"})
    last_s = 0.0
    for position, group in enumerate(run.groups):
        if group.number != position or group.start_s < last_s:
            yield f"group {group.number} is out of order"
        last_s = group.start_s
        version = run.version_at(group.start_s)
        live = position - bisect_right(refunds, group.start_s)
        if live >= _allowed(version, batch, bound):
            yield f"group {group.number} started at {group.start_s} s, {live} before it, at version {version}"


def _batches(run: Run, batch: int, issue_order: bool) -> Iterator[str]:
    members: dict[int, list[int]] = {step: [] for step in range(len(run.published_s))}
    for group in run.groups:
        if len(group.steps) != 1 or len(group.dropped) != 1:
            yield f"group {group.number} is torn apart: {set(group.steps)}, {set(group.dropped)}"
            continue
        (step,), (cause,) = group.steps, group.dropped
        if step < 0:
            continue
        if cause:
            yield f"group {group.number} is both trained and {cause}"
        members[step].append(group.number)
        if group.finish_s > run.published_s[step]:
            yield f"group {group.number} was trained in step {step} before it was finished"
    for step, numbers in members.items():
        if len(numbers) != batch:
            yield f"step {step} trained {len(numbers)} groups"
    order = [number for _, numbers in sorted(members.items()) for number in numbers]
    if issue_order and order != sorted(order):
        yield "batches do not follow the order of issue"


def _lag(run: Run, bound: Fraction, pinned: bool, issue_order: bool) -> Iterator[str]:
    for group in run.groups:
        # A replica may load a version before the last one has it, but not before the version was trained.
        begun = bisect_right(run.train_start_s, group.finish_s)
        if max(group.last_versions) > begun:
            yield f"group {group.number} used version {max(group.last_versions)}, {begun} steps had begun"
        if not pinned and min(group.versions) < run.version_at(group.start_s):
            yield f"group {group.number} started on version {min(group.versions)}, a newer one was out"
        step = max(group.steps)
        if step < 0:
            continue
        lag = step - min(group.versions)
        most = ceil(bound) if issue_order or not bound else inf
        if not 0 <= lag <= most:
            yield f"group {group.number} has lag {lag}"


def _pinned(run: Run, batch: int, bound: Fraction) -> Iterator[str]:
    for group in run.groups:
        version = 0
        while group.number >= _allowed(version, batch, bound):
            version += 1
        found = {*group.versions, *group.last_versions}
        if found != {version}:
            yield f"group {group.number} belongs to version {version}, was generated by {found}"


def _reached(run: Run, batch: int, bound: Fraction) -> Iterator[str]:
    starts = [group.start_s for group in run.groups]
    for version, end_s in enumerate(run.published_s):
        started = bisect_left(starts, end_s)
        allowed = min(_allowed(version, batch, bound), batch * len(run.published_s))
        if started != allowed:
            yield f"{started} groups had started before publication {version + 1}, {allowed} could"
