"""The simulator against results on paper: M/D/1, two-stage lines, the work bound, Little's law."""

from dataclasses import replace
from math import isclose, sqrt
from typing import Any

import numpy as np
import pytest

from bidirl.models.replica import EngineLimits, Replica, Request
from bidirl.models.stages import StageModels
from bidirl.planner import events as ev
from bidirl.planner.plan import Plan
from bidirl.planner.policy import PolicyConfig, preset
from bidirl.sim.metrics import summarise
from bidirl.traces.run_record import RunRecord
from tests.job_strategies import equal_lengths, run, stage_models, switch_costs

BATCH, SAMPLES, PROMPT, RESPONSE, TAU_S = 8, 2, 4, 16, 0.25


# ------------------------------------------------------------------------- M/D/1


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_slot_is_an_m_d_1_queue(load: float) -> None:
    """Mean wait ``rho / (2 mu (1 - rho))``. Source: Pollaczek 1930, Khinchine 1932, constant service."""
    service_s, count = 1.0, 20_000
    models = stage_models(tau_s=service_s / 5, limits=EngineLimits(1 << 12, max_num_seqs=1))
    replica = Replica(models.iteration, models.limits)
    arrivals = np.cumsum(np.random.default_rng(3).exponential(service_s / load, count)).tolist()
    for number, now in enumerate(arrivals):
        replica.submit(now, [Request(number, number, 1, 0, 5)])
    replica.pause(arrivals[-1] + count * service_s)
    finished = dict(replica.take_finished())
    waits = np.array([finished[number] - now - service_s for number, now in enumerate(arrivals)])
    free_s, expected = 0.0, []
    for now in arrivals:  # Lindley's recursion: exact, sample by sample
        start_s = max(now, free_s)
        expected.append(start_s - now)
        free_s = start_s + service_s
    np.testing.assert_allclose(waits, expected, atol=1e-6)
    batches = waits.reshape(50, -1).mean(axis=1)  # means of long batches are nearly independent
    error = batches.std(ddof=1) / sqrt(len(batches))
    assert abs(waits.mean() - load * service_s / (2.0 * (1.0 - load))) < 4.0 * error


# ------------------------------------------------------------- two-stage lines


def line(
    policy: PolicyConfig,
    models: StageModels,
    *,
    rollout: int = 2,
    train: int = 2,
    num_steps: int = 8,
    batch: int = BATCH,
) -> Plan:
    """Return a job of equal lengths in which the rollout pool holds exactly one batch at a time."""
    _, prior = equal_lengths(batch, SAMPLES, PROMPT, RESPONSE)
    return Plan(
        num_steps=num_steps,
        groups_per_step=batch,
        samples_per_group=SAMPLES,
        mini_batches=1,
        rollout_gpus=rollout,
        train_gpus=train,
        rollout_replica_gpus=1,
        train_replica_gpus=1,
        policy=policy,
        models=models,
        priors=(prior,),
        group_slots=batch // rollout,
    )


def line_models(train_s_per_token: float, sync_s: float = 0.0, **more: Any) -> StageModels:
    return stage_models(
        tau_s=TAU_S, train_s_per_token=train_s_per_token, sync_s=sync_s, optimizer_s=0.5, **more
    )


def stage_times(plan: Plan) -> tuple[float, float, float]:
    """Return (generate a batch, train it, sync it) on paper: one token an iteration, linear work."""
    tokens = plan.groups_per_step * SAMPLES * (PROMPT + RESPONSE)
    trainer, replicas = plan.models.trainer, plan.train_replicas
    per_token = trainer.old_logprob.alpha_s + trainer.update.alpha_s
    sync_s = plan.models.sync.seconds(plan.rollout_replicas)
    return RESPONSE * TAU_S, tokens * per_token / replicas + trainer.optimizer_s, sync_s


def steps_of(plan: Plan) -> np.ndarray[Any, np.dtype[np.float64]]:
    workload, _ = equal_lengths(plan.groups_per_step, SAMPLES, PROMPT, RESPONSE)
    return np.diff(run(plan, workload)[0].steps.published_s, prepend=0.0)


@pytest.mark.parametrize("train_s_per_token", [1 / 1024, 1 / 64])
@pytest.mark.parametrize("sync_s", [0.0, 1.5])
def test_colocated_step_is_the_sum_of_its_stages(train_s_per_token: float, sync_s: float) -> None:
    models = line_models(train_s_per_token, sync_s, switch=switch_costs(0.75, 0.5))
    plan = line(preset("colocated_sync", staleness=0), models, train=0)
    gen_s, train_s, published_s = stage_times(plan)
    np.testing.assert_allclose(steps_of(plan), gen_s + 0.75 + train_s + 0.5 + published_s)


@pytest.mark.parametrize("train_s_per_token", [1 / 1024, 1 / 64])
@pytest.mark.parametrize("sync_s", [0.0, 1.5])
def test_on_policy_step_is_the_sum_of_its_stages(train_s_per_token: float, sync_s: float) -> None:
    plan = line(preset("no_borrow", staleness=0), line_models(train_s_per_token, sync_s))
    np.testing.assert_allclose(steps_of(plan), sum(stage_times(plan)))


@pytest.mark.parametrize("staleness", [1, 2, 3])
@pytest.mark.parametrize("train_s_per_token", [1 / 1024, 1 / 256, 1 / 64])
def test_run_ahead_of_a_batch_hides_the_faster_stage(staleness: int, train_s_per_token: float) -> None:
    """In steady state the slower stage sets the pace; the faster one hides behind it."""
    policy = preset("no_borrow", staleness=staleness, in_flight="continue_stale")
    plan = line(policy, line_models(train_s_per_token), num_steps=12)
    gen_s, train_s, _ = stage_times(plan)
    np.testing.assert_allclose(steps_of(plan)[4:-staleness], max(gen_s, train_s))


def test_a_sync_adds_to_the_trainer_when_it_is_slower() -> None:
    plan = line(preset("no_borrow", staleness=1), line_models(1 / 16, 1.5))
    gen_s, train_s, sync_s = stage_times(plan)
    assert gen_s < train_s
    np.testing.assert_allclose(steps_of(plan)[1:], train_s + sync_s)


def test_a_sync_adds_to_the_rollout_when_it_is_slower() -> None:
    """Engines stand still during a sync, and no recomputation is charged where stale KV is kept."""
    plan = line(preset("no_borrow", staleness=1, in_flight="continue_stale"), line_models(1 / 4096, 1.0))
    gen_s, train_s, sync_s = stage_times(plan)
    assert gen_s > train_s + sync_s
    np.testing.assert_allclose(steps_of(plan)[2:-1], gen_s + sync_s)


# ------------------------------------------------------------------- work bound


@pytest.mark.parametrize("name", ["bidirl", "opportunistic"])
@pytest.mark.parametrize("train_s_per_token", [1 / 40, 1 / 8, 1 / 2])
def test_free_borrowing_reaches_the_work_bound(name: str, train_s_per_token: float) -> None:
    """Without switch costs, fixed costs and tails, borrowing keeps all devices at work.

    One group at a time per replica makes generation divisible work. It is not exactly 1: a pool lends only
    when the whole of it is idle, so up to one group's and one pull's time per step is lost.
    """
    batch = 96
    models = stage_models(
        tau_s=1 / 16,
        train_s_per_token=train_s_per_token / 16,
        limits=EngineLimits(1 << 12, max_num_seqs=SAMPLES),
    )
    policy = preset(name, staleness=1, max_chunks_per_pull=2, in_flight="continue_stale")
    plan = replace(line(policy, models, batch=batch, num_steps=10), group_slots=1)
    workload, _ = equal_lengths(batch, SAMPLES, PROMPT, RESPONSE)
    record, _ = run(plan, workload)
    summary = summarise(record)
    tokens = batch * SAMPLES * (PROMPT + RESPONSE)
    per_token = models.trainer.old_logprob.alpha_s + models.trainer.update.alpha_s
    bound_s = (batch * RESPONSE / 16 + tokens * per_token) / 4
    step_s = summary["step_time_s"]["mean"]
    assert isclose(summary["bound"]["work_s"], bound_s, rel_tol=0.02)
    assert 1.0 - 1e-9 <= step_s / bound_s < 1.02
    alone = replace(plan, policy=preset("no_borrow", staleness=1, max_chunks_per_pull=2))
    assert summarise(run(alone, workload)[0])["step_time_s"]["mean"] >= step_s


# -------------------------------------------------------------------- Little's law


def groups_in_flight(plan: Plan) -> tuple[RunRecord, float]:
    """Run a plan; return its record and the time average of the groups that its journal shows in flight."""
    workload, _ = equal_lengths(plan.groups_per_step, SAMPLES, PROMPT, RESPONSE)
    open_groups: dict[int, int] = {}
    area, last_s = 0.0, 0.0

    def sink(now: float, event: ev.Event, actions: list[Any]) -> None:
        nonlocal area, last_s
        area += len(open_groups) * (now - last_s)
        last_s = now
        if isinstance(event, ev.SamplesFinished):
            open_groups[event.group] -= len(event.indices)
        elif isinstance(event, ev.Preempted):
            for group, *_ in event.finished:
                open_groups[group] -= 1
        for action in actions:
            if isinstance(action, ev.StartSamples):
                open_groups.setdefault(action.group, plan.samples_per_group)
        for group in [group for group, left in open_groups.items() if left == 0]:
            del open_groups[group]

    record, _ = run(plan, workload, sink)
    assert not open_groups
    return record, area / record.end_s


@pytest.mark.parametrize("name", ["no_borrow", "bidirl"])
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_littles_law_holds_for_groups_in_flight(name: str, staleness: int) -> None:
    """``L = lambda W``: groups in flight = starts per second x mean time in flight. Source: Little 1961."""
    models = line_models(1 / 64, 0.5, beta_tok_s=0.01, beta_hist_s=1e-3)
    plan = replace(line(preset(name, staleness=staleness), models), group_slots=3)
    record, mean_in_flight = groups_in_flight(plan)
    samples = record.samples
    num_groups = plan.num_steps * plan.groups_per_step
    times = [
        max(samples.finish_s[row : row + SAMPLES]) - samples.start_s[row]
        for row in range(0, num_groups * SAMPLES, SAMPLES)
    ]
    rate_per_s = num_groups / record.end_s
    assert isclose(mean_in_flight, rate_per_s * sum(times) / num_groups, rel_tol=1e-9)
