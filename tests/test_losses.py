"""Losses at awkward moments: every sample is trained once, every invariant holds, and both drivers agree."""

import random
from collections import Counter
from collections.abc import Iterable
from math import inf

import pytest

from bidirl.errors import InputError
from bidirl.executor.backends.fake import FakeBackend
from bidirl.executor.clock import VirtualClock, run_virtual
from bidirl.models.faults import Faults, FaultsConfig
from bidirl.planner.events import Action, Event, ReplicaJoined
from bidirl.planner.invariants import check
from bidirl.planner.plan import Plan
from bidirl.planner.policy import PRESETS, PolicyConfig
from bidirl.sim.driver import Driver
from bidirl.sim.metrics import summarise
from bidirl.traces.run_record import Activity, RunRecord
from bidirl.traces.workload import Workload
from tests.job_strategies import MAX_EVENTS, equal_lengths, stage_models, switch_costs
from tests.test_duality import assert_dual


class Scripted(Faults):
    """Losses at given times and nothing else."""

    def __init__(
        self,
        lives: dict[tuple[int, int], float],
        *,
        side_s: Iterable[float] = (),
        auxiliary_s: Iterable[float] = (),
        restart_s: float = 1.0,
    ) -> None:
        super().__init__(FaultsConfig(restart_s=restart_s), 0)
        self.lives, self.sides, self.auxiliaries = lives, list(side_s), list(auxiliary_s)

    def replica_lifetime_s(self, replica: int, incarnation: int) -> float:
        return self.lives.get((replica, incarnation), inf)

    def auxiliary_lifetime_s(self, replica: int, lease: int) -> float:
        return self.auxiliaries[lease - 1] if lease <= len(self.auxiliaries) else inf

    def side_lifetime_s(self, lease: int) -> float:
        return self.sides[lease - 1] if lease <= len(self.sides) else inf


def preset(name: str) -> PolicyConfig:
    return PolicyConfig.model_validate({"name": name, **PRESETS[name]}, strict=False)


def small(policy: str, **changes: object) -> tuple[Plan, Workload]:
    """Four rollouters and four trainers of one GPU, all groups alike, costs of a second or so."""
    workload, prior = equal_lengths(8, 2, 10, 40)
    costs: dict[str, object] = {
        "sync_s": 0.5,
        "train_s_per_token": 1 / 64,
        "switch": switch_costs(0.5, 0.5, 0.1, 0.1),
    }
    models = stage_models(**{"tau_s": 0.125, **costs, **changes})  # type: ignore[arg-type]
    config = preset(policy)
    plan = Plan(4, 8, 2, 2, 4, 4, 1, 1, config, models, (prior,), reference=True)
    return plan, workload


def run(plan: Plan, workload: Workload, faults: Faults) -> tuple[RunRecord, Counter[str]]:
    """Run under every invariant; check that all that was issued has been trained, once."""
    kinds: Counter[str] = Counter()

    def sink(now: float, event: Event, actions: list[Action]) -> None:
        kinds[type(event).__name__] += 1
        assert kinds.total() < MAX_EVENTS
        check(driver.scheduler)

    driver = Driver(plan, workload, sink=sink, faults=faults)
    record = driver.run()
    assert len(record.steps.published_s) == plan.num_steps
    per_step = plan.groups_per_step * plan.samples_per_group
    assert Counter(record.samples.step) == dict.fromkeys(range(plan.num_steps), per_step)
    summarise(record)
    return record, kinds


@pytest.mark.parametrize("policy", ["no_borrow", "opportunistic", "bidirl"])
@pytest.mark.parametrize("restart_s", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("first_s", [0.0, 0.0625, 3.0, 9.0])
def test_all_replicas_may_go_at_once(policy: str, restart_s: float, first_s: float) -> None:
    plan, workload = small(policy)
    lives = {(replica, life): first_s + life for replica in range(4) for life in range(2)}
    faults = Scripted(lives, restart_s=restart_s)
    _, kinds = run(plan, workload, faults)
    assert kinds["ReplicaLost"] >= 4
    assert_same(plan, workload, faults)


def assert_same(plan: Plan, workload: Workload, faults: Faults) -> None:
    assert_dual(plan, workload, faults, random.Random(0))


def moments(plan: Plan, workload: Workload, start: str, end: str) -> list[tuple[float, float]]:
    """Return the (time of ``start``, time of the next ``end``) pairs of a calm run, by kinds of items."""
    spans: list[tuple[float, float]] = []
    began: list[float] = []

    def sink(now: float, event: Event, actions: list[Action]) -> None:
        if type(event).__name__ == end and began:
            spans.append((began.pop(), now))
            began.clear()
        began.extend(now for action in actions if type(action).__name__ == start)

    Driver(plan, workload, sink=sink).run()
    return spans


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("start", "end"),
    [("SyncReplica", "SyncApplied"), ("BeginLease", "LeaseEntered"), ("EndLease", "LeaseReturned")],
)
def test_a_replica_lost_while_something_is_done_with_it(start: str, end: str, share: float) -> None:
    plan, workload = small("train_on_rollout")
    spans = moments(plan, workload, start, end)
    assert spans
    for began_s, ended_s in spans[:3]:
        faults = Scripted({(1, 0): began_s + share * (ended_s - began_s)})
        _, kinds = run(plan, workload, faults)
        assert kinds["ReplicaLost"] == 1
        assert_same(plan, workload, faults)


def test_a_side_that_is_lost_takes_only_unmerged_work_with_it() -> None:
    plan, workload = small("train_on_rollout")
    for life_s in (1e-9, 0.3, 1.0, 2.0):
        faults = Scripted({}, side_s=[life_s] * 3)
        _, kinds = run(plan, workload, faults)
        assert kinds["SideLost"] >= 1
        assert_same(plan, workload, faults)


def test_auxiliary_rollouters_that_are_lost_give_their_samples_back() -> None:
    plan, workload = small("opportunistic", tau_s=0.5)
    for life_s in (1e-9, 1.0, 3.0):
        faults = Scripted({}, auxiliary_s=[life_s] * 3, restart_s=2.0)
        _, kinds = run(plan, workload, faults)
        assert kinds["ReplicaLost"] >= 1
        assert_same(plan, workload, faults)


def test_a_replica_comes_back_with_the_version_of_then() -> None:
    plan, workload = small("no_borrow")
    calm = Driver(plan, workload).run()
    lost_s = calm.steps.published_s[0] + 0.01
    restart_s = calm.steps.published_s[2] - lost_s + 0.01
    joined: list[tuple[int, int]] = []

    def sink(now: float, event: Event, actions: list[Action]) -> None:
        if isinstance(event, ReplicaJoined):
            joined.append((event.version, driver.scheduler.rollout.published))

    driver = Driver(plan, workload, sink=sink, faults=Scripted({(0, 0): lost_s}, restart_s=restart_s))
    record = driver.run()
    assert joined == [(joined[0][1], joined[0][1])]
    assert joined[0][0] >= 2
    [row] = [row for row, kind in enumerate(record.spans.activity) if kind == Activity.DOWN]
    assert record.spans.start_s[row] == lost_s
    assert record.spans.end_s[row] == pytest.approx(lost_s + restart_s)


def test_losses_of_a_colocated_job_are_refused() -> None:
    plan, workload = small("no_borrow")
    colocated = Plan(4, 8, 2, 2, 4, 0, 1, 1, preset("colocated_sync"), plan.models, plan.priors)
    faults = Faults(FaultsConfig(replica_mtbf_s=9.0), 0)
    with pytest.raises(InputError, match=r"replica_mtbf_s=9\.0"):
        Driver(colocated, workload, faults=faults)

    async def main(clock: VirtualClock) -> None:
        FakeBackend(colocated, workload, clock, faults)

    with pytest.raises(InputError, match=r"replica_mtbf_s=9\.0"):
        run_virtual(main)


def test_faults_cost_time() -> None:
    plan, workload = small("no_borrow")
    calm, _ = run(plan, workload, Faults(FaultsConfig(), 0))
    rough = FaultsConfig(
        sync_failure_rate=0.5, chunk_failure_rate=0.5, straggler_share=1.0, straggler_factor=2.0
    )
    slow, _ = run(plan, workload, Faults(rough, 0))
    assert slow.end_s > 1.5 * calm.end_s
