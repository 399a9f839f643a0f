"""Small random jobs for the proofs: a plan and a workload built directly, no job file and no catalogue."""

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import numpy as np
from hypothesis import strategies as st

from bidirl.models.iteration import AffineIteration
from bidirl.models.replica import EngineLimits
from bidirl.models.stages import StageModels
from bidirl.models.trainer import SegmentCost, TrainerModel
from bidirl.models.transfer import SwitchCosts, SyncModel
from bidirl.planner import events as ev
from bidirl.planner.events import Event
from bidirl.planner.plan import Plan
from bidirl.planner.policy import (
    BatchOrder,
    Dispatch,
    Gate,
    Granularity,
    InFlight,
    Lending,
    Merge,
    PolicyConfig,
    Split,
    VersionMode,
)
from bidirl.sim.driver import Driver, Sink
from bidirl.traces.lengths import LengthPrior
from bidirl.traces.records import GroupBlock
from bidirl.traces.run_record import Activity, RunRecord
from bidirl.traces.workload import Workload, WorkloadConfig
from bidirl.traces.workload_config import DriftTo, LengthTable, Spread, TurnsConfig

__all__ = [
    "FREE_SWITCH",
    "MAX_EVENTS",
    "MAX_EVENTS_AT_ONCE",
    "Case",
    "UnevenDriver",
    "cases",
    "equal_lengths",
    "run",
    "stage_models",
    "switch_costs",
]

MAX_EVENTS = 60_000
"""Events after which a case counts as a livelock; the largest sound case needs fewer than a tenth."""
MAX_EVENTS_AT_ONCE = 2_000
"""Events at one instant after which a case counts as a livelock."""


@dataclass(frozen=True)
class Case:
    """A job ready to run; ``text`` is enough to build it again."""

    plan: Plan
    workload: Workload
    text: str
    apply_spread_s: float = 0.0
    """Seconds between the confirmations of two neighbouring replicas in one sync."""

    def __repr__(self) -> str:
        return self.text


class UnevenDriver(Driver):
    """A driver whose replicas load a version one after the other, as real ones do."""

    apply_spread_s = 0.0

    def _sync(self, syncs: list[ev.SyncReplica]) -> None:
        """Let each replica go its own way: its own pause, then one ``apply_spread_s`` more than the last."""
        if not self.apply_spread_s:
            super()._sync(syncs)
            return
        self.newest = max(self.newest, syncs[0].version)
        for action in syncs:
            index = action.replica
            pause_s = self.replicas[index].pause(self.env.now)
            self._drain(index)
            self.dirty.add(index)
            end_s = (
                pause_s + self.plan.models.sync.seconds(action.num_receivers) + index * self.apply_spread_s
            )
            self.recorder.span(*self.recorder.rollout_unit(index), Activity.SYNC, pause_s, end_s)
            fails = self.faults is not None and self.faults.sync_fails(index, action.serial)
            rank = ev.RANK[ev.SyncFailed if fails else ev.SyncApplied]
            then = self._not_applied if fails else self._applied
            self.env.at(end_s, rank << 48 | action.serial, then, action)


def run(
    plan: Plan, workload: Workload, sink: Sink | None = None, *, apply_spread_s: float = 0.0
) -> tuple[RunRecord, Driver]:
    """Run a plan; AssertionError where events never end."""
    last, here, total = -1.0, 0, 0

    def guard(now: float, event: Event, actions: list[Any]) -> None:
        nonlocal last, here, total
        assert now >= last, "the clock went back"
        here = here + 1 if now == last else 0
        last, total = now, total + 1
        assert here < MAX_EVENTS_AT_ONCE, f"livelock at {now} s: {event}, {actions}"
        assert total < MAX_EVENTS, f"endless run, {now} s: {event}, {actions}"
        if sink is not None:
            sink(now, event, actions)

    driver = UnevenDriver(plan, workload, sink=guard)
    driver.apply_spread_s = apply_spread_s
    return driver.run(), driver


def switch_costs(into_s: float, out_s: float, grad_s: float = 0.0, broadcast_s: float = 0.0) -> SwitchCosts:
    """Return switch costs that are the same in both directions."""
    return SwitchCosts(into_s, out_s, into_s, out_s, grad_s, broadcast_s, into_s, out_s)


FREE_SWITCH = switch_costs(0.0, 0.0)


def stage_models(
    *,
    tau_s: float = 0.01,
    pre_tau_s: float | None = None,
    beta_tok_s: float = 0.0,
    beta_hist_s: float = 0.0,
    limits: EngineLimits | None = None,
    train_tau_s: float = 0.0,
    train_s_per_token: float = 1e-3,
    forward_share: float = 0.25,
    optimizer_s: float = 0.0,
    sync_s: float = 0.0,
    apply_s: float = 0.0,
    switch: SwitchCosts = FREE_SWITCH,
) -> StageModels:
    """Return stage models of round numbers; what is not given costs nothing."""
    forward = SegmentCost(train_tau_s, train_s_per_token * forward_share)
    pre = tau_s if pre_tau_s is None else pre_tau_s
    return StageModels(
        iteration=AffineIteration(pre, tau_s, beta_tok_s, beta_tok_s, beta_hist_s, beta_hist_s),
        limits=limits or EngineLimits(1 << 20),
        trainer=TrainerModel(
            old_logprob=forward,
            reference=forward,
            update=SegmentCost(train_tau_s, train_s_per_token),
            pair_tokens=0.0,
            optimizer_s=optimizer_s,
        ),
        sync=SyncModel(sync_s, 1e-9 if sync_s else 0.0, 1e6, 0.0, 1, sync_s / 8, apply_s),
        switch=switch,
    )


class _EqualLengths:
    """Groups that are all alike."""

    def __init__(self, groups: int, samples: int, prompt_tokens: int, response_tokens: int) -> None:
        self.shape = groups, samples
        self.tokens = prompt_tokens, response_tokens

    def block(self, step_index: int) -> GroupBlock:
        groups, samples = self.shape
        prompt, response = self.tokens
        return GroupBlock(
            first_group=step_index * groups,
            prompt_tokens=np.full(groups, prompt),
            image_tokens=np.zeros(groups, dtype=np.int64),
            response_tokens=np.full((groups, samples), response),
            truncated=np.zeros((groups, samples), dtype=np.bool_),
            reward_s=np.zeros(groups),
            filtered=np.zeros(groups, dtype=np.bool_),
        )


def equal_lengths(
    groups: int, samples: int, prompt_tokens: int, response_tokens: int
) -> tuple[Workload, LengthPrior]:
    """Return a workload without randomness, and what a scheduler knows of it."""
    prior = LengthPrior((float(response_tokens),) * 64, response_tokens, response_tokens, prompt_tokens)
    return cast("Workload", _EqualLengths(groups, samples, prompt_tokens, response_tokens)), prior


STALENESS = ("0", "0.1", "0.3", "0.5", "1", "1.5", "2", "4")
COSTS_S = (0.0, 0.0, 0.0, 0.0, 0.25, 0.25, 1.0, 1e4)


def _policy(draw: Callable[..., Any], placement_is_shared: bool) -> PolicyConfig:
    pick = st.sampled_from
    version_mode = draw(pick(VersionMode))
    order = (
        BatchOrder.ISSUE_ORDER
        if version_mode is VersionMode.PINNED
        else draw(pick((BatchOrder.READY_FIRST, BatchOrder.OLDEST_FIRST, BatchOrder.ISSUE_ORDER)))
    )
    return PolicyConfig(
        name="random",
        staleness=Decimal(0) if placement_is_shared else Decimal(draw(pick(STALENESS))),
        version_mode=version_mode,
        granularity=Granularity.FULL if placement_is_shared else draw(pick(Granularity)),
        in_flight=draw(pick(InFlight)),
        batch_order=order,
        dispatch=draw(pick((Dispatch.LEAST_LOADED, Dispatch.ROUND_ROBIN))),
        lending=draw(pick((Lending.BOTH, Lending.NONE, Lending.ROLLOUT_ON_TRAIN, Lending.TRAIN_ON_ROLLOUT))),
        gate=draw(pick((Gate.NONE, Gate.NONE, Gate.MODELS))),
        split=draw(pick((Split.EVEN, Split.EQ6))),
        merge=draw(pick((Merge.ACCUMULATED, Merge.ORDERED))),
        concurrency_groups_per_replica=draw(pick((None, 1, 2, 3))),
        max_concurrency=draw(pick((None, None, 1, 3))),
        chunk_groups=draw(st.integers(1, 3)),
        max_chunks_per_pull=draw(st.integers(1, 4)),
    )


def _workload(draw: Callable[..., Any], num_steps: int, batch: int, samples: int) -> WorkloadConfig:
    pick = st.sampled_from
    longest, median, sigma = draw(pick(((40, 10.0, 1.5), (3, 1.0, 0.001), (40, 10.0, 0.001), (4, 2.0, 1.5))))
    return WorkloadConfig(
        prompts_per_step=batch,
        samples_per_prompt=samples,
        max_response_tokens=longest,
        lengths=LengthTable(p50=median, sigma=sigma),
        num_steps=num_steps,
        prompt_tokens=draw(pick((1, 20))),
        image_tokens=0,
        drift=draw(pick((None, None, DriftTo(to=3.0, over_steps=2)))),
        filter_rate=draw(pick((0.0, 0.3, 0.7))),
        reward_s=draw(pick((0.0, 0.125, Spread(mean=3.0, p95=9.0)))),
        reward_capacity=draw(pick((None, 1, 2))),
        turns=draw(pick((None, None, TurnsConfig(mean=2.0, max=3, tool_s=0.25, tool_tokens=5)))),
        mini_batches=draw(pick([m for m in range(1, batch + 1) if batch % m == 0])),
        old_logprob=draw(pick(("on", "off"))),
        reference=draw(pick(("off", "on"))),
    )


@st.composite
def cases(draw: Callable[..., Any], *, lending: bool | None = None, pinned: bool | None = None) -> Case:
    """Draw a job; ``lending`` or ``pinned`` fixes that choice."""
    pick = st.sampled_from
    shared = lending is not True and draw(pick((False,) * 9 + (True,)))
    policy = _policy(draw, shared)
    if pinned is not None and pinned != (policy.version_mode is VersionMode.PINNED):
        mode = VersionMode.PINNED if pinned else VersionMode.LATEST
        policy = policy.model_copy(update={"version_mode": mode, "batch_order": BatchOrder.ISSUE_ORDER})
    if lending is not None and lending != (policy.lending is not Lending.NONE):
        policy = policy.model_copy(update={"lending": Lending.BOTH if lending else Lending.NONE})
    num_steps, batch = draw(pick((3, 4, 1, 2, 5, 6))), draw(pick((6, 12, *range(1, 13))))
    samples = draw(st.integers(2, 4))
    config = _workload(draw, num_steps, batch, samples)
    seed = draw(st.integers(0, 3))
    workload = Workload(config, Path(), seed)
    tp = draw(pick((1, 1, 2))), draw(pick((1, 1, 2)))
    pools = draw(st.integers(1, 6)) * max(tp), draw(st.integers(1, 6)) * max(tp)
    size = draw(pick((1, 4, 16)))
    need = 20 + config.max_response_tokens + 2 * 5 + 1
    blocks = -(-need // size) + 1 + draw(pick((0, 1, 3, 1000)))
    limits = EngineLimits(
        blocks * size, size, draw(pick((1, 4, 64))), draw(pick((64, 512))), draw(st.booleans())
    )
    plain = draw(st.booleans())  # no term grows with load: many events fall on one instant
    models = stage_models(
        tau_s=0.125,
        pre_tau_s=draw(pick((0.125, 0.5))),
        beta_tok_s=0.0 if plain else 0.003,
        beta_hist_s=0.0 if plain else 0.0007,
        limits=limits,
        train_tau_s=draw(pick((0.0, 0.125))),
        train_s_per_token=draw(pick((1 / 64, 0.0, 1 / 1024, 1 / 8))),
        forward_share=draw(pick((0.0, 0.25))),
        optimizer_s=draw(pick((0.0, 0.125))),
        sync_s=draw(pick((0.0, 0.125, 2.0))),
        apply_s=draw(pick((0.0, 0.25))),
        switch=SwitchCosts(
            *(draw(pick(COSTS_S)) for _ in range(4)), *(draw(pick((0.0, 0.125, 2.0))) for _ in range(4))
        ),
    )
    priors = tuple(workload.prior(step) for step in range(num_steps))
    plan = Plan(
        num_steps=num_steps,
        groups_per_step=batch,
        samples_per_group=samples,
        mini_batches=config.mini_batches,
        rollout_gpus=pools[0],
        train_gpus=0 if shared else pools[1],
        rollout_replica_gpus=tp[0],
        train_replica_gpus=tp[1],
        policy=policy,
        models=models,
        priors=priors if any(prior != priors[0] for prior in priors) else priors[:1],
        old_logprob=config.old_logprob == "on",
        reference=config.reference == "on",
        scoring=config.filter_rate > 0.0 or config.reward_s != 0.0,
        reward_capacity=config.reward_capacity,
        group_slots=draw(pick((1, 2, 64))),
    )
    spread_s = draw(pick((0.0, 0.0, 0.125, 3.0)))
    return Case(plan, workload, f"Case(seed={seed}, {spread_s=}, config={config!r}, plan={plan!r})", spread_s)
