"""Does borrowing change what is learned? Train twice, with and without it, and compare every bit.

In pinned mode the version that generates a group follows from its number, chunks are cut before anyone is
chosen to run them, and an ordered merge adds gradients in chunk order. Then placement can decide nothing:
the samples, and the weights of every version, must be identical.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from bidirl.errors import InputError
from bidirl.executor.run import RealRun
from bidirl.planner.job import Job
from bidirl.planner.policy import (
    AdmissionRule,
    BatchOrder,
    Expiry,
    Gate,
    InFlight,
    Lending,
    Merge,
    Placement,
    PolicyConfig,
    Split,
    VersionMode,
)
from bidirl.traces.run_record import RunRecord

__all__ = ["DIRECTIONS", "Neutrality", "difference", "latest_job", "neutrality", "pinned_job"]

DIRECTIONS = ("rollout_on_train", "train_on_rollout")
PINNED: dict[str, Any] = {
    "version_mode": VersionMode.PINNED,
    "batch_order": BatchOrder.ISSUE_ORDER,
    "admission": AdmissionRule.COUNTING,
    "expiry": Expiry.NEVER,
    "in_flight": InFlight.CONTINUE_RECOMPUTE,
    "merge": Merge.ORDERED,
}
UNGATED: dict[str, Any] = {"gate": Gate.NONE, "split": Split.EQ6, "max_chunks_per_pull": 1}
"""Any idle pool lends, and chunks are pulled one by one, so that a lent trainer finds some: on a toy job a
gate would rightly refuse most leases, and prove nothing."""


def _with_policy(job: Job, name: str, **choices: Any) -> Job:
    if job.partition is not None and job.partition.placement is Placement.COLOCATED:
        raise InputError(
            "partition.placement = colocated: nothing is lent between one pool; use disaggregated"
        )
    data = job.policy.model_dump() | choices | {"name": name}
    return replace(job, policy=PolicyConfig(**data))


def pinned_job(job: Job, *, lends: bool) -> Job:
    """Return the job in pinned mode with an ordered merge, with borrowing on any idle pool or without."""
    lending = _lending(job) if lends else Lending.NONE
    return _with_policy(job, job.policy.name, **PINNED, **UNGATED, lending=lending)


def latest_job(job: Job) -> Job:
    """Return the job in latest mode with the same borrowing: what pinning costs is read off against it."""
    return _with_policy(
        job, job.policy.name, **UNGATED, lending=_lending(job), version_mode=VersionMode.LATEST
    )


def _lending(job: Job) -> Lending:
    return Lending.BOTH if job.policy.lending is Lending.NONE else job.policy.lending


@dataclass(frozen=True, slots=True)
class Neutrality:
    """What the comparison of two runs shows."""

    difference: str | None
    """The first difference, None if there is none."""
    num_samples: int
    num_tokens: int
    num_versions: int
    leases: dict[str, int]
    """Direction -> leases of the run with borrowing."""
    lent: dict[str, int]
    """Direction -> what lent devices did in it: samples that ended there, chunks merged from there."""
    num_resumed: int
    """Samples of that run that moved from one engine to another with a prefix."""
    tokens_per_s: dict[str, float | None]
    """Run -> throughput: pinned without borrowing, pinned with it, latest with it."""
    weights: str
    """SHA-256 of the last version, of the run without borrowing."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Directions in which lent devices did nothing, so that nothing is shown."""
        return tuple(name for name in DIRECTIONS if not self.lent.get(name))

    def verdict(self) -> str:
        """Return one sentence."""
        counts = [self.leases.get(name, 0) for name in DIRECTIONS]
        done = [self.lent.get(name, 0) for name in DIRECTIONS]
        what = (
            f"{self.num_samples:,} samples ({self.num_tokens:,} tokens) and the weights of "
            f"{self.num_versions} versions; {counts[0]} leases to rollout gave {done[0]} samples, "
            f"{counts[1]} to training gave {done[1]} chunks; {self.num_resumed} samples went on in another "
            "engine"
        )
        if self.difference is not None:
            return f"not identical: {self.difference}; compared {what}"
        if self.missing:
            return (
                f"cannot tell: identical, but nothing was done {' or '.join(self.missing)}; compared {what}"
            )
        return f"identical, bit by bit, in pinned mode with an ordered merge: {what}"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        names = ("difference", "num_samples", "num_tokens", "num_versions", "leases", "lent")
        more = ("num_resumed", "tokens_per_s", "weights")
        proven = self.difference is None and not self.missing
        return {
            "verdict": self.verdict(),
            "proven": "pinned" if proven else None,
            **{name: getattr(self, name) for name in (*names, *more)},
        }


def difference(alone: RealRun, lent: RealRun) -> str | None:
    """Return the first difference between two runs: the weights of a version come before its samples."""
    weights = _other_weights(alone, lent)
    sample = _other_sample(alone, lent)
    if weights is not None and (sample is None or weights <= sample[0]):
        return f"the weights of version {weights} differ"
    return None if sample is None else sample[1]


def _other_weights(alone: RealRun, lent: RealRun) -> int | None:
    ours, others = alone.weight_digests, lent.weight_digests
    found = (version for version in sorted(ours | others) if ours.get(version) != others.get(version))
    return next(found, None)


def _other_sample(alone: RealRun, lent: RealRun) -> tuple[int, str] | None:
    """Return the version of the first sample that differs, and how it does."""
    mine, theirs = alone.sample_digests, lent.sample_digests
    for key in sorted(mine.keys() | theirs.keys()):
        name = f"group {key[0]} sample {key[1]}"
        if key not in mine or key not in theirs:
            where = "with" if key not in mine else "without"
            return 0, f"{name} exists only {where} borrowing"
        versions, others = (
            tuple(dict.fromkeys(version for _, version in run[key][1])) for run in (mine, theirs)
        )
        shown, found = ("+".join(map(str, each)) for each in (versions, others))
        if versions != others:
            return min(versions + others), f"{name} was generated by version {found} in place of {shown}"
        if mine[key][0] != theirs[key][0]:
            return min(versions), f"{name}, of version {shown}, has other tokens"
    return None


def neutrality(runs: dict[str, RealRun], throughput: Callable[[RunRecord], float | None]) -> Neutrality:
    """Compare ``runs`` "pinned, alone" and "pinned, lending"; further runs only give their throughput."""
    alone, lent = runs["pinned, alone"], runs["pinned, lending"]
    samples = lent.record.samples
    last = max(alone.weight_digests, default=0)
    return Neutrality(
        difference=difference(alone, lent),
        num_samples=len(alone.sample_digests),
        num_tokens=sum(alone.record.samples.response_tokens),
        num_versions=len(alone.weight_digests),
        leases=dict(Counter(lent.record.leases.direction)),
        num_resumed=sum(count > 0 for count in samples.num_resumes),
        lent={str(direction): count for direction, count in lent.lent.items()},
        tokens_per_s={name: throughput(run.record) for name, run in runs.items()},
        weights=alone.weight_digests.get(last, ""),
    )
