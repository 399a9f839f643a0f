"""Layouts of one replica of a role: which exist for a model and a node, and which a pool can hold."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import lcm

from bidirl.models.architecture import Architecture

__all__ = ["RolloutLayout", "Style", "TrainLayout", "rollout_layouts", "train_layouts"]

MAX_ROLLOUT_PP = 8
MAX_TRAIN_PP = 16
"""Deepest pipelines tried. Source: the deepest in NeMo-RL's public recipes (DeepSeek-V3: 16)."""
MAX_EP = 64
"""Widest expert parallelism tried. Source: NeMo-RL's recipes use up to 32."""
MAX_CP = 8
"""Widest context parallelism tried. ASSUMED: the GPUs of a node, whose links its exchange needs."""


class Style(StrEnum):
    """How the trainer is cut."""

    FSDP = "fsdp"
    """States sharded over the whole pool; ``tp`` cuts the layers too. Any number of replicas."""
    MEGATRON = "megatron"
    """Weights cut by tensor, pipeline and expert parallelism and copied; a distributed optimizer."""


@dataclass(frozen=True, slots=True, order=True)
class RolloutLayout:
    """One engine: ``tp`` GPUs share each layer, ``pp`` groups of them hold the layers in turn.

    With ``ep > tp`` the engine has ``ep`` GPUs: ``ep / tp`` groups attend to sequences of their own, and each
    GPU holds ``1 / ep`` of the experts whole. ``ep = tp`` is not a layout of its own: it moves the bytes of
    tensor parallelism to the same GPUs and, with routing that is never better than balanced, is no faster.
    """

    tp: int
    pp: int = 1
    ep: int = 1

    @property
    def gpus(self) -> int:
        """Return ``|rho_r|``."""
        return max(self.tp, self.ep) * self.pp

    @property
    def groups(self) -> int:
        """Return how many groups of ``tp`` GPUs attend to sequences of their own in one engine."""
        return max(1, self.ep // self.tp)

    @property
    def unit_gpus(self) -> int:
        """Return what a pool must be a multiple of: whole engines."""
        return self.gpus

    @property
    def label(self) -> str:
        """Return the short name: ``tp2``, ``tp8pp2`` or ``tp1ep8``."""
        more = [f"{name}{size}" for name, size in (("pp", self.pp), ("ep", self.ep)) if size > 1]
        return f"tp{self.tp}" + "".join(more)


@dataclass(frozen=True, slots=True)
class TrainLayout:
    """One trainer replica."""

    style: Style
    tp: int
    pp: int = 1
    ep: int = 1
    """GPUs among which a layer's experts are spread: inside ``tp x cp x dp``, no factor of the replica."""
    cp: int = 1
    """GPUs among which each sequence is spread: Ulysses under FSDP, a ring under Megatron."""

    @property
    def gpus(self) -> int:
        """Return ``|rho_t|``."""
        return self.tp * self.cp * self.pp

    @property
    def unit_gpus(self) -> int:
        """Return what the pool must be a multiple of: whole replicas, and whole groups of experts."""
        return lcm(self.tp * self.cp, self.ep) * self.pp

    @property
    def label(self) -> str:
        """Return the short name: ``fsdp`` or ``megatron tp2pp4ep8``."""
        sizes = (("tp", self.tp), ("pp", self.pp), ("ep", self.ep), ("cp", self.cp))
        parts = [f"{name}{size}" for name, size in sizes if size > 1]
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
    are powers of two, and a replica fills a node's part or whole nodes. Experts are spread evenly, over a
    multiple of ``tp`` (vLLM: the expert size is tensor times data size), without a pipeline.
    Source: vLLM 0.32, ``ParallelConfig`` and ``fused_moe/config.py``; verl-project/verl
    verl/workers/config/rollout.py @005f2732 (``ep = tp x dp``).
    """
    tensor = [tp for tp in _divisors(gpus_per_node) if model.num_attention_heads % tp == 0]
    shapes = [(tp, pp, 1) for tp in tensor for pp in _powers(min(MAX_ROLLOUT_PP, model.num_layers))]
    shapes += [
        (tp, 1, ep)
        for tp in tensor
        for ep in _powers(min(MAX_EP, model.num_experts))
        if ep > tp and ep % tp == 0 and model.num_experts % ep == 0
    ]
    every = (RolloutLayout(*shape) for shape in shapes)
    found = [each for each in every if each.gpus < num_gpus and _aligned(each.gpus, gpus_per_node)]
    return sorted(found, key=lambda layout: (layout.gpus, layout.pp, layout.ep))


def train_layouts(model: Architecture, gpus_per_node: int, num_gpus: int) -> list[TrainLayout]:
    """Return the trainer layouts to try, smallest replica first, FSDP before Megatron.

    Megatron's tensor parallelism also divides the key-value heads or is a multiple of them; expert
    parallelism divides the experts and is a multiple of ``tp``, or 1. Ulysses divides the heads of a tensor
    shard, and the key-value heads or is a multiple of them; a ring pads sequences to a multiple of ``2 cp``.
    Source: NVIDIA/Megatron-LM megatron/core/transformer/transformer_config.py @002526d8 (heads, query
    groups); verl-project/verl verl/models/transformers/monkey_patch.py @0b32cefc (Ulysses);
    NVIDIA-NeMo/RL nemo_rl/models/policy/lm_policy.py @007c9ca8 (padding).
    """
    heads, kv = model.num_attention_heads, model.num_kv_heads
    tensor = [tp for tp in _divisors(gpus_per_node) if heads % tp == 0]
    every = [TrainLayout(Style.FSDP, tp, cp=cp) for tp in tensor for cp in _ulysses(heads, kv, tp)]
    for tp in tensor:
        if kv % tp and tp % kv:
            continue
        for pp in _powers(min(MAX_TRAIN_PP, model.num_layers)):
            for ep in _powers(min(MAX_EP, model.num_experts) or 1):
                if ep == 1 or not (model.num_experts % ep or ep % tp):
                    every += [TrainLayout(Style.MEGATRON, tp, pp, ep, cp) for cp in _powers(MAX_CP)]
    found = [each for each in every if each.unit_gpus < num_gpus and _aligned(each.gpus, gpus_per_node)]
    return sorted(found, key=lambda each: (each.gpus, each.style.value, each.cp, each.pp, each.ep))


def _ulysses(heads: int, kv: int, tp: int) -> Iterator[int]:
    """Yield the sequence-parallel sizes whose all-to-all leaves each GPU whole heads."""
    return (cp for cp in _powers(MAX_CP) if (heads // tp) % cp == 0 and (kv % cp == 0 or cp % kv == 0))


def _aligned(gpus: int, gpus_per_node: int) -> bool:
    return gpus_per_node % gpus == 0 or gpus % gpus_per_node == 0
