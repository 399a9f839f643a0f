"""The length-aware gate: weighs both directions, leaves in time, and does no harm; its lookahead is sound."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.models.lookahead import RolloutState, outlook
from bidirl.planner.budget import Budget
from bidirl.planner.build import build_plan, build_workload
from bidirl.planner.events import BeginLease, Direction, LendingStopped
from bidirl.planner.job import load_job
from bidirl.planner.plan import Plan
from bidirl.sim.driver import Driver
from bidirl.traces.run_record import RunRecord

DEMO = Path(__file__).parent.parent / "examples" / "demo.toml"


def plan_of(policy: str, *more: str) -> tuple[Plan, Driver]:
    sets = [f"policy.name={policy}", "workload.num_steps=6", "workload.prompts_per_step=32", *more]
    job = load_job(DEMO, sets)
    workload = build_workload(job, 1)
    plan = build_plan(job, workload)
    return plan, Driver(plan, workload)


def record_of(policy: str, *more: str) -> RunRecord:
    return plan_of(policy, *more)[1].run()


@pytest.mark.parametrize("rollout", [2, 4, 8, 12])
@pytest.mark.parametrize("staleness", ["0", "0.5", "1", "4"])
def test_it_is_never_worse_than_not_borrowing(rollout: int, staleness: str) -> None:
    sets = (f"partition.rollout_gpus={rollout}", f"policy.staleness={staleness}")
    alone, lent = (record_of(policy, *sets).end_s for policy in ("no_borrow", "bidirl_length_aware"))
    assert lent <= 1.01 * alone


def test_it_weighs_both_directions() -> None:
    starved = record_of("bidirl_length_aware", "partition.rollout_gpus=2", "policy.staleness=0.5")
    swollen = record_of("bidirl_length_aware", "partition.rollout_gpus=12", "policy.staleness=0.5")
    assert starved.leases.direction.count("rollout_on_train") >= 3
    assert swollen.leases.direction.count("train_on_rollout") >= 3


def test_waiting_for_all_idle_replicas_beats_lending_the_first() -> None:
    sets = ("partition.rollout_gpus=8", "policy.staleness=1")
    ends = {policy: record_of(policy, *sets).end_s for policy in ("bidirl", "bidirl_length_aware")}
    assert ends["bidirl_length_aware"] <= ends["bidirl"]


def test_the_way_back_of_a_train_lease_is_hidden() -> None:
    sets = ("partition.rollout_gpus=8", "policy.staleness=0")
    record = record_of("bidirl_length_aware", *sets)
    eq6 = record_of("bidirl", *sets)
    exposed = sum(parts.get("switch", 0.0) for parts in record.steps.parts)
    assert exposed < 0.5 * sum(parts.get("switch", 0.0) for parts in eq6.steps.parts)


def test_lending_that_loses_stops_and_says_so() -> None:
    class Losing(Budget):
        def account(self, direction: Direction, gave_s: float, cost_s: float) -> bool:
            return super().account(direction, 0.0, 1.0)

    seen: list[object] = []
    _, driver = plan_of("bidirl_length_aware", "partition.rollout_gpus=2", "workload.num_steps=12")
    driver.sink = lambda _, __, actions: seen.extend(actions)
    driver.scheduler.lender.budget = Losing()
    record = driver.run()
    begun = [action for action in seen if isinstance(action, BeginLease)]
    stops = [action for action in seen if isinstance(action, LendingStopped)]
    for stop in stops:
        after = seen[seen.index(stop) :]
        assert not [a for a in after if isinstance(a, BeginLease) and a.direction is stop.direction]
    assert begun
    assert stops
    assert record.notes


@given(
    ages=st.lists(st.lists(st.integers(0, 1500), min_size=1, max_size=8), min_size=1, max_size=60),
    startable=st.integers(0, 40),
)
def test_more_replicas_are_never_predicted_later(ages: list[list[int]], startable: int) -> None:
    plan, _ = plan_of("bidirl")
    models = plan.models
    need = max(1, (len(ages) + startable) // 2)
    state = RolloutState(ages, startable, 32, need, 8)
    few, many = (
        outlook(models.iteration, models.limits, plan.prior(0), state, [(0.0, d)], train_s=50.0)
        for d in (4, 8)
    )
    assert 0.0 <= many.ready_s <= few.ready_s * 1.001
    assert many.second_s >= many.ready_s
    assert few.second_s >= few.ready_s


def test_a_batch_that_cannot_fill_is_never_ready() -> None:
    plan, _ = plan_of("bidirl")
    state = RolloutState([[0] * 8], 2, 32, 5, 8)
    found = outlook(plan.models.iteration, plan.models.limits, plan.prior(0), state, [(0.0, 4)], train_s=1.0)
    assert found.ready_s == found.second_s == float("inf")


@pytest.mark.parametrize("rollout", [4, 8])
def test_the_lookahead_predicts_the_first_batch(rollout: int) -> None:
    sets = (f"partition.rollout_gpus={rollout}", "policy.staleness=0", "workload.prompts_per_step=64")
    plan, driver = plan_of("no_borrow", *sets)
    record = driver.run()
    state = RolloutState([], 64, 64, 64, 8)
    found = outlook(
        plan.models.iteration, plan.models.limits, plan.prior(0), state, [(0.0, rollout)], train_s=1.0
    )
    waits = [parts["wait"] for parts in record.steps.parts]
    assert found.ready_s == pytest.approx(sum(waits) / len(waits), rel=0.15)
