"""The [learn] section of a job: what a real run trains, on which task and with which loss.

Only real runs read it. Times and throughput of a simulated run do not depend on it.
"""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = [
    "AdvantageScale",
    "Filtering",
    "LearnConfig",
    "Normalisation",
    "OldPolicy",
    "PaceConfig",
    "Precision",
    "ResponseLengths",
]

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]


class ResponseLengths(StrEnum):
    """What ends a response."""

    WORKLOAD = "workload"
    """The length that the job's workload draws for the sample, as in a simulation of the job."""
    MODEL = "model"
    """The model, by its stop token, or ``workload.max_response_tokens``."""


class Filtering(StrEnum):
    """What happens to groups whose rewards are all equal."""

    OFF = "off"
    """They are trained, with an advantage of zero."""
    ON = "on"
    """They are dropped and replaced (in pinned mode: kept with zero weight)."""


class Normalisation(StrEnum):
    """What the sum of a mini-batch's token losses is divided by."""

    TOKEN = "token"
    """By all response tokens of the mini-batch: a long response counts more."""
    SEQUENCE = "sequence"
    """By its own length, then by the number of responses: each counts the same."""


class AdvantageScale(StrEnum):
    """What a group's centred rewards are divided by."""

    GROUP_STD = "group_std"
    """Their standard deviation. Source: Shao et al. 2024 (DeepSeekMath), GRPO with outcome rewards."""
    NONE = "none"
    """Nothing. Source: Liu et al. 2025, "Understanding R1-Zero-Like Training" (Dr. GRPO)."""


class OldPolicy(StrEnum):
    """Which log-probabilities the ratio is taken against."""

    BEHAVIOUR = "behaviour"
    """Those that the engine returned while it sampled."""
    PROXIMAL = "proximal"
    """Those of the old-logprob segment, as if it had sampled."""
    DECOUPLED = "decoupled"
    """Those of the old-logprob segment; the token's loss is weighted by old / behaviour, which is capped.
    Source: Hilton et al. 2022, "Batch size-invariance for policy optimization"; Fu et al. 2025 (AReaL)."""


class Precision(StrEnum):
    """Type of the forward and backward pass; weights, gradients and optimizer stay in float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class PaceConfig(BaseModel):
    """Least times of an engine iteration and of a trainer chunk: devices of known speed on a small machine.

    Engine and trainer do all their work and then wait until so much time has passed. Results of such a run
    name it.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    iteration_s: NotNegative = 0.0
    """Seconds of an engine iteration, at least."""
    sequence_s: NotNegative = 0.0
    """... and for each sequence in it."""
    token_s: NotNegative = 0.0
    """Seconds of a trainer chunk for each prompt and response token, at least."""


class LearnConfig(BaseModel):
    """Model, task, loss and optimizer of a real run; the defaults learn the packaged tasks."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    task: str = "copy"
    """A packaged task: constant, copy or arithmetic."""
    reward: str | None = None
    """``module:function``, from (prompt token ids, response token ids) to a number; None: the task's own."""
    model_path: str | None = None
    """Folder of a Hugging Face checkpoint; None: a small random decoder of the job's [model.architecture]."""
    lengths: ResponseLengths = ResponseLengths.WORKLOAD
    stop_token: Annotated[int, Field(ge=0)] | None = None
    """Token that ends a response where ``lengths`` is ``model``; None: the task's own, if it has one."""
    temperature: Positive = 1.0
    learning_rate: Positive = 3e-3
    weight_decay: NotNegative = 0.0
    max_gradient_norm: NotNegative = 1.0
    """The merged gradient is scaled down to this norm; 0 leaves it."""
    clip_low: Share = 0.2
    clip_high: NotNegative = 0.2
    kl_weight: NotNegative = 0.0
    """Weight of the KL estimate against version 0; needs ``workload.reference = "on"``."""
    normalisation: Normalisation = Normalisation.TOKEN
    """What a mini-batch's loss is divided by: all its tokens, or each response's own, then the responses."""
    advantage_scale: AdvantageScale = AdvantageScale.GROUP_STD
    old_policy: OldPolicy = OldPolicy.BEHAVIOUR
    """Which log-probabilities the ratio is taken against; all but behaviour need the old-logprob stage."""
    filtering: Filtering = Filtering.OFF
    dtype: Precision = Precision.FLOAT32
    pace: PaceConfig | None = None
    checkpoint_every: Annotated[int, Field(ge=0)] = 10
    """Steps between two checkpoints of a run with a folder; 0: none."""

    @model_validator(mode="after")
    def _reward_is_a_function(self) -> Self:
        if self.reward is not None and not all(self.reward.partition(":")[::2]):
            raise ValueError(f"reward = {self.reward!r} must read module:function: name both")
        return self
