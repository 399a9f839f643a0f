"""Re-rank the best few by simulation: same seeds for all, intervals on differences, more seeds if close."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bidirl.errors import BidirlError
from bidirl.planner.policy import Lending
from bidirl.planner.search.candidates import Candidate, Objective

__all__ = ["Difference", "Evaluation", "Evaluator", "Ranked", "difference", "rank"]

FIRST_SEEDS = 2
"""Seeds that every candidate gets: the fewest that give an interval."""
MAX_SEEDS = 6
"""Seeds after which two candidates that still overlap are called too close."""
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What one simulated run says of a candidate."""

    step_s: float
    tokens_per_s: float
    limit: str = ""
    """What limits the run, with its evidence, in one sentence."""
    details: dict[str, Any] = field(default_factory=dict)


SIMPLER = {each: place for place, each in enumerate(Lending)}
"""Of candidates with equal cost the one that lends less comes first: a lease that never pays is no help."""

Evaluator = Callable[[Candidate, int], Evaluation]
"""Simulate a candidate under a seed; the seed fixes lengths, prompts and rewards, whatever the candidate."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How much more a candidate costs than the best one, paired by seed: a ratio with its interval."""

    ratio: float
    low: float | None
    high: float | None
    """Interval of ``CONFIDENCE``; None with one seed."""
    num_seeds: int

    @property
    def is_equal(self) -> bool:
        """Return whether the runs cost the same under every seed: neither is slower."""
        return self.ratio == self.low == self.high == 1.0

    @property
    def is_sure(self) -> bool:
        """Return whether the interval leaves out 1."""
        return self.low is not None and self.high is not None and (self.low > 1.0 or self.high < 1.0)


@dataclass(frozen=True, slots=True)
class Ranked:
    """A simulated candidate in its place."""

    candidate: Candidate
    evaluations: dict[int, Evaluation]
    """By seed."""
    over_best: Difference | None
    """None for the best one."""
    error: str | None = None

    @property
    def step_s(self) -> float:
        """Return the mean step over the seeds."""
        return statistics.fmean(each.step_s for each in self.evaluations.values())

    @property
    def tokens_per_s(self) -> float:
        """Return the mean throughput over the seeds."""
        return statistics.fmean(each.tokens_per_s for each in self.evaluations.values())

    def cost(self, objective: Objective) -> float:
        """Return what is minimised: seconds, or GPU-seconds."""
        return self.step_s * (self.candidate.num_gpus if objective is Objective.GPU_HOURS else 1)


def difference(one: dict[int, float], other: dict[int, float]) -> Difference:
    """Return ``one / other`` over the seeds that both have, with Student's t interval of the logarithms.

    Source: Student 1908; logarithms because a ratio's error is a factor.
    """
    common = [seed for seed in one if seed in other]
    logs = [math.log(one[seed] / other[seed]) for seed in common]
    middle = statistics.fmean(logs)
    if len(logs) < 2:
        return Difference(math.exp(middle), None, None, len(logs))
    from scipy.special import stdtrit

    reach = (
        float(stdtrit(len(logs) - 1, 0.5 + CONFIDENCE / 2)) * statistics.stdev(logs) / math.sqrt(len(logs))
    )
    return Difference(math.exp(middle), math.exp(middle - reach), math.exp(middle + reach), len(logs))


def rank(
    candidates: Sequence[Candidate],
    evaluate: Evaluator,
    objective: Objective,
    *,
    first_seeds: int = FIRST_SEEDS,
    max_seeds: int = MAX_SEEDS,
) -> list[Ranked]:
    """Simulate the candidates and return them best first.

    All get the same first seeds; the leader and whoever cannot be told from it get one more seed at a time
    until the interval of their difference leaves out 1 or ``max_seeds`` are spent. Of those that stay too
    close, the order is by mean cost. A candidate whose simulation fails comes last, with its reason.
    """
    runs: dict[int, dict[int, Evaluation]] = {index: {} for index in range(len(candidates))}
    errors: dict[int, str] = {}

    def run(index: int, seed: int) -> None:
        if index in errors or seed in runs[index]:
            return
        try:
            runs[index][seed] = evaluate(candidates[index], seed)
        except BidirlError as error:
            errors[index] = str(error)

    def costs(index: int) -> dict[int, float]:
        factor = candidates[index].num_gpus if objective is Objective.GPU_HOURS else 1
        return {seed: each.step_s * factor for seed, each in runs[index].items()}

    for index in range(len(candidates)):
        for seed in range(first_seeds):
            run(index, seed)
    while True:
        alive = [index for index in runs if index not in errors and runs[index]]
        if not alive:
            break
        leader = min(alive, key=lambda index: statistics.fmean(costs(index).values()))
        seeds = len(runs[leader])
        rivals = [
            index
            for index in alive
            if index != leader and not _is_settled(difference(costs(index), costs(leader)))
        ]
        if not rivals or seeds >= max_seeds:
            break
        for index in (leader, *rivals):
            for seed in range(seeds + 1):
                run(index, seed)
    found = []
    alive = [index for index in runs if index not in errors and runs[index]]
    alive.sort(
        key=lambda index: (statistics.fmean(costs(index).values()), _simplicity(candidates[index]), index)
    )
    for place, index in enumerate(alive):
        over = None if place == 0 else difference(costs(index), costs(alive[0]))
        found.append(Ranked(candidates[index], runs[index], over))
    found += [Ranked(candidates[index], {}, None, error) for index, error in errors.items()]
    return found


def _simplicity(candidate: Candidate) -> int:
    return SIMPLER[candidate.lending]


def _is_settled(over: Difference) -> bool:
    """Return whether more seeds would teach nothing: a sure difference, or none at all (equal runs)."""
    return over.is_sure or (over.low == over.high and over.low is not None)
