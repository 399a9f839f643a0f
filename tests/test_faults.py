"""Faults by seed: answers that depend on the question alone, and stragglers."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from bidirl.models.faults import Faults, FaultsConfig, SlowIteration
from bidirl.models.iteration import AffineIteration

EVERYTHING = FaultsConfig(
    replica_mtbf_s=100.0,
    side_mtbf_s=50.0,
    sync_failure_rate=0.5,
    lease_failure_rate=0.5,
    chunk_failure_rate=0.5,
    straggler_share=0.5,
    straggler_factor=2.0,
)


def answers(faults: Faults) -> dict[str, list[object]]:
    model = AffineIteration(1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
    return {
        "replica": [faults.replica_lifetime_s(r, i) for r in range(4) for i in range(4)],
        "auxiliary": [faults.auxiliary_lifetime_s(r, i) for r in range(4) for i in range(4)],
        "side": [faults.side_lifetime_s(lease) for lease in range(16)],
        "sync": [faults.sync_fails(r, s) for r in range(4) for s in range(8)],
        "lease": [faults.lease_fails(lease) for lease in range(32)],
        "chunk": [faults.chunk_fails_at(side, s) for side in range(2) for s in range(16)],
        "straggler": [faults.iteration(model, r) is model for r in range(32)],
    }


@given(st.integers(0, 2**70))
def test_answers_depend_on_the_question_and_the_seed_alone(entropy: int) -> None:
    one, other = Faults(EVERYTHING, entropy), Faults(EVERYTHING, entropy)
    first = answers(one)
    assert answers(other) == answers(one) == first
    assert answers(Faults(EVERYTHING, entropy + 1)) != first


@pytest.mark.parametrize("kind", ["replica_mtbf_s", "side_mtbf_s", "sync_failure_rate", "chunk_failure_rate"])
def test_a_kind_of_fault_changes_no_other(kind: str) -> None:
    with_it = answers(Faults(EVERYTHING, 7))
    without = answers(Faults(EVERYTHING.model_copy(update={kind: FaultsConfig().model_dump()[kind]}), 7))
    own = {"replica_mtbf_s": {"replica", "auxiliary"}, "side_mtbf_s": {"side"}}.get(
        kind, {kind.split("_", maxsplit=1)[0]}
    )
    assert {name for name in with_it if with_it[name] != without[name]} == own


def test_rates_and_means_are_those_asked_for() -> None:
    faults = Faults(EVERYTHING, 1)
    lives = [faults.replica_lifetime_s(r, i) for r in range(50) for i in range(40)]
    assert sum(lives) / len(lives) == pytest.approx(100.0, rel=0.1)
    assert sum(life > 100.0 for life in lives) / len(lives) == pytest.approx(0.368, abs=0.04)
    assert sum(faults.sync_fails(0, s) for s in range(2000)) / 2000 == pytest.approx(0.5, abs=0.05)
    shares = [share for s in range(1000) if (share := faults.chunk_fails_at(0, s)) is not None]
    assert all(0.0 <= share < 1.0 for share in shares)


def test_the_default_injects_nothing() -> None:
    found = answers(Faults(FaultsConfig(), 3))
    assert set(found["replica"]) | set(found["auxiliary"]) | set(found["side"]) == {inf}
    assert not any(found["sync"])
    assert not any(found["lease"])
    assert all(found["straggler"])
    assert set(found["chunk"]) == {None}


@pytest.mark.parametrize(
    "values",
    [
        {"replica_mtbf_s": 0.0},
        {"sync_failure_rate": 1.0},
        {"straggler_factor": 0.5},
        {"restart_s": float("nan")},
        {"mtbf": 1.0},
    ],
)
def test_wrong_values_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        FaultsConfig.model_validate(values)


def test_a_straggler_takes_its_factor_longer() -> None:
    model = AffineIteration(0.3, 0.2, 0.01, 0.02, 1e-4, 1e-5)
    slow = SlowIteration(model, 3.0)
    assert slow.decode(5) == tuple(3.0 * term for term in model.decode(5))
    assert slow.mixed(10, 55.0, 3, 40, 4) == 3.0 * model.mixed(10, 55.0, 3, 40, 4)
