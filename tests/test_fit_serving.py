import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.errors import InputError
from bidirl.models import catalogue
from bidirl.models.architecture import from_catalogue
from bidirl.models.estimate import Source
from bidirl.models.fit.serving import (
    COEFFICIENTS,
    ServingIteration,
    ServingPoint,
    ServingPrior,
    fit_serving,
    fitted_from_mapping,
    leave_one_out,
    serving_prior,
)
from bidirl.models.roofline import Links

tables: Any = importlib.import_module("benchmarks.fit_tables")
points_page: Any = importlib.import_module("benchmarks.fit_points")
PUBLIC = tables.DATA / "profiles" / "aic_silicon_serving_points.csv"
needs_data = pytest.mark.skipif(not PUBLIC.is_file(), reason=f"no {PUBLIC}: set BIDIRL_DATA to its folder")

DENSE = ServingPrior(8e-3, 0.0, 4e-5, 5e-8, 3e-5, share=0.0, pair_tokens=1e-4)
EXPERTS = replace(DENSE, experts_s=6e-3, share=8 / 128)
TRUE_DENSE = (9e-3, 0.0, 6e-5, 3e-8, 4e-5, 0.0)
TRUE_EXPERTS = (7e-3, 5e-3, 6e-5, 3e-8, 4e-5, 1e-3)


def line(values: tuple[float, ...], prior: ServingPrior) -> Callable[[float, float, float], float]:
    """Return the closed form, written again."""

    def seconds(b: float, isl: float, osl: float) -> float:
        tau, experts, token, context, prefill, root = values
        work = isl + prior.pair_tokens * isl * isl / 2
        touched = float(1 - (1 - prior.share) ** b)
        return (
            tau + experts * touched + token * b + context * b * (isl + osl / 2) + prefill * b / osl * work
            + root * sqrt(b)
        )  # fmt: skip

    return seconds


def made(values: tuple[float, ...], prior: ServingPrior) -> list[ServingPoint]:
    seconds = line(values, prior)
    shapes = [(1024.0, 1024.0), (1024.0, 8192.0), (8192.0, 1024.0)]
    return [ServingPoint(b, i, o, seconds(b, i, o)) for i, o in shapes for b in (4.0, 16.0, 64.0, 256.0)]


@pytest.mark.parametrize(("values", "prior"), [(TRUE_DENSE, DENSE), (TRUE_EXPERTS, EXPERTS)])
def test_noiseless_points_are_recovered(values: tuple[float, ...], prior: ServingPrior) -> None:
    fitted = fit_serving(made(values, prior), prior)
    seconds = line(values, prior)
    for shape in [(32.0, 1024.0, 1024.0), (128.0, 8192.0, 1024.0), (8.0, 2048.0, 2048.0)]:
        assert fitted.tpot_s(*shape).value == pytest.approx(seconds(*shape), rel=0.01)
    assert fitted.values[0] == pytest.approx(values[0], rel=0.25)
    assert fitted.residual_median < 0.01
    assert fitted.tpot_s(32.0, 1024.0, 1024.0).source is Source.FITTED


@given(
    st.lists(
        st.tuples(
            st.sampled_from([1.0, 4.0, 16.0, 64.0, 512.0]),
            st.sampled_from([128.0, 1024.0, 8192.0]),
            st.sampled_from([128.0, 1024.0]),
            st.floats(1e-3, 1.0),
        ),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([DENSE, EXPERTS]),
)
def test_coefficients_and_predictions_are_never_negative(
    rows: list[tuple[float, float, float, float]], prior: ServingPrior
) -> None:
    fitted = fit_serving([ServingPoint(*row) for row in rows], prior)
    assert all(value >= 0.0 for value in fitted.values)
    assert all(e.low >= 0.0 for e in fitted.coefficients.values())
    estimate = fitted.tpot_s(32.0, 1024.0, 512.0)
    assert 0.0 < estimate.low <= estimate.value <= estimate.high


def test_one_outlier_moves_little() -> None:
    points = made(TRUE_DENSE, DENSE)
    points[5] = replace(points[5], tpot_s=2.5 * points[5].tpot_s)
    fitted = fit_serving(points, DENSE)
    shape = (64.0, 8192.0, 1024.0)
    assert fitted.tpot_s(*shape).value == pytest.approx(line(TRUE_DENSE, DENSE)(*shape), rel=0.05)


def test_two_points_move_the_scale_and_say_transferred() -> None:
    half = tuple(0.5 * v for v in TRUE_DENSE)
    seconds = line(half, DENSE)
    shown = [ServingPoint(b, 1024.0, 1024.0, seconds(b, 1024.0, 1024.0)) for b in (4.0, 64.0)]
    fitted = fit_serving(shown, DENSE)
    estimate = fitted.tpot_s(16.0, 1024.0, 1024.0)
    assert fitted.few
    assert estimate.source is Source.TRANSFERRED
    assert estimate.value == pytest.approx(seconds(16.0, 1024.0, 1024.0), rel=0.15)


def test_disaggregated_decode_pays_no_prefill() -> None:
    fitted = fit_serving(made(TRUE_DENSE, DENSE), DENSE, "disagg")
    assert fitted.values[COEFFICIENTS.index("prefill_token_s")] == 0.0


def test_campaigns_share_an_offset() -> None:
    points = [replace(p, campaign="a") for p in made(TRUE_DENSE, DENSE)]
    points += [replace(p, campaign="b", num_seqs=2 * p.num_seqs, tpot_s=1.2 * line(TRUE_DENSE, DENSE)(
        2 * p.num_seqs, p.isl_tokens, p.osl_tokens)) for p in points]  # fmt: skip
    fitted = fit_serving(points, DENSE)
    shape = (24.0, 1024.0, 1024.0)
    assert fitted.tpot_s(*shape, campaign="b").value > 1.05 * fitted.tpot_s(*shape, campaign="a").value


def test_far_conditions_are_flagged() -> None:
    fitted = fit_serving(made(TRUE_DENSE, DENSE), DENSE)
    assert not fitted.tpot_s(64.0, 1024.0, 1024.0).extrapolated
    far = fitted.tpot_s(4096.0, 1024.0, 1024.0)
    assert far.extrapolated
    assert "num_seqs = 4096" in far.note


def test_json_round_trip_and_hash() -> None:
    points = made(TRUE_EXPERTS, EXPERTS)
    fitted = fit_serving(points, EXPERTS)
    assert fitted_from_mapping(json.loads(json.dumps(fitted.to_mapping()))) == fitted
    assert fit_serving(points[::-1], EXPERTS).data_hash == fitted.data_hash
    assert fit_serving(points[1:], EXPERTS).data_hash != fitted.data_hash
    with pytest.raises(InputError, match="give what to_mapping wrote"):
        fitted_from_mapping({"kind": "other"})


def test_bad_points_are_refused_in_one_line() -> None:
    with pytest.raises(InputError, match="tpot_s = 0"):
        ServingPoint(1.0, 1.0, 1.0, 0.0)
    with pytest.raises(InputError, match="0 points"):
        fit_serving([], DENSE)
    with pytest.raises(InputError, match="one condition"):
        leave_one_out([ServingPoint(1.0, 1.0, 1.0, 1.0)], DENSE)


def test_the_physical_layer_is_an_iteration_model() -> None:
    iteration = ServingIteration(TRUE_EXPERTS, EXPERTS.share, EXPERTS.pair_tokens)
    base_s, context_s = iteration.decode(16)
    context = 16 * (1024 + 512)
    assert iteration.mixed(0, 0.0, 16, context, 16) == pytest.approx(base_s + context_s * context)
    assert iteration.mixed(512, 1000.0, 16, context, 16) > base_s + context_s * context
    fitted = fit_serving(made(TRUE_EXPERTS, EXPERTS), EXPERTS)
    assert fitted.iteration().decode(16)[0] > 0.0


def test_the_prior_is_the_roofline() -> None:
    device, model = catalogue.gpu("H100 SXM"), from_catalogue("Qwen3-235B-A22B")
    prior = serving_prior(device, model, 8, Links(device.peer_bytes_per_s(8), 1e12, 8), 1.0)
    assert prior.share == 8 / 128
    assert prior.vector()[1] > 0.0
    assert len(prior.vector()) == len(COEFFICIENTS)


@needs_data
def test_repeats_are_one_measurement_and_twice_named_gpus_are_joined() -> None:
    raw = tables.serving_rows(PUBLIC)
    rows = tables.distinct(raw)
    assert 0 < len(raw) - len(rows) < 0.25 * len(raw)
    named_twice = (rows.gpus == rows.moe_tp * rows.moe_ep) & (rows.moe_tp == rows.moe_ep) & (rows.moe_tp > 1)
    assert not named_twice.any()


@needs_data
def test_left_out_public_points_are_predicted() -> None:
    groups = tables.groups_of(tables.distinct(tables.serving_rows(PUBLIC)), "agg", tables.MIN_CONDITIONS)
    frame = points_page.loo_frame(groups[::4], "agg")
    error = points_page.errors(frame)
    assert len(frame) > 200
    assert error.median() < 0.04
    assert error.mean() < 0.09
    assert 0.8 < frame.inside.mean() < 0.97
    assert np.isfinite(error).all()


@needs_data
def test_two_points_and_other_models_predict_a_group() -> None:
    groups = tables.groups_of(tables.distinct(tables.serving_rows(PUBLIC)), "agg", tables.MIN_CONDITIONS)
    frame = points_page.two_point_frame(groups, "ends")
    assert points_page.errors(frame).median() < 0.10
