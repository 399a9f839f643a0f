"""Search a job: price everything, simulate the best few, answer what an engineer asks, keep every reason."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from decimal import Decimal
from math import ceil

from bidirl.errors import BidirlError, NoFeasiblePlan
from bidirl.planner.build import build_workload
from bidirl.planner.job import Job
from bidirl.planner.plan import Plan
from bidirl.planner.policy import Lending, Placement
from bidirl.planner.search import answers
from bidirl.planner.search.algorithm1 import Envelope, algorithm1
from bidirl.planner.search.candidates import Candidate, Objective, Pricing, Search
from bidirl.planner.search.frameworks import Framework
from bidirl.planner.search.legality import Rejection, lending_reason, rejections
from bidirl.planner.search.plans import plan_of, question_of, with_steps
from bidirl.planner.search.ranking import FIRST_SEEDS, MAX_SEEDS, Evaluation, Ranked, rank
from bidirl.planner.sections import Partition
from bidirl.traces.workload import Workload

__all__ = ["Found", "Simulator", "no_plan", "paper_answer", "search_job", "simulated_steps"]

MAX_STEPS = 12
MEASURED_STEPS = 3
"""Steps of a simulated candidate: at most these, at least as many measured ones as a diagnosis needs."""
SAMPLES_PER_RUN = 40_000
"""Samples of one simulated run beyond which it gets only the measured steps: about two seconds of a core."""
SAMPLES_PER_SEARCH = 1_000_000
"""Samples of all simulated runs of a search: about a minute of a core. What comes first is what matters most:
the best splits, then lending, then seeds, neighbours, one-way lending, the 2 x 2, the knee."""
MAX_ROUNDS = 3
"""Rounds in which the neighbours of the best split join: each halves or keeps the distance."""
ALTERNATIVES = 2
ALTERNATIVE_SHARE = 0.03
"""Other layouts of the best split that join, and how close they must come: the stage models cannot tell
layouts apart below that."""
NEIGHBOUR_SHARE = 16
"""A neighbour's pools differ by one step of the grid, or by this part of the cluster if that is more."""

Simulator = Callable[[Job, Plan, int], Evaluation]
"""Run a plan of a job under a seed; passed in, since the planner does not know the simulator."""


@dataclass(frozen=True)
class Found:
    """Everything that a search found; ``best`` is None where nothing is legal."""

    job: Job
    search: Search
    objective: Objective
    best: Candidate | None
    plan: Plan | None
    ranked: list[Ranked]
    """Simulated candidates, best first; empty without a simulator."""
    priced: list[Candidate]
    """The best candidate of every split by the stage models, best first."""
    rejected: list[Rejection]
    no_lending: dict[str, str]
    """Candidates that cannot lend, by label, with the reason."""
    paper: Envelope | None
    """Algorithm 1 with the smallest layouts that fit, as published."""
    other_best: Candidate | None
    """The best candidate for the other objective, by the stage models."""
    factorial: answers.Factorial | None = None
    factorial_base: str = ""
    knee_curve: list[tuple[float, float]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def simulated_steps(job: Job) -> int:
    """Return the steps that a simulated candidate runs: few where a step is large."""
    config = job.workload
    edge = max(1, ceil(job.policy.staleness)) + ceil(job.policy.staleness)
    fewest = edge + MEASURED_STEPS
    affordable = SAMPLES_PER_RUN // (config.prompts_per_step * config.samples_per_prompt)
    return max(fewest, min(MAX_STEPS, affordable))


def paper_answer(search: Search) -> Envelope | None:
    """Return Algorithm 1's partition with the smallest layouts of each role that fit anywhere.

    Source: paper.md; frameworks.md section 1 (layouts: minimal feasible replicas).
    """
    question = search.question
    rollout = next((pool for pool in search.rollouts if pool.refused is None), None)
    train = next((pool for pool in search.trains if pool.micro_tokens.any()), None)
    if rollout is None or train is None:
        return None
    total = question.cluster.num_gpus
    sizes = question.pool_sizes
    return algorithm1(
        ((gpus, total - gpus) for gpus in sizes),
        rollout.layout.gpus,
        train.layout.gpus,
        question.groups,
        rollout.makespan_s,
        lambda replicas: float(train.seconds[sizes.index(replicas * train.layout.gpus)]),
        lambda _rollout, train_gpus: train.reason(train_gpus) is None,
    )


def search_job(
    job: Job,
    objective: Objective,
    top: int,
    simulator: Simulator | None = None,
    framework: Framework | None = None,
) -> Found:
    """Return the best plan of a job with everything that explains it.

    ``top`` splits are simulated, each without lending and, where both pools can hold both roles, lending
    both ways; the best of them also one way. A simulator may be left out: then the stage models decide.
    """
    workload = build_workload(job, 0)
    question = question_of(job, workload)
    bare = Search(question, framework=framework)
    found = bare.ranked(objective)
    switch = None
    if found:
        switch = plan_of(job, bare, found[0], workload).models.switch
    search = Search(question, switch, framework)
    search.rollouts, search.trains = bare.rollouts, bare.trains
    priced = search.ranked(objective)
    rejected = rejections(search)
    other = Objective.GPU_HOURS if objective is Objective.TIME else Objective.TIME
    other_best = next(iter(search.ranked(other)), None)
    blank = Found(
        job, search, objective, None, None, [], priced, rejected, {}, paper_answer(search), other_best
    )
    if not priced:
        return blank
    return _Run(job, workload, search, objective, top, simulator).complete(blank)


def no_plan(found: Found) -> NoFeasiblePlan:
    """Return the error of a search without a legal candidate; it names the binding constraint."""
    search = found.search
    for role, pools in (("rollout", search.rollouts), ("train", search.trains)):
        if all(pool.reason(int(size)) is not None for pool in pools for size in search.sizes):
            mine = [each for each in found.rejected if each.role == role]
            binding = [each for each in mine if not each.reason.startswith("divisibility")] or mine
            if binding:
                last = binding[-1]
                pool = next(pool for pool in pools if pool.layout.label == last.layout)
                reason = pool.reason(last.largest_gpus)
                return NoFeasiblePlan(
                    f"no {role} pool of the cluster's {search.question.cluster.num_gpus} GPUs is legal; "
                    f"{last.layout} on {last.largest_gpus}: {reason}"
                )
    return NoFeasiblePlan(
        f"no two pools of the cluster's {search.question.cluster.num_gpus} GPUs are legal together: "
        "add nodes or use smaller replicas"
    )


class _Run:
    """One search under way: simulated candidates are kept, so that no answer simulates one twice."""

    def __init__(
        self,
        job: Job,
        workload: Workload,
        search: Search,
        objective: Objective,
        top: int,
        simulator: Simulator | None,
    ) -> None:
        self.job = with_steps(job, simulated_steps(job)) if simulator else job
        self.whole = job
        self.workload = workload
        self.search = search
        self.objective = objective
        self.top = top
        self.simulator = simulator
        self.no_lending: dict[str, str] = {}
        config = self.job.workload
        per_run = config.num_steps * config.prompts_per_step * config.samples_per_prompt
        self.runs_left = max(1, SAMPLES_PER_SEARCH // per_run)
        self.plans: dict[tuple[object, Decimal], Plan] = {}
        self.known: dict[tuple[object, int, Decimal], Evaluation] = {}

    def evaluate(self, candidate: Candidate, seed: int, staleness: Decimal | None = None) -> Evaluation:
        """Simulate once per (candidate, seed, bound)."""
        assert self.simulator is not None
        bound = self.job.policy.staleness if staleness is None else staleness
        key = (candidate.key, seed, bound)
        if key not in self.known:
            policy = self.job.policy.model_copy(update={"staleness": bound})
            job = replace(self.job, policy=policy)
            plan = self.plans.get((candidate.key, bound))
            if plan is None:
                plan = self.plans[candidate.key, bound] = plan_of(job, self.search, candidate)
            self.runs_left -= 1
            self.known[key] = self.simulator(job, plan, seed)
        return self.known[key]

    def complete(self, blank: Found) -> Found:
        """Simulate, rank and answer."""
        priced = blank.priced
        if self.simulator is None:
            best = self._with_lending(priced[0])[-1]
            plan = plan_of(self.whole, self.search, best, self.workload)
            curve = answers.modelled_curve(best) if best.train_gpus else []
            return replace(blank, best=best, plan=plan, no_lending=self.no_lending, knee_curve=curve)
        chosen = self._shortlist(priced)
        candidates = chosen if self.runs_left < 3 * len(chosen) else self._variants(chosen)
        ranked = self._rank(candidates[: max(1, self.runs_left)])
        splits = {(each.rollout_gpus, each.train_gpus) for each in chosen}
        for _ in range(MAX_ROUNDS):
            more = [
                each
                for each in self._neighbours(ranked)
                if (each.rollout_gpus, each.train_gpus) not in splits
            ]
            if not more:
                break
            splits |= {(each.rollout_gpus, each.train_gpus) for each in more}
            ranked = self._join(ranked, self._variants(more))
        ranked = self._join(ranked, self._variants(self._other_layouts(ranked)))
        ranked = self._join(ranked, self._one_way(ranked))
        alive = [each for each in ranked if each.error is None]
        errors = [f"{each.candidate.label}: {each.error}" for each in ranked if each.error is not None]
        if not alive:
            return replace(blank, errors=errors)
        best = alive[0].candidate
        plan = plan_of(self.whole, self.search, best, self.workload)
        table, base = self._factorial(alive)
        return replace(
            blank,
            best=best,
            plan=plan,
            ranked=ranked,
            no_lending=self.no_lending,
            factorial=table,
            factorial_base=base,
            knee_curve=self._knee(best),
            errors=errors,
        )

    def _rank(self, candidates: list[Candidate]) -> list[Ranked]:
        """Rank with as many seeds as the budget pays for."""
        fresh = [each for each in candidates if (each.key, 0, self.job.policy.staleness) not in self.known]
        seeds = FIRST_SEEDS if self.runs_left >= FIRST_SEEDS * len(fresh) else 1
        spare = self.runs_left - seeds * len(fresh)
        most = max(seeds, min(MAX_SEEDS, seeds + spare // max(1, len(candidates))))
        return rank(candidates, self.evaluate, self.objective, first_seeds=seeds, max_seeds=most)

    def _join(self, ranked: list[Ranked], more: list[Candidate]) -> list[Ranked]:
        """Rank again with further candidates, if there are any and the budget still pays for them."""
        known = {each.candidate.key for each in ranked}
        fresh = [each for each in more if each.key not in known]
        seeds = max((len(each.evaluations) for each in ranked), default=1)
        if not fresh or self.runs_left < min(seeds, FIRST_SEEDS) * len(fresh):
            return ranked
        return self._rank([each.candidate for each in ranked] + fresh)

    def _shortlist(self, priced: list[Candidate]) -> list[Candidate]:
        """Return the splits to simulate: best by batch and by steady pricing in turn, and one colocated."""
        steady = self.search.splits(Pricing.STEADY)
        steady.sort(key=lambda candidate: candidate.order(self.objective))
        pairs = [each for each in priced if each.placement is Placement.DISAGGREGATED]
        chosen: dict[tuple[int, int], Candidate] = {}
        for turn in range(max(len(pairs), len(steady))):
            for order in (pairs, steady):
                if turn < len(order) and len(chosen) < self.top:
                    each = order[turn]
                    priced_as_batch = self.search.lent(each, Lending.NONE)
                    chosen.setdefault((each.rollout_gpus, each.train_gpus), priced_as_batch)
        colocated = next((each for each in priced if each.placement is Placement.COLOCATED), None)
        return [*chosen.values(), *([] if colocated is None else [colocated])]

    def _variants(self, chosen: list[Candidate]) -> list[Candidate]:
        return [variant for each in chosen for variant in self._with_lending(each)]

    def _with_lending(self, candidate: Candidate) -> list[Candidate]:
        """Return the candidate and, if the pools can hold both roles, its variant that lends both ways."""
        lending = self._allowed()[-1]
        if lending is Lending.NONE:
            return [candidate]
        reason = lending_reason(self.search, candidate)
        if reason is None:
            return [candidate, self.search.lent(candidate, lending)]
        self.no_lending[candidate.label] = reason
        other = next(
            (
                each
                for each in self.search.compatible_splits()
                if (each.rollout_gpus, each.train_gpus) == (candidate.rollout_gpus, candidate.train_gpus)
            ),
            None,
        )
        if other is None or other == candidate or candidate.placement is Placement.COLOCATED:
            return [candidate]
        if (reason := lending_reason(self.search, other)) is not None:
            self.no_lending[other.label] = reason
            return [candidate]
        return [candidate, self.search.lent(other, lending)]

    def _allowed(self) -> list[Lending]:
        framework = self.search.framework
        order = [Lending.NONE, Lending.TRAIN_ON_ROLLOUT, Lending.ROLLOUT_ON_TRAIN, Lending.BOTH]
        return order if framework is None else [each for each in order if each in framework.lending]

    def _one_way(self, ranked: list[Ranked]) -> list[Candidate]:
        """Return the one-way variants of the best candidate that lends both ways."""
        both = next((each.candidate for each in ranked if each.candidate.lending is Lending.BOTH), None)
        if both is None:
            return []
        ways = (Lending.ROLLOUT_ON_TRAIN, Lending.TRAIN_ON_ROLLOUT)
        return [self.search.lent(both, way) for way in ways]

    def _other_layouts(self, ranked: list[Ranked]) -> list[Candidate]:
        best = next((each.candidate for each in ranked if each.error is None), None)
        if best is None:
            return []
        plain = self.search.lent(best, Lending.NONE)
        return self.search.alternatives(plain, ALTERNATIVE_SHARE, ALTERNATIVES)

    def _neighbours(self, ranked: list[Ranked]) -> list[Candidate]:
        """Return the splits beside the best simulated one, each with its best layouts."""
        best = next((each.candidate for each in ranked if each.error is None), None)
        if best is None or best.placement is Placement.COLOCATED or best.num_gpus < self._num_gpus:
            return []
        step = max(self.search.question.unit_gpus, self._num_gpus // NEIGHBOUR_SHARE)
        step -= step % self.search.question.unit_gpus
        wanted = {best.rollout_gpus - step, best.rollout_gpus + step}
        return [each for each in self.search.splits() if each.rollout_gpus in wanted]

    @property
    def _num_gpus(self) -> int:
        return self.search.question.cluster.num_gpus

    def _factorial(self, alive: list[Ranked]) -> tuple[answers.Factorial | None, str]:
        """Return the 2 x 2 of partition and borrowing over the job's own split, or the most even one."""
        lending = self._allowed()[-1]
        planned = next(
            (each for each in alive if each.candidate.lending is lending and each.candidate.train_gpus), None
        )
        if planned is None or lending is Lending.NONE or self.objective is not Objective.TIME:
            return (
                None,
                "",
            )  # gains are in throughput: they mean nothing where GPUs are left unused on purpose
        best = planned.candidate
        base = self._base()
        if base is None or lending_reason(self.search, base) is not None:
            return None, ""
        none = self.search.lent(best, Lending.NONE)
        four = (base, none, self.search.lent(base, lending), best)
        seeds = sorted(planned.evaluations)
        if self.runs_left < 3 * len(seeds):
            return None, ""
        try:
            mean = [sum(self.evaluate(each, seed).step_s for seed in seeds) / len(seeds) for each in four]
        except BidirlError:
            return None, ""
        return answers.factorial(*mean), base.label

    def _base(self) -> Candidate | None:
        written: Partition | None = self.whole.partition
        if written is not None and (named := self.search.named(written)) is not None:
            return named
        splits = self.search.compatible_splits()
        if not splits:
            return None
        order = self.objective
        return min(splits, key=lambda each: (abs(each.rollout_gpus - each.train_gpus), each.order(order)))

    def _knee(self, best: Candidate) -> list[tuple[float, float]]:
        """Return the step of the best candidate by staleness bound, under one seed."""
        if best.placement is Placement.COLOCATED:
            return []
        if self.runs_left < len(answers.KNEE_BOUNDS):
            return answers.modelled_curve(best)
        try:
            return [
                (bound, self.evaluate(best, 0, Decimal(str(bound))).step_s) for bound in answers.KNEE_BOUNDS
            ]
        except BidirlError:
            return []
