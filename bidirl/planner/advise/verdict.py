"""Name what limits a run from its log; or say that the log cannot tell, and which measurement would."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from bidirl.planner.advise.evidence import MIN_STEPS, Evidence, Share
from bidirl.traces.step_log import Mode

__all__ = ["BUSY_IDLE", "HIGH_IDLE", "Limit", "Tail", "Verdict", "idle_table", "judge"]

OVERHEAD_SHARE = 0.2
"""A sync, switch or reward this large is named as the limit: halving it gains 10 %."""
UNEXPLAINED_SHARE = 0.3
"""From here on the time in no timer could be the limit itself (needs C18: 40 %)."""
BUSY_IDLE = 0.1
"""A pool that waits less is busy: the last tenth is rarely reachable, since layouts are coarse."""
HIGH_IDLE = 0.2
"""A pool that waits more is idle enough to act on."""
TURNS_SHARE = 0.6
"""Where roles take turns: the share of the step from which one of them is the limit."""
TAIL_SHARE = 0.8
"""From this share of generation on, the longest sample alone explains it: more GPUs do not help."""
NO_OVERLAP_SHARE = 0.9
"""Generation and training that fill this much of the step one after the other do not overlap."""


_FROM_WAITS = (
    "whether rollout lacks throughput, waits for its longest samples, or is held back by the staleness bound "
    "cannot be told from waits alone"
)
_NO_MORE = "more rollout GPUs do not help"
_LOOK_AT = (
    "look at: the staleness or async ratio (0 forbids overlap), a batch so small that nothing is left to run "
    "ahead, a barrier at each weight sync"
)


class Limit(StrEnum):
    """What limits a run."""

    ROLLOUT = "rollout-bound"
    TRAINER = "trainer-bound"
    TAIL = "tail-bound"
    SYNC = "sync-bound"
    REWARD = "reward-bound"
    SWITCH = "switch-bound"
    ALTERNATING = "stages alternate"
    BALANCED = "balanced"
    MISCONFIGURED = "configuration error"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The limit, what shows it, and what stays open."""

    limit: Limit
    sentence: str
    evidence: tuple[str, ...] = ()
    measure: str = ""
    """The one measurement that would decide; empty where the verdict stands."""
    idle: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    """Shares of each pool's time by cause; None where the log cannot say."""


def idle_table(trainer: float | None, rollout: float | None) -> tuple[Limit, str]:
    """Read the two idle shares as users of disaggregated runs do. Source: needs C14 (verl#7601)."""
    if trainer is None or rollout is None:
        missing = "training" if trainer is None else "rollout"
        return Limit.CANNOT_TELL, f"the idle share of the {missing} pool is not known"
    shares = f"training pool idle {trainer:.0%}, rollout pool idle {rollout:.0%}"
    if trainer >= HIGH_IDLE and rollout >= HIGH_IDLE:
        return Limit.SYNC, f"{shares}: sync, scheduling or data handling stop both"
    if trainer >= HIGH_IDLE:
        return Limit.ROLLOUT, f"{shares}: samples come too slowly"
    if rollout >= HIGH_IDLE:
        return Limit.TRAINER, f"{shares}: samples come faster than they are trained on"
    return Limit.BALANCED, f"{shares}: neither waits long"


@dataclass(frozen=True, slots=True)
class Tail:
    """The longest sample of a batch, by the models that agree with the log (medians over them)."""

    alone_s: float
    """Its decode time, over the steps that it may span."""
    room_s: float
    """The time that generation takes: the wait at staleness 0 or in turn, else the step."""

    @property
    def limits(self) -> bool:
        """Return whether it alone explains the time of generation."""
        return self.alone_s >= TAIL_SHARE * self.room_s

    def __str__(self) -> str:
        """Return the evidence."""
        return f"the longest sample alone needs {self.alone_s:.0f} of its {self.room_s:.0f} s"


def judge(evidence: Evidence, tail: Tail | None = None) -> Verdict:
    """Name the limit; ``tail`` is known where a job is given.

    A verdict stands only if the 90 % intervals of its shares lie on one side of its threshold.
    """
    idle = _idle(evidence)
    if evidence.num_steps < MIN_STEPS:
        many = f"{evidence.num_steps} step{'s' if evidence.num_steps != 1 else ''}"
        return _open(
            f"{many} in the log, and one long sample moves a step",
            f"log at least {MIN_STEPS + 1} steps",
            evidence,
            idle,
        )
    if evidence.step_s is None:
        return _open(
            "no step time and no whole set of its parts is logged",
            "log the step's time, and beside it the trainer's wait (or generation) and its training time",
            evidence,
            idle,
        )
    overhead = _overhead(evidence, idle)
    if overhead is not None:
        return overhead
    if evidence.mode is not Mode.COLOCATED and (found := _alternating(evidence, idle)) is not None:
        return found
    unexplained = evidence.shares.get("unexplained")
    if unexplained is not None and unexplained.high >= UNEXPLAINED_SHARE:
        return _open(
            f"{unexplained} of the step is in no timer",
            "time what runs between the stages (data handling, weight sync, validation, checkpoints)",
            evidence,
            idle,
        )
    if evidence.mode is Mode.COLOCATED:
        return _turns(evidence, tail, idle)
    return _side_by_side(evidence, tail, idle)


def _facts(evidence: Evidence) -> tuple[str, ...]:
    """Return the shares, largest first, as sentences."""
    ordered = sorted(evidence.shares.items(), key=lambda item: -item[1].value)
    step = (
        ""
        if evidence.step_s is None
        else f" of a step of {evidence.step_s:.1f} s (median of {evidence.num_steps})"
    )
    return tuple(f"{name}: {share}{step}" for name, share in ordered if share.value >= 0.005)


def _open(
    why: str, measure: str, evidence: Evidence, idle: Mapping[str, Mapping[str, float | None]]
) -> Verdict:
    return Verdict(
        Limit.CANNOT_TELL, f"Cannot tell what limits this run: {why}.", _facts(evidence), measure, idle
    )


def _overhead(evidence: Evidence, idle: Mapping[str, Mapping[str, float | None]]) -> Verdict | None:
    """Return a verdict where both pools stand still for an overhead; None where none is large."""
    for part, limit in (
        ("weight sync", Limit.SYNC),
        ("role switches", Limit.SWITCH),
        ("rewards", Limit.REWARD),
    ):
        share = evidence.shares.get(part)
        if share is None or share.value < OVERHEAD_SHARE:
            continue
        others = ("generation", "wait", "training") if evidence.mode is Mode.COLOCATED else ("wait",)
        if share.value < max(evidence.share(name) for name in others):
            continue  # what takes more of the step is the limit
        if share.low < OVERHEAD_SHARE:
            return _open(
                f"{part} takes {share}, around the {OVERHEAD_SHARE:.0%} from which it is the limit",
                "log more steps",
                evidence,
                idle,
            )
        return Verdict(
            limit,
            f"This run is {limit}: {part} takes {share} of the step, and both pools stand still for it.",
            _facts(evidence),
            "",
            idle,
        )
    return None


def _alternating(evidence: Evidence, idle: Mapping[str, Mapping[str, float | None]]) -> Verdict | None:
    """Return a verdict where two pools work one after the other (needs C28); None where they overlap."""
    training, generation = evidence.shares.get("training"), evidence.shares.get("generation")
    if training is None or generation is None:
        return None
    filled = generation.value + training.value
    if not NO_OVERLAP_SHARE <= filled <= 1.0 + BUSY_IDLE:
        return None
    if min(generation.value, training.value) < BUSY_IDLE:
        return None
    return Verdict(
        Limit.ALTERNATING,
        f"The two pools alternate instead of overlapping: generation ({generation}) and training "
        f"({training}) fill the step one after the other.",
        (*_facts(evidence), _LOOK_AT),
        "",
        idle,
    )


def _turns(evidence: Evidence, tail: Tail | None, idle: Mapping[str, Mapping[str, float | None]]) -> Verdict:
    """Judge a run whose roles take turns on all GPUs."""
    part = "generation" if "generation" in evidence.shares else "wait"
    generation, training = evidence.shares.get(part), evidence.shares.get("training")
    if generation is None or training is None:
        missing = "generation" if generation is None else "training"
        return _open(f"{missing} is not timed", f"time {missing}", evidence, idle)
    facts = _facts(evidence)
    if _settled(generation, TURNS_SHARE) and generation.value >= TURNS_SHARE:
        if tail is not None and tail.limits:
            words = (
                f"This run is tail-bound: generation takes {generation} of the step, and {tail}: {_NO_MORE}."
            )
            return Verdict(Limit.TAIL, words, facts, "", idle)
        return Verdict(
            Limit.ROLLOUT,
            f"This run is rollout-bound: generation takes {generation} of the step, on all GPUs.",
            (*facts, *_tail_doubt(evidence, tail)),
            "",
            idle,
        )
    if _settled(training, TURNS_SHARE) and training.value >= TURNS_SHARE:
        return Verdict(
            Limit.TRAINER,
            f"This run is trainer-bound: training takes {training} of the step, so overlapping generation "
            f"gains at most {1.0 / max(1e-9, 1.0 - generation.value):.2f}x.",
            facts,
            "",
            idle,
        )
    if not (_settled(generation, TURNS_SHARE) and _settled(training, TURNS_SHARE)):
        return _open(
            f"generation takes {generation} and training {training} of the step, around the "
            f"{TURNS_SHARE:.0%} from which one is the limit",
            "log more steps",
            evidence,
            idle,
        )
    return Verdict(
        Limit.BALANCED,
        f"Neither stage alone limits this run: generation takes {generation}, training {training} of the "
        "step, in turn.",
        facts,
        "",
        idle,
    )


def _tail_doubt(evidence: Evidence, tail: Tail | None) -> tuple[str, ...]:
    if tail is not None:
        return ()
    tokens = evidence.tokens
    mean, longest = tokens.get("response_mean_tokens"), tokens.get("response_max_tokens")
    if mean and longest:
        words = (
            f"the longest response is {longest / mean:.1f} times the mean: whether it alone holds generation "
            "up needs a job (--job) or the seconds of the slowest request"
        )
        return (words,)
    return ()


def _side_by_side(
    evidence: Evidence, tail: Tail | None, idle: Mapping[str, Mapping[str, float | None]]
) -> Verdict:
    """Judge a run with two pools."""
    facts = _facts(evidence)
    wait, training = evidence.shares.get("wait"), evidence.shares.get("training")
    generation = evidence.shares.get("generation")
    if wait is None and generation is not None and training is not None:
        fills_step = generation.low >= NO_OVERLAP_SHARE - BUSY_IDLE
        if fills_step and training.high < 1.0 - HIGH_IDLE:
            wait = Share(*(max(0.0, 1.0 - each) for each in (training.value, training.high, training.low)))
    if wait is None:
        return _open("the trainer's wait for samples is not timed", "log the trainer's wait", evidence, idle)
    if training is None:
        return _open(
            f"only waits are timed ({wait} of the step)", "time the trainer's update", evidence, idle
        )
    if not (_settled(wait, BUSY_IDLE) or evidence.rollout_idle is not None):
        return _open(
            f"the trainer waits {wait} of the step, around the {BUSY_IDLE:.0%} that separates the two",
            "log more steps, or the rollout pool's busy time",
            evidence,
            idle,
        )
    rollout = evidence.rollout_idle
    if rollout is not None:
        limit, words = idle_table(wait.value, rollout.value)
        if limit is Limit.ROLLOUT and tail is not None and tail.limits:
            limit = Limit.TAIL
            words += f"; {tail}: {_NO_MORE}"
        return Verdict(limit, f"This run is {limit}: {words}.", facts, "", idle)
    if wait.value < BUSY_IDLE:
        return Verdict(
            Limit.TRAINER,
            f"This run is trainer-bound, or balanced: the trainer waits only {wait} of the step.",
            (
                *facts,
                "how far the rollout pool is ahead is not logged, so how many GPUs it can spare is open",
            ),
            "log the rollout pool's busy time (running samples over time)",
            idle,
        )
    if tail is not None and tail.limits:
        return Verdict(
            Limit.TAIL,
            f"This run is tail-bound: the trainer waits {wait} of the step, and {tail}: {_NO_MORE}.",
            facts,
            "",
            idle,
        )
    return Verdict(
        Limit.ROLLOUT,
        f"The rollout side limits this run: the trainer waits {wait} of the step for samples.",
        (*facts, _FROM_WAITS, *_tail_doubt(evidence, tail)),
        "log the rollout pool's busy time (running samples over time)",
        idle,
    )


def _settled(share: Share, threshold: float) -> bool:
    return share.low >= threshold or share.high < threshold


def _idle(evidence: Evidence) -> dict[str, dict[str, float | None]]:
    """Return each pool's idle time by cause as shares of the step; None where the log cannot say."""

    def logged(part: str) -> float | None:
        share = evidence.shares.get(part)
        return None if share is None else share.value

    overheads = {"weight sync": logged("weight sync"), "role switches": logged("role switches")}
    if evidence.mode is Mode.COLOCATED:
        tokens = evidence.tokens
        mean, longest = tokens.get("response_mean_tokens"), tokens.get("response_max_tokens")
        generation = logged("generation")
        tail = None
        if mean and longest and generation is not None:
            tail = generation * (1.0 - mean / longest)
        rest = {"generation tail, at most": tail, "unexplained": logged("unexplained")}
        return {"all GPUs": {**overheads, **rest}}
    rollout = None if evidence.rollout_idle is None else evidence.rollout_idle.value
    return {
        "training": {"waits for samples": logged("wait"), **overheads, "unexplained": logged("unexplained")},
        "rollout": {"no work": rollout, **overheads},
    }
