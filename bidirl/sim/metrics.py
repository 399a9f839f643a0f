"""Turn a run's record into the numbers of ``summary.json``.

Throughput, step times, parts, idle shares and bounds cover the *measured* steps: the head and the tail of
the run are dropped as the paper does. Ledger, lag, span, leases and resumes cover the whole run.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bidirl.errors import InvariantBroken
from bidirl.sim.idle import Floats, Ints, PoolTime, pool_times, rows_of
from bidirl.traces.run_record import Owner, RunRecord

__all__ = ["Measured", "measured_steps", "summarise"]

PARTS_TOLERANCE = 1e-6
"""Relative slack between a step's time and the sum of its parts: sums of floats."""

DIRECTIONS = ("rollout_on_train", "train_on_rollout")


@dataclass(frozen=True, slots=True)
class Measured:
    """The steps ``first .. first + num_steps - 1`` that averages are taken over, and their window."""

    first: int
    num_steps: int
    start_s: float
    end_s: float
    head_dropped: int
    tail_dropped: int
    note: str | None
    """Why the window is not the paper's; None if it is."""

    @property
    def steps(self) -> slice:
        """Return the slice of measured steps."""
        return slice(self.first, self.first + self.num_steps)

    @property
    def duration_s(self) -> float:
        """Return the length of the window in seconds."""
        return self.end_s - self.start_s


def measured_steps(record: RunRecord) -> Measured:
    """Drop the head ``max(1, ceil(s))`` and the tail ``ceil(s)`` steps; use all of them if none would remain.

    Source: paper.md, Setup, throughput.
    """
    published = record.steps.published_s
    total = len(published)
    tail = math.ceil(record.staleness)
    head = max(1, tail)
    if total > head + tail:
        last = total - tail - 1
        return Measured(head, last - head + 1, published[head - 1], published[last], head, tail, None)
    if not total:
        note = f"no step was completed in {record.end_s:.6g} s"
        return Measured(0, 0, 0.0, record.end_s, 0, 0, note)
    note = (
        f"{total} steps are too few to drop {head} at the head and {tail} at the tail: all are used, "
        f"start-up included; run at least {head + tail + 1}"
    )
    return Measured(0, total, 0.0, published[-1], 0, 0, note)


def summarise(
    record: RunRecord,
    *,
    sources: Mapping[str, str] | None = None,
    alone_decode_s: Callable[[int, int], float] | None = None,
) -> dict[str, Any]:
    """Return the content of ``summary.json``: plain dicts, strings, ints and floats; None where unknown.

    Args:
        record: the run.
        sources: coefficient -> where it comes from.
        alone_decode_s: (prompt_tokens, response_tokens) -> seconds that a sample needs alone on a replica,
            for the tail bound; without it the fastest observed seconds per token stand in.

    Raises:
        InvariantBroken: the record contradicts itself (overlapping spans, a sample in two places, parts that
            do not sum to their step, a negative lag).
    """
    window = measured_steps(record)
    columns = _Columns.of(record)
    steps = record.steps
    step_s = np.diff(np.asarray(steps.published_s, dtype=np.float64), prepend=0.0)
    measured_s = step_s[window.steps]
    tokens = sum(steps.prompt_tokens[window.steps]) + sum(steps.response_tokens[window.steps])
    tokens_per_s = _ratio(tokens, window.duration_s)
    num_gpus = record.rollout_gpus + record.train_gpus
    pools = pool_times(record, rows_of(record), (window.start_s, window.end_s))
    lag = columns.step[columns.trained] - columns.version[columns.trained]
    if lag.size and lag.min() < 0:
        row = int(np.flatnonzero(columns.trained)[int(lag.argmin())])
        made, used = columns.version[row], columns.step[row]
        raise InvariantBroken(f"sample {row} was trained at {used}, before version {made} made it")
    span = columns.last_version[columns.trained] - columns.version[columns.trained] + 1
    return {
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_gpu": None if tokens_per_s is None else _ratio(tokens_per_s, num_gpus),
        "step_time_s": {
            "mean": float(measured_s.mean()) if measured_s.size else None,
            "p50": float(np.quantile(measured_s, 0.5)) if measured_s.size else None,
            "p95": float(np.quantile(measured_s, 0.95)) if measured_s.size else None,
        },
        "parts_s": _parts(record, step_s, window),
        "idle": _idle(pools),
        "ledger": _ledger(record, columns),
        "lag": {
            "mean": float(lag.mean()) if lag.size else None,
            "max": int(lag.max()) if lag.size else None,
            "histogram": _histogram(lag),
            "enforced": list(record.enforced),
            "unit": "versions per trained sample, counted from its oldest token",
        },
        "span": {
            "mean": float(span.mean()) if span.size else None,
            "max": int(span.max()) if span.size else None,
        },
        "inclusion_by_length": _inclusion(record, columns),
        "borrow": _borrow(record),
        "resume": _resume(record),
        "bound": _bound(record, columns, pools, measured_s, alone_decode_s),
        "sources": dict(sources or {}),
        "wall": {
            "seconds": record.wall_s,
            "decode_tokens_per_s": _ratio(record.decode_tokens, record.wall_s),
            "samples_per_s": _ratio(int(columns.finished.sum()), record.wall_s),
            "events": record.num_events,
        },
        "gpus": {"rollout": record.rollout_gpus, "train": record.train_gpus, "total": num_gpus},
        "measured": {
            "first_step": window.first,
            "num_steps": window.num_steps,
            "start_s": float(window.start_s),
            "end_s": float(window.end_s),
            "head_dropped": window.head_dropped,
            "tail_dropped": window.tail_dropped,
        },
        "note": window.note,
    }


@dataclass(frozen=True, slots=True)
class _Columns:
    """The sample columns that several numbers need, as arrays of one length."""

    response: Ints
    generated: Ints
    version: Ints
    last_version: Ints
    step: Ints
    start: Floats
    trained: npt.NDArray[np.bool_]
    finished: npt.NDArray[np.bool_]
    dropped: npt.NDArray[np.bool_]
    cause: npt.NDArray[np.str_]
    """Cause of each dropped sample, in order; one entry per True of ``dropped``."""

    @classmethod
    def of(cls, record: RunRecord) -> "_Columns":
        """Take the columns of a record."""
        samples = record.samples
        step = _ints(samples.step)
        causes = [cause for cause in samples.dropped if cause]
        flags = list(map(bool, samples.dropped)) if causes else [False] * step.size
        return cls(
            response=_ints(samples.response_tokens),
            generated=_ints(samples.generated_tokens),
            version=_ints(samples.version),
            last_version=_ints(samples.last_version),
            step=step,
            start=np.asarray(samples.start_s, dtype=np.float64),
            trained=step >= 0,
            finished=~np.isnan(np.asarray(samples.finish_s, dtype=np.float64)),
            dropped=np.asarray(flags, dtype=np.bool_),
            cause=np.asarray(causes, dtype=np.str_),
        )


def _ints(values: Sequence[int]) -> Ints:
    return np.asarray(values, dtype=np.int64)


def _ratio(amount: float, per: float) -> float | None:
    """Divide; None where the divisor is not positive."""
    return float(amount) / float(per) if per > 0 else None


def _histogram(values: Ints) -> dict[str, int]:
    return {str(value): int(count) for value, count in enumerate(np.bincount(values)) if count}


def _parts(record: RunRecord, step_s: Floats, window: Measured) -> dict[str, float]:
    """Average the parts of the measured steps; they sum to the mean step time."""
    totals: dict[str, float] = {}
    for number in range(len(step_s))[window.steps]:
        parts = record.steps.parts[number]
        gap = sum(parts.values()) - step_s[number]
        if abs(gap) > PARTS_TOLERANCE * max(1.0, step_s[number]):
            took = f"step {number} took {step_s[number]} s"
            raise InvariantBroken(f"{took}, its parts differ by {gap} s: {parts}")
        for name, seconds in parts.items():
            totals[name] = totals.get(name, 0.0) + seconds
    return {name: seconds / window.num_steps for name, seconds in totals.items()}


def _idle(pools: dict[Owner, PoolTime]) -> dict[str, Any]:
    """Return idle shares of device-seconds, and by cause; the causes of a pool sum to its share."""
    names = {Owner.ROLLOUT: "rollout", Owner.TRAIN: "train"}
    shares = {name: pools[owner].idle_share() for owner, name in names.items()}
    for name, share in shares.items():
        if not -PARTS_TOLERANCE <= share <= 1 + PARTS_TOLERANCE:
            raise InvariantBroken(f"idle share of the {name} pool is {share}, outside [0, 1]")
    by_cause = {name: pools[owner].idle_shares() for owner, name in names.items()}
    return {name: min(1.0, max(0.0, share)) for name, share in shares.items()} | {"by_cause": by_cause}


def _ledger(record: RunRecord, columns: _Columns) -> dict[str, Any]:
    """Count samples and generated response tokens: issued = trained + dropped + unfinished."""
    twice = np.flatnonzero(columns.trained & columns.dropped)
    if twice.size:
        row = int(twice[0])
        used, cause = columns.step[row], record.samples.dropped[row]
        raise InvariantBroken(f"sample {row} is both trained at {used} and {cause}")
    short = np.flatnonzero(columns.trained & (columns.generated != columns.response))
    if short.size:
        row = int(short[0])
        made, full = columns.generated[row], columns.response[row]
        raise InvariantBroken(f"sample {row} was trained with {made} of its {full} tokens")
    return {
        "samples": _account(columns, np.ones(columns.step.size, dtype=np.int64)),
        "tokens": _account(columns, columns.generated),
    }


def _account(columns: _Columns, amount: Ints) -> dict[str, Any]:
    """Split an amount per sample by the place of the sample."""
    rest = ~(columns.trained | columns.dropped)
    lost = amount[columns.dropped]
    by_cause = {str(cause): int(lost[columns.cause == cause].sum()) for cause in np.unique(columns.cause)}
    account: dict[str, Any] = {
        "issued": int(amount.sum()),
        "trained": int(amount[columns.trained].sum()),
        "dropped": int(amount[columns.dropped].sum()),
        "dropped_by_cause": by_cause,
        "unfinished": int(amount[rest].sum()),
    }
    placed = account["trained"] + account["dropped"] + account["unfinished"]
    if placed != account["issued"] or sum(by_cause.values()) != account["dropped"]:
        raise InvariantBroken(f"the ledger does not balance: {account}")
    return account


def _inclusion(record: RunRecord, columns: _Columns) -> dict[str, Any]:
    """Return the share of samples that were trained, per quartile of response length.

    Counted are samples started early enough that a policy in issue order trains them before the run ends
    (version + ceil(s) <= last step), so that the end of the run does not look like starvation. Samples that
    the workload filters are left out. All quartiles equal means that length does not decide.
    """
    last_step = len(record.steps.published_s) - 1
    due = ~np.isnan(columns.start) & (columns.version + math.ceil(record.staleness) <= last_step)
    due[np.flatnonzero(columns.dropped)[columns.cause == "filtered"]] = False
    length, trained = columns.response[due], columns.trained[due]
    if not length.size:
        return {}
    edges = np.quantile(length, (0.25, 0.5, 0.75, 1.0))
    quartile = np.searchsorted(edges, length)
    number = np.bincount(quartile, minlength=4)
    included = np.bincount(quartile, weights=trained, minlength=4)
    return {
        f"q{index + 1}": {
            "max_tokens": float(edges[index]),
            "num_samples": int(number[index]),
            "trained_share": _ratio(included[index], number[index]),
        }
        for index in range(4)
    }


def _borrow(record: RunRecord) -> dict[str, Any]:
    """Sum the leases by direction.

    ``device_seconds`` runs from request to close; ``cost_s`` is the wall time of entering and returning;
    ``saved_s`` is what the gates predicted net of that cost (a run has no twin without the lease to measure
    against: ``compare`` gives the real difference).
    """
    leases = record.leases
    result: dict[str, Any] = {}
    for direction in DIRECTIONS:
        rows = [row for row, name in enumerate(leases.direction) if name == direction]
        device_s = cost_s = 0.0
        for row in rows:
            requested = leases.requested_s[row]
            closed = _known(leases.closed_s[row], record.end_s)
            released = _known(leases.released_s[row], closed)
            entered = min(_known(leases.entered_s[row], released), released)
            device_s += leases.num_gpus[row] * (closed - requested)
            cost_s += (entered - requested) + (closed - released)
        result[direction] = {
            "count": len(rows),
            "device_seconds": device_s,
            "useful_device_seconds": math.fsum(leases.useful_device_s[row] for row in rows),
            "cost_s": cost_s,
            "saved_s": math.fsum(_known(leases.predicted_gain_s[row], 0.0) for row in rows),
            "saved_is": "predicted",
        }
    return result


def _known(value: float, otherwise: float) -> float:
    return otherwise if math.isnan(value) else value


def _resume(record: RunRecord) -> dict[str, Any]:
    """Sum the resumes; ``cost_s`` covers all recomputed prefixes, ``recomputed_tokens`` of them."""
    samples = record.samples
    groups = {samples.group[row] for row, number in enumerate(samples.num_resumes) if number}
    return {
        "count": sum(samples.num_resumes),
        "num_samples": sum(map(bool, samples.num_resumes)),
        "num_groups": len(groups),
        "prefix_tokens": sum(samples.prefix_tokens),
        "recomputed_tokens": record.recomputed_tokens,
        "cost_s": record.recompute_s,
    }


def _bound(
    record: RunRecord,
    columns: _Columns,
    pools: dict[Owner, PoolTime],
    measured_s: Floats,
    alone_decode_s: Callable[[int, int], float] | None,
) -> dict[str, Any]:
    """Hold the mean step time against the work bound and the tail bound.

    ``work_s``: device-seconds of useful work per step over all GPUs. ``tail_s``: the longest sample's own
    decode time of each step, averaged, over the steps that a sample may span (1 + the larger of ceil(s) and
    the largest lag seen). Source: design.md section 10.
    """
    window = measured_steps(record)
    if not measured_s.size:
        return {"work_s": None, "tail_s": None, "tail_is": None, "achieved_over_bound": None}
    num_gpus = record.rollout_gpus + record.train_gpus
    useful = sum(pool.useful_device_s for pool in pools.values())
    work_s = _ratio(useful, num_gpus * window.num_steps)
    rows = np.flatnonzero((columns.step >= window.first) & (columns.step < window.first + window.num_steps))
    tail_s, tail_is = None, None
    if rows.size:
        prompt = record.samples.prompt_tokens
        rows = rows[np.lexsort((columns.response[rows], columns.step[rows]))]
        of_step = columns.step[rows]
        longest = rows[np.concatenate((of_step[1:] != of_step[:-1], np.ones(1, dtype=bool)))]
        if alone_decode_s is not None:
            own = [alone_decode_s(prompt[row], int(columns.response[row])) for row in longest]
            tail_is = "model"
        else:
            finish = np.asarray(record.samples.finish_s, dtype=np.float64)
            per_token = (finish - columns.start) / np.maximum(1, columns.response)
            fastest = np.nanmin(per_token[columns.finished], initial=np.inf)
            own = [float(fastest * columns.response[row]) for row in longest]
            tail_is = "fastest observed sample"
        lag = int((columns.step - columns.version)[columns.trained].max())
        steps_spanned = 1 + max(math.ceil(record.staleness), lag)
        tail_s = math.fsum(own) / len(own) / steps_spanned
        if not math.isfinite(tail_s):
            tail_s, tail_is = None, None
    best = max(work_s or 0.0, tail_s or 0.0)
    achieved = _ratio(float(measured_s.mean()), best)
    return {"work_s": work_s, "tail_s": tail_s, "tail_is": tail_is, "achieved_over_bound": achieved}
