"""Layouts of one replica of a role: which exist for a model and a node, and which a pool can hold."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from bidirl.models.architecture import Architecture

__all__ = ["RolloutLayout", "Style", "TrainLayout", "rollout_layouts", "train_layouts"]

MAX_ROLLOUT_PP = 8
MAX_TRAIN_PP = 16
"""Deepest pipelines tried. Source: the deepest in NeMo-RL's public recipes (DeepSeek-V3: 16)."""
MAX_EP = 64
"""Widest expert parallelism tried. Source: NeMo-RL's recipes use up to 32."""


class Style(StrEnum):
    """How the trainer is cut."""

    FSDP = "fsdp"
    """States sharded over the whole pool; ``tp`` cuts the layers too. Any number of replicas."""
    MEGATRON = "megatron"
    """Weights cut by tensor, pipeline and expert parallelism and copied; a distributed optimizer."""


@dataclass(frozen=True, slots=True, order=True)
class RolloutLayout:
    """One engine: ``tp`` GPUs share each layer, ``pp`` groups of them hold the layers in turn.

    Expert parallelism inside an engine moves the same weights to the same GPUs, and no prior of ours can
    tell it from tensor parallelism, so it is not a layout of its own.
    """

    tp: int
    pp: int = 1

    @property
    def gpus(self) -> int:
        """Return ``|rho_r|``."""
        return self.tp * self.pp

    @property
    def unit_gpus(self) -> int:
        """Return what a pool must be a multiple of: whole engines."""
        return self.gpus

    @property
    def label(self) -> str:
        """Return the short name: ``tp2`` or ``tp8pp2``."""
        return f"tp{self.tp}" + (f"pp{self.pp}" if self.pp > 1 else "")


@dataclass(frozen=True, slots=True)
class TrainLayout:
    """One trainer replica."""

    style: Style
    tp: int
    pp: int = 1
    ep: int = 1
    """GPUs among which a layer's experts are spread: inside ``tp x dp``, so not a factor of the replica."""

    @property
    def gpus(self) -> int:
        """Return ``|rho_t|``."""
        return self.tp * self.pp

    @property
    def unit_gpus(self) -> int:
        """Return what the pool must be a multiple of: whole replicas, and whole groups of experts."""
        return max(self.tp, self.ep) * self.pp

    @property
    def label(self) -> str:
        """Return the short name: ``fsdp`` or ``megatron tp2pp4ep8``."""
        parts = [
            f"{name}{size}" for name, size in (("tp", self.tp), ("pp", self.pp), ("ep", self.ep)) if size > 1
        ]
        return " ".join([self.style.value, *(["".join(parts)] if parts else [])])


def _divisors(number: int) -> Iterator[int]:
    return (size for size in range(1, number + 1) if number % size == 0)


def _powers(limit: int) -> Iterator[int]:
    size = 1
    while size <= limit:
        yield size
        size *= 2


def rollout_layouts(model: Architecture, gpus_per_node: int, num_gpus: int) -> list[RolloutLayout]:
    """Return the engine layouts to try, smallest replica first.

    Tensor parallelism stays in a node and divides its GPUs and the attention heads (vLLM's rule); pipelines
    are powers of two, and a replica fills a node's part or whole nodes.
    """
    found = [
        RolloutLayout(tp, pp)
        for tp in _divisors(gpus_per_node)
        if model.num_attention_heads % tp == 0
        for pp in _powers(min(MAX_ROLLOUT_PP, model.num_layers))
        if tp * pp < num_gpus and _aligned(tp * pp, gpus_per_node)
    ]
    return sorted(found, key=lambda layout: (layout.gpus, layout.pp))


def train_layouts(model: Architecture, gpus_per_node: int, num_gpus: int) -> list[TrainLayout]:
    """Return the trainer layouts to try, smallest replica first, FSDP before Megatron.

    Megatron's tensor parallelism also divides the key-value heads or is a multiple of them (Megatron-LM's
    grouped-query rule); expert parallelism divides the experts and is a multiple of ``tp``, or 1.
    """
    found = [
        TrainLayout(Style.FSDP, tp)
        for tp in _divisors(gpus_per_node)
        if model.num_attention_heads % tp == 0 and tp < num_gpus
    ]
    for tp in _divisors(gpus_per_node):
        kv = model.num_kv_heads
        if model.num_attention_heads % tp or (kv % tp and tp % kv):
            continue
        for pp in _powers(min(MAX_TRAIN_PP, model.num_layers)):
            for ep in _powers(min(MAX_EP, model.num_experts) or 1):
                layout = TrainLayout(Style.MEGATRON, tp, pp, ep)
                if ep > 1 and (model.num_experts % ep or ep % tp):
                    continue
                if layout.unit_gpus < num_gpus and _aligned(layout.gpus, gpus_per_node):
                    found.append(layout)
    return sorted(found, key=lambda each: (each.gpus, each.style.value, each.pp, each.ep))


def _aligned(gpus: int, gpus_per_node: int) -> bool:
    return gpus_per_node % gpus == 0 or gpus % gpus_per_node == 0
