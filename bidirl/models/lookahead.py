"""Predict the next two publications under a schedule of rollout replicas: what the length-aware gate asks.

A fluid picture of the whole rollout pool. All running samples decode in lockstep, spread evenly over the
replicas, so one *token time* serves all of them; a batch shrinks as samples end, waiting groups fill freed
places, and the seconds per token follow from the batch. A sample that has generated ``a`` tokens is longer
than ``a``: its end is drawn from the length prior conditioned on survival, not from the prior.

Some representative groups stand for all, each for the same number of real ones.
Source: ours (design.md section 5, "Gain = predicted time of the next two publications without minus with
the lease"); checked against the replica model in tests.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from bidirl.models.iteration import IterationModel
from bidirl.models.makespan import (
    GOLDEN,
    GUMBEL_SHARE,
    EngineCaps,
    LengthQuantiles,
    batch_cap,
    quantile,
)

__all__ = ["Outlook", "RolloutState", "Stretch", "outlook"]

NUM_REPRESENTATIVES = 24
"""Groups that stand for all; 24 of 8 samples keep a call near 0.3 ms, and 96 change the gain by under 3 %."""

Stretch = tuple[float, float]
"""(seconds from now, rollout replicas from then on)."""


@dataclass(frozen=True, slots=True)
class RolloutState:
    """What is known of the rollout pool at a decision."""

    running: Sequence[Sequence[float]]
    """Per group in flight: the tokens that each of its unfinished samples has generated."""
    startable: int
    """Groups that may start now."""
    per_step: int
    """Groups that a publication lets start, and that each step needs."""
    need: int
    """Complete groups that the trainer still waits for."""
    samples_per_group: int
    places: int = 0
    """Sequences that one replica runs at once; 0: what the engine's limits allow."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """Seconds from now."""

    ready_s: float
    """The next batch is complete."""
    second_s: float
    """The batch after it is complete."""


class _Fluid:
    """The pool in flight; moved from one end of a representative sample to the next."""

    def __init__(
        self, iteration: IterationModel, limits: EngineCaps, prior: LengthQuantiles, state: RolloutState
    ) -> None:
        total = len(state.running) + state.startable + state.per_step
        self.weight = max(1.0, total / NUM_REPRESENTATIVES)
        self.iteration = iteration
        self.prior = prior
        self.n = state.samples_per_group
        self.cap = state.places or batch_cap(limits, prior, self.n)
        computed = prior.prompt_mean_tokens / (self.n if limits.prefix_caching else 1)
        pairs = computed * (computed + 1.0) / 2.0
        base_s, _ = iteration.decode(1)
        self.prefill_s = max(0.0, iteration.mixed(max(1, int(computed)), pairs, 1, 0, 1) - base_s) * self.n
        """Seconds by which starting one group lengthens the iterations of one replica."""
        self.time_s = 0.0
        self.token = 0.0
        self.alive = 0
        self.context = 0.0
        self.waiting = 0
        self.done = 0
        self.draw = 0
        self.ends: list[tuple[float, int, float]] = []
        """(token time of the end, group, context at the end) of running representatives."""
        self.left: list[int] = []
        self._cohort(sum(map(len, state.running)))
        stride = self.weight
        position = stride / 2.0
        while position < len(state.running):
            self._add(state.running[int(position)])
            position += stride
        self._cohort(state.startable * self.n)
        self.waiting = round(state.startable / self.weight)
        self.per_step = max(1, round(state.per_step / self.weight))
        available = len(state.running) + state.startable
        self.need = min(1.0, state.need / available) * (len(self.left) + self.waiting) if available else 0.0
        """Representatives that make the next batch complete."""

    def _cohort(self, num_samples: float) -> None:
        """Let the next representative stand for the longest of ``num_samples`` real samples."""
        self.longest = 1.0 - GUMBEL_SHARE / max(1.0, num_samples)

    def start_step(self) -> None:
        """Let the groups of a publication wait for places."""
        self.waiting += self.per_step
        self._cohort(self.per_step * self.weight * self.n)

    def _add(self, ages: Sequence[float]) -> None:
        group = len(self.left)
        self.left.append(len(ages))
        if not ages:
            self.done += 1
        quantiles, prompt = self.prior.quantiles, self.prior.prompt_mean_tokens
        num, cap = len(quantiles), self.prior.max_tokens
        for age in ages:
            self.draw += 1
            passed = bisect_right(quantiles, age) / num
            level = self.longest or (self.draw * GOLDEN) % 1.0
            self.longest = 0.0
            level = passed + (1.0 - passed) * level
            rest = max(1.0, quantile(quantiles, cap, level) - age)
            heappush(self.ends, (self.token + rest, group, prompt + age + rest))
            self.context += prompt + age
        self.alive += len(ages)

    def _fill(self, replicas: float) -> None:
        room = replicas * self.cap / self.weight
        while self.waiting > 0 and (self.alive + self.n <= room or self.alive == 0):
            self.waiting -= 1
            self._add([0.0] * self.n)
            self.time_s += self.prefill_s * self.weight / replicas

    def run(self, need: float, schedule: Sequence[Stretch], until_s: float = inf) -> float:
        """Move on until ``need`` representatives are complete, or to ``until_s``; return the time."""
        at = 0
        while self.done < need:
            while at + 1 < len(schedule) and schedule[at + 1][0] <= self.time_s:
                at += 1
            replicas = schedule[at][1]
            horizon = min(schedule[at + 1][0] if at + 1 < len(schedule) else inf, until_s)
            if replicas <= 0.0:
                if horizon == inf:
                    return inf
                self.time_s = horizon
            else:
                self._fill(replicas)
                if not self.ends:
                    if until_s == inf:
                        return inf
                    self.time_s = max(self.time_s, until_s)
                else:
                    self._step(replicas, horizon)
            if self.time_s >= until_s:
                break
        return self.time_s

    def _step(self, replicas: float, horizon: float) -> None:
        end, group, context = self.ends[0]
        steps = end - self.token
        share = self.weight / replicas
        seqs = self.alive * share
        base_s, context_s = self.iteration.decode(max(1, round(seqs)))
        span_s = steps * (base_s + context_s * (self.context * share + 0.5 * seqs * steps))
        if self.time_s + span_s > horizon:
            part = (horizon - self.time_s) / span_s if span_s > 0.0 else 0.0
            self.context += self.alive * steps * part
            self.token += steps * part
            self.time_s = horizon
            return
        self.time_s += span_s
        self.token = end
        self.context += self.alive * steps - context
        self.alive -= 1
        heappop(self.ends)
        self.left[group] -= 1
        if self.left[group] == 0:
            self.done += 1


def outlook(
    iteration: IterationModel,
    limits: EngineCaps,
    prior: LengthQuantiles,
    state: RolloutState,
    schedule: Sequence[Stretch],
    *,
    train_s: float,
    not_before_s: float = 0.0,
) -> Outlook:
    """Predict when the next two batches are complete.

    ``schedule`` says how many replicas roll out from when on (ascending, first at 0). The next batch is
    trained from ``max(ready, not_before_s)`` for ``train_s``; its publication lets ``per_step`` more
    groups start. The answer is inf where the groups in flight can never fill a batch.
    """
    fluid = _Fluid(iteration, limits, prior, state)
    if state.need > len(state.running) + state.startable:
        return Outlook(inf, inf)
    ready_s = fluid.run(fluid.need, schedule)
    published_s = max(ready_s, not_before_s) + train_s
    second = fluid.need + fluid.per_step
    fluid.run(second, schedule, published_s)
    if fluid.done < second:
        fluid.start_step()
        fluid.time_s = max(fluid.time_s, published_s)
        return Outlook(ready_s, max(published_s, fluid.run(second, schedule)))
    return Outlook(ready_s, published_s)
