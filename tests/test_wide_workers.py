"""Workers of two devices each: tensor parallelism and FSDP2 behind the same commands, with leases."""

import os

import pytest

from bidirl.executor.backends.assemble import Kind
from bidirl.executor.backends.ray_session import children_of
from bidirl.executor.neutral import DIRECTIONS, pinned_job
from bidirl.executor.run import run_real
from bidirl.planner.job import load_job
from tests.real_jobs import TINY, checked, needs
from tests.test_ray_backend import SMALL

pytestmark = pytest.mark.engine

WIDE = (
    *SMALL,
    "model.architecture.num_kv_heads=2",
    "cluster.gpus_per_node=4",
    "partition.rollout_gpus=2",
    "partition.rollout_tp=2",
    "partition.train_tp=2",
    "workload.num_steps=2",
)


def test_two_devices_a_worker() -> None:
    needs("vllm")
    before = children_of(os.getpid())
    run = run_real(pinned_job(load_job(TINY, WIDE), lends=True), 0, Kind.VLLM, digest=True, watch=checked)
    assert [len(about["devices"]) for about in run.workers] == [2, 2]
    assert all(run.lent[direction] > 0 for direction in DIRECTIONS)
    assert max(step.mismatch_max for step in run.learning) < 1e-4
    assert children_of(os.getpid()) <= before
