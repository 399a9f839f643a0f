"""Fit on the first steps, predict the rest: synthetic runs, and the public ones where they are at hand."""

import os
from pathlib import Path

import numpy as np
import pytest

from bidirl.errors import InputError
from bidirl.models.fit.holdout import hold_out
from bidirl.planner.calibration.report import holdout_json, pooled
from bidirl.traces.logs import read_logs
from bidirl.traces.step_log import Mode, StepLog

DATA = Path(os.environ.get("BIDIRL_DATA", Path(__file__).parents[2] / "shared" / "data"))
STEP_LOGS = DATA / "published" / "verl_step_logs.csv"
MAIN = ("generation_s", "old_logprob_s", "reference_s", "update_s")


def run(seed: int, *, packed: bool = True, num: int = 120) -> StepLog:
    """Return a run whose responses shorten from 300 to 200 tokens."""
    rng = np.random.default_rng(seed)
    mean = 200.0 + 100.0 * np.exp(-np.arange(num) / 12.0) + rng.normal(0.0, 4.0, num)
    longest, prompt = rng.uniform(500.0, 1024.0, num), rng.normal(90.0, 1.0, num)
    work = 1.0 + 0.02 * (mean + prompt) if packed else np.full(num, 7.0)
    columns = {
        "response_mean_tokens": mean,
        "response_max_tokens": longest,
        "prompt_mean_tokens": prompt,
        "generation_s": (0.05 * mean + 0.015 * longest) * np.exp(0.02 * rng.normal(size=num)),
        "update_s": work * np.exp(0.015 * rng.normal(size=num)),
        "testing_s": rng.uniform(10.0, 90.0, num),
    }
    return StepLog("test", Mode.COLOCATED, "a step", columns, source=f"run {seed}")


def test_drifting_lengths_are_followed_better_than_by_both_baselines() -> None:
    for seed in range(4):
        for held in hold_out(run(seed), 30).values():
            figures = held.to_json()
            assert figures["median_error"] < 0.03
            assert figures["median_error"] < min(figures["baseline_mean"], figures["baseline_last"])


def test_padded_batches_lose_nothing_to_the_mean() -> None:
    for seed in range(4):
        figures = hold_out(run(seed, packed=False), 30)["update_s"].to_json()
        assert figures["median_error"] < figures["baseline_mean"] + 0.005


def test_later_times_are_never_read() -> None:
    log = run(1)
    later = log.column("update_s").copy()
    later[30:] *= 10.0
    other = StepLog("test", log.mode, "a step", {**log.columns, "update_s": later}, source=log.source)
    one, ten = hold_out(log, 30)["update_s"], hold_out(other, 30)["update_s"]
    assert one.fitted == ten.fitted


def test_validation_is_no_stage_and_absent_stages_are_left_out() -> None:
    assert set(hold_out(run(2), 30)) == {"generation_s", "update_s"}


@pytest.mark.parametrize("num_first", [-1, 0, 120, 500])
def test_an_impossible_split_is_refused(num_first: int) -> None:
    with pytest.raises(InputError, match="--holdout-after") as caught:
        hold_out(run(0), num_first)
    assert "\n" not in str(caught.value)


def test_json_is_the_contract_for_one_run_and_adds_runs_for_several() -> None:
    runs = [hold_out(run(0), 30), hold_out(run(1), 30)]
    one = holdout_json(["a"], runs[:1])
    assert set(one) == {"holdout"}
    assert set(one["holdout"]["update_s"]) == {
        "median_error",
        "p90_error",
        "coverage",
        "baseline_mean",
        "baseline_last",
    }
    both = holdout_json(["a", "b"], runs)
    assert set(both["runs"]) == {"a", "b"}
    assert pooled(runs)["update_s"].num_steps == 180
    assert both["runs"]["a"] == one["holdout"]


@pytest.mark.skipif(not STEP_LOGS.exists(), reason="the public data are not here: set BIDIRL_DATA")
def test_public_runs_meet_their_targets() -> None:
    runs = [hold_out(log, 30) for log in read_logs([STEP_LOGS])]
    assert len(runs) >= 3
    covered = []
    for held in (each for found in runs for stage, each in found.items() if stage in MAIN):
        figures = held.to_json()
        assert figures["median_error"] <= 0.05
        assert figures["p90_error"] <= 0.12
        covered.append(figures["coverage"])
    assert min(covered) >= 0.84
    assert 0.85 <= np.mean(covered) <= 0.95
