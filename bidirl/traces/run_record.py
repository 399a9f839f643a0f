"""What one run leaves behind: spans, steps, samples and leases as columns.

Filled by a driver (simulated or real), read by metrics, tables, figures and the trace export. Lists of
plain numbers, one list per column: appending is cheap, numpy takes them whole.
"""

from array import array
from collections.abc import MutableSequence
from dataclasses import dataclass, field
from enum import IntEnum

__all__ = ["Activity", "Leases", "Owner", "RunRecord", "Samples", "Spans", "Steps"]

Column = MutableSequence[int]
Times = MutableSequence[float]


def _ints() -> Column:
    return array("i")


def _floats() -> Times:
    return array("d")


class Owner(IntEnum):
    """The pool that owns a device; a lent device still counts in it."""

    ROLLOUT = 0
    TRAIN = 1


class Activity(IntEnum):
    """What a device does during a span. Time outside all spans is idle for want of work."""

    GENERATE = 0
    OLD_LOGPROB = 1
    REFERENCE = 2
    UPDATE = 3
    OPTIMIZER = 4
    MERGE = 5
    """Gradients or results of the auxiliary side travel to the primary trainer."""
    SYNC = 6
    """Paused for, or applying, new weights."""
    SWITCH_IN = 7
    SWITCH_OUT = 8
    BROADCAST = 9
    """Weights to the auxiliary trainer between two updates of one lease."""
    CHECKPOINT = 10
    DOWN = 11
    """Lost or restarting."""


@dataclass(slots=True)
class Spans:
    """Intervals of activity; spans of one device never overlap."""

    owner: list[int] = field(default_factory=list)
    unit: list[int] = field(default_factory=list)
    """Index of the first GPU of the unit inside its pool (0 <= unit < GPUs of the pool)."""
    num_gpus: list[int] = field(default_factory=list)
    """GPUs ``unit .. unit + num_gpus - 1`` of the pool are busy with the activity."""
    activity: list[int] = field(default_factory=list)
    start_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)
    step: list[int] = field(default_factory=list)
    """Step of the trainer at the start of the span."""


@dataclass(slots=True)
class Steps:
    """One row per training step, in order; row ``k`` publishes version ``k + 1``."""

    batch_ready_s: list[float] = field(default_factory=list)
    """When the last group that the step needed was ready."""
    train_start_s: list[float] = field(default_factory=list)
    published_s: list[float] = field(default_factory=list)
    """When the weights of version ``k + 1`` had been confirmed by every active primary rollout replica."""
    prompt_tokens: list[int] = field(default_factory=list)
    response_tokens: list[int] = field(default_factory=list)
    num_groups: list[int] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)
    """Seconds of the trainer's time line between two publications by state (``wait``, ``old_logprob``,
    ``reference``, ``update``, ``optimizer``, ``merge``, ``broadcast``, ``sync``, ``drain``, ``switch``,
    ``reward``, ``checkpoint``); they sum to the step's time."""
    extra: dict[str, list[float]] = field(default_factory=dict)
    """What only a real run knows, by the names of ``tables.LEARNING_COLUMNS``; one value per step."""


@dataclass(slots=True)
class Samples:
    """One row per issued sample, in order of the sample's id; packed, since a run may have a million."""

    group: Column = field(default_factory=_ints)
    index: Column = field(default_factory=_ints)
    prompt_tokens: Column = field(default_factory=_ints)
    response_tokens: Column = field(default_factory=_ints)
    """Length of the sample when complete."""
    generated_tokens: Column = field(default_factory=_ints)
    """Tokens generated so far; equal to ``response_tokens`` when finished."""
    start_s: Times = field(default_factory=_floats)
    """When the group was first handed to a replica (nan if never)."""
    finish_s: Times = field(default_factory=_floats)
    """nan while unfinished."""
    version: Column = field(default_factory=_ints)
    """Oldest version of any of its tokens."""
    last_version: Column = field(default_factory=_ints)
    """Newest version of any of its tokens; ``span = last_version - version + 1``."""
    step: Column = field(default_factory=_ints)
    """Step that trained it (= version of the weights that consumed it); -1 if none."""
    dropped: list[str] = field(default_factory=list)
    """Cause of a drop (``filtered``, ``expired``, ``failed``); empty otherwise."""
    num_resumes: Column = field(default_factory=_ints)
    prefix_tokens: Column = field(default_factory=_ints)
    """Tokens prefilled again by resumes (sum over its resumes)."""
    chunk: Column = field(default_factory=_ints)
    """Index of its chunk inside its step's first update segment; -1 if untrained."""


@dataclass(slots=True)
class Leases:
    """One row per lease."""

    direction: list[str] = field(default_factory=list)
    """``rollout_on_train`` or ``train_on_rollout``."""
    num_gpus: list[int] = field(default_factory=list)
    requested_s: list[float] = field(default_factory=list)
    entered_s: list[float] = field(default_factory=list)
    released_s: list[float] = field(default_factory=list)
    closed_s: list[float] = field(default_factory=list)
    predicted_gain_s: list[float] = field(default_factory=list)
    threshold_s: list[float] = field(default_factory=list)
    useful_device_s: list[float] = field(default_factory=list)
    """Device-seconds of work done by the lent devices."""


@dataclass(slots=True)
class RunRecord:
    """Everything a run leaves behind; times are seconds from the start of the run."""

    rollout_gpus: int
    train_gpus: int
    samples_per_prompt: int
    prompts_per_step: int
    staleness: float
    enforced: tuple[str, ...]
    """Which of ``admission``, ``lag``, ``span`` the policy guarantees."""
    spans: Spans = field(default_factory=Spans)
    steps: Steps = field(default_factory=Steps)
    samples: Samples = field(default_factory=Samples)
    leases: Leases = field(default_factory=Leases)
    end_s: float = 0.0
    decode_tokens: int = 0
    recomputed_tokens: int = 0
    """Tokens prefilled again after engine preemption, resume or a weight sync."""
    recompute_s: float = 0.0
    num_events: int = 0
    notes: list[str] = field(default_factory=list)
    """What the run has to say for itself: lending that stopped, replicas that were lost."""
    wall_s: float = 0.0
    """Wall-clock seconds that the run took to compute."""
