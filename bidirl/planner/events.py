"""What the scheduler hears and what it asks for.

An *action* is a request to a driver; its ``serial`` is unique in a run. An *event* is a fact that a driver
reports; its ``cause`` is the serial of the action that led to it (0 for facts that nobody asked for), so
an answer to an action that no longer matters is recognised and ignored.

Rollout replicas are numbered ``0 .. d_r - 1`` (primary) and ``d_r .. d_r + d_a - 1`` (auxiliary rollouters
on the training pool). Trainer sides are 0 (primary) and 1 (auxiliary trainer on the rollout pool).
"""

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

__all__ = [
    "ACTIONS",
    "EVENTS",
    "RANK",
    "Action",
    "BeginLease",
    "Broadcast",
    "BroadcastDone",
    "ChunkFailed",
    "ChunkFinished",
    "CoefficientsUpdated",
    "Direction",
    "DropGroup",
    "EndLease",
    "Event",
    "Filtered",
    "GateDecision",
    "LeaseEntered",
    "LeaseFailed",
    "LeaseReturned",
    "LendingStopped",
    "Merge",
    "Merged",
    "OptimizerStep",
    "Preempt",
    "Preempted",
    "Progress",
    "Publish",
    "Published",
    "ReplicaJoined",
    "ReplicaLost",
    "RequestProgress",
    "RestartReplica",
    "Rewarded",
    "RunStarted",
    "SamplesFinished",
    "ScoreGroup",
    "SegmentKind",
    "SetTimer",
    "SideLost",
    "StartChunks",
    "StartSamples",
    "SyncApplied",
    "SyncFailed",
    "SyncReplica",
    "TimerFired",
    "Updated",
    "from_json",
    "to_json",
]


class Direction(StrEnum):
    """Who borrows from whom."""

    ROLLOUT_ON_TRAIN = "rollout_on_train"
    TRAIN_ON_ROLLOUT = "train_on_rollout"
    TIME_SHARE = "time_share"
    """Colocated: the trainer's own turn on the devices that it shares with the rollouter."""


class SegmentKind(StrEnum):
    """Kinds of trainer work; the value is the name used in models, spans and tables."""

    OLD_LOGPROB = "old_logprob"
    REFERENCE = "reference"
    UPDATE = "update"


# ------------------------------------------------------------------ actions


@dataclass(slots=True)
class StartSamples:
    """Hand samples of one group to a replica; ``prefixes`` are tokens generated before (all 0: fresh)."""

    serial: int
    replica: int
    group: int
    indices: tuple[int, ...]
    prefixes: tuple[int, ...]
    version: int
    """Version that the replica runs when it takes the samples."""
    attempt: int


@dataclass(slots=True)
class Preempt:
    """Take the unfinished samples of some groups off a replica at its next iteration boundary."""

    serial: int
    replica: int
    groups: tuple[int, ...]


@dataclass(slots=True)
class RequestProgress:
    """Ask how many tokens each unfinished sample of a replica has."""

    serial: int
    replica: int


@dataclass(slots=True)
class ScoreGroup:
    """Have the rewards of a complete group computed."""

    serial: int
    group: int


@dataclass(slots=True)
class DropGroup:
    """Forget a group: it will never be trained. ``cause`` is the ledger's word for it."""

    serial: int
    group: int
    cause: str


@dataclass(slots=True)
class StartChunks:
    """Run chunks ``first .. last - 1`` of a segment on a side in one pull.

    ``work`` and ``longest`` are the pull's effective tokens and those of its longest sample (trainer model).
    """

    serial: int
    side: int
    step: int
    segment: int
    kind: SegmentKind
    first: int
    last: int
    work: float
    longest: float
    num_replicas: int
    attempt: int


@dataclass(slots=True)
class Merge:
    """Bring the auxiliary side's results of a segment to the primary trainer, in chunk order."""

    serial: int
    step: int
    segment: int
    kind: SegmentKind
    chunks: tuple[int, ...]
    num_tokens: int
    """Response tokens of the chunks: what forward-only results amount to."""


@dataclass(slots=True)
class OptimizerStep:
    """Apply the merged gradient of mini-batch ``update`` of a step on the primary trainer."""

    serial: int
    step: int
    update: int


@dataclass(slots=True)
class Broadcast:
    """Give the updated weights to the auxiliary side before a further segment needs them."""

    serial: int
    step: int
    update: int


@dataclass(slots=True)
class Publish:
    """Put the weights of a version where replicas can take them later (pinned mode)."""

    serial: int
    version: int


@dataclass(slots=True)
class SyncReplica:
    """Pause a replica at its next boundary, load a version, reset its prefix cache and go on."""

    serial: int
    replica: int
    version: int
    num_receivers: int
    recompute: bool
    """Whether the KV of running samples is rebuilt under the new weights."""


@dataclass(slots=True)
class BeginLease:
    """Let ``replicas`` change role; ``version`` is what an auxiliary rollouter must load."""

    serial: int
    lease: int
    direction: Direction
    replicas: tuple[int, ...]
    version: int
    gain_s: float
    threshold_s: float


@dataclass(slots=True)
class EndLease:
    """Give the devices of a lease back."""

    serial: int
    lease: int


@dataclass(slots=True)
class GateDecision:
    """A gate that said no: predicted gain and threshold, for the journal only."""

    serial: int
    direction: Direction
    gain_s: float
    threshold_s: float


@dataclass(slots=True)
class LendingStopped:
    """Lending in a direction cost more than it gave too often; said once, for the journal and the report."""

    serial: int
    direction: Direction
    num_losses: int
    gave_s: float
    cost_s: float


@dataclass(slots=True)
class SetTimer:
    """Wake the scheduler after ``delay_s``."""

    serial: int
    timer: int
    delay_s: float


@dataclass(slots=True)
class RestartReplica:
    """Bring a lost replica back."""

    serial: int
    replica: int


# ------------------------------------------------------------------- events


@dataclass(slots=True)
class RunStarted:
    """The run begins: all replicas hold version 0."""

    cause: int = 0


@dataclass(slots=True)
class SamplesFinished:
    """All samples of a group that a replica held have ended; ``tokens`` are their response lengths."""

    replica: int
    group: int
    indices: tuple[int, ...]
    tokens: tuple[int, ...]
    prompt_tokens: int
    cause: int


@dataclass(slots=True)
class Preempted:
    """Samples left a replica: unfinished ones with their tokens, and those that had ended unannounced."""

    replica: int
    unfinished: tuple[tuple[int, int, int], ...]
    """(group, index, generated tokens)."""
    finished: tuple[tuple[int, int, int, int], ...]
    """(group, index, response tokens, prompt tokens)."""
    cause: int


@dataclass(slots=True)
class Progress:
    """Tokens of the unfinished samples of a replica: (group, index, generated tokens)."""

    replica: int
    samples: tuple[tuple[int, int, int], ...]
    cause: int


@dataclass(slots=True)
class Rewarded:
    """A group has its rewards and may be trained."""

    group: int
    cause: int


@dataclass(slots=True)
class Filtered:
    """A group's rewards are all equal: it carries no gradient."""

    group: int
    cause: int


@dataclass(slots=True)
class LeaseEntered:
    """The devices of a lease now play the borrowed role."""

    lease: int
    cause: int


@dataclass(slots=True)
class LeaseReturned:
    """The devices of a lease are back in their own role."""

    lease: int
    cause: int


@dataclass(slots=True)
class LeaseFailed:
    """The role change did not work; the devices are back in their own role."""

    lease: int
    cause: int


@dataclass(slots=True)
class ChunkFinished:
    """A side has finished a pull."""

    side: int
    step: int
    segment: int
    first: int
    last: int
    attempt: int
    cause: int


@dataclass(slots=True)
class ChunkFailed:
    """A side could not finish a pull; its chunks must run again."""

    side: int
    step: int
    segment: int
    first: int
    last: int
    attempt: int
    cause: int


@dataclass(slots=True)
class Merged:
    """The auxiliary side's results of a segment are with the primary trainer."""

    step: int
    segment: int
    cause: int


@dataclass(slots=True)
class Updated:
    """An optimizer step is done."""

    step: int
    update: int
    cause: int


@dataclass(slots=True)
class BroadcastDone:
    """The auxiliary side holds the updated weights."""

    step: int
    update: int
    cause: int


@dataclass(slots=True)
class Published:
    """A version lies ready for replicas."""

    version: int
    cause: int


@dataclass(slots=True)
class SyncApplied:
    """A replica confirms that it runs a version."""

    replica: int
    version: int
    cause: int


@dataclass(slots=True)
class SyncFailed:
    """A replica did not get a version; it still runs the old one."""

    replica: int
    version: int
    cause: int


@dataclass(slots=True)
class TimerFired:
    """A timer's delay is over."""

    timer: int
    cause: int


@dataclass(slots=True)
class ReplicaLost:
    """A rollout replica is gone, and with it what its samples had generated."""

    replica: int
    cause: int = 0


@dataclass(slots=True)
class ReplicaJoined:
    """A rollout replica is back with an empty engine, holding ``version``."""

    replica: int
    version: int
    cause: int = 0


@dataclass(slots=True)
class SideLost:
    """The auxiliary trainer side is gone, and with it its unmerged results."""

    side: int
    cause: int = 0


@dataclass(slots=True)
class CoefficientsUpdated:
    """New calibration: factors on the predicted rollout and training times."""

    rollout_factor: float
    train_factor: float
    cause: int = 0


Action = (
    StartSamples
    | Preempt
    | RequestProgress
    | ScoreGroup
    | DropGroup
    | StartChunks
    | Merge
    | OptimizerStep
    | Broadcast
    | Publish
    | SyncReplica
    | BeginLease
    | EndLease
    | GateDecision
    | LendingStopped
    | SetTimer
    | RestartReplica
)
Event = (
    RunStarted
    | SamplesFinished
    | Preempted
    | Progress
    | Rewarded
    | Filtered
    | LeaseEntered
    | LeaseReturned
    | LeaseFailed
    | ChunkFinished
    | ChunkFailed
    | Merged
    | Updated
    | BroadcastDone
    | Published
    | SyncApplied
    | SyncFailed
    | TimerFired
    | ReplicaLost
    | ReplicaJoined
    | SideLost
    | CoefficientsUpdated
)

ACTIONS: dict[str, type[Any]] = {kind.__name__: kind for kind in Action.__args__}
EVENTS: dict[str, type[Any]] = {kind.__name__: kind for kind in Event.__args__}

_ORDER: tuple[type[Any], ...] = (
    RunStarted,
    CoefficientsUpdated,
    ReplicaLost,
    SideLost,
    ReplicaJoined,
    SyncFailed,
    SyncApplied,
    Published,
    LeaseFailed,
    LeaseReturned,
    LeaseEntered,
    Preempted,
    Progress,
    SamplesFinished,
    Filtered,
    Rewarded,
    ChunkFailed,
    ChunkFinished,
    Merged,
    BroadcastDone,
    Updated,
    TimerFired,
)
RANK: dict[type[Any], int] = {kind: rank for rank, kind in enumerate(_ORDER)}
"""Order of simultaneous events: by kind, then by cause; never by arrival."""


def to_json(item: Action | Event) -> dict[str, Any]:
    """Return an action or event as plain JSON data, its type under ``kind_of``."""
    data: dict[str, Any] = {"kind_of": type(item).__name__}
    for column in fields(item):
        data[column.name] = getattr(item, column.name)
    return data


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def from_json(data: dict[str, Any]) -> Any:
    """Return the action or event that :func:`to_json` wrote; KeyError for an unknown type or field."""
    data = dict(data)
    kind_of = data.pop("kind_of")
    kind = ACTIONS.get(kind_of) or EVENTS[kind_of]
    values = {name: _tuples(value) for name, value in data.items()}
    if "direction" in values:
        values["direction"] = Direction(values["direction"])
    if "kind" in values:
        values["kind"] = SegmentKind(values["kind"])
    return kind(**values)
