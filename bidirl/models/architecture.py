"""The [model] section of a job, and what follows from a decoder's architecture."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bidirl.errors import InputError
from bidirl.models import catalogue

__all__ = ["Architecture", "ArchitectureNumbers", "ModelConfig", "from_catalogue", "from_hf_config"]

STRICT = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)
Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, slots=True)
class Architecture:
    """Shape of a decoder-only transformer, dense or a mixture of experts."""

    name: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_params: int
    """All parameters, a vision part included."""
    active_params: int
    """Parameters a text token uses, embedding matrices included, vision part not."""
    tie_word_embeddings: bool
    num_experts: int = 0
    experts_per_token: int = 0
    num_attention_layers: int = 0
    """Layers with a growing KV cache; 0 means all of them."""
    kv_values_per_layer: int = 0
    """Cached values per token and layer where it is not ``2 * num_kv_heads * head_dim``; 0 means it is."""
    vision_params: int = 0
    mlp_width: int = 0
    """Width of the MLP that one token passes: dense, or all its experts together."""
    source: str = ""

    @property
    def attention_layers(self) -> int:
        """Return the number of layers that attend to the whole context."""
        return self.num_attention_layers or self.num_layers

    def kv_bytes_per_token(self, dtype_bytes: float = 2.0) -> float:
        """Return the cached bytes of one token: ``2 * kv_heads * head_dim`` values in each layer."""
        values = self.kv_values_per_layer or 2 * self.num_kv_heads * self.head_dim
        return self.attention_layers * values * dtype_bytes

    @property
    def matmul_params(self) -> int:
        """Return the parameters a token is multiplied with: active ones less an untied input embedding."""
        lookup = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        return self.active_params - lookup

    @property
    def flop_per_token(self) -> float:
        """Return the forward FLOP of one token without attention scores: two per multiplied parameter."""
        return 2.0 * self.matmul_params

    @property
    def flop_per_pair(self) -> float:
        """Return the forward FLOP of one (query, key) pair: score and weighted sum, all layers and heads."""
        return 4.0 * self.attention_layers * self.num_attention_heads * self.head_dim

    @property
    def pair_tokens(self) -> float:
        """Return the work of one pair in units of one token's linear layers."""
        return self.flop_per_pair / self.flop_per_token

    @property
    def num_tensors(self) -> int:
        """Estimate the weight tensors of a checkpoint: about 11 a dense layer, 3 an expert.

        Query, key, value, output, gate, up, down, two norms and two head norms (Qwen3) per layer; router
        and experts in place of the three MLP matrices; embedding, final norm and output matrix.
        """
        per_layer = 11 if self.num_experts == 0 else 9 + 3 * self.num_experts
        return self.num_layers * per_layer + 3

    def weight_bytes(self, dtype_bytes: float = 2.0) -> float:
        """Return the bytes of all weights."""
        return self.num_params * dtype_bytes

    def decode_bytes(self, num_tokens: float, dtype_bytes: float = 2.0) -> float:
        """Return the weight bytes that an iteration over ``num_tokens`` tokens reads.

        Dense: the matrices it multiplies with. Experts: those that at least one token picks, as if at
        random: ``1 - (1 - k/E)**tokens`` of them (uniform routing, ours; real routing is skewed: fewer).
        """
        if self.num_experts == 0:
            return self.matmul_params * dtype_bytes
        lookup = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        fixed = self.num_params - self.vision_params - lookup - self.routed_params
        touched = 1.0 - float((1.0 - self.experts_per_token / self.num_experts) ** num_tokens)
        return (fixed + touched * self.routed_params) * dtype_bytes

    @property
    def routed_params(self) -> float:
        """Return the parameters of all routed experts, from the gap between all and active ones."""
        if self.num_experts == 0:
            return 0.0
        language = self.num_params - self.vision_params
        return (language - self.active_params) / (1.0 - self.experts_per_token / self.num_experts)


class ArchitectureNumbers(BaseModel):
    """Architecture numbers under the catalogue's column names; counts follow from them."""

    model_config = STRICT

    num_layers: Count
    hidden_size: Count
    num_attention_heads: Count
    num_kv_heads: Count
    vocab_size: Count
    intermediate_size: Count | None = None
    head_dim: Count | None = None
    """Default: ``hidden_size / num_attention_heads``."""
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    num_experts: Count | None = None
    experts_per_token: Count | None = None
    moe_intermediate_size: Count | None = None
    shared_expert_intermediate_size: int = Field(default=0, ge=0)
    num_dense_layers: int = Field(default=0, ge=0)
    """Leading layers with a dense MLP in a mixture of experts."""
    vision_params: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        moe = (self.num_experts, self.experts_per_token, self.moe_intermediate_size)
        if any(moe) and not all(moe):
            raise ValueError(
                "a mixture of experts needs num_experts, experts_per_token and moe_intermediate_size: "
                "give all three"
            )
        if self.num_experts and self.experts_per_token and self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token = {self.experts_per_token} exceeds num_experts = {self.num_experts}: "
                "lower it"
            )
        if self.intermediate_size is None and (not self.num_experts or self.num_dense_layers):
            raise ValueError("intermediate_size is missing: dense layers need the width of their MLP")
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size = {self.hidden_size} is not a multiple of num_attention_heads = "
                f"{self.num_attention_heads}: give head_dim"
            )
        if self.num_attention_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads = {self.num_attention_heads} is not a multiple of num_kv_heads = "
                f"{self.num_kv_heads}: correct one of them"
            )
        return self

    def resolve(self, name: str, source: str) -> Architecture:
        """Return the architecture with its parameter counts.

        Source: the formulas are those of the catalogue (per layer: attention, MLP or experts with router,
        two norms; once: embedding, output matrix unless tied, final norm).
        """
        h, n_q, n_kv = self.hidden_size, self.num_attention_heads, self.num_kv_heads
        d = self.head_dim or h // n_q
        attention = 2 * h * n_q * d + 2 * h * n_kv * d
        attention += (n_q + 2 * n_kv) * d if self.qkv_bias else 0
        attention += 2 * d if self.qk_norm else 0
        dense = 3 * h * (self.intermediate_size or 0)
        once = self.vocab_size * h * (1 if self.tie_word_embeddings else 2) + h
        common = self.num_layers * (attention + 2 * h) + once
        if not (self.num_experts and self.experts_per_token and self.moe_intermediate_size):
            num_params = active = common + self.num_layers * dense
        else:
            num_moe = self.num_layers - self.num_dense_layers
            expert = 3 * h * self.moe_intermediate_size
            fixed = h * self.num_experts + 3 * h * self.shared_expert_intermediate_size
            common += self.num_dense_layers * dense + num_moe * fixed
            num_params = common + num_moe * self.num_experts * expert
            active = common + num_moe * self.experts_per_token * expert
        return Architecture(
            name=name,
            num_layers=self.num_layers,
            hidden_size=h,
            num_attention_heads=n_q,
            num_kv_heads=n_kv,
            head_dim=d,
            vocab_size=self.vocab_size,
            num_params=num_params + self.vision_params,
            active_params=active,
            tie_word_embeddings=self.tie_word_embeddings,
            num_experts=self.num_experts or 0,
            experts_per_token=self.experts_per_token or 0,
            vision_params=self.vision_params,
            mlp_width=(self.experts_per_token or 0) * (self.moe_intermediate_size or 0)
            or (self.intermediate_size or 0),
            source=source,
        )


def from_catalogue(name: str) -> Architecture:
    """Return the catalogue model that ``name`` means; raise ``InputError`` if unknown."""
    row = catalogue.model_row(name)
    special = CACHE_EXCEPTIONS.get(row["name"], {})
    return Architecture(
        name=row["name"],
        num_layers=int(row["num_layers"]),
        hidden_size=int(row["hidden_size"]),
        num_attention_heads=int(row["num_attention_heads"]),
        num_kv_heads=int(row["num_kv_heads"]),
        head_dim=int(row["head_dim"]),
        vocab_size=int(row["vocab_size"]),
        num_params=int(row["total_params"]),
        active_params=int(row["active_params"]),
        tie_word_embeddings=row["tie_word_embeddings"] == "true",
        num_experts=int(row["num_experts"] or 0),
        experts_per_token=int(row["experts_per_token"] or 0),
        vision_params=int(row["vision_params"] or 0),
        mlp_width=int(row["experts_per_token"] or 0) * int(row["moe_intermediate_size"] or 0)
        or int(row["intermediate_size"] or 0),
        source=row["source"],
        **special,
    )


CACHE_EXCEPTIONS: dict[str, dict[str, int]] = {
    "DeepSeek-V3": {"kv_values_per_layer": 576},
    "Qwen3.5-35B-A3B": {"num_attention_layers": 10},
}
"""Models whose cache is not two vectors per head in every layer. Source: the notes of data/models.csv."""


class ModelConfig(BaseModel):
    """The model: exactly one of a catalogue name, a table of numbers, or a local config.json."""

    model_config = STRICT

    name: str | None = None
    """Catalogue name; beside ``architecture`` or ``config`` it is only a label."""
    architecture: ArchitectureNumbers | None = None
    config: str | None = None
    """Path of a Hugging Face config.json, from the job's folder."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.architecture is not None and self.config is not None:
            raise ValueError("architecture and config are both given: keep one of them")
        if self.architecture is None and self.config is None:
            if self.name is None:
                raise ValueError("the model is missing: give name, architecture or config")
            try:
                catalogue.model_row(self.name)
            except InputError as error:
                raise ValueError(str(error)) from None
        return self

    def resolve(self, base_dir: Path | None = None) -> Architecture:
        """Return the architecture; reads the file that ``config`` names, from ``base_dir``."""
        if self.architecture is not None:
            return self.architecture.resolve(self.name or "custom model", "job file")
        if self.config is not None:
            return from_hf_config((base_dir or Path()) / self.config, self.name)
        return from_catalogue(self.name or "")


def from_hf_config(path: Path, name: str | None = None) -> Architecture:
    """Read a Hugging Face config.json of a dense or mixture-of-experts decoder.

    A multimodal file's ``text_config`` counts; its vision part stays out of the parameter count. Raises
    ``InputError`` for a missing, malformed or unsupported file.
    """
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}): give a config.json") from None
    except ValueError as error:
        raise InputError(f"{path}: is not JSON ({error}): give a Hugging Face config.json") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: holds no table of settings: give a Hugging Face config.json")
    outer, text = data, data.get("text_config") or data
    kind = str(text.get("model_type", outer.get("model_type", "")))
    if any(key in text for key in ("kv_lora_rank", "linear_num_key_heads", "ssm_cfg")):
        raise InputError(
            f"{path}: model_type {kind!r} has latent or linear attention, which config.json import does not "
            "cover: give model.architecture numbers instead"
        )
    aliases = {
        "num_layers": ("num_hidden_layers", "n_layer"),
        "hidden_size": ("hidden_size", "n_embd"),
        "num_attention_heads": ("num_attention_heads", "n_head"),
        "num_kv_heads": ("num_key_value_heads", "num_attention_heads", "n_head"),
        "vocab_size": ("vocab_size",),
        "intermediate_size": ("intermediate_size",),
        "head_dim": ("head_dim",),
        "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
        "experts_per_token": ("num_experts_per_tok",),
        "moe_intermediate_size": ("moe_intermediate_size",),
        "shared_expert_intermediate_size": ("shared_expert_intermediate_size",),
    }
    numbers: dict[str, Any] = {}
    for field, keys in aliases.items():
        value = next((text[key] for key in keys if text.get(key) is not None), None)
        if value is not None:
            numbers[field] = value
    needed = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
    missing = [aliases[name][0] for name in needed if name not in numbers]
    if missing:
        raise InputError(f"{path}: has no {missing[0]}: give a decoder's config.json or architecture numbers")
    if numbers.get("num_experts") and "moe_intermediate_size" not in numbers:
        numbers["moe_intermediate_size"] = numbers.get("intermediate_size")
    tied = text.get("tie_word_embeddings", outer.get("tie_word_embeddings", False))
    numbers["tie_word_embeddings"] = bool(tied)
    numbers["qkv_bias"] = bool(text.get("attention_bias", False)) or kind.startswith("qwen2")
    numbers["qk_norm"] = kind.startswith("qwen3")
    numbers["num_dense_layers"] = int(text.get("first_k_dense_replace", 0) or 0)
    try:
        shape = ArchitectureNumbers.model_validate(numbers)
    except ValueError as error:
        detail = "; ".join(str(error).splitlines()[1:3]).strip()
        raise InputError(f"{path}: {detail}: correct the file or give architecture numbers") from None
    return shape.resolve(name or path.parent.name or path.stem, f"{path.name} given in the job")
