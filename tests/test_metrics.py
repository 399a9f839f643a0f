"""Metrics: hand-made records with known answers, conservation properties, and refusals."""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.errors import InvariantBroken
from bidirl.sim.idle import pool_times, rows_of
from bidirl.sim.metrics import measured_steps, summarise
from bidirl.traces.run_record import Activity, Owner, RunRecord

PLAIN: dict[str, Any] = {
    "rollout_gpus": 2,
    "train_gpus": 2,
    "samples_per_prompt": 1,
    "prompts_per_step": 2,
    "enforced": ("admission",),
}


def add_span(
    record: RunRecord,
    owner: int,
    unit: int,
    gpus: int,
    activity: int,
    start: float,
    end: float,
    step: int = 0,
) -> None:
    """Append one span."""
    spans = record.spans
    numbers = (owner, unit, gpus, activity, step)
    columns = (spans.owner, spans.unit, spans.num_gpus, spans.activity, spans.step)
    for column, value in zip(columns, numbers, strict=True):
        column.append(int(value))
    spans.start_s.append(start)
    spans.end_s.append(end)


def add_step(
    record: RunRecord, published: float, tokens: int = 100, parts: dict[str, float] | None = None
) -> None:
    """Append one step of ``tokens`` prompt and as many response tokens."""
    steps = record.steps
    before = steps.published_s[-1] if steps.published_s else 0.0
    steps.batch_ready_s.append(before)
    steps.train_start_s.append(before)
    steps.published_s.append(published)
    steps.prompt_tokens.append(tokens)
    steps.response_tokens.append(tokens)
    steps.num_groups.append(2)
    steps.parts.append(parts or {"wait": 0.25 * (published - before), "update": 0.75 * (published - before)})


def add_sample(
    record: RunRecord,
    length: int = 10,
    *,
    version: int = 0,
    step: int = -1,
    dropped: str = "",
    start: float = 0.0,
    finish: float = 1.0,
    generated: int | None = None,
    resumes: int = 0,
) -> None:
    """Append one sample in a group of its own."""
    samples = record.samples
    samples.group.append(len(samples.group))
    samples.index.append(0)
    samples.prompt_tokens.append(5)
    samples.response_tokens.append(length)
    samples.generated_tokens.append(length if generated is None else generated)
    samples.start_s.append(start)
    samples.finish_s.append(finish)
    samples.version.append(version)
    samples.last_version.append(version)
    samples.step.append(step)
    samples.dropped.append(dropped)
    samples.num_resumes.append(resumes)
    samples.prefix_tokens.append(7 * resumes)
    samples.chunk.append(0 if step >= 0 else -1)


def steady_record(num_steps: int = 6, staleness: float = 1.0) -> RunRecord:
    """Build steps of 10 s: 6 s of generation on both rollout GPUs, 7.5 s of update on both others."""
    record = RunRecord(staleness=staleness, **PLAIN)
    for step in range(num_steps):
        begin = 10.0 * step
        add_span(record, Owner.ROLLOUT, 0, 1, Activity.GENERATE, begin, begin + 6.0, step)
        add_span(record, Owner.ROLLOUT, 1, 1, Activity.GENERATE, begin, begin + 6.0, step)
        add_span(record, Owner.TRAIN, 0, 2, Activity.UPDATE, begin + 2.5, begin + 10.0, step)
        add_step(record, begin + 10.0)
        for length in (10, 20):
            add_sample(
                record, length, version=max(0, step - 1), step=step, start=begin, finish=begin + length / 10
            )
    record.end_s = 10.0 * num_steps
    return record


def numbers(value: object) -> Iterator[float]:
    """Yield every number of a nested summary."""
    if isinstance(value, dict):
        for item in value.values():
            yield from numbers(item)
    elif isinstance(value, int | float):
        yield value


def test_steady_state_has_the_numbers_worked_out_by_hand() -> None:
    summary = summarise(
        steady_record(), sources={"tau_dec": "roofline"}, alone_decode_s=lambda _, tokens: tokens / 10
    )
    assert summary["measured"]["first_step"] == 1
    assert summary["measured"]["num_steps"] == 4
    assert summary["note"] is None
    assert summary["tokens_per_s"] == pytest.approx(20.0)
    assert summary["tokens_per_s_per_gpu"] == pytest.approx(5.0)
    assert summary["step_time_s"] == {"mean": 10.0, "p50": 10.0, "p95": 10.0}
    assert summary["parts_s"] == pytest.approx({"wait": 2.5, "update": 7.5})
    assert summary["idle"]["rollout"] == pytest.approx(0.4)
    assert summary["idle"]["by_cause"]["rollout"]["admission"] == pytest.approx(0.4)
    assert summary["idle"]["train"] == pytest.approx(0.25)
    assert summary["idle"]["by_cause"]["train"]["wait_rollout"] == pytest.approx(0.25)
    assert summary["ledger"]["samples"]["issued"] == summary["ledger"]["samples"]["trained"] == 12
    assert summary["lag"]["histogram"] == {"0": 2, "1": 10}
    assert summary["span"] == {"mean": 1.0, "max": 1}
    assert summary["bound"]["work_s"] == pytest.approx((2 * 6.0 + 2 * 7.5) / 4)
    assert summary["bound"]["tail_s"] == pytest.approx(2.0 / 2)
    assert summary["bound"]["achieved_over_bound"] == pytest.approx(10.0 / 6.75)
    assert summary["sources"] == {"tau_dec": "roofline"}


def test_the_summary_has_the_contract_keys_and_is_plain_json() -> None:
    summary = summarise(steady_record())
    assert set(summary) >= {
        *("tokens_per_s", "tokens_per_s_per_gpu", "step_time_s", "parts_s", "idle", "ledger", "lag", "span"),
        *("inclusion_by_length", "borrow", "resume", "bound", "sources", "wall"),
    }
    assert set(summary["borrow"]["train_on_rollout"]) >= {"count", "device_seconds", "cost_s", "saved_s"}
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert all(math.isfinite(number) for number in numbers(summary))


@pytest.mark.parametrize(
    ("num_steps", "staleness", "first", "kept"),
    [(6, 0.0, 1, 5), (6, 0.1, 1, 4), (6, 1.0, 1, 4), (9, 2.5, 3, 3), (2, 0.0, 1, 1)],
)
def test_head_and_tail_are_dropped_as_the_paper_does(
    num_steps: int, staleness: float, first: int, kept: int
) -> None:
    window = measured_steps(steady_record(num_steps, staleness))
    assert (window.first, window.num_steps, window.note) == (first, kept, None)
    assert window.duration_s == pytest.approx(10.0 * kept)


@pytest.mark.parametrize(("num_steps", "staleness"), [(1, 0.0), (2, 1.0), (6, 3.0)])
def test_too_few_steps_use_all_and_say_so(num_steps: int, staleness: float) -> None:
    summary = summarise(steady_record(num_steps, staleness))
    assert summary["measured"]["num_steps"] == num_steps
    assert "too few" in summary["note"]
    assert summary["tokens_per_s"] == pytest.approx(20.0)


def test_a_run_without_a_step_reports_nothing_but_idle_and_ledger() -> None:
    record = RunRecord(staleness=1.0, end_s=4.0, **PLAIN)
    add_sample(record, generated=3, finish=math.nan)
    summary = summarise(record)
    assert summary["tokens_per_s"] == 0.0
    assert summary["step_time_s"]["mean"] is None
    assert summary["idle"]["train"] == 1.0
    assert summary["ledger"]["tokens"] == {
        "issued": 3,
        "trained": 0,
        "dropped": 0,
        "dropped_by_cause": {},
        "unfinished": 3,
    }
    assert "no step" in summary["note"]
    json.dumps(summary, allow_nan=False)


def test_idle_before_the_pools_next_work_is_admission_only_while_the_trainer_is_busy() -> None:
    record = RunRecord(staleness=0.0, end_s=20.0, **PLAIN)
    add_span(record, Owner.ROLLOUT, 0, 1, Activity.GENERATE, 0.0, 4.0)
    add_span(record, Owner.ROLLOUT, 1, 1, Activity.GENERATE, 0.0, 6.0)
    add_span(record, Owner.TRAIN, 0, 2, Activity.UPDATE, 6.0, 9.0)
    add_span(record, Owner.TRAIN, 0, 2, Activity.MERGE, 9.0, 10.0)
    add_span(record, Owner.ROLLOUT, 0, 2, Activity.SYNC, 10.0, 11.0)
    add_span(record, Owner.ROLLOUT, 0, 1, Activity.GENERATE, 11.0, 20.0)
    add_span(record, Owner.TRAIN, 0, 2, Activity.UPDATE, 12.0, 14.0)
    pools = pool_times(record, rows_of(record), (0.0, 20.0))
    idle = pools[Owner.ROLLOUT].idle_device_s
    assert idle["admission"] == pytest.approx(2 * 4.0)
    assert idle["no_work"] == pytest.approx(2.0 + 9.0)
    assert idle["sync"] == pytest.approx(2.0)
    idle = pools[Owner.TRAIN].idle_device_s
    assert idle["merge"] == pytest.approx(2.0)
    assert idle["sync"] == pytest.approx(2.0)
    assert idle["wait_rollout"] == pytest.approx(2 * (6.0 + 1.0 + 6.0))


def test_a_lent_device_counts_in_the_pool_that_owns_it() -> None:
    record = steady_record()
    before = summarise(record)["idle"]
    add_span(record, Owner.ROLLOUT, 0, 1, Activity.SWITCH_IN, 26.0, 27.0)
    add_span(record, Owner.ROLLOUT, 0, 1, Activity.UPDATE, 27.0, 29.0)
    add_span(record, Owner.ROLLOUT, 0, 1, Activity.SWITCH_OUT, 29.0, 30.0)
    after = summarise(record)["idle"]
    assert after["train"] == before["train"]
    assert after["rollout"] == pytest.approx(before["rollout"] - 2.0 / (2 * 40.0))
    assert after["by_cause"]["rollout"]["switch_in"] == pytest.approx(1.0 / 80.0)


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(0, 1, 0.0, 2.0), (0, 1, 1.0, 3.0)], "one device in two spans"),
        ([(0, 2, 0.0, 2.0), (1, 1, 1.0, 3.0)], "one device in two spans"),
        ([(1, 2, 0.0, 2.0)], "outside its pool of 2 GPUs"),
        ([(0, 1, 2.0, 1.0)], "ends before it starts"),
        ([(0, 1, math.nan, 1.0)], "ends before it starts"),
    ],
)
def test_impossible_spans_are_refused_with_both_names(
    spans: list[tuple[int, int, float, float]], message: str
) -> None:
    record = RunRecord(staleness=0.0, end_s=3.0, **PLAIN)
    for unit, gpus, start, end in spans:
        add_span(record, Owner.TRAIN, unit, gpus, Activity.UPDATE, start, end)
    with pytest.raises(InvariantBroken, match=message) as caught:
        summarise(record)
    assert str(caught.value).count("UPDATE") == len(spans)


def test_touching_and_empty_spans_are_no_overlap() -> None:
    record = RunRecord(staleness=0.0, end_s=3.0, **PLAIN)
    third = 1.0 / 3.0
    for start, end in ((0.0, 3 * third), (0.1 + 0.2, 0.1 + 0.2), (1.0, 1.0), (1.0 - 1e-12, 2.0)):
        add_span(record, Owner.TRAIN, 0, 2, Activity.UPDATE, start, end)
    assert summarise(record)["idle"]["train"] == pytest.approx(1.0 / 3.0)


def test_the_ledger_balances_by_cause() -> None:
    record = steady_record()
    add_sample(record, 30, version=1, dropped="expired")
    add_sample(record, 40, version=1, dropped="filtered")
    add_sample(record, 50, version=1, generated=11, finish=math.nan)
    ledger = summarise(record)["ledger"]
    assert ledger["samples"] == {
        "issued": 15,
        "trained": 12,
        "dropped": 2,
        "unfinished": 1,
        "dropped_by_cause": {"expired": 1, "filtered": 1},
    }
    assert ledger["tokens"]["dropped_by_cause"] == {"expired": 30, "filtered": 40}
    assert ledger["tokens"]["issued"] == 180 + 70 + 11


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"step": 3, "dropped": "expired"}, "both trained at 3 and expired"),
        ({"step": 3, "generated": 2}, "with 2 of its 10 tokens"),
        ({"step": 1, "version": 4}, "trained at 1, before version 4 made it"),
    ],
)
def test_a_sample_in_two_places_is_refused(wrong: dict[str, Any], message: str) -> None:
    record = steady_record()
    add_sample(record, **wrong)
    with pytest.raises(InvariantBroken, match=message):
        summarise(record)


def test_parts_that_do_not_sum_to_their_step_are_refused() -> None:
    record = steady_record()
    record.steps.parts[2] = {"wait": 1.0}
    with pytest.raises(InvariantBroken, match="step 2 took"):
        summarise(record)


def test_inclusion_shows_starved_long_samples_but_not_the_end_of_the_run() -> None:
    record = RunRecord(staleness=1.0, **PLAIN)
    for step in range(6):
        add_step(record, 10.0 * (step + 1))
    for row in range(80):
        add_sample(record, 10 + row, version=0, step=1 if row < 60 else -1)
    for row in range(20):
        add_sample(record, 10 + row, version=5)
        add_sample(record, 10 + row, version=0, dropped="filtered")
    inclusion = summarise(record)["inclusion_by_length"]
    assert [inclusion[f"q{number}"]["trained_share"] for number in (1, 2, 3, 4)] == [1.0, 1.0, 1.0, 0.0]
    assert sum(quartile["num_samples"] for quartile in inclusion.values()) == 80


def test_leases_are_charged_in_every_state() -> None:
    record = steady_record()
    leases = record.leases
    for entered, released, closed in (
        (12.0, 16.0, 17.0),
        (math.nan, 13.0, 14.0),
        (math.nan, math.nan, math.nan),
    ):
        leases.direction.append("train_on_rollout")
        leases.num_gpus.append(2)
        leases.requested_s.append(10.0)
        leases.entered_s.append(entered)
        leases.released_s.append(released)
        leases.closed_s.append(closed)
        leases.predicted_gain_s.append(1.5)
        leases.threshold_s.append(0.0)
        leases.useful_device_s.append(3.0)
    borrow = summarise(record)["borrow"]
    assert borrow["rollout_on_train"]["count"] == 0
    assert borrow["train_on_rollout"]["count"] == 3
    assert borrow["train_on_rollout"]["device_seconds"] == pytest.approx(2 * (7.0 + 4.0 + 50.0))
    assert borrow["train_on_rollout"]["cost_s"] == pytest.approx((2.0 + 1.0) + (3.0 + 1.0) + 50.0)
    assert borrow["train_on_rollout"]["saved_s"] == pytest.approx(4.5)


def test_resumes_count_samples_and_groups() -> None:
    record = steady_record()
    add_sample(record, resumes=2)
    resume = summarise(replace(record, recompute_s=0.5))["resume"]
    assert (resume["count"], resume["num_groups"], resume["prefix_tokens"], resume["cost_s"]) == (
        2,
        1,
        14,
        0.5,
    )


def test_a_pool_without_gpus_is_never_idle() -> None:
    record = replace(steady_record(), rollout_gpus=4, train_gpus=0)
    spans = record.spans
    spans.unit = [
        2 if owner == Owner.TRAIN else unit for owner, unit in zip(spans.owner, spans.unit, strict=True)
    ]
    spans.owner = [int(Owner.ROLLOUT)] * len(spans.owner)
    summary = summarise(record)
    assert summary["idle"]["train"] == 0.0
    assert summary["idle"]["rollout"] == pytest.approx((0.4 + 0.25) / 2)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 4),
            st.integers(1, 3),
            st.sampled_from(Activity),
            st.floats(0.0, 5.0),
            st.booleans(),
        ),
        max_size=25,
    ),
    st.tuples(st.floats(0.0, 20.0), st.floats(0.0, 20.0)),
)
def test_useful_and_idle_sum_to_the_pool_and_match_a_count_by_hand(
    pieces: list[tuple[int, int, Activity, float, bool]], window: tuple[float, float]
) -> None:
    record = RunRecord(staleness=0.0, **{**PLAIN, "rollout_gpus": 7, "train_gpus": 7})
    free = np.zeros((2, 7))
    low, high = min(window), max(window)
    busy = [0.0, 0.0]
    for first, gpus, activity, duration, on_train in pieces:
        units = slice(first, first + gpus)
        start = float(free[int(on_train), units].max())
        free[int(on_train), units] = start + duration
        add_span(record, int(on_train), first, gpus, activity, start, start + duration)
        if activity <= Activity.OPTIMIZER:
            busy[int(on_train)] += gpus * max(0.0, min(start + duration, high) - max(start, low))
    pools = pool_times(record, rows_of(record), (low, high))
    for owner in Owner:
        assert pools[owner].useful_device_s == pytest.approx(busy[owner], abs=1e-9)
        assert 0.0 <= pools[owner].idle_share() <= 1.0 + 1e-9
        assert all(seconds >= 0.0 for seconds in pools[owner].idle_device_s.values())


def big_record(num_steps: int = 40, groups: int = 64, per_group: int = 8) -> RunRecord:
    """Build a record of a sweep cell's size: 20,480 samples and about 5,000 spans."""
    rng = np.random.default_rng(5)
    record = RunRecord(12, 4, per_group, groups, 1.0, ("admission",))
    for step in range(num_steps):
        for unit in range(12):
            edges = 10.0 * step + np.sort(rng.uniform(0, 10, 20))
            for index in range(10):
                add_span(
                    record,
                    0,
                    unit,
                    1,
                    Activity.GENERATE,
                    float(edges[2 * index]),
                    float(edges[2 * index + 1]),
                )
        add_span(record, 1, 0, 4, Activity.UPDATE, 10.0 * step, 10.0 * step + 7.0)
        add_step(record, 10.0 * (step + 1))
    count = num_steps * groups * per_group
    lengths = rng.integers(1, 2048, count).tolist()
    for row in range(count):
        step = row // (groups * per_group)
        add_sample(record, lengths[row], version=max(0, step - 1), step=step)
    return record


def test_a_sweep_cell_costs_little_more_than_reading_its_lists() -> None:
    record = big_record()
    assert len(record.samples.step) == 20480
    columns = [getattr(record.samples, name) for name in ("group", "step", "version", "start_s", "finish_s")]

    def fastest(call: Callable[[], object]) -> float:
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return min(times)

    reading = fastest(lambda: [np.asarray(list(column)) for column in columns])
    assert fastest(lambda: summarise(record)) < 25 * reading
