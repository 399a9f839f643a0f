"""Memory of both roles on one GPU: itemised, with a verdict and the headroom."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from bidirl.errors import InputError
from bidirl.models.estimate import Estimate, Source

if TYPE_CHECKING:
    from bidirl.models.architecture import Architecture
    from bidirl.models.catalogue import Gpu

__all__ = [
    "EngineInputs",
    "EngineOptions",
    "LossPath",
    "MemoryBudget",
    "MemoryItem",
    "fitting_micro_tokens",
    "host_memory",
    "kv_estimate",
    "kv_tokens",
    "layer_params",
    "logit_items",
    "recomputed_layer_bytes",
    "rollout_memory",
    "train_memory",
    "usable_bytes",
]

DRIVER_SHARE = 0.98
"""Share of the nominal memory that the driver reports. Source: data/gpus.csv notes and vLLM's own run on an
RTX 4090: 0.937 (L40S, error correction in memory) to 0.996; 0.980 on the RTX 4090."""
ENGINE_OVERHEAD_BYTES = 0.758e9
"""CUDA context, CUDA graphs and workspaces of one engine process.
Source: what vLLM 0.19 left unexplained on the RTX 4090 (Llama-3.1-8B, 41,408 KV tokens at 0.9)."""
TRAIN_OVERHEAD_BYTES = 1.5e9
"""CUDA context, communication buffers of the trainer. ASSUMED: about twice the engine's, no public row."""
FRAGMENTATION_SHARE = 0.05
"""Share of the trainer's memory lost between blocks of the allocator. ASSUMED: no public row."""
STATE_BYTES_PER_PARAM = {"master weights": 4.0, "gradients": 4.0, "optimizer moments": 8.0}
"""Mixed-precision AdamW: FP32 master weight, FP32 gradient, two FP32 moments: 16 bytes a parameter.
Source: ZeRO (Rajbhandari et al. 2020), section 3.1, with FP32 gradients as FSDP reduces them."""
UNFUSED_BYTES_PER_LOGIT = 18.0
"""A loss without any fusion: logits in BF16, their FP32 copy, its log-softmax, the FP32 gradient, and the
gradient in BF16 with its copy. Source: counting; prime-rl's SFT rows (H100, H200, B200) leave 16 to 19."""
FUSED_CHUNK_TOKENS = 1024
"""Tokens whose logits exist at a time in a fused language-model head.
Source: prime-rl's RL rows leave about 1.2 GiB at a vocabulary of 151,936 (docs/planning.md)."""
ROUTED_COPIES = 8.0
"""Copies of the hidden states of a layer's routed tokens: permuted input, expert output, weighted output,
combined output, and the gradient of each.
Source: prime-rl's Qwen3-30B-A3B rows, 9.5 between 16K and 64K tokens; rounded down to what can be named."""


class LossPath(StrEnum):
    """How the trainer computes the loss, which decides how often the logits exist in memory."""

    IN_PLACE = "in_place"
    """FP32 logits whose gradient takes their place once: 8 bytes a logit. The default of the time models."""
    FUSED = "fused"
    """A fused head: only a chunk of the tokens has logits at a time."""
    UNFUSED = "unfused"
    """Every copy that plain framework code keeps: 18 bytes a logit."""


class EngineInputs(Protocol):
    """What a job says about the rollout engine; the [engine] section has these fields."""

    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def gpu_memory_utilization(self) -> float: ...
    @property
    def prefix_caching(self) -> bool: ...
    @property
    def kv_tokens(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Engine inputs with vLLM's defaults on data-centre boards (256 sequences, 8,192 tokens, 0.9)."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    prefix_caching: bool = True
    kv_tokens: int | None = None
    """KV memory in tokens where the engine printed it; None computes it."""


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One use of memory on one GPU."""

    name: str
    num_bytes: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """All uses of one role on one GPU against what the GPU has."""

    role: str
    capacity_bytes: float
    items: tuple[MemoryItem, ...]

    @property
    def total_bytes(self) -> float:
        """Return the sum of the items."""
        return sum(item.num_bytes for item in self.items)

    @property
    def headroom_bytes(self) -> float:
        """Return what is left; negative where the role does not fit."""
        return self.capacity_bytes - self.total_bytes

    @property
    def fits(self) -> bool:
        """Say whether the role fits."""
        return self.headroom_bytes >= 0.0

    def verdict(self) -> str:
        """Return one line: fits or not, by how much, and the largest item."""
        largest = max(self.items, key=lambda item: item.num_bytes)
        gib = 2.0**30
        relation = "fits with" if self.fits else "does not fit: lacks"
        return (
            f"{self.role} {relation} {abs(self.headroom_bytes) / gib:.1f} GiB of "
            f"{self.capacity_bytes / gib:.1f}{' to spare' if self.fits else ''}; "
            f"the largest item is {largest.name} ({largest.num_bytes / gib:.1f} GiB)"
        )


def usable_bytes(device: Gpu) -> float:
    """Return the memory that the driver reports for ``device``."""
    return device.need("memory_bytes") * DRIVER_SHARE


def _engine_items(model: Architecture, tp: int, engine: EngineInputs) -> tuple[MemoryItem, ...]:
    tokens = engine.max_num_batched_tokens
    width = (
        model.hidden_size * 4 + (2 * model.mlp_width + 2 * model.num_attention_heads * model.head_dim) / tp
    )
    return (
        MemoryItem("weights", model.weight_bytes() / tp, "BF16, split over the tensor-parallel group"),
        MemoryItem("activations", tokens * width * 2.0, f"one layer of {tokens} tokens in BF16"),
        MemoryItem("logits", engine.max_num_seqs * model.vocab_size * 8.0, "FP32 logits and probabilities"),
        MemoryItem("context and graphs", ENGINE_OVERHEAD_BYTES, "measured on one board"),
    )


def kv_estimate(device: Gpu, model: Architecture, tp: int, engine: EngineInputs) -> Estimate:
    """Return the KV tokens of one engine on ``tp`` GPUs: what its memory share leaves, in whole blocks.

    Raises ``InputError`` where the weights leave less than one block, and for a share outside (0, 1].
    """
    share = engine.gpu_memory_utilization
    if not 0.0 < share <= 1.0:
        raise InputError(f"gpu_memory_utilization = {share}: must be in (0, 1]; vLLM's default is 0.9")
    items = _engine_items(model, tp, engine)
    capacity = usable_bytes(device) * share
    free = capacity - sum(item.num_bytes for item in items)
    cache_gpus = min(tp, model.num_kv_heads) if model.kv_values_per_layer == 0 else 1
    per_token = model.kv_bytes_per_token() / cache_gpus
    blocks = int(free / per_token) // engine.block_size
    if blocks < 1:
        budget = MemoryBudget(f"engine of {model.name} on {device.name}, tp={tp}", capacity, items)
        raise InputError(f"{budget.verdict()}: raise rollout_tp or gpu_memory_utilization")
    tokens = float(blocks * engine.block_size)
    doubt = (
        0.02 * device.need("memory_bytes") + 0.5 * (ENGINE_OVERHEAD_BYTES + items[1].num_bytes)
    ) / per_token
    low = max(float(engine.block_size), tokens - doubt)
    return Estimate(
        tokens, min(low, tokens), tokens + doubt, Source.ROOFLINE, f"{device.name}, {model.name}, tp={tp}"
    )


def kv_tokens(
    device: Gpu, model: Architecture, tp: int, utilization: float = 0.9, max_num_batched_tokens: int = 8192
) -> int:
    """Return the KV tokens of one engine that may use the share ``utilization`` of each GPU's memory."""
    engine = EngineOptions(gpu_memory_utilization=utilization, max_num_batched_tokens=max_num_batched_tokens)
    return int(kv_estimate(device, model, tp, engine).value)


def fitting_micro_tokens(
    device: Gpu, model: Architecture, tp: int, num_gpus: int, *, at_least: int, at_most: int
) -> int | None:
    """Return the largest micro-batch of a trainer that fits: ``at_most``, halved until it does.

    None if even ``at_least`` tokens (the longest sample) do not fit.
    """
    tokens = max(at_most, at_least)
    while not train_memory(device, model, tp, num_gpus, tokens).fits:
        if tokens <= at_least:
            return None
        tokens = max(at_least, tokens // 2)
    return tokens


def host_memory(
    model: Architecture, *, rollout_tp: int, train_gpus: int, gpus_per_node: int, capacity_bytes: float
) -> MemoryBudget:
    """Return what sleeping roles keep in the host memory of one node that lends all its GPUs.

    A sleeping engine at level 1 backs up its weights (level 2 keeps nothing); a trainer that yields its GPU
    moves its sharded states. Source: needs C61, C65 (measured backup: 22 GiB for Qwen3-8B's 15.3 GiB).
    """
    state = sum(STATE_BYTES_PER_PARAM.values()) * model.num_params / train_gpus
    items = (
        MemoryItem("sleeping engines", gpus_per_node * model.weight_bytes() / rollout_tp, "level 1 backup"),
        MemoryItem("yielding trainers", gpus_per_node * state, "FP32 states of their shards"),
    )
    return MemoryBudget(f"host of {gpus_per_node} GPUs with {model.name}", capacity_bytes, items)


def rollout_memory(device: Gpu, model: Architecture, tp: int, engine: EngineInputs) -> MemoryBudget:
    """Return the engine's memory on one GPU, its KV pool filling the share it may use."""
    items = _engine_items(model, tp, engine)
    capacity = usable_bytes(device) * engine.gpu_memory_utilization
    pool = max(0.0, capacity - sum(item.num_bytes for item in items))
    budget = MemoryItem("KV pool", pool, f"what is left of {engine.gpu_memory_utilization:g} of the memory")
    return MemoryBudget(f"engine of {model.name} on {device.name}, tp={tp}", capacity, (*items, budget))


def train_memory(
    device: Gpu, model: Architecture, tp: int, num_gpus: int, micro_tokens: int, cp: int = 1
) -> MemoryBudget:
    """Return the trainer's memory on one GPU: fully sharded states, checkpointed activations, FP32 logits.

    ``num_gpus`` shard the state; ``micro_tokens`` is the tokens of one micro-batch of one replica, of which
    each of ``cp`` context-parallel GPUs holds its part. Nothing is offloaded to the host. Raises
    ``InputError`` for sizes below one.
    """
    if min(tp, num_gpus, micro_tokens, cp) < 1:
        raise InputError(
            f"tp={tp}, cp={cp}, num_gpus={num_gpus}, micro_tokens={micro_tokens}: each must be at least 1"
        )
    micro_tokens = -(-micro_tokens // cp)
    items = [
        MemoryItem(name, model.num_params * per_param / num_gpus, f"FP32, sharded over {num_gpus}")
        for name, per_param in STATE_BYTES_PER_PARAM.items()
    ]
    embedding = model.vocab_size * model.hidden_size
    if num_gpus > tp:
        unit = max(layer_params(model), embedding) * 2.0 / tp
        items.append(MemoryItem("gathered weights", 2.0 * unit, "two units in BF16: in use and next"))
        items.append(MemoryItem("unreduced gradients", 2.0 * unit, "one unit in FP32"))
    stored = model.num_layers * micro_tokens * model.hidden_size * 2.0
    capacity = usable_bytes(device)
    items += [
        MemoryItem("checkpointed activations", stored / tp, "one BF16 hidden state a layer"),
        MemoryItem(
            "one layer recomputed",
            recomputed_layer_bytes(model, micro_tokens, tp),
            "activations and their gradients, BF16",
        ),
        *logit_items(model, micro_tokens, tp, LossPath.IN_PLACE),
        MemoryItem("context and buffers", TRAIN_OVERHEAD_BYTES, "assumed"),
        MemoryItem("fragmentation", FRAGMENTATION_SHARE * capacity, "assumed"),
    ]
    return MemoryBudget(
        f"trainer of {model.name} on {num_gpus} x {device.name}, tp={tp}", capacity, tuple(items)
    )


def layer_params(model: Architecture) -> float:
    """Return the parameters of one decoder layer, all its experts included."""
    embedding = model.vocab_size * model.hidden_size
    return (model.num_params - model.vision_params - embedding) / model.num_layers


def recomputed_layer_bytes(model: Architecture, micro_tokens: int, tp: int) -> float:
    """Return the activations of one layer and their gradients, as they exist in its backward pass."""
    heads = (model.num_attention_heads + 2 * model.num_kv_heads) * model.head_dim
    width = 6 * model.hidden_size + (3 * model.mlp_width + 2 * heads) / tp
    return micro_tokens * width * 4.0


def logit_items(model: Architecture, micro_tokens: int, tp: int, path: LossPath) -> tuple[MemoryItem, ...]:
    """Return the logits of one micro-batch, exactly ``tokens x vocabulary x 4`` bytes, and their copies."""
    tokens = min(micro_tokens, FUSED_CHUNK_TOKENS) if path is LossPath.FUSED else micro_tokens
    logits = tokens * model.vocab_size * 4.0 / tp
    own = MemoryItem("logits", logits, f"FP32, {tokens} x {model.vocab_size} x 4 bytes")
    if path is LossPath.UNFUSED:
        copies = logits * (UNFUSED_BYTES_PER_LOGIT / 4.0 - 1.0)
        return own, MemoryItem("logit copies and gradients", copies, "of a loss without fusion")
    return own, MemoryItem("logit gradients", logits, "the same size")
