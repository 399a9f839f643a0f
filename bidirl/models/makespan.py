"""Seconds until a set of samples, or a list of trainer segments, is done: what planner and gates compare.

Pure Python and about 20 microseconds a call: run-time decisions call it. No true length is read, only the
length prior.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heappop, heapreplace
from math import ceil, exp, log, sqrt
from typing import Protocol

from bidirl.models.iteration import IterationModel
from bidirl.models.trainer import TrainerModel

__all__ = [
    "EngineCaps",
    "LengthQuantiles",
    "batch_cap",
    "expected_max_tokens",
    "quantile",
    "rollout_makespan_s",
    "trainer_makespan_s",
]

NUM_REPRESENTATIVES = 16
"""Sequences that stand for the running batch of a replica. 16 keeps a call near 20 microseconds, and 24
are no closer to the replica model over random cases (docs/models.md)."""
MAX_WAVES = 2
"""Waves of waiting samples walked one by one; earlier ones run at the steady state's rate."""
GUMBEL_SHARE = exp(-0.5772156649015329)
"""``E[max of n] ~ Q(1 - GUMBEL_SHARE / n)``: exact for exponential tails, where it is ``ln n + gamma``."""
GOLDEN = 0.6180339887498949
"""Step of the low-discrepancy sequence that orders waiting lengths (Kronecker sequence)."""


class LengthQuantiles(Protocol):
    """What is known of response lengths: ``bidirl.traces.lengths.LengthPrior`` has this shape."""

    @property
    def quantiles(self) -> tuple[float, ...]:
        """Return tokens at the midpoints of equal-probability slices, ascending."""
        ...

    @property
    def max_tokens(self) -> int:
        """Return the cap of a response."""
        ...

    @property
    def prompt_mean_tokens(self) -> float:
        """Return the mean tokens of a prompt."""
        ...


class EngineCaps(Protocol):
    """What bounds a batch: ``bidirl.models.replica.EngineLimits`` has this shape."""

    @property
    def kv_tokens(self) -> int: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def prefix_caching(self) -> bool: ...


@lru_cache(maxsize=256)
def _moments(quantiles: tuple[float, ...]) -> tuple[float, float]:
    """Return ``(mean, mean square)`` of the law."""
    num = len(quantiles)
    return sum(quantiles) / num, sum(q * q for q in quantiles) / num


@lru_cache(maxsize=256)
def _levels(quantiles: tuple[float, ...], max_tokens: int, num: int) -> tuple[float, ...]:
    """Return the lengths at ``num`` evenly spaced levels of the law."""
    return tuple(quantile(quantiles, max_tokens, (j + 0.5) / num) for j in range(num))


def quantile(quantiles: tuple[float, ...], max_tokens: float, p: float) -> float:
    """Return tokens at probability ``p``, between midpoints linearly, beyond the last one by its tail.

    The tail is the mean of an exponential one (too short for a log-normal law) and a Pareto one (too long),
    both through the last two midpoints, cut at ``max_tokens``.
    """
    num = len(quantiles)
    position = p * num - 0.5
    if position <= 0.0:
        return quantiles[0]
    index = int(position)
    if index < num - 1:
        low = quantiles[index]
        return low + (position - index) * (quantiles[index + 1] - low)
    top = quantiles[-1]
    if num == 1 or p >= 1.0:
        return max(top, float(max_tokens)) if p >= 1.0 else top
    below = quantiles[-2]
    steps = log(0.5 / num / (1.0 - p)) / log(3.0)
    exponential, pareto = top + steps * (top - below), top * (top / below) ** steps
    return min(float(max(max_tokens, top)), 0.5 * float(exponential + pareto))


def expected_max_tokens(prior: LengthQuantiles, num_samples: float) -> float:
    """Return the expected longest of ``num_samples`` responses, in tokens."""
    if num_samples <= 1.0:
        return _moments(prior.quantiles)[0]
    return quantile(prior.quantiles, prior.max_tokens, 1.0 - GUMBEL_SHARE / num_samples)


def batch_cap(limits: EngineCaps, prior: LengthQuantiles, samples_per_group: int = 1) -> int:
    """Return how many sequences one engine runs at once: its limit, or what the KV memory holds.

    A resident sequence holds its prompt (shared within a group under prefix caching) and, on average over
    time, ``E[L^2] / (2 E[L])`` generated tokens. Source: mean age in a renewal process.
    """
    mean, square = _moments(prior.quantiles)
    shared = samples_per_group if limits.prefix_caching else 1
    per_sequence = prior.prompt_mean_tokens / shared + square / (2.0 * mean)
    return max(1, min(limits.max_num_seqs, int(limits.kv_tokens / per_sequence)))


def rollout_makespan_s(
    iteration: IterationModel,
    limits: EngineCaps,
    prior: LengthQuantiles,
    num_samples: int,
    num_replicas: int,
    *,
    samples_per_group: int = 1,
    ages: Sequence[float] = (),
) -> float:
    """Return the expected seconds until all samples are done on the slowest of ``num_replicas`` engines.

    ``num_samples`` have not started; ``ages`` holds the tokens that each running sample has generated.
    Both are spread evenly. Sequences decode in lockstep, one token an iteration, so the batch shrinks along
    the survival curve; waiting samples fill freed places. A few representative sequences at evenly spaced
    quantiles carry the batch, and the expected longest of all samples sets the end (ours).
    """
    total = num_samples + len(ages)
    if total == 0:
        return 0.0
    quantiles, prompt = prior.quantiles, prior.prompt_mean_tokens
    mean, square = _moments(quantiles)
    num_running = -(-len(ages) // num_replicas)
    num_here = max(1, ceil(total / num_replicas))
    batch = min(num_here, batch_cap(limits, prior, samples_per_group))
    reps = min(batch, NUM_REPRESENTATIVES)
    scale = batch / reps
    places = _start(prior, reps, min(1.0, num_running / batch), ages)
    num_waiting = (num_here - batch) / scale
    computed = prompt / samples_per_group if limits.prefix_caching else prompt
    fresh = max(0, batch - num_running)
    time_s = _prefill_s(iteration, limits, fresh * computed, prompt)
    context = reps * prompt + sum(age for _, age in places)
    decode = iteration.decode
    refill_s = 0.0
    if num_waiting > 0:
        steady = square / (2.0 * mean)
        base_s, context_s = decode(batch)
        step_s = base_s + context_s * batch * (prompt + steady)
        resident = int(batch * (prompt + steady))
        pairs = computed * (computed + 1.0) / 2.0
        mixed_s = iteration.mixed(max(1, int(computed)), pairs, batch, resident, batch)
        refill_s = max(0.0, mixed_s - step_s) * scale
        skipped = max(0.0, num_waiting - MAX_WAVES * reps)
        num_waiting = ceil(num_waiting - skipped)
        spread = sqrt(2.0 * log(num_replicas) * (square - mean * mean) * (num_here - batch)) / batch
        time_s += (skipped * mean / reps + spread) * step_s + skipped * refill_s
    heap = [(left, left + age) for left, age in places]
    heapify(heap)
    last = max(length for _, length in heap)
    now, alive, waited = 0.0, reps, 0
    while alive:
        end, length = heap[0]
        steps = end - now
        if steps > 0.0:
            seqs = int(alive * scale + 0.5) or 1
            base_s, context_s = decode(seqs)
            time_s += steps * (base_s + context_s * (context * scale + 0.5 * seqs * (steps - 1.0)))
            context += alive * steps
            now = end
        context -= prompt + length
        if waited < num_waiting:
            waited += 1
            tokens = quantile(quantiles, prior.max_tokens, (waited * GOLDEN) % 1.0)
            heapreplace(heap, (now + tokens, tokens))
            context += prompt
            time_s += refill_s
        else:
            heappop(heap)
            alive -= 1
    tail = expected_max_tokens(prior, min(total, batch * num_replicas)) - last
    if tail > 0.0:
        base_s, context_s = decode(max(1, int(scale / 4.0)))
        time_s += tail * (base_s + context_s * (prompt + last + 0.5 * tail))
    return time_s


def _start(
    prior: LengthQuantiles, reps: int, running_share: float, ages: Sequence[float]
) -> list[tuple[float, float]]:
    """Return ``(tokens left, age)`` of the representatives of the first batch.

    A running sample of age ``a`` is longer than ``a``: its level is drawn from the rest of the law.
    """
    quantiles, cap = prior.quantiles, prior.max_tokens
    num_running = round(reps * running_share)
    num_fresh = reps - num_running
    places = [(tokens, 0.0) for tokens in _levels(quantiles, cap, num_fresh)]
    if num_running:
        by_age = sorted(ages)
        for j in range(num_running):
            age = by_age[int((j + 0.5) / num_running * len(by_age))]
            passed = bisect_left(quantiles, age) / len(quantiles)
            level = passed + (1.0 - passed) * (((j + 1) * GOLDEN) % 1.0)
            places.append((max(1.0, quantile(quantiles, cap, level) - age), age))
    return places


def _prefill_s(iteration: IterationModel, limits: EngineCaps, tokens: float, prompt: float) -> float:
    """Return the seconds to prefill ``tokens`` prompt tokens in full iterations, nothing decoding beside."""
    if tokens <= 0.0:
        return 0.0
    budget = min(tokens, float(limits.max_num_batched_tokens))
    pairs = budget * (prompt + 1.0) / 2.0
    return tokens / budget * iteration.mixed(max(1, int(budget)), pairs, 0, 0, 1)


def trainer_makespan_s(
    trainer: TrainerModel,
    segments: Sequence[tuple[str, float, float]],
    num_replicas: int,
) -> float:
    """Return the seconds of trainer segments in order on ``num_replicas`` replicas: the paper's ``M_t``.

    Each segment is ``(kind, work, longest)`` in effective tokens (``TrainerModel.pull_s``), in one pull;
    each update ends with an optimizer step. A segment starts when the slowest replica ended the last one.
    """
    time_s = 0.0
    for kind, work, longest in segments:
        if work > 0.0:
            time_s += trainer.pull_s(kind, work, longest, num_replicas)
            if kind == "update":
                time_s += trainer.optimizer_s
    return time_s
