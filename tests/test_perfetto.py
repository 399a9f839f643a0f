"""The trace export against the rules of the trace-event format."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.traces.perfetto import trace_events, write_trace
from bidirl.traces.run_record import Activity, Spans

POOLS = ("rollout pool", "training pool")
NAMES = tuple(activity.name.lower() for activity in Activity)
COUNTERS = {"running samples": ([0.0, 1.0, 2.5], [0, 16, 3]), "buffered groups": ([0.5], [2])}


def some_spans() -> Spans:
    """Build spans of three units, in no order."""
    return Spans(
        owner=[1, 0, 0, 0],
        unit=[0, 1, 0, 0],
        num_gpus=[4, 1, 1, 1],
        activity=[Activity.UPDATE, Activity.GENERATE, Activity.SYNC, Activity.GENERATE],
        start_s=[2.0, 0.0, 1.0000004, 0.0],
        end_s=[3.25, 1.75, 1.5, 1.0000004],
        step=[1, 0, 0, 0],
    )


def check_format(events: list[dict[str, Any]]) -> None:
    """Check what every viewer relies on."""
    timed = [event for event in events if event["ph"] != "M"]
    assert events[: len(events) - len(timed)] == [event for event in events if event["ph"] == "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    named = {event["pid"] for event in events if event["name"] == "process_name"}
    threads = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert len({tid for _, tid in threads}) == len(threads)
    for event in events:
        assert {"ph", "name", "pid", "ts"} <= set(event)
        assert isinstance(event["ts"], int)
        assert event["pid"] in named
        assert event["pid"] > 0
        match event["ph"]:
            case "X":
                assert isinstance(event["dur"], int)
                assert event["dur"] >= 0
                assert (event["pid"], event["tid"]) in threads
            case "i":
                assert event["s"] in {"g", "p", "t"}
            case "C":
                assert all(isinstance(value, int | float) for value in event["args"].values())
            case "M":
                assert event["args"]
            case phase:
                pytest.fail(f"unknown phase {phase}")


def test_events_follow_the_format() -> None:
    events = trace_events(some_spans(), pools=POOLS, activities=NAMES, published_s=[3.25], counters=COUNTERS)
    check_format(events)
    assert [event["name"] for event in events if event["ph"] == "X"] == [
        "generate",
        "generate",
        "sync",
        "update",
    ]
    update = next(event for event in events if event["name"] == "update")
    assert (update["ts"], update["dur"], update["args"]) == (2_000_000, 1_250_000, {"step": 1, "gpus": 4})
    assert [event["ts"] for event in events if event["ph"] == "i"] == [3_250_000]
    labels = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert labels == {"GPU 0", "GPU 1", "GPUs 0-3"}
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert processes == [*POOLS, "counters"]
    assert sum(event["ph"] == "C" for event in events) == 4


@given(st.lists(st.floats(1e-7, 100.0), min_size=1, max_size=12))
def test_touching_spans_never_overlap_after_rounding(durations: list[float]) -> None:
    borders = [0.0]
    for duration in durations:
        borders.append(borders[-1] + duration)
    count = len(durations)
    spans = Spans([0] * count, [0] * count, [1] * count, [0] * count, borders[:-1], borders[1:], [0] * count)
    events = [event for event in trace_events(spans, pools=POOLS, activities=NAMES) if event["ph"] == "X"]
    for before, after in pairwise(events):
        assert before["ts"] + before["dur"] == after["ts"]


def test_the_file_is_strict_json_with_its_origin(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, some_spans(), pools=POOLS, activities=NAMES, about={"job": "demo.toml"})
    content = json.loads(path.read_text())
    assert content["otherData"] == {"job": "demo.toml"}
    check_format(content["traceEvents"])


def test_an_empty_run_still_opens(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", Spans(), pools=POOLS, activities=NAMES)
    check_format(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])
