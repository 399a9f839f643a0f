"""The public re-implementation: the committed scan, the example and the semantics behind them."""

from dataclasses import replace
from pathlib import Path

import pytest

from bidirl.planner.build import build_plan, build_workload
from bidirl.planner.job import load_job
from bidirl.planner.policy import AdmissionRule
from bidirl.sim.reality.rfc import REGIMES, RULES, believed, keeps_out, rival, scanned
from bidirl.sim.reality.rfc_example import MODELS_FILE, example_toml
from bidirl.sim.reality.rfc_fit import FIT_TOLERANCE, draw_sets, fit, load_scan, write_scan
from bidirl.sim.reality.rfc_job import (
    POLICIES,
    STALENESS,
    measured_rates,
    rfc_models,
    rfc_plan,
    rfc_summary,
)
from bidirl.sim.reality.table import RealityRow, RealityTable

EXAMPLES = Path(__file__).parents[1] / "examples"
STALE = "the scan is stale: run python -m bidirl.sim.reality.rfc_fit, then ...rfc_example examples"


def test_the_published_rates_are_carried_over() -> None:
    rates = measured_rates()
    assert len(rates) == 9
    assert rates["no_borrow", "0"] == 2702.4
    assert rates["bidirl", "4"] == 4858.6


def test_every_scanned_set_fits_the_two_rows_and_only_they_were_fitted() -> None:
    rows = load_scan()
    assert {row.found.regime for row in rows} == set(REGIMES)
    for row in rows:
        if row.fits:
            assert abs(row.error("no_borrow", "0")) <= FIT_TOLERANCE
            assert abs(row.error("no_borrow", "4")) <= FIT_TOLERANCE
    for rule in RULES:
        for regime in REGIMES:
            assert len(scanned(rule, regime)) >= 10


def test_the_scan_survives_its_file() -> None:
    text = write_scan(list(load_scan()))
    assert text.count("\n") == len(load_scan()) + 1


@pytest.mark.parametrize(
    "cell", [("no_borrow", "1"), ("opportunistic", "1"), ("bidirl", "0"), ("bidirl", "4")]
)
def test_the_believed_set_still_gives_what_the_scan_says(cell: tuple[str, str]) -> None:
    best = believed()
    rate = rfc_summary(best.found.chosen, *cell, best.admission)["tokens_per_s"]
    assert rate == pytest.approx(best.rates[cell], rel=5e-3), STALE


def test_a_draw_is_fitted_again() -> None:
    best = believed()
    again = next(fit(best.found.draw, draw_sets()[best.found.draw]))
    known = next(row for row in scanned(RULES[0], again.regime) if row.found.draw == again.draw)
    assert again.regime == "trainer-bound"
    assert again.chosen.rollout_factor == pytest.approx(known.found.chosen.rollout_factor, rel=0.02), STALE


def test_a_budget_renewed_at_sync_is_the_counting_rule_where_nothing_is_dropped() -> None:
    chosen = rival().found.chosen
    rates = {
        rule: rfc_summary(chosen, "bidirl", "1", rule)["tokens_per_s"]
        for rule in (AdmissionRule.COUNTING, AdmissionRule.BUDGET_AT_SYNC)
    }
    assert len(set(rates.values())) == 1


def test_counting_twice_holds_one_batch_of_run_ahead_back() -> None:
    for regime in REGIMES:
        once, twice = (scanned(rule, regime)[0] for rule in RULES)
        assert twice.rates["no_borrow", "1"] < once.rates["no_borrow", "1"]


def test_shares_are_shares() -> None:
    rows = scanned(RULES[1], REGIMES[1])
    for policy in POLICIES:
        assert 0.0 <= keeps_out(rows, policy) <= 1.0


def test_the_example_is_the_believed_set() -> None:
    best = believed()
    assert (EXAMPLES / "rfc_4r12t.toml").read_text(encoding="utf-8") == example_toml(), STALE
    job = load_job(EXAMPLES / "rfc_4r12t.toml")
    plan = build_plan(job, build_workload(job, 0))
    assert plan.models == rfc_models(best.found.chosen), STALE
    ours, _ = rfc_plan(best.found.chosen, "bidirl", "1", best.admission)
    assert replace(plan, num_steps=ours.num_steps, group_slots=ours.group_slots, notes=ours.notes) == ours
    assert (EXAMPLES / MODELS_FILE).is_file()


def test_a_table_prints_rows_that_miss() -> None:
    rows = (
        RealityRow("fitted", 100.0, 101.0, used_for_fit=True),
        RealityRow("missed", 100.0, 50.0, 40.0, 60.0, note="why|so"),
        RealityRow("unknown", None, 3.0),
    )
    table = RealityTable("Title", "tokens/s", rows, (), text="text")
    text = table.to_markdown()
    assert "-50.0%" in text
    assert "40.00 to 60.00" in text
    assert "why\\|so" in text
    assert table.num_fitted == 1
    assert table.worst_error(used_for_fit=False) == 0.5
    assert len(STALENESS) == 3
