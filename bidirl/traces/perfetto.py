"""Write a run as trace events that ui.perfetto.dev and chrome://tracing open.

A pool is a process, a unit of GPUs a thread, a span a complete event; weights published are global instants
and counters get a process of their own. Times are whole microseconds from the start of the run.

Source: the public Trace Event Format document (JSON object format; phases X, M, C, i).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

__all__ = ["SpanColumns", "trace_events", "write_trace"]

MICROSECONDS_PER_S = 1e6

THREADS_PER_PROCESS = 1_000_000
"""Thread ids are unique over all pools and never 0: some viewers key threads by the id alone."""

Counter = tuple[Sequence[float], Sequence[float]]


class SpanColumns(Protocol):
    """Columns of spans of equal length: pool index, first GPU, GPUs, activity index, seconds, step."""

    @property
    def owner(self) -> Sequence[int]: ...
    @property
    def unit(self) -> Sequence[int]: ...
    @property
    def num_gpus(self) -> Sequence[int]: ...
    @property
    def activity(self) -> Sequence[int]: ...
    @property
    def start_s(self) -> Sequence[float]: ...
    @property
    def end_s(self) -> Sequence[float]: ...
    @property
    def step(self) -> Sequence[int]: ...


def trace_events(
    spans: SpanColumns,
    *,
    pools: Sequence[str],
    activities: Sequence[str],
    published_s: Sequence[float] = (),
    counters: Mapping[str, Counter] | None = None,
) -> list[dict[str, Any]]:
    """Return the events: metadata first, then everything else by time.

    Args:
        spans: the run's spans; spans of one unit may touch but not overlap.
        pools: name of each pool, by index in ``spans.owner``.
        activities: name of each activity, by index in ``spans.activity``.
        published_s: when version ``k + 1`` was published, for each step ``k``.
        counters: name -> (times in seconds, values), for instance running samples or buffered groups.
    """
    events = [*_spans(spans, activities), *_instants(published_s), *_counters(counters or {}, len(pools) + 1)]
    events.sort(key=lambda event: event["ts"])
    return [*_names(spans, pools, bool(counters)), *events]


def write_trace(
    path: Path,
    spans: SpanColumns,
    *,
    pools: Sequence[str],
    activities: Sequence[str],
    published_s: Sequence[float] = (),
    counters: Mapping[str, Counter] | None = None,
    about: Mapping[str, str] | None = None,
) -> None:
    """Write ``trace.json``; ``about`` is kept as ``otherData`` (see `trace_events` for the rest)."""
    events = trace_events(
        spans, pools=pools, activities=activities, published_s=published_s, counters=counters
    )
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about or {})}
    path.write_text(json.dumps(content, separators=(",", ":"), allow_nan=False), encoding="utf-8")


def _microseconds(seconds: float) -> int:
    return round(seconds * MICROSECONDS_PER_S)


def _thread(pool: int, unit: int) -> int:
    return (pool + 1) * THREADS_PER_PROCESS + unit


def _spans(spans: SpanColumns, activities: Sequence[str]) -> Iterable[dict[str, Any]]:
    """Yield a complete event per span; start and end are rounded alike, so touching spans still touch."""
    columns = zip(
        *(spans.owner, spans.unit, spans.num_gpus, spans.activity, spans.start_s, spans.end_s, spans.step),
        strict=True,
    )
    for pool, unit, num_gpus, activity, start_s, end_s, step in columns:
        begin = _microseconds(start_s)
        yield {
            "ph": "X",
            "name": activities[activity],
            "cat": "activity",
            "pid": pool + 1,
            "tid": _thread(pool, unit),
            "ts": begin,
            "dur": _microseconds(end_s) - begin,
            "args": {"step": step, "gpus": num_gpus},
        }


def _instants(published_s: Sequence[float]) -> Iterable[dict[str, Any]]:
    """Yield a global instant per publication, on the first thread of the first pool."""
    for step, seconds in enumerate(published_s):
        yield {
            "ph": "i",
            "s": "g",
            "name": f"version {step + 1} published",
            "cat": "publication",
            "pid": 1,
            "tid": _thread(0, 0),
            "ts": _microseconds(seconds),
        }


def _counters(counters: Mapping[str, Counter], process: int) -> Iterable[dict[str, Any]]:
    for name, (times_s, values) in counters.items():
        for seconds, value in zip(times_s, values, strict=True):
            yield {
                "ph": "C",
                "name": name,
                "pid": process,
                "ts": _microseconds(seconds),
                "args": {"value": value},
            }


def _names(spans: SpanColumns, pools: Sequence[str], counted: bool) -> Iterable[dict[str, Any]]:
    """Yield the metadata that names and orders processes and threads."""
    processes = [*pools, *(["counters"] if counted else [])]
    for index, name in enumerate(processes):
        yield _metadata("process_name", index + 1, 0, {"name": name})
        yield _metadata("process_sort_index", index + 1, 0, {"sort_index": index})
    widest: dict[tuple[int, int], int] = {}
    for pool, unit, num_gpus in zip(spans.owner, spans.unit, spans.num_gpus, strict=True):
        widest[pool, unit] = max(num_gpus, widest.get((pool, unit), 0))
    for (pool, unit), num_gpus in sorted(widest.items()):
        name = f"GPU {unit}" if num_gpus == 1 else f"GPUs {unit}-{unit + num_gpus - 1}"
        thread = _thread(pool, unit)
        yield _metadata("thread_name", pool + 1, thread, {"name": name})
        yield _metadata("thread_sort_index", pool + 1, thread, {"sort_index": unit})


def _metadata(kind: str, process: int, thread: int, content: Mapping[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "ts": 0, "args": dict(content)}
