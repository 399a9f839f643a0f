"""Fits of stages: recovery, coverage, what the prior decides and what the data, words, JSON."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bidirl.errors import InputError
from bidirl.models.estimate import Source
from bidirl.models.fit.fitted import FittedStage
from bidirl.models.fit.fitting import PriorTime, fit_log, fit_stage
from bidirl.models.fit.regression import fit_map, noise_scale
from bidirl.traces.step_log import Mode, StepLog

Column = NDArray[np.float64]


def log_of(**columns: Column) -> StepLog:
    return StepLog("test", Mode.COLOCATED, "a step", columns, source="test log")


def lengths(
    rng: np.random.Generator, num: int, mean: float = 200.0, spread: float = 30.0
) -> dict[str, Column]:
    return {
        "response_mean_tokens": rng.normal(mean, spread, num),
        "response_max_tokens": rng.uniform(500.0, 1000.0, num),
        "prompt_mean_tokens": rng.normal(90.0, 2.0, num),
    }


def packed_run(rng: np.random.Generator, num: int, noise: float, **given: float) -> StepLog:
    base = lengths(rng, num, **given)
    tokens = base["response_mean_tokens"] + base["prompt_mean_tokens"]
    return log_of(**base, update_s=(1.0 + 0.02 * tokens) * np.exp(noise * rng.normal(size=num)))


def test_noiseless_times_are_recovered_exactly() -> None:
    rng = np.random.default_rng(0)
    base = lengths(rng, 60)
    tokens = base["response_mean_tokens"] + base["prompt_mean_tokens"]
    log = log_of(
        **base,
        update_s=1.0 + 0.02 * tokens,
        generation_s=0.5 + 0.05 * base["response_mean_tokens"] + 0.012 * base["response_max_tokens"],
    )
    fits = fit_log(log)
    update, generation = fits["update_s"].coefficients(), fits["generation_s"].coefficients()
    assert update["sequence_mean_tokens"].value == pytest.approx(0.02, rel=1e-3)
    assert update["fixed"].value == pytest.approx(1.0, rel=1e-2)
    assert generation["response_mean_tokens"].value == pytest.approx(0.05, rel=1e-3)
    assert generation["response_max_tokens"].value == pytest.approx(0.012, rel=1e-3)
    assert all(found.source is Source.FITTED for found in update.values())
    assert fits["update_s"].predict(log.columns).value_s == pytest.approx(log.column("update_s"), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "times"),
    [
        ("constant", lambda c: np.full(60, 8.0)),
        ("packed", lambda c: 0.03 * (c["response_mean_tokens"] + c["prompt_mean_tokens"])),
        ("padded to the longest", lambda c: 0.01 * (c["response_max_tokens"] + c["prompt_mean_tokens"])),
    ],
)
def test_the_way_of_batching_is_found(name: str, times: object) -> None:
    rng = np.random.default_rng(1)
    base = lengths(rng, 60)
    assert callable(times)
    noisy = times(base) * np.exp(0.01 * rng.normal(size=60))
    fitted = fit_stage(log_of(**base, reference_s=noisy), "reference_s")
    assert fitted.form.name == name
    assert fitted.form.weight > 0.95


def test_intervals_cover_what_they_say() -> None:
    inside = []
    for seed in range(16):
        log = packed_run(np.random.default_rng(seed), 100, 0.02)
        at = fit_stage(log.rows(slice(0, 30)), "update_s").predict(log.rows(slice(30, None)).columns)
        times = log.column("update_s")[30:]
        inside.append(float(np.mean((at.low_s <= times) & (times <= at.high_s))))
    assert 0.87 <= np.mean(inside) <= 0.96


def test_coverage_holds_outside_the_range_too() -> None:
    inside = []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        early, late = packed_run(rng, 30, 0.02), packed_run(rng, 30, 0.02, mean=320.0)
        at = fit_stage(early, "update_s").predict(late.columns)
        times = late.column("update_s")
        inside.append(float(np.mean((at.low_s <= times) & (times <= at.high_s))))
    assert np.mean(inside) >= 0.85


def test_three_steps_move_the_scale_and_keep_the_shape_of_the_prior() -> None:
    log = packed_run(np.random.default_rng(2), 3, 0.01, spread=3.0)
    tenfold = replace(log, columns={**log.columns, "update_s": 10.0 * log.column("update_s")})
    prior = PriorTime(value_s=6.0, log_sd=0.4)
    one, ten = fit_stage(log, "update_s", prior), fit_stage(tenfold, "update_s", prior)
    assert one.typical().value == pytest.approx(np.median(log.column("update_s")), rel=0.03)
    assert ten.typical().value == pytest.approx(10.0 * np.median(log.column("update_s")), rel=0.05)
    packed = next(form for form in one.forms if form.name == "packed")
    assert packed.shares[1] / sum(packed.shares) == pytest.approx(0.9, abs=0.1)
    assert any("the prior's" in line for line in one.statements)


def test_two_hundred_steps_override_the_shape_of_the_prior() -> None:
    rng = np.random.default_rng(3)
    base = lengths(rng, 200)
    tokens = base["response_mean_tokens"] + base["prompt_mean_tokens"]
    times = (6.0 + 0.014 * tokens) * np.exp(0.01 * rng.normal(size=200))
    found = fit_stage(log_of(**base, update_s=times), "update_s", PriorTime(50.0, 0.4)).coefficients()
    assert found["fixed"].value == pytest.approx(6.0, rel=0.1)
    assert found["sequence_mean_tokens"].value == pytest.approx(0.014, rel=0.1)
    assert found["fixed"].low < 6.0 < found["fixed"].high


def test_a_roofline_far_off_hardly_matters_and_a_near_one_steadies() -> None:
    log = packed_run(np.random.default_rng(4), 3, 0.1)
    far, none = fit_stage(log, "update_s", PriorTime(60.0, 0.4)), fit_stage(log, "update_s")
    assert far.typical().value == pytest.approx(none.typical().value, rel=0.25)


def test_outliers_do_not_move_a_fit() -> None:
    log = packed_run(np.random.default_rng(5), 40, 0.01)
    spoiled = log.column("update_s").copy()
    spoiled[[7, 19, 33]] *= [3.0, 2.0, 5.0]
    clean = fit_stage(log, "update_s")
    fitted = fit_stage(replace(log, columns={**log.columns, "update_s": spoiled}), "update_s")
    assert fitted.typical().value == pytest.approx(clean.typical().value, rel=0.01)
    assert fitted.residuals.num_outliers == 3


@pytest.mark.parametrize("num_cold", [0, 1, 2])
def test_cold_first_steps_are_found(num_cold: int) -> None:
    log = packed_run(np.random.default_rng(6), 30, 0.01)
    times = log.column("update_s").copy()
    times[:num_cold] *= 1.5
    fitted = fit_stage(replace(log, columns={**log.columns, "update_s": times}), "update_s")
    assert fitted.residuals.num_cold == num_cold
    assert fitted.num_rows == 30 - num_cold


def test_a_capped_log_says_that_it_cannot_separate_tau() -> None:
    rng = np.random.default_rng(7)
    base = {**lengths(rng, 30), "response_max_tokens": np.full(30, 512.0)}
    times = (10.0 + 0.03 * base["response_mean_tokens"]) * np.exp(0.01 * rng.normal(size=30))
    capped = fit_stage(log_of(**base, generation_s=times), "generation_s")
    assert any("tau" in line and "another cap" in line for line in capped.statements)
    base["response_max_tokens"] = rng.uniform(300.0, 512.0, 30)
    free = fit_stage(log_of(**base, generation_s=times), "generation_s")
    assert not any("another cap" in line for line in free.statements)


def test_equal_lengths_leave_the_way_of_batching_open() -> None:
    rng = np.random.default_rng(8)
    base = {name: np.full(30, float(column[0])) for name, column in lengths(rng, 1).items()}
    log = log_of(**base, update_s=8.0 * np.exp(0.02 * rng.normal(size=30)))
    fitted = fit_stage(log, "update_s")
    assert len(fitted.forms) > 1
    assert any("cannot tell whether" in line for line in fitted.statements)
    near, far = (
        fitted.estimate(
            response_mean_tokens=base["response_mean_tokens"][0] * k,
            prompt_mean_tokens=base["prompt_mean_tokens"][0],
        )
        for k in (1.0, 2.0)
    )
    assert far.extrapolated
    assert not near.extrapolated
    assert (far.high - far.low) / far.value > 3.0 * (near.high - near.low) / near.value


def test_a_log_without_lengths_is_a_constant_and_says_so() -> None:
    rng = np.random.default_rng(9)
    log = log_of(generation_s=20.0 * np.exp(0.02 * rng.normal(size=20)), step=np.arange(20.0))
    fitted = fit_stage(log, "generation_s")
    assert fitted.form.terms == ("fixed",)
    assert fitted.estimate().value == pytest.approx(20.0, rel=0.03)
    assert any("no lengths" in line for line in fitted.statements)


def test_stages_of_one_trainer_lend_each_other_evidence() -> None:
    rng = np.random.default_rng(10)
    base = lengths(rng, 15, spread=2.0)
    tokens = base["response_mean_tokens"] + base["prompt_mean_tokens"]
    log = log_of(
        **base,
        update_s=(0.02 * tokens) * np.exp(0.02 * rng.normal(size=15)),
        reference_s=(0.004 * tokens) * np.exp(0.001 * rng.normal(size=15)),
    )

    def packed(fitted: FittedStage) -> float:
        return sum(form.weight for form in fitted.forms if form.name == "packed")

    assert packed(fit_log(log)["update_s"]) > packed(fit_stage(log, "update_s"))


def test_extrapolation_is_flagged_per_step() -> None:
    log = packed_run(np.random.default_rng(11), 30, 0.01)
    fitted = fit_stage(log, "update_s")
    columns = {name: column[:3].copy() for name, column in log.columns.items()}
    columns["response_mean_tokens"][1] *= 3.0
    assert fitted.predict(columns).extrapolated.tolist() == [False, True, False]
    flagged = fitted.estimate(response_mean_tokens=900.0, prompt_mean_tokens=90.0, response_max_tokens=800.0)
    assert flagged.extrapolated
    assert "response_mean_tokens = 900" in flagged.note


def test_json_round_trip_and_hash() -> None:
    log = packed_run(np.random.default_rng(12), 30, 0.01)
    fitted = fit_stage(log, "update_s")
    again = FittedStage.from_json(json.loads(json.dumps(fitted.to_json(), allow_nan=False)))
    assert again == fitted
    assert (again.predict(log.columns).value_s == fitted.predict(log.columns).value_s).all()
    assert fit_stage(log, "update_s").data_hash == fitted.data_hash
    changed = log.column("update_s").copy()
    changed[4] += 1e-9
    other = fit_stage(replace(log, columns={**log.columns, "update_s": changed}), "update_s")
    assert other.data_hash != fitted.data_hash


@pytest.mark.parametrize(
    "spoil", [lambda d: d.pop("forms"), lambda d: d.update(forms=[{}]), lambda d: d.update(x=1)]
)
def test_a_malformed_fit_is_refused_in_one_line(spoil: object) -> None:
    data = fit_stage(packed_run(np.random.default_rng(13), 12, 0.01), "update_s").to_json()
    assert callable(spoil)
    spoil(data)
    with pytest.raises(InputError, match="calibrate again") as caught:
        FittedStage.from_json(data)
    assert "\n" not in str(caught.value)


def test_missing_quantities_and_stages_are_named() -> None:
    log = packed_run(np.random.default_rng(14), 12, 0.01)
    with pytest.raises(InputError, match="has no generation_s"):
        fit_stage(log, "generation_s")
    with pytest.raises(InputError, match="needs prompt_mean_tokens"):
        fit_stage(log, "update_s").predict({"response_mean_tokens": np.ones(2)})
    with pytest.raises(InputError, match="no stage times"):
        fit_log(log_of(step=np.arange(3.0)))


def test_gaps_in_a_log_are_left_out() -> None:
    log = packed_run(np.random.default_rng(15), 40, 0.01)
    holed = {name: column.copy() for name, column in log.columns.items()}
    holed["update_s"][5] = np.nan
    holed["response_mean_tokens"][9] = np.nan
    fitted = fit_stage(replace(log, columns=holed), "update_s")
    assert fitted.num_rows == 38
    assert np.isnan(fitted.predict(holed).value_s[9])


@settings(max_examples=8)
@given(st.integers(0, 10_000), st.floats(0.01, 1000.0))
def test_times_in_other_units_change_nothing_but_the_scale(seed: int, unit: float) -> None:
    log = packed_run(np.random.default_rng(seed), 10, 0.02)
    scaled = replace(log, columns={**log.columns, "update_s": unit * log.column("update_s")})
    one, other = fit_stage(log, "update_s"), fit_stage(scaled, "update_s")
    assert other.predict(log.columns).value_s == pytest.approx(
        unit * one.predict(log.columns).value_s, rel=1e-6
    )


@given(st.integers(0, 10_000))
def test_coefficients_are_never_negative_and_intervals_hold_the_value(seed: int) -> None:
    rng = np.random.default_rng(seed)
    design = rng.uniform(0.5, 1.5, (6, 3))
    fit = fit_map(design, rng.uniform(0.5, 2.0, 6), np.full(3, 1 / 3), np.full(3, 0.3))
    assert (fit.coefficients >= 0.0).all()
    assert fit.scale > 0.0
    assert (fit.log_variance(design) > 0.0).all()


def test_few_residuals_are_drawn_to_the_typical_noise() -> None:
    rng = np.random.default_rng(16)
    assert noise_scale(np.zeros(3), 3) == pytest.approx(0.02)
    assert noise_scale(0.05 * rng.normal(size=400), 2) == pytest.approx(0.05, rel=0.1)
    with pytest.raises(InputError, match="no rows"):
        fit_map(np.ones((0, 1)), np.ones(0), np.ones(1), np.ones(1))
