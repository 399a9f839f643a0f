"""Hypothesis profiles (``ci`` repeats exactly and stays short, ``deep`` searches), and the order of tests."""

import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci",
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("deep", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""One thread a process, as workers have: on tiny models, threads that spin while others run take ten times as
long."""

LONGEST = (
    "test_run_faults_ray",
    "test_run_faults_real",
    "test_wide_workers",
    "test_ray_backend",
    "test_validate_engine",
)
"""Files of few and long tests: they begin first, so that none runs alone at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))
