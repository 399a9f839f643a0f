"""Same seed, same run to the last bit; a journal fed back gives the same actions; streams do not mix."""

import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.planner.events import CoefficientsUpdated, Event, from_json, to_json
from bidirl.planner.plan import Plan
from bidirl.planner.policy import preset
from bidirl.planner.scheduler import Scheduler
from bidirl.traces.run_record import RunRecord
from bidirl.traces.workload import Workload, WorkloadConfig
from bidirl.traces.workload_config import DriftTo, LengthTable, Spread, TurnsConfig
from tests.job_strategies import Case, cases, run, stage_models

Journal = list[tuple[str, Event, list[Any]]]

CONFIG = WorkloadConfig(
    prompts_per_step=6,
    samples_per_prompt=3,
    max_response_tokens=40,
    lengths=LengthTable(p50=10.0, sigma=1.0),
    num_steps=4,
    prompt_tokens=20,
)


def journal_of(plan: Plan, workload: Workload, spread_s: float = 0.0) -> tuple[Journal, RunRecord]:
    """Run a plan and keep (exact time, event, actions); repr of a float is exact."""
    journal: Journal = []
    record, _ = run(
        plan,
        workload,
        lambda now, event, actions: journal.append((now.hex(), event, list(actions))),
        apply_spread_s=spread_s,
    )
    return journal, record


def plan_of(workload: Workload, name: str = "bidirl") -> Plan:
    return Plan(
        num_steps=CONFIG.num_steps,
        groups_per_step=CONFIG.prompts_per_step,
        samples_per_group=CONFIG.samples_per_prompt,
        mini_batches=1,
        rollout_gpus=2,
        train_gpus=2,
        rollout_replica_gpus=1,
        train_replica_gpus=1,
        policy=preset(name, staleness=1),
        models=stage_models(beta_tok_s=1e-3, beta_hist_s=1e-5, sync_s=0.5),
        priors=(workload.prior(0),),
        scoring=True,
    )


def flat(record: RunRecord) -> str:
    """Return everything in a record that a clock on the wall does not change."""
    record.wall_s = 0.0
    return repr(astuple(record))


@given(case=cases())
def test_same_seed_same_journal(case: Case) -> None:
    (one, first), (two, second) = (
        journal_of(case.plan, case.workload, case.apply_spread_s) for _ in range(2)
    )
    assert one == two
    assert flat(first) == flat(second)


@given(case=cases())
def test_replay_gives_the_same_actions(case: Case) -> None:
    journal, _ = journal_of(case.plan, case.workload, case.apply_spread_s)
    scheduler = Scheduler(case.plan)
    for time_s, event, actions in journal:
        copy = from_json(json.loads(json.dumps(to_json(event))))
        assert copy == event
        assert scheduler.handle(copy, float.fromhex(time_s)) == actions
        for action in actions:
            assert from_json(json.loads(json.dumps(to_json(action)))) == action
    assert scheduler.done


@given(case=cases(lending=True))
def test_nothing_is_left_undone(case: Case) -> None:
    """After each event everything that can start has started: an event without content leads to nothing."""
    journal, _ = journal_of(case.plan, case.workload, case.apply_spread_s)
    scheduler = Scheduler(case.plan)
    for time_s, event, actions in journal:
        now = float.fromhex(time_s)
        assert scheduler.handle(event, now) == actions
        assert scheduler.done or scheduler.handle(CoefficientsUpdated(1.0, 1.0), now) == []


def test_listening_changes_nothing() -> None:
    workload = Workload(CONFIG, Path(), 0)
    plan = plan_of(workload)
    assert flat(journal_of(plan, workload)[1]) == flat(run(plan, workload)[0])


@pytest.mark.parametrize("name", ["no_borrow", "bidirl"])
def test_two_seeds_differ(name: str) -> None:
    one, two = (Workload(CONFIG, Path(), seed) for seed in (0, 1))
    assert journal_of(plan_of(one, name), one)[0] != journal_of(plan_of(two, name), two)[0]


def columns(workload: Workload, step: int) -> dict[str, list[Any]]:
    block = workload.block(step)
    names = ("prompt_tokens", "image_tokens", "response_tokens", "truncated", "reward_s", "filtered")
    return {name: np.asarray(getattr(block, name)).tolist() for name in names}


EXTRAS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "rewards": ({"reward_s": Spread(mean=1.0, p95=3.0)}, {"reward_s"}),
    "filter": ({"filter_rate": 0.5}, {"filtered"}),
    "prompts": ({"prompt_tokens": Spread(mean=20.0, p95=60.0)}, {"prompt_tokens"}),
    "images": ({"image_tokens": 7}, {"prompt_tokens", "image_tokens"}),
    "turns": (
        {"turns": TurnsConfig(mean=2.0, max=3, tool_s=Spread(mean=1.0, p95=2.0), tool_tokens=5)},
        set(),
    ),
    "difficulty": ({"group_correlation": 0.5}, {"response_tokens", "truncated"}),
    "drift": ({"drift": DriftTo(to=2.0, over_steps=2)}, {"response_tokens", "truncated"}),
}


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_a_new_source_changes_no_other_stream(extra: str) -> None:
    update, may_change = EXTRAS[extra]
    for step in range(3):
        plain = columns(Workload(CONFIG, Path(), 5), step)
        more = columns(Workload(CONFIG.model_copy(update=update), Path(), 5), step)
        changed = {name for name in plain if plain[name] != more[name]}
        assert changed <= may_change


@given(order=st.permutations(range(5)))
def test_blocks_do_not_depend_on_the_order_of_asking(order: list[int]) -> None:
    config = CONFIG.model_copy(update={"filter_rate": 0.5, "reward_s": Spread(mean=1.0, p95=3.0)})
    asked = Workload(config, Path(), 3)
    found = {step: columns(asked, step) for step in order}
    assert all(found[step] == columns(Workload(config, Path(), 3), step) for step in range(5))
