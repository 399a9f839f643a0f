"""Plausible worlds: complete models of a job that all agree with its log, one per draw of the unknowns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import exp, log

from bidirl.errors import InputError
from bidirl.models.stages import StageModels
from bidirl.models.transfer import SwitchCosts, SyncModel
from bidirl.planner.advise.scaling import slowed_iteration, slowed_trainer
from bidirl.planner.advise.unknowns import RANGES, Unknowns
from bidirl.planner.build import build_plan, build_workload
from bidirl.planner.costs import num_pulls
from bidirl.planner.job import Job
from bidirl.planner.plan import Plan
from bidirl.planner.policy import Placement
from bidirl.planner.search.ranking import Evaluation
from bidirl.traces.length_fit import fit_length_law
from bidirl.traces.workload_config import LengthTable, WorkloadConfig

__all__ = ["Known", "Simulator", "World", "fit_world", "with_lengths"]

Simulator = Callable[[Job, Plan, int], Evaluation]
"""Run a plan of a job under a seed; passed in, since the planner does not know the simulator."""

SEGMENTS = ("old_logprob", "reference", "update")
WAIT_PROBES = 6
WAIT_TOLERANCE = 0.015
"""Simulations that look for the rollout speed under which the trainer waits as logged, and the distance, as
a share of the step, that ends the search: below what a few simulated steps resolve."""
HIDDEN_WAIT = 0.02
"""Below this share of the step the trainer's wait says nothing of rollout, but that it is fast enough."""
FAR_CAP = 5.0
"""A cap this many means away is reached by a tail, not by the body of the lengths."""
MOST_EXPOSED = 0.9
"""Most of a logged wait that may be something else."""
SPEED_RANGE = (1.0 / 64.0, 64.0)
"""Factors on the engine prior beyond which a log is not explained by speed: a configuration error."""


@dataclass(frozen=True, slots=True)
class Known:
    """What a log says of a step: medians, in seconds and tokens; None where it does not say."""

    step_s: float
    generation_s: float | None = None
    wait_s: float | None = None
    old_logprob_s: float | None = None
    reference_s: float | None = None
    update_s: float | None = None
    weight_sync_s: float | None = None
    response_mean_tokens: float | None = None
    truncated_share: float | None = None
    step_error: float = 0.0
    """Standard error of ``step_s`` as a share of it."""
    role_change_s: float | None = None
    """Seconds of role changes that the generation timer holds, where the log times generation apart."""

    def segment_s(self, name: str) -> float | None:
        """Return the seconds of a trainer segment."""
        match name:
            case "old_logprob":
                return self.old_logprob_s
            case "reference":
                return self.reference_s
            case _:
                return self.update_s

    @property
    def train_s(self) -> float | None:
        """Return all trainer seconds, None if none is known."""
        parts = [part for name in SEGMENTS if (part := self.segment_s(name)) is not None]
        return sum(parts) if parts else None


@dataclass(frozen=True, slots=True)
class World:
    """One model of the job that agrees with the log."""

    seed: int
    unknowns: Unknowns
    job: Job
    """The job as it ran, lengths of this world in it."""
    known: Known
    rollout_factor: float
    train_factors: dict[str, float]
    """On all times of a segment's prior, under which the logged seconds come out."""
    fixed_s: dict[str, float] = field(default_factory=dict)
    """Seconds of a segment per step that more GPUs do not shorten."""
    other_s: float = 0.0
    """Seconds of the step that neither a stage nor the weight sync explains."""
    exposed_s: float = 0.0
    """Seconds logged as waiting that no faster rollout removes."""

    def plan(self, job: Job) -> Plan:
        """Return the plan of this job, or of a changed one, under this world's models."""
        plan = build_plan(job, build_workload(job, self.seed))
        drawn = self.unknowns
        share = drawn.fixed_share
        factors = {name: factor * (1.0 - share) for name, factor in self.train_factors.items()}
        models = plan.models
        models = replace(
            models,
            iteration=slowed_iteration(models.iteration, self.rollout_factor, drawn.decode_tilt),
            trainer=slowed_trainer(models.trainer, factors, self.fixed_s, num_pulls(plan)),
            switch=_switch(models, drawn.switch_place),
        )
        models = replace(models, sync=_sync(models, self.known.weight_sync_s, drawn.sync_factor))
        return replace(plan, models=models)

    def after(self, job: Job) -> Job:
        """Return a changed job with the lengths that it would see in this world."""
        return _scaled_lengths(job, self.unknowns.drift)

    @property
    def step_s(self) -> float:
        """Return the step of the running job, anywhere within its own uncertainty."""
        return self.known.step_s * (1.0 + self.known.step_error * self.unknowns.noise)


def _sync(models: StageModels, logged_s: float | None, factor: float) -> SyncModel:
    sync = models.sync
    if logged_s is not None:
        return replace(sync, fixed_s=logged_s, s_per_byte=0.0, per_tensor_s=0.0, per_hop_s=0.0, apply_s=0.0)
    if any(name.startswith("sync.") and "job" in source.note for name, source in models.sources.items()):
        return sync
    return replace(
        sync,
        fixed_s=sync.fixed_s * factor,
        s_per_byte=sync.s_per_byte * factor,
        per_tensor_s=sync.per_tensor_s * factor,
        per_hop_s=sync.per_hop_s * factor,
        apply_s=sync.apply_s * factor,
    )


def _switch(models: StageModels, place: float) -> SwitchCosts:
    """Return switch costs at a place of their priors' intervals."""
    found = {}
    for name, source in models.sources.items():
        if name.startswith("switch.") and 0.0 < source.low < source.high:
            found[name.removeprefix("switch.")] = source.low * (source.high / source.low) ** place
    known = {name: value for name, value in found.items() if hasattr(models.switch, name)}
    return replace(models.switch, **known)


def with_lengths(job: Job, drawn: Unknowns, known: Known) -> Job:
    """Return the job with what a world says of its response lengths.

    A law that only has a mean gets the share at the cap that the log prints, else a drawn one where the cap
    is ``FAR_CAP`` means away, else the drawn spread; any law is moved to the mean of the log.
    """
    config = job.workload
    if config.group_correlation == 0.0:
        config = config.model_copy(update={"group_correlation": drawn.correlation})
    lengths = config.lengths
    mean_tokens = known.response_mean_tokens
    if isinstance(lengths, LengthTable) and lengths.mean is not None:
        others = (lengths.p50, lengths.p95, lengths.truncated, lengths.sigma)
        if all(value is None for value in others):
            config = config.model_copy(update={"lengths": _law(config, lengths.mean, drawn, known)})
    job = replace(job, workload=config)
    if mean_tokens is None:
        return job
    return _scaled_lengths(job, mean_tokens / build_workload(job, 0).prior(0).mean_tokens)


def _law(config: WorkloadConfig, mean: float, drawn: Unknowns, known: Known) -> LengthTable:
    """Return a law of this mean with a tail or a spread; the spread where no law has that tail."""
    mean = known.response_mean_tokens or mean
    cap = config.max_response_tokens
    by_spread = LengthTable(mean=mean, sigma=drawn.sigma)
    truncated = known.truncated_share or None
    if known.truncated_share is None and cap >= FAR_CAP * mean:
        truncated = drawn.truncated
    if truncated is None:
        return by_spread
    try:
        by_tail = LengthTable(mean=mean, truncated=truncated)
        fit_length_law(by_tail.stats(cap), label="lengths", source="log")
    except (InputError, ValueError):
        return by_spread
    return by_tail


def _scaled_lengths(job: Job, factor: float) -> Job:
    drift = job.workload.drift
    level = drift[0] if isinstance(drift, tuple) else 1.0
    bounded = min(100.0, max(0.01, level * factor))
    return replace(job, workload=job.workload.model_copy(update={"drift": (bounded,)}))


def fit_world(job: Job, known: Known, drawn: Unknowns, simulate: Simulator, seed: int) -> World | None:
    """Return the world of a draw; None where no speed explains the log under it.

    Trainer segments that are timed fix their own factors, the others follow the update. Generation is fixed
    by its own time where roles take turns, else by the trainer's wait; where only the step is timed, one
    factor scales everything, with the drawn ratio of the two roles.
    """
    try:
        job = with_lengths(job, drawn, known)
        bare = World(seed, drawn, job, known, 1.0, dict.fromkeys(SEGMENTS, 1.0))
        return _fitted(bare, simulate)
    except InputError:
        return None


def _parts(world: World, simulate: Simulator) -> dict[str, float]:
    """Return the seconds of the step's parts in a world whose fixed seconds are not split off yet."""
    whole = replace(world, unknowns=replace(world.unknowns, fixed_share=0.0))
    found = simulate(world.job, whole.plan(world.job), world.seed)
    parts = {name: float(seconds) for name, seconds in found.details["parts_s"].items()}
    return parts | {"step": found.step_s}


def _fitted(world: World, simulate: Simulator) -> World | None:
    known, drawn = world.known, world.unknowns
    if known.train_s is None:
        return _fit_step(replace(world, rollout_factor=1.0 / drawn.pool_tilt), simulate)
    parts = _parts(world, simulate)
    update = (known.update_s or known.train_s) / max(parts.get("update", 0.0), 1e-9)
    factors = {}
    untimed = update * _fitting_share(known, parts, update)
    for name in SEGMENTS:
        logged, prior = known.segment_s(name), parts.get(name, 0.0)
        if name == "update" or prior <= 0.0:
            factors[name] = update
        else:
            factors[name] = untimed if logged is None else logged / prior
    world = replace(world, train_factors=factors)
    partition = world.job.partition
    if partition is not None and partition.placement is Placement.COLOCATED:
        role_s = known.role_change_s
        gen_s = known.generation_s
        if gen_s is None:
            gen_s = max(0.0, known.step_s - known.train_s)
        gen_s = gen_s * (1.0 - drawn.role_share) if role_s is None else gen_s - role_s
        world = replace(world, rollout_factor=gen_s / max(parts.get("wait", 0.0), 1e-9))
    elif known.wait_s is not None:
        found = _fit_wait(world, simulate)
        if found is None:
            return None
        world = found
    else:
        world = replace(world, rollout_factor=update / drawn.pool_tilt)
    if not SPEED_RANGE[0] <= world.rollout_factor <= SPEED_RANGE[1]:
        return None
    return _with_rest(world, simulate)


def _fitting_share(known: Known, parts: Mapping[str, float], update: float) -> float:
    """Return the share of the stages that the job has and the log does not time, for which the step has room.

    They follow the update's factor, but not beyond the seconds that the timed parts leave of the step: a job
    file may describe a reference stage that the run does not have.
    """
    untimed = update * sum(parts.get(name, 0.0) for name in SEGMENTS if known.segment_s(name) is None)
    on_path = known.wait_s if known.generation_s is None else known.generation_s
    if untimed <= 0.0 or on_path is None or known.train_s is None:
        return 1.0
    sync_s = parts.get("sync", 0.0) if known.weight_sync_s is None else known.weight_sync_s
    room_s = max(0.0, known.step_s - on_path - known.train_s - sync_s)
    return min(1.0, room_s / untimed)


def _fit_step(world: World, simulate: Simulator) -> World:
    """Scale everything by one factor so that the step comes out: all but the sync is linear in it."""
    parts = _parts(world, simulate)
    sync_s = parts.get("sync", 0.0)
    factor = max(0.0, world.known.step_s - sync_s) / (parts["step"] - sync_s)
    factors = dict.fromkeys(SEGMENTS, factor)
    world = replace(world, rollout_factor=factor * world.rollout_factor, train_factors=factors)
    return _with_fixed(world, {name: factor * parts.get(name, 0.0) for name in SEGMENTS})


def _fit_wait(world: World, simulate: Simulator) -> World | None:
    """Find the rollout speed under which the trainer waits as logged (Illinois method in the logarithm).

    A wait too short to say anything leaves the speed within the prior's range, cut where it would show.
    """
    known, drawn = world.known, world.unknowns
    assert known.wait_s is not None
    exposed_s = min(MOST_EXPOSED * known.wait_s, drawn.exposed_share * known.step_s)
    wait_s = known.wait_s - exposed_s
    hidden = wait_s < HIDDEN_WAIT * known.step_s
    target = HIDDEN_WAIT * known.step_s if hidden else wait_s
    close_s = WAIT_TOLERANCE * known.step_s

    def miss(place: float) -> float:
        mine = replace(world, rollout_factor=exp(place))
        return _parts(mine, simulate).get("wait", 0.0) - target

    place, value = 0.0, miss(0.0)
    found: float | None = place if abs(value) <= close_s else None
    step = -log(2.0) if value > 0.0 else log(2.0)
    other, other_value = place, value
    while found is None and value * other_value > 0.0:
        place, value = other, other_value
        other = place + step
        if abs(other) > log(SPEED_RANGE[1]):
            return None
        other_value = miss(other)
        found = other if abs(other_value) <= close_s else None
    for _ in range(WAIT_PROBES):
        if found is not None:
            break
        middle = (place * other_value - other * value) / (other_value - value)
        at = miss(middle)
        if abs(at) <= close_s:
            found = middle
        elif at * other_value < 0.0:
            place, value = other, other_value
        else:
            value /= 2.0
        other, other_value = middle, at
    factor = exp(other if found is None else found)
    if hidden:
        span = RANGES["pool_tilt"]
        factor *= 0.25 ** (log(span.high / drawn.pool_tilt) / log(span.high / span.low))
    return replace(world, rollout_factor=factor, exposed_s=exposed_s)


def _with_fixed(world: World, seconds: dict[str, float]) -> World:
    share = world.unknowns.fixed_share
    return replace(world, fixed_s={name: share * value for name, value in seconds.items()})


def _with_rest(world: World, simulate: Simulator) -> World:
    """Split off the seconds that more GPUs do not shorten, and those that nothing explains."""
    parts = _parts(world, simulate)
    other = world.known.step_s - parts["step"] - world.exposed_s
    return replace(
        _with_fixed(world, {name: parts.get(name, 0.0) for name in SEGMENTS}), other_s=max(0.0, other)
    )
