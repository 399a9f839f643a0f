"""Reports: the verdict names the limit that the numbers show, and says when they show none."""

import io
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from bidirl.sim.cells import cells_of, ratio, values_of
from bidirl.sim.compare import Comparison
from bidirl.sim.diagnosis import Limit, diagnose
from bidirl.sim.metrics import summarise
from bidirl.sim.report import (
    compare_table,
    compare_verdict,
    print_summary,
    summary_tables,
    sweep_table,
    sweep_verdict,
    verdict,
)
from bidirl.sim.text import count, percent, seconds, times
from bidirl.traces.run_record import RunRecord
from bidirl.traces.tables import flatten


def summary_of(
    parts: dict[str, float] | None = None,
    admission: float = 0.0,
    no_work: float = 0.0,
    wait: float = 0.0,
    sync: float = 0.01,
    tail_s: float = 1.0,
    **more: Any,
) -> dict[str, Any]:
    """Build the summary of a run with steps of 38.4 s."""
    record = RunRecord(4, 12, 8, 64, 1.0, ("admission",))
    summary = summarise(record) | {"note": None, "tokens_per_s": 3412.0, "tokens_per_s_per_gpu": 213.25}
    summary["step_time_s"] = {"mean": 38.4, "p50": 38.0, "p95": 41.0}
    summary["parts_s"] = parts or {"wait": 11.9, "update": 26.0, "sync": 0.5}
    by_cause = {
        "rollout": {"sync": sync, "admission": admission, "no_work": no_work},
        "train": {"sync": sync, "wait_rollout": wait},
    }
    shares = {pool: sum(causes.values()) for pool, causes in by_cause.items()}
    summary["idle"] = shares | {"by_cause": by_cause}
    summary["measured"] |= {"num_steps": 38}
    summary["bound"] = {"work_s": 30.0, "tail_s": tail_s, "achieved_over_bound": 1.28}
    return summary | more


def text_of(*things: Table | str) -> str:
    """Render for a wide terminal."""
    console = Console(file=io.StringIO(), width=160, color_system=None)
    for thing in things:
        console.print(thing)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_the_verdict_is_one_sentence_with_the_numbers() -> None:
    assert verdict(summary_of(admission=0.04, no_work=0.07, wait=0.3), "bidirl") == (
        "bidirl: 3,412 tokens/s (213 per GPU); step 38.4 s; rollout pool idle 12 %, training pool idle 31 %, "
        "limited by rollout (rollout pool waits 11 %, training pool 30 %)"
    )


@pytest.mark.parametrize(
    ("summary", "limit"),
    [
        (summary_of(wait=0.4), Limit.ROLLOUT),
        (summary_of(wait=0.4, no_work=0.1, tail_s=36.0), Limit.TAIL),
        (summary_of(admission=0.4, wait=0.05), Limit.TRAINING),
        (summary_of(admission=0.05, wait=0.05), Limit.NOTHING),
        (summary_of(admission=0.3, wait=0.35), Limit.IN_TURN),
        (summary_of(admission=0.3, wait=0.35, tail_s=36.0), Limit.TAIL),
        (summary_of(admission=0.12, wait=0.05), Limit.TRAINING),
        (summary_of(admission=0.11, wait=0.08), Limit.NOTHING),
        (
            summary_of(wait=0.4, measured={"num_steps": 2, "head_dropped": 1, "tail_dropped": 1}),
            Limit.CANNOT_TELL,
        ),
        (
            summary_of(parts={"wait": 10.0, "sync": 5.0, "drain": 5.0, "update": 18.4}, wait=0.3),
            Limit.OVERHEAD,
        ),
        (summary_of(parts={"wait": 10.0, "reward": 10.0, "update": 18.4}, wait=0.3), Limit.OVERHEAD),
        (summary_of(wait=0.4, note="3 steps are too few"), Limit.CANNOT_TELL),
        (summary_of(gpus={"rollout": 0, "train": 16}, parts={"wait": 30.0, "update": 8.4}), Limit.ROLLOUT),
        (summary_of(gpus={"rollout": 0, "train": 16}, parts={"wait": 8.4, "update": 30.0}), Limit.TRAINING),
        (summary_of(gpus={"rollout": 16, "train": 0}, parts={"wait": 19.0, "update": 19.4}), Limit.IN_TURN),
    ],
)
def test_the_limit_follows_from_parts_and_waiting(summary: dict[str, Any], limit: Limit) -> None:
    diagnosis = diagnose(summary)
    assert diagnosis.limit is limit
    assert diagnosis.because
    assert "limit" in str(diagnosis)


def test_a_run_without_steps_is_told_to_run_longer() -> None:
    summary = summarise(RunRecord(4, 12, 8, 64, 1.0, (), end_s=5.0))
    assert "cannot tell what limits it (no step was completed in 5 s)" in verdict(summary, "demo")
    assert "n/a" in text_of(*summary_tables(summary))


def test_the_tables_show_every_part_cause_and_lease() -> None:
    summary = summary_of(wait=0.3)
    assert "Leases" not in text_of(*summary_tables(summary))
    summary["borrow"]["train_on_rollout"] |= {
        "count": 3,
        "device_seconds": 120.0,
        "cost_s": 9.0,
        "saved_s": 20.0,
    }
    summary["ledger"]["samples"] |= {"issued": 20480, "dropped": 512, "dropped_by_cause": {"expired": 512}}
    summary["ledger"]["tokens"] |= {"dropped_by_cause": {"expired": 99_000}}
    console = Console(file=io.StringIO(), width=120, color_system=None)
    print_summary(summary, "bidirl", console)
    text = text_of(*summary_tables(summary))
    for word in (
        "update",
        "wait_rollout",
        "20,480",
        "expired",
        "99,000",
        "Leases",
        "20.0 s",
        "1.28x",
        "admission",
    ):
        assert word in text


ROWS: list[dict[str, object]] = [
    {
        "policy.name": policy,
        "policy.staleness": staleness,
        "seed": seed,
        "tokens_per_s": 1000.0 * gain + 10 * staleness + seed,
        "step_time_s.mean": 30.0,
        "idle.rollout": 0.1,
        "idle.train": 0.2,
    }
    for policy, gain in (("no_borrow", 1.0), ("bidirl", 1.5), ("areal", 1.2))
    for staleness in (0, 1, 0.5)
    for seed in range(3)
]
VARIED = ["policy.name", "policy.staleness"]


def test_a_sweep_is_summed_up_in_one_sentence() -> None:
    text = sweep_verdict(ROWS, VARIED)
    assert text.startswith(
        "best of 9 cells: policy=bidirl, staleness=1 with 1,511 tokens/s (mean of 3 seeds)"
    )
    assert "1.51x the slowest (policy=no_borrow, staleness=0)" in text
    assert "Over no_borrow: bidirl 1.49x-1.50x, median 1.50x of 3 cells; areal" in text
    assert "cannot tell" not in text


def test_a_sweep_table_is_pivoted_over_the_policy() -> None:
    text = text_of(sweep_table(ROWS, VARIED))
    assert [word for word in text.split() if word in {"no_borrow", "bidirl", "areal"}] == [
        "no_borrow",
        "bidirl",
        "areal",
    ]
    assert text.count("±") == 9
    single = [row for row in ROWS if row["policy.name"] == "bidirl"]
    assert "100 %" in text_of(sweep_table(single, ["policy.staleness"]))


def test_failed_cells_are_counted_not_averaged() -> None:
    rows: list[dict[str, object]] = [
        *ROWS,
        {"policy.name": "roll", "policy.staleness": 0.5, "seed": 0, "tokens_per_s": ""},
    ]
    assert sweep_verdict(rows, VARIED).endswith("; 1 of 10 cells have no result")
    assert "n/a" in text_of(sweep_table(rows, VARIED))
    assert "cannot tell" in sweep_verdict(rows[-1:], VARIED)


@pytest.mark.parametrize(
    ("values", "doubt"),
    [
        ([(100.0,), (99.0,)], "with one seed: run more seeds"),
        ([(100.0,), (90.0,)], ""),
        ([(100.0, 90.0), (99.0, 89.0)], ""),
        ([(100.0, 99.0), (90.0, 100.0)], "the order changes between seeds"),
    ],
)
def test_close_cells_are_not_called_apart(values: list[tuple[float, ...]], doubt: str) -> None:
    rows = [
        {"partition.rollout_gpus": 4 + cell, "seed": seed, "tokens_per_s": value}
        for cell, seeds in enumerate(values)
        for seed, value in enumerate(seeds)
    ]
    text = sweep_verdict(rows, ["partition.rollout_gpus"])
    assert (doubt in text) if doubt else ("cannot tell" not in text)


def test_compare_shows_the_speed_up_over_the_first() -> None:
    runs = {"no_borrow": summary_of(wait=0.4, tokens_per_s=2000.0), "bidirl": summary_of(wait=0.2)}
    found = Comparison(tuple(runs), (0,), {name: {0: summary} for name, summary in runs.items()})
    assert "1.706x" in text_of(compare_table(found))
    assert compare_verdict(found) == (
        "cannot tell, one seed gives no interval: bidirl has 3,412 tokens/s, 1.706x no_borrow; run more seeds"
    )


def test_flattened_summaries_are_sweep_rows() -> None:
    row = flatten(summary_of(wait=0.3)) | {"policy.name": "bidirl", "seed": 0}
    assert row["idle.by_cause.train.wait_rollout"] == 0.3
    assert "policy=bidirl with 3,412" in sweep_verdict([row], ["policy.name"])


def test_cells_pair_seeds_and_sort_numbers() -> None:
    cells = cells_of(ROWS, VARIED)
    assert values_of(cells, 1) == ["0", "0.5", "1"]
    assert values_of(cells, 0) == ["no_borrow", "bidirl", "areal"]
    gain = ratio(cells["bidirl", "0"], cells["no_borrow", "0"])
    assert gain is not None
    assert gain.num_seeds == 3
    assert gain.low <= gain.mean <= gain.high


def test_unknown_numbers_read_as_such() -> None:
    assert [write(None) for write in (count, percent, seconds, times)] == ["n/a"] * 4
    assert [write(float("nan")) for write in (count, percent, seconds, times)] == ["n/a"] * 4
    assert (count(3412.4), count(0.5), percent(0.123, 1), seconds(1234.5), times(1.5)) == (
        *("3,412", "0.5", "12.3 %"),
        *("1,234.5 s", "1.50x"),
    )
