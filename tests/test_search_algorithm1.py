"""Algorithm 1 and the search against brute force, on thousands of random small clusters."""

from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.planner.build import build_plan, build_workload
from bidirl.planner.gates import Predictor, batch_work
from bidirl.planner.policy import Lending, Placement
from bidirl.planner.search.algorithm1 import algorithm1, compatible, step_seconds
from bidirl.planner.search.candidates import Objective, Pricing, Search
from bidirl.planner.search.layouts import RolloutLayout, Style, TrainLayout
from bidirl.planner.search.plans import job_of, plan_of, question_of
from bidirl.planner.search.run import paper_answer
from bidirl.planner.search.train_pool import TrainPool
from tests.search_cases import brute_force, question, small_job, table_search

BASE = question()
CLUSTERS = 40
"""Random clusters drawn from each of hypothesis's seeds: thousands in all, without its cost for each."""


def tables(rng: np.random.Generator, count: int) -> list[tuple[int, list[float]]]:
    """Return one to three replica sizes with seconds by pool size: few values (ties), some illegal cells."""
    sizes = rng.choice([1, 2, 3, 4], size=rng.integers(1, 4), replace=False)
    found = []
    for size in sizes:
        seconds = rng.integers(1, 13, size=count).astype(float)
        seconds[rng.random(count) < rng.choice([0.0, 0.2, 0.6])] = inf
        found.append((int(size), seconds.tolist()))
    return found


@given(st.integers(0, 2**32))
def test_algorithm_1_is_the_best_compatible_partition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(CLUSTERS):
        num_gpus, rho_r, rho_t = (int(rng.integers(1, top)) for top in (25, 7, 7))
        unit = int(rng.choice([1, 2, 3, 8]))
        partitions = [(g, num_gpus - g) for g in range(unit, num_gpus, unit)]
        m_r, m_t = rng.integers(1, 10, size=(2, num_gpus + 1)).tolist()
        found = algorithm1(partitions, rho_r, rho_t, 60, m_r.__getitem__, m_t.__getitem__)
        legal = [
            (60 / max(m_r[a // rho_r], m_t[b // rho_t]), -a)
            for a, b in partitions
            if not (a % rho_r or b % rho_r or a % rho_t or b % rho_t)
        ]
        if not legal:
            assert found is None
            continue
        rate, place = max(legal)
        assert found is not None
        assert found.groups_per_s == pytest.approx(rate)
        assert found.rollout_gpus == -place  # of equals the first partition stays
        assert found.rollout_gpus == found.rollout_replicas * rho_r
        assert found.train_gpus == found.train_replicas * rho_t


@given(seed=st.integers(0, 2**32), objective=st.sampled_from(list(Objective)))
def test_the_search_never_loses_to_brute_force(seed: int, objective: Objective) -> None:
    """Odd nodes, one GPU a pool, illegal cells, ties: the same least cost, with or without unused GPUs."""
    rng = np.random.default_rng(seed)
    for _ in range(CLUSTERS):
        nodes, per_node = int(rng.integers(1, 6)), int(rng.integers(1, 7))
        count = nodes * per_node if nodes <= 2 else nodes
        staleness = float(rng.choice([0.0, 0.25, 1.0, 2.0]))
        search = table_search(BASE, nodes, per_node, staleness, tables(rng, count), tables(rng, count))
        found = search.ranked(objective)
        expected = brute_force(search, objective)
        if expected == inf:
            assert found == []
            continue
        assert found[0].cost(objective) == pytest.approx(expected)
        costs = [candidate.order(objective) for candidate in found]
        assert costs == sorted(costs)  # the written tie rule


@given(st.integers(0, 2**32))
def test_compatible_splits_are_the_best_that_can_switch_roles(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(CLUSTERS // 2):
        nodes, per_node = int(rng.integers(1, 5)), int(rng.integers(1, 9))
        count = nodes * per_node if nodes <= 2 else nodes
        search = table_search(BASE, nodes, per_node, 1.0, tables(rng, count), tables(rng, count))
        found = {each.rollout_gpus: each.step_s for each in search.compatible_splits()}
        sizes = list(search.question.pool_sizes)
        for index, g_r in enumerate(sizes):
            back = len(sizes) - 1 - index
            each = [
                max(float(a.seconds[index]), float(b.seconds[back]))
                for a, b in product(search.rollouts, search.trains)
                if compatible(g_r, sizes[back], a.layout.gpus, b.layout.unit_gpus)
            ]
            assert found.get(g_r, inf) == min(each, default=inf)


@pytest.mark.parametrize(
    "overrides",
    [
        ("cluster.num_nodes=1", "cluster.gpus_per_node=6"),
        ("cluster.num_nodes=1", "cluster.gpus_per_node=2", "model.name=Qwen3-0.6B"),
        ("cluster.num_nodes=3", "cluster.gpus_per_node=4"),
        ('cluster.gpu="H100"', "cluster.num_nodes=4", 'model.name="Qwen3-30B-A3B"'),
        ("cluster.gpus_per_node=3", "workload.mini_batches=2", "policy.staleness=0.5"),
    ],
)
def test_real_models_against_brute_force(overrides: tuple[str, ...]) -> None:
    """Every pair of layouts and pools, priced one by one from the pools' own plain formulas."""
    asked = question(*overrides)
    search = Search(asked)
    sizes = list(asked.pool_sizes)
    best = inf
    for rollout, train in product(search.rollouts, search.trains):
        for g_r, g_t in product(sizes, sizes):
            if g_r + g_t > asked.cluster.num_gpus:
                continue
            if rollout.reason(g_r) is None and train.reason(g_t) is None:
                seconds = (rollout.makespan_s(g_r // rollout.layout.gpus), train.seconds_on(g_t))
                best = min(best, float(step_seconds(*seconds, asked.staleness)))
    found = [each for each in search.ranked(Objective.TIME) if each.train_gpus]
    assert (found[0].step_s if found else inf) == pytest.approx(best)


@pytest.mark.parametrize("rollout_gpus", [4, 8, 12])
def test_prices_are_those_of_the_scheduler_s_predictor(rollout_gpus: int) -> None:
    job = small_job("workload.prompts_per_step=64", f"partition.rollout_gpus={rollout_gpus}")
    workload = build_workload(job, 0)
    search = Search(question_of(job, workload))
    plan = build_plan(job, workload)
    assert job.partition is not None
    named = search.named(job.partition)
    assert named is not None
    predictor = Predictor(plan)
    assert named.rollout_s == pytest.approx(predictor.rollout_s(64, plan.rollout_replicas, 0))
    assert named.train_s == pytest.approx(predictor.train_s(batch_work(plan), plan.train_replicas))
    assert plan_of(job, search, named).models == plan.models
    assert job_of(job, search, named).partition == job.partition


def test_layouts_that_a_partition_cannot_say_become_plans_too() -> None:
    job = small_job('cluster.gpu="H100"', "cluster.num_nodes=4", 'model.name="Qwen3-30B-A3B"')
    search = Search(question_of(job, build_workload(job, 0)))
    layout = TrainLayout(Style.MEGATRON, 2, 2, 4)
    pool = next(each for each in search.trains if each.layout == layout)
    candidate = next(
        each
        for each in search.alternatives(search.splits()[1], inf, 10_000)
        if each.train == layout and each.rollout == RolloutLayout(2, 2)
    )
    plan = plan_of(job, search, candidate)
    assert (plan.rollout_replicas, plan.train_replicas) == (4, 4)
    predicted = Predictor(plan).train_s(batch_work(plan), plan.train_replicas)
    assert predicted == pytest.approx(pool.seconds_on(16))
    assert Predictor(plan).rollout_s(plan.groups_per_step, 4, 0) == pytest.approx(candidate.rollout_s)


@pytest.mark.parametrize("layout", [TrainLayout(Style.FSDP, 2), TrainLayout(Style.MEGATRON, 1, 2, 1)])
def test_micro_batches_by_formula_are_those_by_trial(layout: TrainLayout) -> None:
    """Memory as ``a / gpus + b`` gives what asking the memory model for each size gives."""
    pool = TrainPool(question("cluster.num_nodes=2"), layout)
    for gpus, found in zip(pool.question.sizes, pool.micro_tokens, strict=True):
        tried = 0
        if pool.kind(int(gpus)) == "memory":
            tried = next((t for t in pool.rungs() if pool.budget(int(gpus), t).fits), 0)
        assert found == tried, gpus


def test_the_published_algorithm_takes_the_smallest_layouts() -> None:
    search = Search(question("workload.prompts_per_step=64"))
    found = paper_answer(search)
    assert found is not None
    assert (found.rollout_replica_gpus, found.train_replica_gpus) == (1, 1)
    assert found.rollout_gpus + found.train_gpus == 16
    best = search.ranked(Objective.TIME)[0]
    assert best.step_s <= 64 / found.groups_per_s * (1 + 1e-9)  # all layouts: never worse


def test_steady_generation_is_never_slower_than_a_barrier() -> None:
    search = Search(question("workload.prompts_per_step=64"))
    for pool in search.rollouts:
        assert (pool.steady <= pool.seconds).all()
    on_policy = Search(question("policy.staleness=0"))
    assert np.array_equal(on_policy.rollouts[0].steady, on_policy.rollouts[0].seconds)
    for batch, steady in zip(search.splits(), search.splits(Pricing.STEADY), strict=True):
        assert steady.step_s <= batch.step_s


def test_lending_never_makes_a_price_worse() -> None:
    job = small_job("workload.prompts_per_step=64")
    switch = build_plan(job, build_workload(job, 0)).models.switch
    search = Search(question_of(job, build_workload(job, 0)), switch)
    for candidate in search.compatible_splits():
        both = search.lent(candidate, Lending.BOTH)
        assert both.step_s <= candidate.step_s
        assert search.lent(both, Lending.NONE) == candidate
        ways = [
            search.lent(candidate, way).step_s for way in (Lending.ROLLOUT_ON_TRAIN, Lending.TRAIN_ON_ROLLOUT)
        ]
        assert both.step_s == min(ways)


def test_a_colocated_candidate_takes_turns_on_everything() -> None:
    found = Search(question()).colocated()[-1]
    assert found.placement is Placement.COLOCATED
    assert (found.num_gpus, found.train_gpus) == (16, 0)
    assert found.step_s == found.rollout_s + found.train_s


def test_cost_grows_at_most_linearly_with_the_cluster() -> None:
    """Counted, not timed: priced (layout, pool size) pairs, and calls of the rollout model."""
    counts, calls = [], []
    for nodes in (64, 256, 1024):
        search = Search(
            question('cluster.gpu="H100"', f"cluster.num_nodes={nodes}", "workload.prompts_per_step=1024")
        )
        search.ranked(Objective.TIME)
        counts.append(search.num_evaluated)
        calls.append(sum(len(pool._known) for pool in search.rollouts))
    slopes = np.diff(np.log(counts)) / np.log(4)
    assert (slopes <= 1.02).all()
    assert (np.diff(np.log(calls)) / np.log(4) <= 1.0).all()
