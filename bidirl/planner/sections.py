"""The sections of a job that the planner owns, beside the policy: partition, engine, models."""

from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bidirl.planner.policy import Placement

__all__ = ["EngineConfig", "ModelsConfig", "Partition", "PartitionConfig", "SwitchOverrides"]

STRICT = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0)]


class PartitionConfig(BaseModel):
    """The [partition] section as written; without the section the planner chooses."""

    model_config = STRICT

    placement: Placement = Placement.DISAGGREGATED
    rollout_gpus: Count | None = None
    train_gpus: Count | None = None
    """One of the two counts is enough: the other pool gets the rest of the cluster."""
    rollout_tp: Count = 1
    train_tp: Count = 1


@dataclass(frozen=True, slots=True)
class Partition:
    """Devices and layouts of the two roles, resolved; replica counts follow from them."""

    placement: Placement
    rollout_gpus: int
    """GPUs of the rollout pool; of the whole cluster where the roles take turns (colocated)."""
    train_gpus: int
    """GPUs of the training pool; 0 where the roles take turns on ``rollout_gpus``."""
    rollout_tp: int
    train_tp: int

    @property
    def num_gpus(self) -> int:
        """Return the GPUs of both pools."""
        return self.rollout_gpus + self.train_gpus

    def as_written(self) -> dict[str, str | int]:
        """Return the [partition] section that resolves to this partition."""
        layouts: dict[str, str | int] = {"rollout_tp": self.rollout_tp, "train_tp": self.train_tp}
        if self.placement is Placement.COLOCATED:
            return {"placement": str(self.placement), **layouts}
        pools = {"rollout_gpus": self.rollout_gpus, "train_gpus": self.train_gpus}
        return {"placement": str(self.placement), **pools, **layouts}


class EngineConfig(BaseModel):
    """Limits of one rollout engine.

    The defaults suit a server of one to eight GPUs; an engine's own depend on its version and device, so a
    job that copies a real setup should state them.
    """

    model_config = STRICT

    max_num_seqs: Count = 256
    max_num_batched_tokens: Count = 8192
    block_size: Count = 16
    """Tokens in one KV block."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    prefix_caching: bool = True
    kv_tokens: Count | None = None
    """KV capacity of one replica; without it the memory model gives it."""

    @model_validator(mode="after")
    def _holds_a_batch(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens = {self.max_num_batched_tokens} is below max_num_seqs = "
                f"{self.max_num_seqs}, so the running sequences would not fit one iteration: "
                "raise the first or lower the second"
            )
        if self.kv_tokens is not None and self.kv_tokens < self.block_size:
            raise ValueError(
                f"kv_tokens = {self.kv_tokens} hold no block of {self.block_size} tokens: raise kv_tokens"
            )
        return self


class SwitchOverrides(BaseModel):
    """Measured seconds of a role change that replace those of the model."""

    model_config = STRICT

    rollout_on_train_in_s: Seconds | None = None
    rollout_on_train_out_s: Seconds | None = None
    train_on_rollout_in_s: Seconds | None = None
    train_on_rollout_out_s: Seconds | None = None
    grad_s: Seconds | None = None
    broadcast_s: Seconds | None = None


class ModelsConfig(BaseModel):
    """Where calibrated stage models come from, and single numbers that are known better."""

    model_config = STRICT

    file: str | None = None
    """Path of a models.json, from the job's folder."""
    switch: SwitchOverrides | None = None
    sync_s: Seconds | None = None
    """Seconds of one weight sync."""
