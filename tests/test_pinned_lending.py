"""In pinned mode a trainer that waits while replicas drain is asked whether it lends."""

from dataclasses import replace

import pytest

from bidirl.executor.neutral import pinned_job
from bidirl.models.trainer import SegmentCost
from bidirl.planner.build import build_plan, build_workload
from bidirl.sim.driver import Driver
from tests.real_jobs import tiny_job


@pytest.mark.parametrize("staleness", ["1", "2"])
def test_a_trainer_whose_version_lies_published_lends(staleness: str) -> None:
    """It goes on before the replicas have drained, and here finds no batch: rollout is far slower."""
    settings = (f"policy.staleness={staleness}", 'workload.old_logprob="off"', "models.sync_s=0")
    job = pinned_job(tiny_job(*settings, rollout_gpus=1, gpus=2, steps=8), lends=True)
    workload = build_workload(job, 0)
    plan = build_plan(job, workload)
    trainer = replace(plan.models.trainer, update=SegmentCost(0.0, 1e-9), optimizer_s=0.0)
    switch = replace(plan.models.switch, rollout_on_train_in_s=0.0, rollout_on_train_out_s=0.0)
    models = replace(plan.models, trainer=trainer, switch=switch)
    leases = Driver(replace(plan, models=models), workload).run().leases
    assert leases.direction.count("rollout_on_train") >= 7
