"""Arguments and environment of an engine; needs neither torch nor vLLM."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bidirl.errors import InputError
from bidirl.planner.sections import EngineConfig

__all__ = [
    "CPU_BLOCK_TOKENS",
    "EngineSettings",
    "checkpoint_shapes",
    "engine_arguments",
    "environment",
    "kv_bytes",
    "prepare_environment",
    "settings_from_job",
]

CPU_BLOCK_TOKENS = 32
"""vLLM's CPU attention takes KV blocks of multiples of this; its default, 128, hides stale prefixes of short
prompts, because only whole blocks are shared."""
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
SPARE_BLOCKS = 1
"""vLLM keeps one block that is never given out."""
FULL_BATCH_TOKENS = 8192
"""KV for every sequence at its longest, up to this many tokens, where the job gives no ``kv_tokens``."""

PROCESSES = "VLLM_ENABLE_V1_MULTIPROCESSING"
CORES = "VLLM_CPU_OMP_THREADS_BIND"
PROCESSOR = "bidirl.executor.backends.vllm.sampling:GumbelProcessor"
WORKER_EXTENSION = "bidirl.executor.backends.vllm.transfer.WorkerExtension"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What decides an engine."""

    folder: str
    """Hugging Face folder: config.json and safetensors."""
    max_model_tokens: int
    """Longest prompt + response."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 4096
    kv_tokens: int = FULL_BATCH_TOKENS
    block_size: int = CPU_BLOCK_TOKENS
    prefix_caching: bool = True
    dtype: str = "float32"
    tp: int = 1
    temperature: float = 1.0
    """0 is greedy."""
    eos_id: int | None = None
    """None: responses end by length only, and a response that reached its length is complete."""
    device: str = "cpu"
    """``cpu`` or ``cuda``."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise InputError(f"dtype = {self.dtype}: not known here: use one of {', '.join(DTYPE_BYTES)}")
        if self.temperature < 0:
            raise InputError(f"temperature = {self.temperature}: must be at least 0 (0 is greedy)")
        if self.kv_tokens < self.max_model_tokens:
            raise InputError(
                f"kv_tokens = {self.kv_tokens} do not hold one sample of {self.max_model_tokens} tokens: "
                "raise engine.kv_tokens or shorten prompts or responses"
            )


def settings_from_job(
    engine: EngineConfig, folder: Path | str, *, max_model_tokens: int, **more: Any
) -> EngineSettings:
    """Return the settings of an engine under a job's limits; ``more`` are further fields by name.

    Raises:
        InputError: the model's attention heads do not divide by the engine's devices.
    """
    device = more.get("device", "cpu")
    tp = more.get("tp", 1)
    if tp > 1 and (heads := int(_config(str(folder))["num_attention_heads"])) % tp:
        raise InputError(
            f"partition.rollout_tp = {tp}: the model's {heads} attention heads do not divide by it; choose a "
            "divisor"
        )
    block = engine.block_size
    if device == "cpu":
        block = -(-block // CPU_BLOCK_TOKENS) * CPU_BLOCK_TOKENS
    kv_tokens = engine.kv_tokens
    if kv_tokens is None:
        kv_tokens = max(max_model_tokens, min(engine.max_num_seqs * max_model_tokens, FULL_BATCH_TOKENS))
    return EngineSettings(
        folder=str(folder),
        max_model_tokens=max_model_tokens,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        kv_tokens=kv_tokens,
        block_size=block,
        prefix_caching=engine.prefix_caching,
        **more,
    )


def kv_bytes(settings: EngineSettings) -> int:
    """Return the bytes of KV memory per device: whole blocks for ``kv_tokens``, and vLLM's spare one."""
    config = _config(settings.folder)
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    values = 2 * int(config["num_hidden_layers"]) * max(1, kv_heads // settings.tp) * head_dim
    blocks = -(-settings.kv_tokens // settings.block_size) + SPARE_BLOCKS
    return blocks * settings.block_size * values * DTYPE_BYTES[settings.dtype]


def engine_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Return vLLM's keyword arguments (``EngineArgs`` and ``AsyncEngineArgs`` alike).

    KV memory is always given in bytes: the default is a share of the host's memory, and two engines on one
    host then take each other's. Partial prefills are off on CPU: vLLM's first model runner fails on them with
    a per-request seed, and a whole prefill keeps the arithmetic of a resumed sample the same.
    """
    arguments: dict[str, Any] = {
        "model": settings.folder,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "kv_cache_memory_bytes": kv_bytes(settings),
        "block_size": settings.block_size,
        "enable_prefix_caching": settings.prefix_caching,
        "tensor_parallel_size": settings.tp,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "generation_config": "vllm",
        "worker_extension_cls": WORKER_EXTENSION,
        "weight_transfer_config": {"backend": "gloo"},
    }
    if settings.device == "cpu":
        arguments |= {
            "enforce_eager": True,
            "async_scheduling": False,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(settings.max_num_batched_tokens, settings.max_model_tokens),
            "logits_processors": [PROCESSOR],
        }
    else:
        arguments["enable_sleep_mode"] = True
    return arguments


def environment(*, device: str = "cpu", num_ranks: int = 1) -> dict[str, str]:
    """Return the environment of a worker process, to be set before torch or vLLM is imported there.

    ``num_ranks``: devices of the engine; above 1 it has worker processes of its own (tensor parallelism).
    One OpenMP thread: spinning threads of two workers on few cores make both several times slower.
    ``device`` is the engine's: on CPU nothing is compiled (that costs 6 s at the first request, and needs a
    C++ compiler), and ranks are told their cores, since vLLM wants a NUMA node for each otherwise.
    """
    cpu = {"TORCHDYNAMO_DISABLE": "1"} if device == "cpu" else {}
    if device == "cpu" and num_ranks > 1:
        cores = sorted(os.sched_getaffinity(0))
        cpu[CORES] = "|".join(str(cores[rank % len(cores)]) for rank in range(num_ranks))
    return cpu | {
        "OMP_NUM_THREADS": "1",
        PROCESSES: "1" if num_ranks > 1 else "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "USE_TORCHVISION": "0",
    }


def prepare_environment(*, device: str = "cpu", num_ranks: int = 1) -> None:
    """Set ``environment`` in this process; other values that the user has set are kept.

    Raises:
        InputError: vLLM is already loaded and would start the engine's processes otherwise than is needed.
    """
    wanted = environment(device=device, num_ranks=num_ranks)
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    if os.environ[PROCESSES] != wanted[PROCESSES]:
        if "vllm" in sys.modules:
            raise InputError(
                f"{PROCESSES} = {os.environ[PROCESSES]}: this engine needs {wanted[PROCESSES]} and vLLM is "
                "already loaded: start it in a process of its own"
            )
        os.environ[PROCESSES] = wanted[PROCESSES]


def checkpoint_shapes(folder: Path | str) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of a folder's safetensors, read from their headers; empty where there are none.

    Source: the safetensors format: 8 bytes of little-endian header length, then JSON.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return shapes


def _config(folder: str) -> dict[str, Any]:
    """Return the configuration of a folder's language model."""
    path = Path(folder) / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: no readable model configuration ({error}): give a Hugging Face folder"
        ) from None
    text: dict[str, Any] = config.get("text_config", config)
    return text
