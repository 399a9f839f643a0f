"""Online calibration from a run's own journal: true factors are found, others are left alone."""

import dataclasses
from math import log
from pathlib import Path

import pytest

from bidirl.planner import events as ev
from bidirl.planner.build import build_plan, build_workload
from bidirl.planner.events import Action, Event
from bidirl.planner.gates import Predictor
from bidirl.planner.job import load_job
from bidirl.planner.plan import Plan
from bidirl.planner.policy import Recalibration
from bidirl.planner.recalibrator import Recalibrator
from bidirl.sim.driver import Driver
from tests.test_duality import JOB, length_aware

Journal = list[tuple[float, Event, list[Action]]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Journal]:
    path = tmp_path_factory.mktemp("job") / "job.toml"
    path.write_text(JOB.replace("num_steps = 4", "num_steps = 8"), encoding="utf-8")
    job = load_job(path)
    workload = build_workload(job, 1)
    plan = length_aware(build_plan(job, workload))
    journal: Journal = []
    Driver(plan, workload, sink=lambda now, event, actions: journal.append((now, event, actions))).run()
    return plan, journal


def factors(plan: Plan, journal: Journal, slower: float = 1.0) -> list[ev.CoefficientsUpdated]:
    recalibrator = Recalibrator(plan)
    told = [recalibrator.note(slower * now, event, actions) for now, event, actions in journal]
    return [factor for factor in told if factor is not None]


def test_models_that_are_right_are_left_alone(run: tuple[Plan, Journal]) -> None:
    plan, journal = run
    assert factors(plan, journal) == []
    assert not any(isinstance(event, ev.CoefficientsUpdated) for _, event, _ in journal)


@pytest.mark.parametrize("slower", [0.6, 1.5])
def test_a_slower_machine_is_found_on_both_sides(run: tuple[Plan, Journal], slower: float) -> None:
    plan, journal = run
    last = factors(plan, journal, slower)[-1]
    assert abs(log(last.train_factor / slower)) < 0.05
    assert abs(log(last.rollout_factor / slower)) < 0.05


def test_only_a_policy_that_asks_for_it_is_calibrated(run: tuple[Plan, Journal]) -> None:
    plan, _ = run
    assert Recalibrator.of(plan) is not None
    off = plan.policy.model_copy(update={"recalibration": Recalibration.OFF})
    assert Recalibrator.of(dataclasses.replace(plan, policy=off)) is None


def test_new_factors_reach_predictions_made_before(run: tuple[Plan, Journal]) -> None:
    predictor = Predictor(run[0])
    before = predictor.batch_s(0), predictor.rollout_s(4, 2, 0)
    predictor.recalibrate(3.0, 2.0)
    assert predictor.batch_s(0) == 2.0 * before[0]
    assert predictor.rollout_s(4, 2, 0) == 3.0 * before[1]


def test_the_option_is_read_from_a_job(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB, encoding="utf-8")
    assert load_job(path).policy.recalibration is Recalibration.OFF
    job = load_job(path, ["policy.recalibration=online"])
    assert job.policy.recalibration is Recalibration.ONLINE
