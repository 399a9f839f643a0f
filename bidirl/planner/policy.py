"""The [policy] section: a framework is a named combination of small, independent choices.

``PRESETS`` is data: a new system is a new row. ``SUPPORTED`` is the one place that says which values the
scheduler carries out; a choice outside it is refused when a job is loaded, never ignored.
"""

from collections.abc import Mapping
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bidirl.errors import InputError

__all__ = [
    "MAX_STALENESS",
    "PINNED_BY_PRESET",
    "PRESETS",
    "SUPPORTED",
    "AdmissionRule",
    "BatchOrder",
    "Dispatch",
    "Expiry",
    "Gate",
    "Granularity",
    "InFlight",
    "Lending",
    "Merge",
    "Placement",
    "PolicyConfig",
    "Recalibration",
    "Split",
    "VersionMode",
    "preset",
    "unsupported",
    "with_preset",
]

MAX_STALENESS = 1000
"""Batches of run-ahead; more bounds nothing in a run of ordinary length, so it is a typing error."""


class Placement(StrEnum):
    """Whether the roles have pools of their own."""

    DISAGGREGATED = "disaggregated"
    COLOCATED = "colocated"
    """Both roles take turns on all GPUs."""


class VersionMode(StrEnum):
    """Which weights generate a sample."""

    LATEST = "latest"
    """The newest applied version, at the start and after each sync."""
    PINNED = "pinned"
    """One version per group, fixed by its number: placement cannot change what is learned."""


class Granularity(StrEnum):
    """When training of a step starts."""

    FULL = "full"
    """When all groups of the batch are there."""
    STREAMED = "streamed"
    """When the groups of a mini-batch are there."""


class InFlight(StrEnum):
    """What happens at a sync to samples that are being generated."""

    DRAIN = "drain"
    RESTART = "restart"
    CONTINUE_RECOMPUTE = "continue_recompute"
    """Keep the tokens, prefill them again under the new weights."""
    CONTINUE_STALE = "continue_stale"
    """Keep the tokens and their KV cache."""


class BatchOrder(StrEnum):
    """Which complete groups a batch takes."""

    READY_FIRST = "ready_first"
    ISSUE_ORDER = "issue_order"
    """Exactly the next groups by number; waits for stragglers."""
    OLDEST_FIRST = "oldest_first"
    """Of the complete groups, those issued first."""


class AdmissionRule(StrEnum):
    """How run-ahead is counted (frameworks.md; needs.md, staleness conventions)."""

    COUNTING = "counting"
    """Cumulative: started groups less refunds stay below ``A(v) = floor((v + 1 + s) * B)``."""
    BUDGET_AT_SYNC = "budget_at_sync"
    """Renewed at each sync: what is in flight or waits then, and new ones, at most ``floor((1 + s) * B)``.

    Source: verl fully_async, ``max_required_samples`` less the backlog at the sync.
    """
    BUDGET_DOUBLE_COUNTED = "budget_double_counted"
    """The same, with complete groups that wait for the trainer counted twice.

    Source: verl-project/verl#7938, #7940: finished tasks that were not yet reaped.
    """


class Expiry(StrEnum):
    """What happens to a group that has become too old."""

    NEVER = "never"
    DROP = "drop"
    """Dropped when a batch would consume it with a lag above ``ceil(s)``."""
    CANCEL = "cancel"
    """Cancelled, in flight or complete, once no later batch could take it with a lag within ``ceil(s)``."""
    WAIT = "wait"
    """Training waits for it rather than letting its lag exceed ``ceil(s)``."""


class Dispatch(StrEnum):
    """Which replica a new group goes to."""

    LEAST_LOADED = "least_loaded"
    ROUND_ROBIN = "round_robin"


class Lending(StrEnum):
    """In which directions an idle pool lends its devices."""

    NONE = "none"
    ROLLOUT_ON_TRAIN = "rollout_on_train"
    TRAIN_ON_ROLLOUT = "train_on_rollout"
    BOTH = "both"


class Gate(StrEnum):
    """What must hold before a lease is taken."""

    NONE = "none"
    """Any idle pool lends."""
    AVERAGES = "averages"
    """Running averages of observed times promise a gain above the switch costs."""
    MODELS = "models"
    """The stage-time models promise it."""
    ORACLE = "oracle"
    """Both branches are simulated with the true lengths to the second next publication.

    A bound on what foresight is worth; it exists in the simulator only.
    """


class Split(StrEnum):
    """How work is divided between the primary and the auxiliary side."""

    EVEN = "even"
    """Same amount for both sides, whatever their size."""
    EQ6 = "eq6"
    """By capacity. Source: paper, Eq. 6."""
    LENGTH_AWARE = "length_aware"
    """By predicted time left."""


class Merge(StrEnum):
    """How gradients of the two sides are added."""

    ORDERED = "ordered"
    """Chunk by chunk, in chunk order: equal bit by bit to training without a lease."""
    ACCUMULATED = "accumulated"
    """One sum per side: equal up to the order of summation."""


class Recalibration(StrEnum):
    """Whether the gates' predictions follow what a run measures."""

    OFF = "off"
    """The models are taken as they are."""
    ONLINE = "online"
    """Factors on the predicted times follow finished pulls and reported progress (``models.online``)."""


Count = Annotated[int, Field(ge=1)]


class PolicyConfig(BaseModel):
    """All choices of one policy, resolved; ``name`` is the preset they started from."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = "bidirl"
    staleness: Annotated[Decimal, Field(ge=0, le=MAX_STALENESS, decimal_places=9)] = Decimal(1)
    """Batches that generation may run ahead of training; exact, so that 0.1 of 60 groups is 6.

    The default 1 is the paper's.
    """
    version_mode: VersionMode = VersionMode.LATEST
    granularity: Granularity = Granularity.FULL
    in_flight: InFlight = InFlight.CONTINUE_RECOMPUTE
    batch_order: BatchOrder = BatchOrder.READY_FIRST
    dispatch: Dispatch = Dispatch.LEAST_LOADED
    lending: Lending = Lending.NONE
    gate: Gate = Gate.NONE
    split: Split = Split.EQ6
    merge: Merge = Merge.ACCUMULATED
    admission: AdmissionRule = AdmissionRule.COUNTING
    expiry: Expiry = Expiry.NEVER
    recalibration: Recalibration = Recalibration.OFF
    concurrency_groups_per_replica: Count | None = None
    """Groups that one rollout replica holds at a time; without it only the engine's limits count."""
    max_concurrency: Count | None = None
    """Groups in flight over all replicas; without it only admission counts."""
    chunk_groups: Count | None = None
    """Groups in one trainer chunk; without it as many as give each trainer replica some samples of a pull."""
    max_chunks_per_pull: Count = 8
    """``s_max`` of the paper's Algorithm 2: chunks that a side takes at once."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.version_mode is VersionMode.PINNED and self.batch_order is not BatchOrder.ISSUE_ORDER:
            raise ValueError(
                f"version_mode = pinned fixes the batches by group number, batch_order = {self.batch_order} "
                'does not: set batch_order = "issue_order"'
            )
        if self.expiry is Expiry.WAIT and self.batch_order is BatchOrder.READY_FIRST:
            raise ValueError(
                "expiry = wait waits for old groups, batch_order = ready_first would not take them: "
                'set batch_order = "oldest_first"'
            )
        if self.expiry is Expiry.WAIT and self.admission is not AdmissionRule.COUNTING:
            raise ValueError(
                "expiry = wait relies on the counting rule for old groups to fit one batch: "
                'set admission = "counting"'
            )
        if self.version_mode is VersionMode.PINNED and self.admission is not AdmissionRule.COUNTING:
            raise ValueError(
                f"version_mode = pinned needs the counting rule, admission = {self.admission} is not: "
                'set admission = "counting"'
            )
        if self.version_mode is VersionMode.PINNED and self.expiry is not Expiry.NEVER:
            raise ValueError(
                f"version_mode = pinned keeps every group, expiry = {self.expiry} does not: "
                'set expiry = "never"'
            )
        return self


_ASYNC: dict[str, Any] = {}
"""No borrowing: two pools that run ahead by the staleness bound, interrupted samples continue.

Source: frameworks.md section 1: "no borrow" is veRL's fully asynchronous trainer with partial rollout.
"""
_BORROW: dict[str, Any] = {"gate": "models", "split": "eq6"}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "colocated_sync": {"in_flight": "drain", "batch_order": "issue_order", "staleness": Decimal(0)},
    "no_borrow": _ASYNC,
    # Source: paper.md, ablation: borrow on any idle, no gate, no model-guided split.
    "opportunistic": {"lending": "both", "gate": "none", "split": "even"},
    "rollout_on_train": {**_BORROW, "lending": "rollout_on_train"},
    "train_on_rollout": {**_BORROW, "lending": "train_on_rollout"},
    "bidirl": {**_BORROW, "lending": "both"},
    "bidirl_length_aware": {**_BORROW, "lending": "both", "split": "length_aware"},
    "oracle": {"lending": "both", "split": "length_aware", "gate": "oracle"},
    # Source: frameworks.md section 2.3: one group is the unit, 16 of them per replica, mini-batches stream.
    "verl_fully_async": {
        "granularity": "streamed",
        "admission": "budget_at_sync",
        "concurrency_groups_per_replica": 16,
    },
    # Source: frameworks.md section 4: counting bound, batches by creation time, round robin over servers.
    "areal": {"batch_order": "oldest_first", "dispatch": "round_robin"},
    # Source: frameworks.md section 5: oldest step first; what grows older than ceil(ratio) is aborted.
    "roll": {"batch_order": "oldest_first", "expiry": "cancel"},
}
"""Preset name -> the choices in which it differs from the defaults of ``PolicyConfig``."""

PINNED_BY_PRESET: Mapping[str, Mapping[str, Any]] = {
    "colocated_sync": {"staleness": Decimal(0), "placement": "colocated"},
}
"""Choices that belong to a preset so much that a job's other value is set aside, with a notice.

So one job file serves ``compare --policies colocated_sync,bidirl``.
"""

SUPPORTED: Mapping[str, frozenset[StrEnum]] = {
    "version_mode": frozenset({VersionMode.LATEST, VersionMode.PINNED}),
    "granularity": frozenset({Granularity.FULL, Granularity.STREAMED}),
    "in_flight": frozenset(InFlight),
    "batch_order": frozenset(BatchOrder),
    "dispatch": frozenset(Dispatch),
    "lending": frozenset(Lending),
    "gate": frozenset({Gate.NONE, Gate.MODELS, Gate.ORACLE}),
    "split": frozenset(Split),
    "merge": frozenset({Merge.ACCUMULATED, Merge.ORDERED}),
    "admission": frozenset(AdmissionRule),
    "expiry": frozenset(Expiry),
    "recalibration": frozenset(Recalibration),
}
"""Values that the scheduler carries out, per choice."""


def unsupported(policy: PolicyConfig) -> list[tuple[str, StrEnum, frozenset[StrEnum]]]:
    """Return the choices that the scheduler cannot carry out yet: ``(choice, value, supported values)``."""
    found = []
    for choice, values in SUPPORTED.items():
        value: StrEnum = getattr(policy, choice)
        if value not in values:
            found.append((choice, value, values))
    return found


def with_preset(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the choices of a policy section laid over those of its preset; an unknown name adds none."""
    name = written.get("name", "bidirl")
    base = PRESETS.get(name, {}) if isinstance(name, str) else {}
    return {**base, "name": name, **written}


def preset(name: str, **choices: Any) -> PolicyConfig:
    """Return a preset with single choices replaced; enum values may be given by their names.

    Raises:
        InputError: no preset has this name, or a choice is unknown or breaks a rule.
    """
    if name not in PRESETS:
        raise InputError(f"policy {name!r} is no preset: choose one of {', '.join(sorted(PRESETS))}")
    merged = with_preset({"name": name, **choices})
    if isinstance(merged.get("staleness"), int | str):
        merged["staleness"] = Decimal(merged["staleness"])
    try:
        for choice, values in SUPPORTED.items():
            if choice in merged:
                merged[choice] = type(next(iter(values)))(merged[choice])
        return PolicyConfig(**merged)
    except ValueError as error:
        raise InputError(f"policy {name!r}: {error}") from None
