"""Put it together: from a run's log, and its job where it is given, to a verdict and ranked changes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import log
from statistics import median

from bidirl.errors import InputError
from bidirl.planner.advise.changes import Change, candidates
from bidirl.planner.advise.doubts import doubts_of_job, doubts_of_log, is_misconfigured, over_prior
from bidirl.planner.advise.evidence import Evidence, evidence_of
from bidirl.planner.advise.tryout import (
    COVERAGE,
    FEWEST_WORLDS,
    Gain,
    fit_worlds,
    steps_of,
    try_change,
    try_changes,
)
from bidirl.planner.advise.unknowns import RANGES
from bidirl.planner.advise.verdict import Limit, Tail, Verdict, judge
from bidirl.planner.advise.worlds import Simulator, World
from bidirl.planner.build import build_plan, build_workload
from bidirl.planner.job import Job
from bidirl.planner.policy import Placement
from bidirl.traces.step_log import Mode, StepLog

__all__ = ["Advice", "Advised", "advise", "middle_world"]

NUM_CHANGES = 3
NUM_SERIOUS = 4
"""Changes that are tried in every world, after all were tried in the middle one."""
NUM_DRAWS = (12, 20)
SAMPLES_PER_ADVICE = 2_000_000
"""Simulated samples of one piece of advice: about half a minute of a core; fewer worlds for large steps."""
TAIL_WORLDS = 5
"""Models in which the longest sample is looked at."""
WORTH = 0.005
"""A change must promise more than this to be listed."""

Progress = Callable[[str], None]
"""Told what is being done, one line."""


@dataclass(frozen=True, slots=True)
class Advised:
    """A change and what it would gain; ``gain`` is None where only a bound is known."""

    change: str
    how: str
    gain: float | None
    low: float | None
    high: float
    per_gpu: float | None = None
    sure_share: float | None = None
    limit: str = ""
    parts_s: Mapping[str, float] = field(default_factory=dict)
    step_s: float | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    """Everything said of one run."""

    source: str
    verdict: Verdict
    evidence: Evidence
    changes: tuple[Advised, ...]
    refused: tuple[str, ...]
    """Changes that one might expect, and why they are not advised."""
    unknown: tuple[str, ...]
    """What the log cannot tell."""
    notes: tuple[str, ...]
    num_worlds: int = 0


def advise(
    log: StepLog,
    job: Job | None = None,
    simulate: Simulator | None = None,
    progress: Progress = lambda _line: None,
    most_worlds: int = NUM_DRAWS[1],
) -> Advice:
    """Return the advice on a run; without a job only what shares alone say.

    ``most_worlds`` bounds the plausible models: with fewer the intervals are coarser.

    Raises:
        InputError: the job does not describe the run of the log.
    """
    if job is not None and job.partition is not None and log.mode is Mode.UNKNOWN:
        colocated = job.partition.placement is Placement.COLOCATED
        log = replace(log, mode=Mode.COLOCATED if colocated else Mode.ASYNC)
    evidence = evidence_of(log)
    verdict = judge(evidence)
    notes = [*log.notes, *doubts_of_log(log)]
    if evidence.is_summed:
        notes.append("no step timer: the step is the sum of its stages")
    plain = Advice(log.source, verdict, evidence, (), (), (), tuple(notes))
    if verdict.limit is Limit.CANNOT_TELL or evidence.step_s is None:
        return replace(plain, unknown=(verdict.measure,))
    if job is None or simulate is None:
        unknown = [*([verdict.measure] if verdict.measure else []), *_WITHOUT_JOB]
        return replace(plain, changes=_bounds(evidence), unknown=tuple(unknown))
    notes += _mismatch(log, job, evidence)
    progress("comparing the stages with the hardware")
    ratios = over_prior(evidence, job, simulate)
    notes += doubts_of_job(ratios)
    if is_misconfigured(ratios):
        sentence = f"This run has a configuration error: {notes[-1]}."
        verdict = replace(verdict, limit=Limit.MISCONFIGURED, sentence=sentence, measure=_CHECK)
        return replace(plain, verdict=verdict, notes=tuple(notes), unknown=(_CHECK,))
    return _with_job(replace(plain, notes=tuple(notes)), job, simulate, progress, most_worlds)


_CHECK = "time one generation and one update outside the framework, on the same GPUs"
_WITHOUT_JOB = ("what a change would gain: give --job with the cluster, the model and the workload",)


def _mismatch(log: StepLog, job: Job, evidence: Evidence) -> list[str]:
    """Return where job and log differ; refuse a job of another placement."""
    partition = job.partition
    if partition is None:
        raise InputError("the job has no [partition]: write how the logged run splits its GPUs")
    colocated = partition.placement is Placement.COLOCATED
    if colocated != (evidence.mode is Mode.COLOCATED):
        raise InputError(
            f"partition.placement = {partition.placement}, but the log tells of mode {evidence.mode}: "
            "describe the logged run, or read the log with another --format"
        )
    found = []
    gpus = log.facts.get("num_gpus")
    if gpus and round(gpus) != partition.num_gpus:
        found.append(
            f"the log tells of {gpus:.0f} GPUs, the job of {partition.num_gpus}: the job is followed"
        )
    plan = build_plan(job, build_workload(job, 0))
    for stage, has_stage in (("old_logprob", plan.old_logprob), ("reference", plan.reference)):
        if has_stage and evidence.known().update_s and f"{stage}_s" not in evidence.seconds:
            found.append(
                f"{stage}: the job has this stage, the log does not time it: it gets what the timed parts "
                f'leave of the step; if the run has none, set workload.{stage} = "off"'
            )
    return found


def _bounds(evidence: Evidence) -> tuple[Advised, ...]:
    """Return what shares alone bound: the gain if a part took no time."""
    found = []
    if evidence.mode is Mode.COLOCATED:
        rollout = max(evidence.share("generation"), evidence.share("wait"))
        training = evidence.share("training")
        if min(rollout, training) > 0.0:
            bound = 1.0 / max(1.0 - training, 1.0 - rollout)
            how = "bound: the shorter stage hidden behind the longer one, both as fast as on all GPUs"
            found.append(Advised("overlap generation and training", how, None, None, bound))
    elif evidence.share("wait") > 0.0:
        how = "bound: the trainer never waits (more rollout, run-ahead or lending)"
        found.append(
            Advised("hide the wait for samples", how, None, None, 1.0 / (1.0 - evidence.share("wait")))
        )
    for part in ("weight sync", "role switches", "rewards"):
        if (share := evidence.share(part)) > WORTH:
            how = f"bound: {part} in no time"
            found.append(Advised(f"shorten {part}", how, None, None, 1.0 / (1.0 - share)))
    found.sort(key=lambda each: -each.high)
    return tuple(found[:NUM_CHANGES])


def _num_draws(job: Job, num_runs: int) -> int:
    config = job.workload
    per_run = steps_of(job) * config.prompts_per_step * config.samples_per_prompt
    low, high = NUM_DRAWS
    return max(low, min(high, SAMPLES_PER_ADVICE // (per_run * num_runs)))


def middle_world(worlds: list[World]) -> World:
    """Return the world whose unknowns lie closest to the middle of their ranges."""

    def distance(world: World) -> float:
        total = log(world.unknowns.drift) ** 2
        for name, span in RANGES.items():
            value = getattr(world.unknowns, name)
            if span.is_log:
                place = log(value / span.low) / log(span.high / span.low)
            else:
                place = (value - span.low) / (span.high - span.low)
            total += (place - 0.5) ** 2
        return total

    return min(worlds, key=distance)


def _with_job(plain: Advice, job: Job, simulate: Simulator, progress: Progress, most_worlds: int) -> Advice:
    evidence, partition = plain.evidence, job.partition
    assert partition is not None
    num_draws = _num_draws(job, 3 + NUM_SERIOUS if partition.train_gpus == 0 else 7 + NUM_SERIOUS)
    num_draws = min(num_draws, most_worlds)
    progress(f"fitting {num_draws} plausible models to the log")
    worlds = fit_worlds(job, evidence.known(), simulate, num_draws)
    unknown = [plain.verdict.measure] if plain.verdict.measure else []
    if len(worlds) < FEWEST_WORLDS:
        notes = (*plain.notes, f"only {len(worlds)} of {num_draws} plausible models agree with the log")
        unknown.append("what a change would gain: check that the job describes the logged run")
        return replace(plain, notes=notes, unknown=tuple(unknown))
    middle = middle_world(worlds)
    verdict = judge(evidence, _tail(worlds, simulate))
    progress("trying changes in the middle one")
    tried = candidates(job, middle, verdict.limit)
    quick = {each.name: _quick(middle, each, simulate, partition.num_gpus) for each in tried}
    serious = sorted(
        (each for each in tried if isinstance(quick[each.name], float)),
        key=lambda each: -float(quick[each.name]),
    )[:NUM_SERIOUS]
    refused = [f"{name}: {reason}" for name, reason in quick.items() if isinstance(reason, str)]
    progress(f"trying {len(serious)} of {len(tried)} changes in all {len(worlds)}")
    gains = try_changes(worlds, {each.name: each.job for each in serious}, simulate, partition.num_gpus)
    listed = []
    for each in serious:
        gain = gains[each.name]
        if isinstance(gain, str):
            refused.append(f"{each.name}: {gain}")
        elif max(gain.gain, gain.per_gpu) > 1.0 + WORTH:
            listed.append(_advised(each, gain))
        else:
            refused.append(
                f"{each.name}: no gain predicted ({gain.gain:.2f}x, {gain.low:.2f} to {gain.high:.2f})"
            )
    listed.sort(key=lambda each: -(each.per_gpu or 0.0))
    if verdict.limit is Limit.TAIL:
        refused.append("more rollout GPUs: the longest samples are the limit, not throughput")
    remarks = [*plain.notes]
    if not listed:
        remarks.append(
            f"none of {len(tried)} changes tried gains more than {WORTH:.1%} in the middle of the models"
        )
    return replace(
        plain,
        verdict=verdict,
        changes=tuple(listed[:NUM_CHANGES]),
        refused=tuple(refused),
        unknown=tuple(unknown),
        notes=tuple(remarks),
        num_worlds=len(worlds),
    )


def _tail(worlds: list[World], simulate: Simulator) -> Tail | None:
    """Return the longest sample of the running job: medians over some of its models."""
    alone, room = [], []
    for world in worlds[:: max(1, len(worlds) // TAIL_WORLDS)]:
        found = simulate(world.job, world.plan(world.job), world.seed)
        alone_s = found.details["bound"].get("tail_s")
        if alone_s is None:
            return None
        overlaps = world.job.policy.staleness > 0
        alone.append(float(alone_s))
        room.append(found.step_s if overlaps else float(found.details["parts_s"].get("wait", 0.0)))
    return Tail(median(alone), median(room))


def _quick(world: World, change: Change, simulate: Simulator, gpus: int) -> float | str:
    """Return the gain per GPU of a change in one world, or why it cannot run."""
    found = try_change([world], change.job, simulate, gpus)
    return found if isinstance(found, str) else found.per_gpu


def _advised(change: Change, gain: Gain) -> Advised:
    sure = f"in {gain.sure_share:.0%} of {gain.num_worlds} plausible models no slower"
    how = f"{change.how}; simulated, {sure}; interval of {COVERAGE:.0%}"
    return Advised(
        change.name,
        how,
        gain.gain,
        gain.low,
        gain.high,
        gain.per_gpu,
        gain.sure_share,
        gain.limit,
        gain.parts_s,
        gain.step_s,
    )
