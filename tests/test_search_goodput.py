"""Goodput under a failure rate: closed forms, and the simulator's own losses of rollout replicas."""

import random
from dataclasses import replace
from math import exp
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.models.faults import FaultsConfig
from bidirl.planner.build import build_workload
from bidirl.planner.cli import simulated
from bidirl.planner.job import Job
from bidirl.planner.search.candidates import Candidate, Search
from bidirl.planner.search.goodput import (
    Goodput,
    capacity_share,
    checkpoint_interval_s,
    checkpointed_share,
    goodput,
    lost_work_s,
    up_probability,
)
from bidirl.planner.search.plans import plan_of, question_of
from tests.search_cases import small_job

RATE = FaultsConfig(replica_mtbf_s=400.0, restart_s=60.0)
SYNC_S = 1.0


def planned(rollout_gpus: int, *overrides: str) -> tuple[Job, Search, Candidate]:
    job = small_job(
        "workload.prompts_per_step=64",
        "workload.num_steps=14",
        'policy.name="no_borrow"',
        f"partition.rollout_gpus={rollout_gpus}",
        *overrides,
    )
    search = Search(question_of(job, build_workload(job, 0)))
    assert job.partition is not None
    candidate = search.named(job.partition)
    assert candidate is not None
    return job, search, candidate


def answer(rollout_gpus: int, faults: FaultsConfig) -> Goodput:
    _, search, candidate = planned(rollout_gpus)
    found = goodput(search, candidate, faults, SYNC_S)
    assert found is not None
    return found


# --------------------------------------------------------------- closed forms


def test_a_replica_keeps_what_renewals_leave_it() -> None:
    """Up-times drawn from the exponential: the last ``min(U, l)`` seconds of each are lost."""
    rng = random.Random(1)
    ups = [rng.expovariate(1 / 300.0) for _ in range(40_000)]
    kept = sum(max(0.0, up - 70.0) for up in ups) / sum(up + 45.0 for up in ups)
    assert capacity_share(300.0, 45.0, 70.0) == pytest.approx(kept, rel=0.02)
    assert capacity_share(300.0, 0.0, 0.0) == 1.0


def test_young_s_interval_is_near_the_best_of_daly_s_formula() -> None:
    checkpoint_s, restart_s, mtbf_s = 10.0, 120.0, 20_000.0
    grid = np.linspace(50.0, 5000.0, 2000)
    shares = [checkpointed_share(float(w), checkpoint_s, restart_s, mtbf_s) for w in grid]
    young = checkpoint_interval_s(checkpoint_s, mtbf_s)
    assert young == pytest.approx((2 * 10.0 * 20_000.0) ** 0.5)
    assert checkpointed_share(young, checkpoint_s, restart_s, mtbf_s) > max(shares) * (1 - 1e-4)
    first_order = 1 - checkpoint_s / young - young / (2 * mtbf_s) - restart_s / mtbf_s
    assert checkpointed_share(young, checkpoint_s, restart_s, mtbf_s) == pytest.approx(first_order, abs=2e-3)


def test_checkpoints_and_restarts_as_they_are_drawn() -> None:
    rng = random.Random(2)
    interval_s, checkpoint_s, restart_s, mtbf_s = 200.0, 10.0, 50.0, 600.0
    clock = useful = 0.0
    for _ in range(20_000):
        while (up := rng.expovariate(1 / mtbf_s)) < interval_s + checkpoint_s:
            clock += up
            while (up := rng.expovariate(1 / mtbf_s)) < restart_s:
                clock += up
            clock += restart_s
        clock += interval_s + checkpoint_s
        useful += interval_s
    assert checkpointed_share(interval_s, checkpoint_s, restart_s, mtbf_s) == pytest.approx(
        useful / clock, rel=0.02
    )


@given(st.integers(1, 12), st.integers(0, 6), st.floats(0.01, 0.99))
def test_the_chance_of_enough_replicas(needed: int, extra: int, availability: float) -> None:
    found = up_probability(needed, needed + extra, availability)
    assert 0.0 <= found <= 1.0 + 1e-12
    assert found >= availability ** (needed + extra) - 1e-12
    assert up_probability(needed, needed + extra + 1, availability) >= found - 1e-12
    assert up_probability(needed, needed, availability) == pytest.approx(availability**needed)


def test_equal_lengths_lose_half_their_stay() -> None:
    """All samples of 100 tokens: a group in residence has done half of its work on average."""
    _, search, candidate = planned(
        4, "workload.max_response_tokens=101", "workload.lengths={mean=100.0, p50=100.0, p95=100.5}"
    )
    pool = next(each for each in search.rollouts if each.layout == candidate.rollout)
    here = min(pool.cap, 64 * 8 // 4)
    base_s, context_s = pool.iteration.decode(here)
    step_s = base_s + context_s * here * (pool.question.prior.prompt_mean_tokens + 50.0)
    assert lost_work_s(pool, 4) == pytest.approx(50.0 * step_s, rel=0.02)


# ------------------------------------------------------------------- the plan


def test_without_a_rate_there_is_no_answer() -> None:
    _, search, candidate = planned(4)
    assert goodput(search, candidate, FaultsConfig(), SYNC_S) is None


def test_losses_cost_more_the_more_often_they_come() -> None:
    found = [answer(4, FaultsConfig(replica_mtbf_s=rate, restart_s=60.0)) for rate in (1e4, 1e5, 1e6, 1e9)]
    shares = [each.goodput for each in found]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0, abs=0.01)
    intervals = [each.checkpoint_interval_steps for each in found]
    assert intervals == sorted(intervals)
    for each in found:
        assert each.gpu_mtbf_s == each.rollout_mtbf_s  # engines of one GPU
        assert each.trainer_mtbf_s == pytest.approx(each.gpu_mtbf_s / 12)
        assert each.rollout_capacity == pytest.approx(
            each.rollout_mtbf_s * exp(-each.lost_work_s / each.rollout_mtbf_s) / (each.rollout_mtbf_s + 60.0)
        )


def test_spares_pay_where_generation_is_the_limit() -> None:
    few, many = answer(4, RATE), answer(12, RATE)
    assert few.spares_that_pay > 0
    assert many.spares_that_pay == 0  # the trainer is: more rollout replicas change nothing
    assert [each.replicas for each in few.spares] == list(range(9))
    steps = [each.step_s for each in few.spares]
    assert steps == sorted(steps, reverse=True)
    assert few.spares[0].step_s == few.expected_step_s
    chances = [each.up_probability for each in few.spares]
    assert chances == sorted(chances)


@pytest.mark.parametrize("rollout_gpus", [4, 8])
def test_the_simulator_loses_as_much(rollout_gpus: int) -> None:
    """Losses every 400 s, 60 s of restart: the step grows as the closed form says, within seeds' noise."""
    job, search, candidate = planned(rollout_gpus)
    plan = plan_of(job, search, candidate)
    failing = replace(job, faults=RATE)
    seeds = range(3)
    ratios = [simulated(failing, plan, s).step_s / simulated(job, plan, s).step_s for s in seeds]
    found = goodput(search, candidate, RATE, plan.models.sync.seconds(candidate.rollout_replicas))
    assert found is not None
    predicted = found.trainer_share * found.expected_step_s / found.step_s  # the trainer is not injected
    assert fmean(ratios) == pytest.approx(predicted, rel=0.1)
