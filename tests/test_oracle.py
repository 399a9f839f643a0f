"""Foresight: a copy of a running simulation goes on like the original, and the oracle is no worse."""

from pathlib import Path

import pytest

from bidirl.planner.build import build_plan, build_workload
from bidirl.planner.events import RunStarted
from bidirl.planner.job import load_job
from bidirl.sim.driver import Driver
from bidirl.sim.oracle import attach_oracle, fork

DEMO = Path(__file__).parent.parent / "examples" / "demo.toml"


def driver(policy: str, *more: str) -> Driver:
    sets = [f"policy.name={policy}", "workload.num_steps=5", "workload.prompts_per_step=16", *more]
    job = load_job(DEMO, sets)
    workload = build_workload(job, 3)
    found = Driver(build_plan(job, workload), workload)
    attach_oracle(found)
    return found


@pytest.mark.parametrize("policy", ["no_borrow", "bidirl", "bidirl_length_aware"])
@pytest.mark.parametrize("events", [1, 40, 90])
def test_a_copy_goes_on_like_the_original(policy: str, events: int) -> None:
    one = driver(policy)
    one._post(0.0, RunStarted())
    for _ in range(events):
        one.env.step()
    other = fork(one)
    for run in (one, other):
        while not run.scheduler.done:
            run.env.step()
    assert one.env.now == other.env.now
    assert one.recorder.record.samples == other.recorder.record.samples
    assert one.recorder.record.steps == other.recorder.record.steps


@pytest.mark.parametrize("staleness", ["0", "0.5", "1"])
def test_foresight_is_not_beaten_by_the_models(staleness: str) -> None:
    ends = {
        policy: driver(policy, f"policy.staleness={staleness}").run().end_s
        for policy in ("no_borrow", "bidirl_length_aware", "oracle")
    }
    assert ends["oracle"] <= 1.02 * min(ends.values())


def test_other_policies_stay_as_they_are() -> None:
    assert driver("bidirl").scheduler.lender.gatekeeper.foresee is None
