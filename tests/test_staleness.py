"""The staleness bound, read off the tables of finished runs; three planted faults must show."""

import ast
import tempfile
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from math import floor
from pathlib import Path

import pytest
from hypothesis import given

from bidirl.planner.admission import Admission
from bidirl.planner.events import SamplesFinished
from bidirl.planner.plan import Plan
from bidirl.planner.policy import BatchOrder, Lending, VersionMode, preset
from bidirl.planner.rollout import RolloutSide
from bidirl.traces.run_record import RunRecord
from bidirl.traces.tables import columns_of, write_samples, write_steps
from bidirl.traces.workload import Workload
from tests import staleness_reader
from tests.job_strategies import Case, cases, equal_lengths, run, stage_models
from tests.staleness_reader import Run, problems, read_run

Rig = tuple[Plan, Workload]


def tables(record: RunRecord) -> Run:
    """Write a run's tables and read them back with the independent reader."""
    with tempfile.TemporaryDirectory() as folder:
        write_samples(Path(folder, "samples.csv"), columns_of(record.samples))
        write_steps(Path(folder, "steps.csv"), columns_of(record.steps))
        return read_run(Path(folder))


def breaches(
    plan: Plan, workload: Workload, *, saturated: bool = False, spread_s: float = 0.0, reward_s: float = 0.0
) -> list[str]:
    record, _ = run(plan, workload, apply_spread_s=spread_s)
    policy = plan.policy
    return problems(
        tables(record),
        plan.groups_per_step,
        str(policy.staleness),
        pinned=policy.version_mode is VersionMode.PINNED,
        issue_order=policy.batch_order is BatchOrder.ISSUE_ORDER,
        reward_s=reward_s,
        saturated=saturated,
    )


def starved_trainer(
    staleness: str, batch: int, *, num_steps: int = 6, pinned: bool = False, sync_s: float = 1.0
) -> Rig:
    """Return a job in which generation always waits for credit before a publication."""
    workload, prior = equal_lengths(batch, 2, 4, 3)
    pins = {"version_mode": "pinned", "batch_order": "issue_order"} if pinned else {}
    plan = Plan(
        num_steps=num_steps,
        groups_per_step=batch,
        samples_per_group=2,
        mini_batches=1,
        rollout_gpus=2,
        train_gpus=1,
        rollout_replica_gpus=1,
        train_replica_gpus=1,
        policy=preset("no_borrow", staleness=staleness, **pins),
        models=stage_models(train_s_per_token=0.1, sync_s=sync_s),
        priors=(prior,),
    )
    return plan, workload


def test_reader_shares_no_code() -> None:
    tree = ast.parse(Path(staleness_reader.__file__).read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names == {"bisect", "collections.abc", "csv", "dataclasses", "fractions", "math", "pathlib"}


@given(case=cases())
def test_no_job_breaks_its_bound(case: Case) -> None:
    reward_s = case.workload.config.reward_s
    known_s = (
        reward_s if isinstance(reward_s, float) else 0.0
    )  # else drawn per group: only "not before its end"
    assert not breaches(case.plan, case.workload, spread_s=case.apply_spread_s, reward_s=known_s)


@given(case=cases(lending=True, pinned=True))
def test_pinned_jobs_learn_the_same_with_and_without_lending(case: Case) -> None:
    alone = replace(case.plan, policy=case.plan.policy.model_copy(update={"lending": Lending.NONE}))
    keys = [
        [group.key for group in tables(run(plan, case.workload)[0]).groups] for plan in (case.plan, alone)
    ]
    assert keys[0] == keys[1]


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize(
    ("staleness", "batch"),
    [("0", 7), ("0.1", 60), ("0.3", 10), ("0.5", 7), ("1", 7), ("1.5", 7), ("2", 7), ("0.7", 10)],
)
def test_bound_is_kept_and_reached(staleness: str, batch: int, pinned: bool) -> None:
    plan, workload = starved_trainer(staleness, batch, pinned=pinned)
    assert not breaches(plan, workload, saturated=True)


def _off_by_one(right: Callable[[Admission, int], int]) -> Callable[[Admission, int], int]:
    return lambda rule, version: right(rule, version) + 1


def _float_floor(_: Callable[[Admission, int], int]) -> Callable[[Admission, int], int]:
    return lambda rule, version: floor(
        (version + 1 + rule.numerator / rule.denominator) * rule.groups_per_step
    )


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize(("staleness", "batch"), [("0", 4), ("0.5", 4), ("1", 4), ("2", 3)])
def test_reader_sees_one_group_too_many(
    staleness: str, batch: int, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Admission, "limit", _off_by_one(Admission.limit))
    plan, workload = starved_trainer(staleness, batch, pinned=pinned)
    assert breaches(plan, workload)


def test_reader_sees_a_bound_in_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (3 + 1 + 0.1) * 60 < 246 == Admission.of(60, Decimal("0.1")).limit(3)
    monkeypatch.setattr(Admission, "limit", _float_floor(Admission.limit))
    plan, workload = starved_trainer("0.1", 60)
    found = breaches(plan, workload, saturated=True)
    assert found
    assert "245 groups had started before publication 4, 246 could" in found[0]


def test_reader_sees_a_refund_before_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    right = RolloutSide.on_samples_finished
    seen = []

    def finished(side: RolloutSide, event: SamplesFinished) -> None:
        right(side, event)
        seen.append(event.group)
        if len(seen) == 1:  # guesses that the first complete group will be filtered
            side.limit += 1

    plan, workload = starved_trainer("0", 4)
    assert not breaches(plan, workload, reward_s=5.0)
    monkeypatch.setattr(RolloutSide, "on_samples_finished", finished)
    assert breaches(plan, workload, reward_s=5.0)


@pytest.mark.parametrize("pinned", [False, True])
def test_reader_sees_credit_before_the_last_confirmation(
    pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = RolloutSide.publish

    def publish(side: RolloutSide, version: int) -> None:
        right(side, version)
        side.limit = side.core.plan.admission.limit(version)

    plan, workload = starved_trainer("1", 4, pinned=pinned)
    assert not breaches(plan, workload, saturated=True, spread_s=0.5)
    monkeypatch.setattr(RolloutSide, "publish", publish)
    assert breaches(plan, workload, spread_s=0.5)
