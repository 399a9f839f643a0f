"""Memory of a GPU with two roles: peaks by loss path, Megatron states, sleepers, hot switches, data plane."""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from bidirl.errors import InputError
from bidirl.models.memory import (
    FRAGMENTATION_SHARE,
    ROUTED_COPIES,
    STATE_BYTES_PER_PARAM,
    TRAIN_OVERHEAD_BYTES,
    EngineInputs,
    LossPath,
    MemoryBudget,
    MemoryItem,
    layer_params,
    logit_items,
    recomputed_layer_bytes,
    rollout_memory,
    usable_bytes,
)

if TYPE_CHECKING:
    from bidirl.models.architecture import Architecture
    from bidirl.models.catalogue import Gpu

__all__ = [
    "engine_residue_bytes",
    "lent_memory",
    "megatron_memory",
    "profiled_image_tokens",
    "routing_bytes",
    "sharded_peak_bytes",
    "sleep_levels",
]

ENGINE_RESIDUE_BYTES = 774 * 2.0**20
ENGINE_RESIDUE_TP_BYTES = 2440 * 2.0**20
"""What an engine keeps on its GPU while asleep: context, graphs, and with tp > 1 communication buffers.
Source: NVIDIA-NeMo/RL#223 (Llama-3.2-1B: 774 MiB at TP 1, 2,440 MiB at TP 2 of the older commit; the newer
one printed 7,392 MiB, so this is a lower figure)."""
AUXILIARY_BYTES_PER_PARAM = 8.0
"""An auxiliary trainer holds FP32 weights and gradients; the primary alone owns the optimizer (paper.md)."""
MEGATRON_REPLICATED_BYTES = 6.0
MEGATRON_SHARDED_BYTES = 12.0
"""BF16 weight and FP32 gradient on every data-parallel rank; FP32 master weight and two moments sharded.
Source: Megatron-LM docs, distributed optimizer, BF16 with FP32 gradients: ``6 + 12 / d`` a parameter."""


def sharded_peak_bytes(
    model: Architecture, *, num_gpus: int, micro_tokens: int, path: LossPath, tp: int = 1
) -> float:
    """Return the peak that the allocator of a fully sharded trainer reports on one GPU.

    States and checkpointed activations stay; the loss and the backward pass of a layer take turns, so the
    larger one counts. The CUDA context and fragmentation are not in an allocator's peak.
    Source: ours; within 10 % of prime-rl's rows of full training (tests/test_memory_roles.py).
    """
    states = sum(STATE_BYTES_PER_PARAM.values()) * model.num_params / num_gpus
    stored = model.num_layers * micro_tokens * model.hidden_size * 2.0 / tp
    embedding = model.vocab_size * model.hidden_size
    unit = max(layer_params(model), embedding) * 2.0 / tp if num_gpus > tp else 0.0
    routed = model.experts_per_token * model.hidden_size * 2.0 * ROUTED_COPIES * micro_tokens
    layer = recomputed_layer_bytes(model, micro_tokens, tp) + routed + 4.0 * unit
    loss = sum(item.num_bytes for item in logit_items(model, micro_tokens, tp, path)) + 2.0 * unit
    if path is LossPath.FUSED:  # its logits are a buffer that outlives the loss
        return states + stored + layer + loss - 2.0 * unit
    return states + stored + max(layer, loss)


def megatron_memory(
    device: Gpu,
    model: Architecture,
    *,
    tp: int,
    pp: int,
    ep: int,
    num_gpus: int,
    micro_tokens: int,
    cp: int = 1,
) -> MemoryBudget:
    """Return the memory of the first pipeline stage of a Megatron-style trainer on one GPU.

    Weights are cut by ``tp`` and ``pp`` and copied over data parallelism, whose ranks share the optimizer;
    experts are cut by ``ep`` in place of ``tp``. Context parallelism copies weights as data parallelism does
    and gives each of ``cp`` GPUs its part of each sequence. The first of ``pp`` stages keeps ``pp``
    micro-batches (1F1B). Source: Narayanan et al. 2021 (schedule), Korthikanti et al. 2022 (sequence
    parallelism). Raises ``InputError`` for GPUs that the layout does not divide.
    """
    if num_gpus % (tp * cp * pp) or num_gpus % (ep * pp):
        raise InputError(
            f"num_gpus={num_gpus} is no multiple of tp x pp x cp = {tp * pp * cp} and "
            f"ep x pp = {ep * pp}: change one"
        )
    micro_tokens = -(-micro_tokens // cp)
    routed = model.routed_params
    dense = (model.num_params - routed) / (tp * pp)
    experts = routed / (ep * pp)
    sharded = dense / (num_gpus // (tp * pp)) + experts / (num_gpus // (ep * pp))
    stored = -(-model.num_layers // pp) * pp * micro_tokens * model.hidden_size * 2.0 / tp
    moved = model.experts_per_token * model.hidden_size * 2.0 * ROUTED_COPIES * micro_tokens / tp
    logits = logit_items(model, micro_tokens, tp, LossPath.IN_PLACE) if pp == 1 else ()
    capacity = usable_bytes(device)
    items = (
        MemoryItem("weights and gradients", (dense + experts) * MEGATRON_REPLICATED_BYTES, "BF16 and FP32"),
        MemoryItem("optimizer shard", sharded * MEGATRON_SHARDED_BYTES, "FP32, over data parallelism"),
        MemoryItem("checkpointed activations", stored, f"{pp} micro-batches of one stage"),
        MemoryItem("one layer recomputed", recomputed_layer_bytes(model, micro_tokens, tp), "BF16"),
        MemoryItem("routed tokens", moved, "permuted inputs and outputs of the experts"),
        *logits,
        MemoryItem("context and buffers", TRAIN_OVERHEAD_BYTES, "assumed"),
        MemoryItem("fragmentation", FRAGMENTATION_SHARE * capacity, "assumed"),
    )
    layout = f"tp={tp}, pp={pp}, ep={ep}" + (f", cp={cp}" if cp > 1 else "")
    return MemoryBudget(f"trainer of {model.name} on {num_gpus} x {device.name}, {layout}", capacity, items)


def engine_residue_bytes(tp: int) -> float:
    """Return what a sleeping engine keeps on each of its ``tp`` GPUs."""
    return ENGINE_RESIDUE_BYTES if tp == 1 else ENGINE_RESIDUE_TP_BYTES


def lent_memory(
    device: Gpu, model: Architecture, engine: EngineInputs, *, rollout_tp: int, train_gpus: int
) -> MemoryBudget:
    """Return one GPU on which the engine is awake while a trainer's process waits.

    The waiting trainer has its states in host memory or, as an auxiliary, none; its context stays. So the
    engine's share and that context must fit together.
    """
    awake = rollout_memory(device, model, rollout_tp, engine)
    waiting = MemoryItem("waiting trainer", TRAIN_OVERHEAD_BYTES, "context and buffers of its process")
    role = f"engine beside a waiting trainer of {train_gpus} GPUs"
    return MemoryBudget(role, usable_bytes(device), (*awake.items, waiting))


@cache
def _sleep_rows() -> tuple[tuple[str, str, float, float], ...]:
    text = files("bidirl.models").joinpath("data", "switch_costs.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return tuple(
        (row["level"], row["operation"], float(row["weight_gb"]), float(row["time_s"]))
        for row in rows
        if row["system"] == "vLLM"
    )


def sleep_levels(weight_bytes: float) -> dict[int, tuple[float, float]]:
    """Return ``{level: (sleep_s, wake_s)}`` of an engine with ``weight_bytes`` on one GPU.

    Lines through the two measured models, not below zero. Level 1 backs the weights up in host memory,
    level 2 drops them and loads them again. Source: vllm-project/vllm#48337 (A100).
    """
    found: dict[int, tuple[float, float]] = {}
    for level in (1, 2):
        seconds = []
        for operation in ("sleep", "wake"):
            points = sorted((x, y) for lv, op, x, y in _sleep_rows() if (lv, op) == (str(level), operation))
            (x0, y0), (x1, y1) = points
            seconds.append(max(0.0, y0 + (y1 - y0) * (weight_bytes / 1e9 - x0) / (x1 - x0)))
        found[level] = (seconds[0], seconds[1])
    return found


def routing_bytes(tokens: int, moe_layers: int, experts_per_token: int, bytes_per_index: int = 1) -> int:
    """Return the bytes of a sample's expert choices, sent with it where training replays the routing.

    ``tokens x layers x top-k x bytes``. Source: needs C71 (NVIDIA/Megatron-LM#4168).
    """
    return tokens * moe_layers * experts_per_token * bytes_per_index


def profiled_image_tokens(num_images: int, profile_tokens: int, actual_tokens: int) -> tuple[int, int]:
    """Return the image tokens that an engine's start-up profile reserves, and those that a request needs.

    The profiler assumes the largest image that the processor allows, whatever the data holds.
    Source: needs C91 (vllm-project/vllm#18550).
    """
    return num_images * profile_tokens, num_images * actual_tokens
