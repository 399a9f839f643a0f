import csv
import json
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.errors import InputError
from bidirl.models.estimate import Source
from bidirl.models.fit.switch import (
    OPERATIONS,
    SwitchRow,
    choose_sleep_level,
    fit_switch,
    fitted_from_mapping,
    leave_one_out,
    screen_switch,
)

SMALL, LARGE = 1.192e9, 16.381e9


def c61_rows() -> list[SwitchRow]:
    return [
        SwitchRow(f"{name} {operation}", operation, size, seconds)
        for name, size, times in (
            ("0.6B", SMALL, (0.22, 1.22, 0.12, 1.80)),
            ("8B", LARGE, (10.57, 2.19, 0.31, 6.53)),
        )
        for operation, seconds in zip(("sleep_1_s", "wake_1_s", "sleep_2_s", "wake_2_s"), times, strict=True)
    ]


def test_c61_each_size_takes_the_level_with_the_smaller_sum() -> None:
    fitted = fit_switch(c61_rows())
    large, small = choose_sleep_level(fitted, LARGE), choose_sleep_level(fitted, SMALL)
    assert large.level == 2
    assert large.reason == "6.84 s against 12.76 s"
    assert small.level == 1
    assert small.reason == "1.44 s against 1.92 s"


def test_c61_from_the_8b_alone() -> None:
    fitted = fit_switch(c61_rows()[4:])
    assert choose_sleep_level(fitted, LARGE).level == 2


def test_level_1_needs_host_memory() -> None:
    fitted = fit_switch(c61_rows())
    choice = choose_sleep_level(fitted, SMALL, host_free_bytes=1e9)
    assert choice.level == 2
    assert "1.2 GB of host memory" in choice.reason


def test_a_measured_size_stays_measured_and_others_follow_the_line() -> None:
    fitted = fit_switch(c61_rows())
    assert fitted.seconds("wake_2_s", LARGE).value == pytest.approx(6.53)
    assert fitted.seconds("wake_2_s", LARGE).source is Source.MEASURED
    between = fitted.seconds("wake_2_s", 8e9)
    assert between.source is Source.FITTED
    assert 1.80 < between.value < 6.53
    assert fitted.seconds("wake_2_s", 100e9).extrapolated
    assert fitted.seconds("grad_s", 8e9).source is Source.TRANSFERRED


def test_impossible_and_unknown_rows_are_refused_by_name() -> None:
    rows = [
        SwitchRow("too fast", "wake_1_s", LARGE, 0.02),
        SwitchRow("no time", "grad_s", LARGE, 0.0),
        SwitchRow("other", "nap_s", LARGE, 1.0),
        SwitchRow("discards", "sleep_2_s", LARGE, 1e-3),
    ]
    kept, refused = screen_switch(rows)
    assert [row.name for row in kept] == ["discards"]
    assert "row 'too fast': wake_1_s of 16.4 GB in 0.02 s is 819 GB/s: at most 64 GB/s" in refused[0].reason
    assert len(refused) == 3
    with pytest.raises(InputError, match="row 'too fast'"):
        fit_switch(rows[:1])
    with pytest.raises(InputError, match="0 rows"):
        fit_switch([])
    with pytest.raises(InputError, match="'nap_s' is unknown"):
        fit_switch(kept).seconds("nap_s", LARGE)
    with pytest.raises(InputError, match="needs two or more"):
        leave_one_out(kept)


@given(
    st.sampled_from(OPERATIONS),
    st.lists(st.tuples(st.floats(1e8, 1e11), st.floats(2.0, 100.0)), min_size=1, max_size=5),
)
def test_lines_are_never_negative(operation: str, shown: list[tuple[float, float]]) -> None:
    fitted = fit_switch([SwitchRow(str(i), operation, size, s) for i, (size, s) in enumerate(shown)])
    assert min(fitted.lines[operation]) >= 0.0
    estimate = fitted.seconds(operation, 5e9)
    assert 0.0 < estimate.low <= estimate.value <= estimate.high


def test_a_line_of_many_sizes_is_recovered() -> None:
    rows = [SwitchRow(str(n), "grad_s", n * 1e9, 0.4 + 0.2 * n) for n in (1, 3, 8, 20, 50)]
    fitted = fit_switch(rows)
    assert fitted.lines["grad_s"] == pytest.approx((0.4, 0.2e-9), rel=0.05)


def test_costs_of_a_job_carry_their_sources() -> None:
    costs, sources = fit_switch(c61_rows()).switch_costs(8e9, LARGE)
    assert costs.time_share_out_s == pytest.approx(0.31)
    assert costs.broadcast_s == costs.grad_s
    assert set(sources) == {f"switch.{name}" for name in costs.__slots__}


def test_json_round_trip() -> None:
    fitted = fit_switch([*c61_rows(), SwitchRow("too fast", "wake_1_s", LARGE, 0.02)])
    assert fitted_from_mapping(json.loads(json.dumps(fitted.to_mapping()))) == fitted
    with pytest.raises(InputError, match="give what to_mapping wrote"):
        fitted_from_mapping({"kind": "fitted-switch"})


def test_the_papers_rows_predict_each_other() -> None:
    text = files("bidirl.models").joinpath("data/switch_costs.csv").read_text("utf-8")
    rows = [
        SwitchRow(row["model"], row["operation"], float(row["weight_gb"]) * 1e9, float(row["time_s"]))
        for row in csv.DictReader(text.splitlines())
        if row["system"] == "BiDiRL"
    ]
    generic = dict.fromkeys(OPERATIONS, (1.0, 0.4e-9))
    errors = sorted(abs(e.value / row.seconds - 1.0) for row, e in leave_one_out(rows, generic))
    assert len(errors) == 10
    assert errors[5] < 0.30
