"""Device time by activity and idle time by cause, from spans.

Shares are device-seconds over device-seconds, never averages of averages. A lent device counts in the
pool that owns it. Spans of many GPUs are cut at every unit boundary of their pool into *rows*, so the cost
follows the number of distinct units, not the number of GPUs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bidirl.errors import InvariantBroken
from bidirl.traces.run_record import Activity, Owner, RunRecord, Spans

__all__ = ["CAUSES", "TRAINER", "USEFUL", "PoolTime", "Rows", "pool_times", "rows_of"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

USEFUL = (Activity.GENERATE, Activity.OLD_LOGPROB, Activity.REFERENCE, Activity.UPDATE, Activity.OPTIMIZER)
"""Activities that advance the training; all other spans are overhead, and idle."""

TRAINER = (
    Activity.OLD_LOGPROB,
    Activity.REFERENCE,
    Activity.UPDATE,
    Activity.OPTIMIZER,
    Activity.MERGE,
    Activity.BROADCAST,
    Activity.CHECKPOINT,
)
"""Activities that show that the trainer is busy, on whichever pool they run."""

CAUSES = {
    "sync": Activity.SYNC,
    "switch_in": Activity.SWITCH_IN,
    "switch_out": Activity.SWITCH_OUT,
    "merge": Activity.MERGE,
    "broadcast": Activity.BROADCAST,
    "checkpoint": Activity.CHECKPOINT,
    "down": Activity.DOWN,
}
"""Causes of idleness that have spans; time outside all spans gets a name by its pool."""

TIME_TOLERANCE = 1e-9
"""Relative slack of span borders: sums of floats on one clock, not a real overlap."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Spans cut at unit borders, sorted by (segment, start); a *segment* is GPUs that are never split."""

    segment: Ints
    start_s: Floats
    end_s: Floats
    activity: Ints
    segment_owner: Ints
    segment_first: Ints
    """First GPU of the segment inside its pool."""
    segment_gpus: Ints


@dataclass(frozen=True, slots=True)
class PoolTime:
    """Device-seconds of one pool inside a window."""

    num_gpus: int
    device_s: float
    useful_device_s: float
    idle_device_s: dict[str, float]
    """By cause; the sum plus ``useful_device_s`` is ``device_s``."""

    def idle_share(self) -> float:
        """Return the share of device-seconds without useful work, in [0, 1]; 0 for a pool without GPUs."""
        return sum(self.idle_shares().values())

    def idle_shares(self) -> dict[str, float]:
        """Return the shares of device-seconds by cause of idleness."""
        total = self.device_s
        return {cause: seconds / total if total else 0.0 for cause, seconds in self.idle_device_s.items()}


def rows_of(record: RunRecord) -> Rows:
    """Cut spans at unit borders and check that no device does two things at once.

    Raises:
        InvariantBroken: spans of one device overlap, run backwards, or leave their pool.
    """
    spans = record.spans
    owner = np.asarray(spans.owner, dtype=np.int64)
    first = np.asarray(spans.unit, dtype=np.int64)
    last = first + np.asarray(spans.num_gpus, dtype=np.int64)
    activity = np.asarray(spans.activity, dtype=np.int64)
    start = np.asarray(spans.start_s, dtype=np.float64)
    end = np.asarray(spans.end_s, dtype=np.float64)
    backwards = np.flatnonzero(~(end >= start))
    if backwards.size:
        raise InvariantBroken(f"a span ends before it starts: {_story(spans, int(backwards[0]))}")
    keep = end > start
    parts, owners, firsts, widths = [], [], [], []
    num_segments = 0
    for pool, gpus in ((Owner.ROLLOUT, record.rollout_gpus), (Owner.TRAIN, record.train_gpus)):
        index = np.flatnonzero(keep & (owner == pool))
        if index.size and (int(first[index].min()) < 0 or int(last[index].max()) > gpus):
            bad = int(index[(first[index] < 0) | (last[index] > gpus)][0])
            raise InvariantBroken(f"span outside its pool of {gpus} GPUs: {_story(spans, bad)}")
        edges = np.unique(np.concatenate((np.array([0, gpus]), first[index], last[index])))
        low = np.searchsorted(edges, first[index])
        count = np.searchsorted(edges, last[index]) - low
        offset = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        parts.append((np.repeat(index, count), np.repeat(low, count) + offset + num_segments))
        owners.append(np.full(edges.size - 1, int(pool), dtype=np.int64))
        firsts.append(edges[:-1])
        widths.append(np.diff(edges))
        num_segments += edges.size - 1
    span = np.concatenate([part[0] for part in parts])
    segment = np.concatenate([part[1] for part in parts])
    order = np.lexsort((start[span], segment))
    span, segment = span[order], segment[order]
    row_start, row_end = start[span], end[span]
    slack = TIME_TOLERANCE * np.maximum(1.0, np.abs(row_end[:-1]))
    overlap = np.flatnonzero((segment[1:] == segment[:-1]) & (row_start[1:] < row_end[:-1] - slack))
    if overlap.size:
        one, other = int(span[overlap[0]]), int(span[overlap[0] + 1])
        raise InvariantBroken(f"one device in two spans: {_story(spans, one)} and {_story(spans, other)}")
    return Rows(
        segment=segment,
        start_s=row_start,
        end_s=row_end,
        activity=activity[span],
        segment_owner=np.concatenate(owners),
        segment_first=np.concatenate(firsts),
        segment_gpus=np.concatenate(widths),
    )


def pool_times(record: RunRecord, rows: Rows, window_s: tuple[float, float]) -> dict[Owner, PoolTime]:
    """Measure useful and idle device-seconds of both pools inside a window.

    Time outside all spans of the training pool is ``sync`` while any device applies new weights (the trainer
    may not go on before all have them), else ``wait_rollout``. On the rollout pool it is ``admission`` while
    the trainer is busy and the pool has work later in the run (nothing more may start until the trainer
    moves on), else ``no_work`` (the other replicas finish their last samples, or the run ends).

    Raises:
        InvariantBroken: the parts do not sum to the pool's device-seconds.
    """
    low, high = window_s
    start, end = np.clip(rows.start_s, low, high), np.clip(rows.end_s, low, high)
    inside = end > start
    segment, start, end = rows.segment[inside], start[inside], end[inside]
    activity = rows.activity[inside]
    busy_s = (end - start) * rows.segment_gpus[segment]
    owner = rows.segment_owner[segment]
    spent = np.bincount(owner * len(Activity) + activity, weights=busy_s, minlength=2 * len(Activity))
    gap_segment, gap_start, gap_end = _gaps(segment, start, end, rows.segment_gpus.size, window_s)
    gap_s = (gap_end - gap_start) * rows.segment_gpus[gap_segment]
    on_rollout = rows.segment_owner[gap_segment] == Owner.ROLLOUT
    gap_gpus = rows.segment_gpus[gap_segment]
    generating = rows.start_s[rows.activity == Activity.GENERATE]
    last_work_s = float(generating.max()) if generating.size else low
    held_s = _overlap_s(rows, TRAINER, gap_start[on_rollout], np.minimum(gap_end[on_rollout], last_work_s))
    admission = float(held_s @ gap_gpus[on_rollout])
    paused_s = _overlap_s(rows, (Activity.SYNC,), gap_start[~on_rollout], gap_end[~on_rollout])
    sync = float(paused_s @ gap_gpus[~on_rollout])
    uncovered = {
        Owner.ROLLOUT: {"admission": admission, "no_work": max(0.0, gap_s[on_rollout].sum() - admission)},
        Owner.TRAIN: {"wait_rollout": max(0.0, gap_s[~on_rollout].sum() - sync)},
    }
    result = {}
    for pool, gpus in ((Owner.ROLLOUT, record.rollout_gpus), (Owner.TRAIN, record.train_gpus)):
        by_activity = spent[pool * len(Activity) : (pool + 1) * len(Activity)]
        idle = {cause: float(by_activity[act]) for cause, act in CAUSES.items()}
        idle |= {cause: float(seconds) for cause, seconds in uncovered[pool].items()}
        if pool is Owner.TRAIN:
            idle["sync"] += sync
        useful = float(by_activity[list(USEFUL)].sum())
        total = gpus * (high - low)
        if abs(useful + sum(idle.values()) - total) > 1e-6 * max(1.0, total):
            parts_text = f"useful {useful} + idle {idle}"
            raise InvariantBroken(f"{pool.name} pool: {parts_text} is not {total} device-seconds")
        result[pool] = PoolTime(gpus, total, useful, idle)
    return result


def _gaps(
    segment: Ints, start: Floats, end: Floats, num_segments: int, window_s: tuple[float, float]
) -> tuple[Ints, Floats, Floats]:
    """List the uncovered intervals of every segment; rows are sorted by (segment, start)."""
    low, high = window_s
    changes = segment[1:] != segment[:-1]
    is_first = np.concatenate((np.ones(min(1, segment.size), dtype=bool), changes))
    is_last = np.concatenate((changes, np.ones(min(1, segment.size), dtype=bool)))
    before = np.where(is_first, low, np.concatenate((np.full(min(1, segment.size), low), end[:-1])))
    empty = np.setdiff1d(np.arange(num_segments), segment)
    gap_segment = np.concatenate((segment, segment[is_last], empty))
    gap_start = np.concatenate((before, end[is_last], np.full(empty.size, low)))
    gap_end = np.concatenate((start, np.full(int(is_last.sum()), high), np.full(empty.size, high)))
    real = gap_end > gap_start
    return gap_segment[real], gap_start[real], gap_end[real]


def _overlap_s(rows: Rows, kinds: Sequence[Activity], low: Floats, high: Floats) -> Floats:
    """Return the seconds of each interval ``low .. high`` in which any device does one of the activities."""
    chosen = np.isin(rows.activity, kinds)
    if not chosen.any():
        return np.zeros(low.size)
    order = np.argsort(rows.start_s[chosen], kind="stable")
    start, end = rows.start_s[chosen][order], np.maximum.accumulate(rows.end_s[chosen][order])
    opens = np.concatenate((np.ones(1, dtype=bool), start[1:] > end[:-1]))
    closes = np.concatenate((opens[1:], np.ones(1, dtype=bool)))
    border = np.column_stack((start[opens], end[closes]))
    spent = np.concatenate((np.zeros(1), np.cumsum(border[:, 1] - border[:, 0])))
    level, border_s = np.column_stack((spent[:-1], spent[1:])).ravel(), border.ravel()
    overlap: Floats = np.interp(np.maximum(low, high), border_s, level) - np.interp(low, border_s, level)
    return overlap


def _story(spans: Spans, index: int) -> str:
    """Describe one span for an error."""
    unit, gpus = spans.unit[index], spans.num_gpus[index]
    return (
        f"span {index} {Activity(spans.activity[index]).name} on {Owner(spans.owner[index]).name} GPUs "
        f"{unit}..{unit + gpus - 1}, {spans.start_s[index]!r}..{spans.end_s[index]!r} s"
    )
