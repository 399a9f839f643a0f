"""The online calibration: learning, dead band, drift alarms and their false-alarm rate."""

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.errors import InputError
from bidirl.models.online import Calibration, Factors, Observation, Side, observe


def fold(
    ratios: Iterable[float], state: Calibration | None = None
) -> tuple[Calibration, list[tuple[int, Factors]]]:
    state = state or Calibration()
    told = []
    for i, ratio in enumerate(ratios):
        state, factors = observe(state, Observation(Side.TRAIN, 2.0, 2.0 * float(np.exp(ratio))))
        if factors is not None:
            told.append((i, factors))
    return state, told


def test_a_constant_error_is_learned_and_told_once() -> None:
    _, told = fold([np.log(1.3)] * 50)
    assert len(told) == 1
    assert told[-1][1].train_factor == pytest.approx(1.3)
    assert told[-1][1].rollout_factor == 1.0
    assert told[-1][1].drifted is None


def test_small_errors_stay_inside_the_dead_band() -> None:
    rng = np.random.default_rng(0)
    assert fold(0.01 + 0.01 * rng.normal(size=300))[1] == []


def test_one_stall_moves_nothing() -> None:
    rng = np.random.default_rng(1)
    state, _ = fold(0.02 * rng.normal(size=60))
    stalled, told = fold([np.log(20.0)], state)
    assert told == []
    assert abs(stalled.train.level - state.train.level) < 0.01


def test_a_slower_machine_is_noticed_soon_and_its_factor_is_right() -> None:
    found = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        state, _ = fold(0.02 * rng.normal(size=80))
        after, told = fold(np.log(1.1) + 0.02 * rng.normal(size=40), state)
        alarms = [(i, factors) for i, factors in told if factors.drifted is Side.TRAIN]
        assert alarms
        assert alarms[0][0] < 12
        found.append(np.exp(after.train.told))
    assert np.median(found) == pytest.approx(1.1, rel=0.01)


@pytest.mark.parametrize("dof", [4.0, np.inf])
def test_false_alarms_are_rare(dof: float) -> None:
    alarms = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        noise = rng.normal(size=500) if np.isinf(dof) else rng.standard_t(dof, 500)
        alarms += fold(0.02 * noise)[0].train.num_drifts
    assert alarms / (12 * 500) < 1e-3


def test_chatter_is_rare_under_noise() -> None:
    rng = np.random.default_rng(3)
    assert len(fold(0.05 * rng.normal(size=1000))[1]) <= 5


def test_sides_are_kept_apart() -> None:
    state = Calibration()
    for _ in range(20):
        state, _ = observe(state, Observation(Side.ROLLOUT, 1.0, 1.5))
        state, _ = observe(state, Observation(Side.TRAIN, 1.0, 0.8))
    assert np.exp(state.rollout.told) == pytest.approx(1.5)
    assert np.exp(state.train.told) == pytest.approx(0.8)


@given(st.lists(st.floats(-2.0, 2.0), max_size=60))
def test_it_is_a_pure_function_of_what_it_saw(ratios: list[float]) -> None:
    one, two = fold(ratios), fold(ratios)
    assert one == two
    level = one[0].train.told
    assert not ratios or min(ratios) - 8.0 <= level <= max(ratios) + 8.0


@pytest.mark.parametrize(
    ("predicted", "measured"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (1.0, float("nan"))]
)
def test_times_must_be_positive(predicted: float, measured: float) -> None:
    with pytest.raises(InputError, match="must be positive"):
        observe(Calibration(), Observation(Side.TRAIN, predicted, measured))
