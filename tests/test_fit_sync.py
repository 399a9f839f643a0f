import csv
import json
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.errors import InputError
from bidirl.models.architecture import from_catalogue
from bidirl.models.estimate import Source
from bidirl.models.fit.sync import SyncRow, fit_sync, fitted_from_mapping, leave_one_out, screen_sync

C56 = ((30.5e9, 15.76, 4.38), (235e9, 58.57, 23.7), (7.6e9, 0.12, 0.02))
"""Parameters, seconds without and with the checkpoint engine. Source: verl docs/advance/fully_async.md."""


def c56_rows() -> list[SyncRow]:
    return [
        SyncRow(f"{params / 1e9:g}B {arm}", 2.0 * params, 400, 50e9, seconds)
        for params, off, on in C56
        for arm, seconds in (("off", off), ("on", on))
    ]


def packaged() -> list[SyncRow]:
    text = files("bidirl.models").joinpath("data/weight_sync.csv").read_text("utf-8")
    rows = []
    for row in csv.DictReader(text.splitlines()):
        if row["used"] == "yes":
            shape, link = from_catalogue(row["model"]), float(row["link_gb_per_s"]) * 1e9
            rows.append(
                SyncRow(row["model"], shape.weight_bytes(), shape.num_tensors, link, float(row["time_s"]))
            )
    return rows


def test_c56_the_7b_rows_are_refused_by_name() -> None:
    kept, refused = screen_sync(c56_rows())
    rates = [round(row.bytes_per_s / 1e9, 1) for row in kept]
    assert rates == [3.9, 13.9, 8.0, 19.8]
    assert [r.name for r in refused] == ["7.6B off", "7.6B on"]
    assert "row '7.6B off'" in refused[0].reason
    assert "127 GB/s" in refused[0].reason
    assert "760 GB/s" in refused[1].reason
    fitted = fit_sync(c56_rows())
    assert fitted.num_rows == 4
    assert fitted.refused == refused


def test_only_impossible_rows_are_an_error_that_names_the_first() -> None:
    with pytest.raises(InputError, match="row 'fast'"):
        fit_sync([SyncRow("fast", 15e9, 300, 50e9, 0.02)])
    with pytest.raises(InputError, match="0 rows"):
        fit_sync([])
    with pytest.raises(InputError, match="needs two or more"):
        leave_one_out([SyncRow("one", 15e9, 300, 50e9, 6.0)])


def test_known_terms_are_recovered() -> None:
    rows = [
        SyncRow(f"{n}", size * 1e9, n, 25e9, 2.0 + size * 1e9 / (0.5 * 25e9) + 3e-3 * n)
        for size, n in ((2, 200), (16, 400), (60, 18000), (140, 700), (470, 36000), (8, 9000))
    ]
    fitted = fit_sync(rows)
    for row in rows:
        where = (row.num_bytes, row.num_tensors, row.link_bytes_per_s)
        assert fitted.seconds(*where).value == pytest.approx(row.seconds, rel=0.05)
    assert fitted.seconds(100e9, 1000, 25e9).value == pytest.approx(2.0 + 8.0 + 3.0, rel=0.1)


@given(
    st.lists(
        st.tuples(st.floats(1e9, 1e12), st.integers(1, 40000), st.floats(0.1, 500.0)), min_size=1, max_size=6
    )
)
def test_terms_are_never_negative(shown: list[tuple[float, int, float]]) -> None:
    rows = [SyncRow(str(i), size, n, 1e15, seconds) for i, (size, n, seconds) in enumerate(shown)]
    fitted = fit_sync(rows)
    assert min(fitted.multipliers) >= 0.0
    estimate = fitted.seconds(20e9, 400, 50e9, 16)
    assert 0.0 < estimate.low <= estimate.value <= estimate.high


def test_the_model_and_its_sources_agree_with_the_fit() -> None:
    fitted = fit_sync(packaged())
    shape = from_catalogue("Qwen3-8B")
    model, sources = fitted.sync_model(shape.weight_bytes(), shape.num_tensors, 50e9)
    asked = fitted.seconds(shape.weight_bytes(), shape.num_tensors, 50e9, 16)
    assert model.seconds(16) == pytest.approx(asked.value)
    assert sources["sync.fixed_s"].source is Source.FITTED
    assert all(e.low <= e.value <= e.high for e in sources.values())
    assert fitted.seconds(2e12, 400, 50e9).extrapolated


def test_json_round_trip() -> None:
    fitted = fit_sync(c56_rows())
    assert fitted_from_mapping(json.loads(json.dumps(fitted.to_mapping()))) == fitted
    with pytest.raises(InputError, match="give what to_mapping wrote"):
        fitted_from_mapping({})


def test_leave_one_out_of_the_public_nccl_rows() -> None:
    errors = sorted(
        abs(e.value / row.seconds - 1.0)
        for row, e in leave_one_out(packaged(), (1.0, 0.3, 0.4, 1.0, 1.0), 3.0)
    )
    assert errors[len(errors) // 2] < 0.25
