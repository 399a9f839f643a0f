"""What can be chosen about the loss and the trainer; plain values without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite

from bidirl.errors import InputError
from bidirl.planner.learn import AdvantageScale, Normalisation, OldPolicy, Precision

__all__ = ["LossConfig", "PlantedFault", "Summation", "TrainerConfig"]


class Summation(StrEnum):
    """How a chunk's gradient is summed over its rows, and the chunks' gradients over the mini-batch."""

    FLOAT32 = "float32"
    """In the order at hand: another cut into chunks gives the same up to rounding."""
    EXACT = "exact"
    """Row by row, rounded to a fixed grid and summed in float64 without any rounding: the same bits for any
    cut, order, placement and merge. Costs one pass a row, and 8 bytes a parameter and chunk."""


class PlantedFault(StrEnum):
    """Faults that tests plant to see that they are found; no job file reaches them."""

    NONE = "none"
    CHUNK_NORMALISED = "chunk_normalised"
    """The loss is divided by the chunk's count in place of the mini-batch's."""
    REVERSED_MERGE = "reversed_merge"
    """Chunk gradients are added last to first."""


def _positive(name: str, value: float) -> None:
    if not isfinite(value) or value <= 0:
        raise InputError(f"{name} = {value}: must be above 0; raise it")


def _not_negative(name: str, value: float) -> None:
    if not isfinite(value) or value < 0:
        raise InputError(f"{name} = {value}: must not be negative; use 0 to leave it out")


@dataclass(frozen=True, slots=True)
class LossConfig:
    """The GRPO loss. Raises ``InputError`` for values out of range."""

    normalisation: Normalisation = Normalisation.TOKEN
    advantage_scale: AdvantageScale = AdvantageScale.GROUP_STD
    old_policy: OldPolicy = OldPolicy.BEHAVIOUR
    clip_low: float = 0.2
    clip_high: float = 0.2
    """The ratio counts within ``[1 - clip_low, 1 + clip_high]``. Source: Schulman et al. 2017 (PPO), 0.2."""
    behaviour_cap: float = 5.0
    """Largest old / behaviour weight of a token (decoupled only). Source: AReaL's shipped examples, 5.0."""
    kl_weight: float = 0.0
    """Weight of the KL estimate against version 0; above 0 the step needs a reference segment."""

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high", "kl_weight"):
            _not_negative(name, getattr(self, name))
        _positive("behaviour_cap", self.behaviour_cap)
        if self.clip_low >= 1.0:
            raise InputError(f"clip_low = {self.clip_low}: must be below 1, a ratio is positive; lower it")

    @property
    def needs_old(self) -> bool:
        """Whether an update needs the results of an old-logprob segment."""
        return self.old_policy is not OldPolicy.BEHAVIOUR

    @property
    def needs_reference(self) -> bool:
        """Whether an update needs the results of a reference segment."""
        return self.kl_weight > 0.0


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """One torch replica. Raises ``InputError`` for values out of range.

    The optimizer is AdamW over all parameters; the defaults are those that learn the packaged tasks on the
    packaged model (docs/learning.md), far above what a pretrained model needs.
    """

    loss: LossConfig = field(default_factory=LossConfig)
    learning_rate: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_gradient_norm: float = 1.0
    """The merged gradient is scaled down to this norm; 0 leaves it."""
    precision: Precision = Precision.FLOAT32
    summation: Summation = Summation.FLOAT32
    device: str = "cpu"
    """``cpu``, ``cuda`` or ``cuda:N``."""
    micro_tokens: int = 4096
    """Padded tokens that one micro-batch may hold, prompt included; a longer sample runs alone."""
    logit_tokens: int = 2048
    """Response tokens whose float32 logits exist at once."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "epsilon", "micro_tokens", "logit_tokens"):
            _positive(name, getattr(self, name))
        for name in ("weight_decay", "max_gradient_norm"):
            _not_negative(name, getattr(self, name))
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise InputError(f"{name} = {getattr(self, name)}: must lie in [0, 1); lower it")
