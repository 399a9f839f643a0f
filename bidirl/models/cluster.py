"""The [cluster] section of a job: which GPUs, how many, and how they are linked."""

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from bidirl.errors import InputError
from bidirl.models import catalogue
from bidirl.models.catalogue import COLUMNS, Gpu

__all__ = ["ClusterConfig", "GpuChoice", "GpuNumbers", "resolve_gpu"]

STRICT = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)
Rate = Annotated[float, Field(gt=0, strict=False)]
"""A positive number; a whole number is one too (TOML's 400 is not 400.0)."""


def _no_bool(data: object) -> object:
    """Refuse booleans where numbers are lax: Python counts True as 1."""
    if isinstance(data, dict):
        for key, value in data.items():
            if isinstance(value, bool | str) and key not in ("name", "gpu", "train_gpu", "rollout_gpu"):
                raise ValueError(f"{key} = {value!r}: must be a number; write it without quotes")
    return data


class GpuNumbers(BaseModel):
    """Numbers of a GPU; with ``name`` of a catalogue row they replace that row's numbers one by one."""

    model_config = STRICT

    name: str = "custom GPU"
    memory_gib: Rate | None = None
    memory_bandwidth_gb_per_s: Rate | None = None
    bf16_dense_tflops: Rate | None = None
    fp8_dense_tflops: Rate | None = None
    nvlink_gb_per_s: Rate | None = None
    pcie_gb_per_s: Rate | None = None
    typical_inter_node_gbit_per_s: Rate | None = None

    _numbers = model_validator(mode="before")(_no_bool)


def _branch(value: object) -> str:
    return "name" if isinstance(value, str) else "numbers"


GpuChoice = Annotated[
    Annotated[str, Tag("name")] | Annotated[GpuNumbers, Tag("numbers")],
    Discriminator(_branch),
]


def resolve_gpu(choice: str | GpuNumbers) -> Gpu:
    """Return the GPU that a job names or describes; raise ``InputError`` for an unknown name."""
    if isinstance(choice, str):
        return catalogue.gpu(choice)
    known = catalogue.gpu_matches(choice.name)
    base = catalogue.gpu(choice.name) if known else Gpu(name=choice.name)
    given = {
        field: number * factor
        for column, (field, factor) in COLUMNS.items()
        if (number := getattr(choice, column)) is not None
    }
    numbers: dict[str, Any] = {field: getattr(base, field) for field, _ in COLUMNS.values()} | given
    source = "; ".join(part for part in ("job file", base.source) if part)
    return Gpu(name=base.name, nvlink_gpus=base.nvlink_gpus, source=source, note=base.note, **numbers)


class ClusterConfig(BaseModel):
    """GPUs and links of a cluster of equal nodes."""

    model_config = STRICT

    gpu: GpuChoice
    """Catalogue name or table of numbers."""
    num_nodes: Annotated[int, Field(ge=1)]
    gpus_per_node: Annotated[int, Field(ge=1)]
    train_gpu: GpuChoice | None = None
    """Another GPU type for the training pool."""
    rollout_gpu: GpuChoice | None = None
    """Another GPU type for the rollout pool."""
    inter_node_gbit_per_s: Rate | None = None
    """Network of one node, one way, over all its cards; default: the catalogue's typical rate per GPU."""
    intra_node_gb_per_s: Rate | None = None
    """GPU-to-GPU rate in a node, one way; default: the GPU's NVLink, else its PCIe rate."""
    host_memory_gib: Rate | None = None
    """Memory of one node; without it no verdict is given on sleeping in host memory."""
    price_per_gpu_hour: Annotated[float, Field(ge=0, strict=False)] | None = None

    _numbers = model_validator(mode="before")(_no_bool)

    @model_validator(mode="after")
    def _known(self) -> Self:
        for choice in (self.gpu, self.train_gpu, self.rollout_gpu):
            if choice is not None:
                try:
                    resolve_gpu(choice)
                except InputError as error:
                    raise ValueError(str(error)) from None
        return self

    @property
    def num_gpus(self) -> int:
        """Return the number of GPUs of all nodes."""
        return self.num_nodes * self.gpus_per_node

    @property
    def train_device(self) -> Gpu:
        """Return the GPU of the training pool."""
        return resolve_gpu(self.gpu if self.train_gpu is None else self.train_gpu)

    @property
    def rollout_device(self) -> Gpu:
        """Return the GPU of the rollout pool."""
        return resolve_gpu(self.gpu if self.rollout_gpu is None else self.rollout_gpu)

    def peer_bytes_per_s(self, device: Gpu, num_gpus: int) -> float:
        """Return the one-way rate of one GPU among ``num_gpus`` GPUs of a node."""
        if self.intra_node_gb_per_s is not None:
            return self.intra_node_gb_per_s * 1e9
        return device.peer_bytes_per_s(num_gpus)

    def node_bytes_per_s(self, device: Gpu) -> float:
        """Return the one-way network rate of a whole node; raise ``InputError`` if nobody gives it."""
        if self.inter_node_gbit_per_s is not None:
            return self.inter_node_gbit_per_s * 1e9 / 8
        if device.inter_node_bytes_per_s is None:
            raise InputError(
                f"gpu {device.name!r} has no typical network rate in the catalogue: "
                "give cluster.inter_node_gbit_per_s, the rate of one node"
            )
        return device.inter_node_bytes_per_s * self.gpus_per_node
