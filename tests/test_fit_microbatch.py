import importlib
import json
from math import exp, log
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.errors import InputError
from bidirl.models import catalogue
from bidirl.models.architecture import from_catalogue
from bidirl.models.estimate import Source
from bidirl.models.fit.microbatch import (
    MicroBatch,
    MicroBatchRow,
    Weights,
    fit_microbatch,
    fitted_from_mapping,
    leave_out,
)

tables: Any = importlib.import_module("benchmarks.fit_tables")
PUBLIC = tables.DATA / "published" / "prime_rl_trainer_bench.csv"
needs_data = pytest.mark.skipif(not PUBLIC.is_file(), reason=f"no {PUBLIC}: set BIDIRL_DATA to its folder")
H100, H200 = catalogue.gpu("H100 SXM"), catalogue.gpu("H200")
SMALL, LARGE = from_catalogue("Qwen3-4B"), from_catalogue("Qwen3-8B")


def row(tokens: int, e_lin: float, e_pair: float, weights: Weights = "adapter", **more: Any) -> MicroBatchRow:
    run = MicroBatch(more.get("device", H100), more.get("model", SMALL), 8, tokens, weights)
    host = 0.6e-9 * run.host_params
    return MicroBatchRow(run, run.linear_s / e_lin + run.pair_s / e_pair + host + 0.05)


def test_utilisations_are_recovered() -> None:
    rows = [row(n, 0.3, 0.6) for n in (2048, 8192, 16384, 32768, 65536)]
    rows += [row(n, 0.3, 0.6, "all_host_optimizer") for n in (8192, 65536)]
    fitted = fit_microbatch(rows)
    e_lin, e_pair = fitted.utilisation(("H100 SXM", "Qwen3-4B"))
    assert e_lin == pytest.approx(0.3, rel=0.03)
    assert e_pair == pytest.approx(0.6, rel=0.03)
    assert fitted.shared["host_s_per_param"] == pytest.approx(0.6e-9, rel=0.05)
    asked = row(49152, 0.3, 0.6)
    assert fitted.seconds(asked.run).value == pytest.approx(asked.seconds, rel=0.02)


def test_a_group_without_rows_takes_the_means_and_says_so() -> None:
    fitted = fit_microbatch([row(n, 0.3, 0.6) for n in (8192, 65536)])
    other = MicroBatch(H200, LARGE, 8, 16384, "adapter")
    estimate = fitted.seconds(other)
    own = fitted.seconds(MicroBatch(H100, SMALL, 8, 16384, "adapter"))
    assert estimate.source is Source.TRANSFERRED
    assert own.source is Source.FITTED
    assert log(estimate.high / estimate.low) > log(own.high / own.low)
    with pytest.raises(InputError, match="was not fitted"):
        fitted.utilisation(other.group)


@given(
    st.lists(st.tuples(st.sampled_from([4096, 16384, 65536]), st.floats(0.05, 0.7)), min_size=1, max_size=5)
)
def test_estimates_are_positive_and_grow_with_length(shown: list[tuple[int, float]]) -> None:
    fitted = fit_microbatch([row(n, e, e) for n, e in shown])
    times = [fitted.seconds(MicroBatch(H100, SMALL, 8, n, "all")) for n in (4096, 16384, 65536)]
    assert times[0].value < times[1].value < times[2].value
    assert all(0.0 < e.low <= e.value <= e.high for e in times)


def test_a_time_that_beats_the_peak_is_refused() -> None:
    run = MicroBatch(H100, SMALL, 8, 65536, "all")
    with pytest.raises(InputError, match="the timer missed work"):
        MicroBatchRow(run, 0.5 * (run.linear_s + run.pair_s))
    with pytest.raises(InputError, match="0 rows"):
        fit_microbatch([])


def test_the_trainer_takes_the_fit() -> None:
    fitted = fit_microbatch([row(n, 0.3, 0.6) for n in (2048, 8192, 16384, 32768, 65536)])
    segment, pair_tokens = fitted.update_segment(H100, SMALL)
    run = MicroBatch(H100, SMALL, 1, 32768, "all")
    work = 32768 + pair_tokens * 32768**2 / 2
    assert segment.compute_s(work) == pytest.approx(fitted.seconds(run).value, rel=0.01)


def test_json_round_trip_and_flags() -> None:
    fitted = fit_microbatch([row(n, 0.3, 0.6) for n in (8192, 65536)])
    assert fitted_from_mapping(json.loads(json.dumps(fitted.to_mapping()))) == fitted
    assert fitted.seconds(MicroBatch(H100, SMALL, 8, 1024, "all")).extrapolated
    with pytest.raises(InputError, match="give what to_mapping wrote"):
        fitted_from_mapping({"kind": "fitted-microbatch"})


@needs_data
def test_left_out_public_rows_are_predicted() -> None:
    rows = tables.trainer_rows(PUBLIC)
    groups = [r.run.group for r in rows]
    predicted = [(r, e) for r, e in leave_out(rows, id) if groups.count(r.run.group) > 1]
    errors = sorted(abs(e.value / r.seconds - 1.0) for r, e in predicted)
    assert len(errors) >= 30
    assert errors[len(errors) // 2] < 0.06
    assert exp(abs(log(max(e.value / r.seconds for r, e in predicted)))) < 3.0
