"""One scheduler, two clocks: the simulator and the executor with a fake backend write the same journal."""

import asyncio
import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bidirl.executor.backends.fake import FakeBackend
from bidirl.executor.clock import RealClock, VirtualClock, run_virtual
from bidirl.executor.driver import Driver as Executor
from bidirl.models.faults import Faults, FaultsConfig
from bidirl.planner.build import build_plan, build_workload
from bidirl.planner.events import Action, Event
from bidirl.planner.invariants import check
from bidirl.planner.job import load_job
from bidirl.planner.plan import Plan
from bidirl.planner.policy import Gate, Recalibration, Split
from bidirl.planner.scheduler import Scheduler
from bidirl.sim.driver import Driver as Simulator
from bidirl.traces.run_record import RunRecord, Spans
from bidirl.traces.workload import Workload
from tests.job_strategies import MAX_EVENTS, Case, cases

Journal = list[tuple[float, Event, list[Action]]]

many = settings(max_examples=4 * settings().max_examples)


class BoundedFaults(Faults):
    """Faults whose losses end, so that every run does."""

    def replica_lifetime_s(self, replica: int, incarnation: int) -> float:
        return super().replica_lifetime_s(replica, incarnation) if incarnation < 3 else float("inf")

    def auxiliary_lifetime_s(self, replica: int, lease: int) -> float:
        return super().auxiliary_lifetime_s(replica, lease) if lease < 20 else float("inf")


@st.composite
def fault_configs(draw: Callable[..., Any]) -> FaultsConfig:
    pick = st.sampled_from
    return FaultsConfig(
        replica_mtbf_s=draw(pick((None, 1.0, 4.0, 16.0))),
        restart_s=draw(pick((0.0, 0.5, 4.0))),
        side_mtbf_s=draw(pick((None, 0.5, 4.0))),
        sync_failure_rate=draw(pick((0.0, 0.3))),
        lease_failure_rate=draw(pick((0.0, 0.3))),
        chunk_failure_rate=draw(pick((0.0, 0.2))),
        straggler_share=draw(pick((0.0, 0.5))),
        straggler_factor=2.5,
    )


def length_aware(plan: Plan) -> Plan:
    """Return the plan with the policy that asks replicas for their progress and learns from it."""
    policy = plan.policy.model_copy(
        update={"split": Split.LENGTH_AWARE, "gate": Gate.MODELS, "recalibration": Recalibration.ONLINE}
    )
    return dataclasses.replace(plan, policy=policy)


def bounded(journal: Journal) -> Callable[[float, Event, list[Action]], None]:
    def sink(now: float, event: Event, actions: list[Action]) -> None:
        assert len(journal) < MAX_EVENTS, f"endless run, {now} s: {event}"
        journal.append((now, event, actions))

    return sink


def simulate(plan: Plan, workload: Workload, faults: Faults | None) -> tuple[Journal, RunRecord]:
    journal: Journal = []
    return journal, Simulator(plan, workload, sink=bounded(journal), faults=faults).run()


def execute(
    plan: Plan, workload: Workload, faults: Faults | None, shuffle: random.Random | None = None
) -> tuple[Journal, RunRecord]:
    journal: Journal = []

    async def main(clock: VirtualClock) -> RunRecord:
        backend = FakeBackend(plan, workload, clock, faults)
        return await Executor(plan, backend, clock, sink=bounded(journal)).run()

    return journal, run_virtual(main, shuffle=shuffle)


def per_device(spans: Spans) -> list[tuple[Any, ...]]:
    """Return a row per device: drivers write and cut spans of neighbours in their own ways."""
    rows = zip(
        spans.owner,
        spans.unit,
        spans.num_gpus,
        spans.activity,
        spans.start_s,
        spans.end_s,
        spans.step,
        strict=True,
    )
    return [(owner, device, *rest) for owner, unit, num, *rest in rows for device in range(unit, unit + num)]


def columns(record: RunRecord) -> dict[str, Any]:
    """Return a record as comparable data."""
    found: dict[str, Any] = {}
    for column in dataclasses.fields(record):
        value = getattr(record, column.name)
        if column.name == "spans":
            found["spans"] = per_device(value)
        elif column.name != "wall_s":
            found[column.name] = repr(value)  # nan equals nan
    return found


def assert_dual(plan: Plan, workload: Workload, faults: Faults | None, shuffle: random.Random) -> Journal:
    simulated, record = simulate(plan, workload, faults)
    for mixed in (None, shuffle):
        executed, other = execute(plan, workload, faults, mixed)
        for one, two in zip(simulated, executed, strict=False):
            assert one == two
        assert len(simulated) == len(executed)
        mine, its = columns(record), columns(other)
        spans, others = Counter(mine.pop("spans")), Counter(its.pop("spans"))
        assert (spans - others, others - spans) == (Counter(), Counter())
        assert mine == its
    return simulated


@many
@given(case=cases(), seed=st.integers(0, 9))
def test_both_drivers_write_the_same_journal(case: Case, seed: int) -> None:
    assert_dual(case.plan, case.workload, None, random.Random(seed))


@many
@given(case=cases(lending=True), aware=st.booleans(), config=fault_configs(), seed=st.integers(0, 9))
def test_both_drivers_agree_on_faults(case: Case, aware: bool, config: FaultsConfig, seed: int) -> None:
    plan = length_aware(case.plan) if aware else case.plan
    assert_dual(plan, case.workload, BoundedFaults(config, seed), random.Random(seed))


@given(case=cases(lending=True), seed=st.integers(0, 9))
def test_both_drivers_agree_on_length_aware_lending(case: Case, seed: int) -> None:
    assert_dual(length_aware(case.plan), case.workload, None, random.Random(seed))


JOB = """\
[cluster]
gpu = "A6000"
num_nodes = 2
gpus_per_node = 8
inter_node_gbit_per_s = 200.0

[model]
name = "Qwen3-VL-4B"

[workload]
prompts_per_step = 12
samples_per_prompt = 4
max_response_tokens = 512
lengths = { p50 = 150, p95 = 450 }
num_steps = 4
mini_batches = 2
filter_rate = 0.1
drift = { to = 2.0, over_steps = 3 }

[partition]
rollout_gpus = 4

[policy]
name = "opportunistic"
staleness = 0.5

[models.switch]
rollout_on_train_in_s = 0.05
rollout_on_train_out_s = 0.05
train_on_rollout_in_s = 0.05
train_on_rollout_out_s = 0.05
grad_s = 0.02
broadcast_s = 0.02
"""


@pytest.fixture(scope="module")
def paper_like(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Workload]:
    """Return a small job of the paper's kind that lends in both directions."""
    path = tmp_path_factory.mktemp("job") / "job.toml"
    path.write_text(JOB, encoding="utf-8")
    job = load_job(path)
    workload = build_workload(job, 1)
    return build_plan(job, workload), workload


def test_a_job_of_the_papers_kind_is_dual(paper_like: tuple[Plan, Workload]) -> None:
    plan, workload = paper_like
    journal = assert_dual(plan, workload, None, random.Random(0))
    kinds = {type(event).__name__ for _, event, _ in journal}
    assert {"LeaseEntered", "SyncApplied", "ChunkFinished", "SamplesFinished"} <= kinds


def run_real(
    plan: Plan, workload: Workload, faults: Faults | None, seconds: float
) -> tuple[Journal, RunRecord]:
    """Run on the real clock, sped up so that it takes about ``seconds``."""
    _, record = simulate(plan, workload, faults)
    journal: Journal = []

    async def main() -> RunRecord:
        clock = RealClock(speed=record.end_s / seconds)
        driver = Executor(plan, FakeBackend(plan, workload, clock, faults), clock, sink=watch)
        drivers.append(driver)
        result = await driver.run()
        assert asyncio.all_tasks() == {asyncio.current_task()}, "no task is left behind"
        return result

    def watch(now: float, event: Event, actions: list[Action]) -> None:
        journal.append((now, event, actions))
        check(drivers[0].scheduler)

    drivers: list[Executor] = []
    return journal, asyncio.run(main())


def assert_replays(plan: Plan, journal: Journal) -> None:
    scheduler = Scheduler(plan)
    for now, event, actions in journal:
        assert scheduler.handle(event, now) == actions
    assert scheduler.done


def test_a_journal_of_the_real_clock_replays(paper_like: tuple[Plan, Workload]) -> None:
    plan, workload = paper_like
    journal, record = run_real(plan, workload, None, 1.0)
    assert [now for now, _, _ in journal] == sorted(now for now, _, _ in journal)
    assert record.steps.num_groups == [12] * 4
    assert_replays(plan, journal)


def test_a_journal_of_faults_on_the_real_clock_replays(paper_like: tuple[Plan, Workload]) -> None:
    plan, workload = paper_like
    _, calm = simulate(plan, workload, None)
    config = FaultsConfig(
        replica_mtbf_s=calm.end_s / 2,
        restart_s=calm.end_s / 50,
        side_mtbf_s=calm.end_s / 40,
        sync_failure_rate=0.3,
        lease_failure_rate=0.3,
        chunk_failure_rate=0.1,
    )
    journal, record = run_real(plan, workload, BoundedFaults(config, 3), 1.0)
    kinds = {type(event).__name__ for _, event, _ in journal}
    assert {"ReplicaLost", "ReplicaJoined", "ChunkFailed"} <= kinds
    assert record.steps.num_groups == [12] * 4
    assert_replays(plan, journal)
