"""Small real runs on stand-ins: jobs, and a run that checks the invariants after every event."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bidirl.executor.backends.assemble import Kind
from bidirl.executor.backends.real import RealBackend
from bidirl.executor.backends.stub import StubConfig
from bidirl.executor.driver import Driver
from bidirl.executor.run import RealRun, run_real
from bidirl.planner.events import Action, Event
from bidirl.planner.invariants import check
from bidirl.planner.job import Job, load_job

TINY = Path(__file__).parents[1] / "examples" / "tiny.toml"
SLOW = StubConfig(step_s=5e-4, token_s=2e-5, max_num_seqs=16)
"""Slow enough for idle pools, quick enough for a test."""


def needs(*packages: str) -> None:
    """Skip a test where a package is not installed; unlike an import, this takes no time."""
    import pytest

    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed here")


def tiny_settings(steps: int = 6, rollout_gpus: int = 2, gpus: int = 4) -> list[str]:
    """Return what makes a job of four workers of ``TINY``, unless told otherwise."""
    return [
        f"workload.num_steps={steps}",
        "workload.prompts_per_step=6",
        "workload.max_response_tokens=32",
        "workload.lengths={p50 = 10, p95 = 30}",
        "model.architecture.vocab_size=16",
        f"cluster.gpus_per_node={gpus}",
        f"partition.rollout_gpus={rollout_gpus}",
    ]


def tiny_job(*settings: str, steps: int = 6, rollout_gpus: int = 2, gpus: int = 4) -> Job:
    """Return a job of four workers, unless told otherwise."""
    return load_job(TINY, [*tiny_settings(steps, rollout_gpus, gpus), *settings])


def checked(driver: Driver, _: RealBackend) -> None:
    """Have the invariants checked after every event, and the journal still written."""
    inner = driver.sink

    def sink(now: float, event: Event, actions: list[Action]) -> None:
        check(driver.scheduler)
        if inner is not None:
            inner(now, event, actions)

    driver.sink = sink


def run_stub(job: Job, seed: int = 0, **more: Any) -> RealRun:
    """Run a job on numpy stand-ins in threads."""
    more.setdefault("stub", SLOW)
    more.setdefault("digest", True)
    more.setdefault("watch", checked)
    return run_real(job, seed, Kind.STUB, **more)
