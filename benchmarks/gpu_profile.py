"""Measure the training role, decode and role switches on one device; needs torch and transformers, no vLLM.

    python benchmarks/gpu_profile.py [--device cuda|cpu] [--quick] [--limit-s 420] [--out DIR]

Sections: the trainer's stages over a grid of (rows, tokens), fitted on half of it and held against the other
half; decode steps over (rows, context), likewise; what sleep and wake move and leave behind; weights into an
engine's copy on the same device; gradients to the host and back. A section that would outlast the limit is
skipped and says so. Writes profile.json and prints a table. ``--device cpu --quick`` is its own test.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the machine has no installed bidirl

from bidirl.executor.backends.torch.settings import TrainerConfig  # noqa: E402
from bidirl.executor.backends.torch.tiny import build_tiny  # noqa: E402
from bidirl.executor.roles import Draft, Row  # noqa: E402
from bidirl.planner.events import SegmentKind  # noqa: E402
from bidirl.planner.learn import Precision  # noqa: E402

SMALL = SimpleNamespace(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=2,
    num_kv_heads=1,
    head_dim=32,
    intermediate_size=128,
    vocab_size=512,
    tie_word_embeddings=True,
    num_experts=None,
)
LARGE = SimpleNamespace(
    num_layers=28,
    hidden_size=1024,
    num_attention_heads=16,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=3072,
    vocab_size=151936,
    tie_word_embeddings=True,
    num_experts=None,
)
"""Qwen3-0.6B. Source: its public config.json."""
MIN_PROMPT = 4


@dataclass
class Profile:
    """What was measured so far, and how long it may still take."""

    device: str
    quick: bool
    end: float
    result: dict[str, Any] = field(default_factory=dict)

    def time_left(self, name: str, needed_s: float) -> bool:
        """Say whether a section still fits; note it if not."""
        left = self.end - time.perf_counter()
        if left < needed_s:
            self.result[name] = f"skipped: {left:.0f} s left, {needed_s:.0f} s needed"
        return left >= needed_s

    def seconds(self, work: Callable[[], object], repeats: int = 3) -> float:
        """Return the median time of some repeats after one that is not counted."""
        work()
        found = []
        for _ in range(repeats):
            self.wait()
            since = time.perf_counter()
            work()
            self.wait()
            found.append(time.perf_counter() - since)
        return statistics.median(found)

    def once(self, work: Callable[[], object]) -> float:
        """Return the time of one call."""
        self.wait()
        since = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - since

    def wait(self) -> None:
        import torch

        if self.device != "cpu":
            torch.cuda.synchronize()

    def used_bytes(self) -> int:
        """Return the bytes of the device that are taken, by this process or another."""
        import torch

        if self.device == "cpu":
            return 0
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return int(total - free)


def errors_of_half(features: np.ndarray, seconds: np.ndarray) -> dict[str, Any]:
    """Fit ``seconds = features @ coefficients`` on every other cell, predict the rest.

    Relative least squares, coefficients not below 0 (a cost never is): the most negative one is dropped
    until none is.
    """
    fit = np.arange(len(seconds)) % 2 == 0
    keep = list(range(features.shape[1]))
    while True:
        scaled = features[fit][:, keep] / seconds[fit, None]
        found, *_ = np.linalg.lstsq(scaled, np.ones(int(fit.sum())), rcond=None)
        if (found >= 0).all() or len(keep) == 1:
            break
        keep.pop(int(np.argmin(found)))
    coefficients = np.zeros(features.shape[1])
    coefficients[keep] = found
    errors = np.abs(features[~fit] @ coefficients / seconds[~fit] - 1.0)
    return {
        "coefficients": coefficients.tolist(),
        "num_free_parameters": features.shape[1],
        "num_fitted": int(fit.sum()),
        "num_predicted": len(errors),
        "median_error": float(np.median(errors)),
        "p90_error": float(np.quantile(errors, 0.9)),
    }


def rows_of(num_rows: int, num_tokens: int, vocab_size: int) -> list[Row]:
    rng = np.random.default_rng(0)
    prompt = max(MIN_PROMPT, num_tokens // 8)
    return [
        Row(
            Draft(
                at,
                0,
                rng.integers(vocab_size, size=prompt, dtype=np.int32),
                at,
                num_tokens,
                rng.integers(vocab_size, size=num_tokens - prompt, dtype=np.int32),
                np.full(num_tokens - prompt, -np.log(vocab_size), np.float32),
            ),
            0.0,
            float(rng.normal()),
        )
        for at in range(num_rows)
    ]


def cells(rows: Sequence[int], tokens: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield (rows, tokens) in an order in which every other one is spread over the grid."""
    for at, number in enumerate(rows):
        line = [(number, length) for length in tokens if number * length <= most]
        yield from line if at % 2 == 0 else reversed(line)


def trainer_section(profile: Profile, trainer: Any, shape: Any) -> None:
    """Time forward (old-logprob, reference) and update chunks, and the optimizer."""
    grid = (
        cells((1, 2, 4), (16, 32, 64), 256)
        if profile.quick
        else cells((1, 2, 4, 8, 16, 32), (256, 512, 1024, 2048, 4096), 16384)
    )
    table = []
    for num_rows, num_tokens in grid:
        if not profile.time_left("trainer_cut_short", 30.0):
            break
        rows = rows_of(num_rows, num_tokens, shape.vocab_size)
        counts = {"num_tokens": num_rows * num_tokens, "num_sequences": num_rows}
        forward_s = profile.seconds(lambda rows=rows: trainer.logprobs(rows))
        update_s = profile.seconds(lambda r=rows, c=counts: trainer.run(SegmentKind.UPDATE, 0, r, **c))
        table.append({"rows": num_rows, "tokens": num_tokens, "forward_s": forward_s, "update_s": update_s})
    gradient = trainer.states.take()
    optimizer_s = profile.seconds(lambda: trainer.apply([gradient]))
    work = np.array([[1.0, c["rows"] * c["tokens"], c["rows"] * c["tokens"] ** 2 / 2] for c in table])
    profile.result["trainer"] = {
        "form": "tau + alpha * tokens + gamma * rows * tokens^2 / 2",
        "cells": table,
        "optimizer_s": optimizer_s,
        "forward": errors_of_half(work, np.array([c["forward_s"] for c in table])),
        "update": errors_of_half(work, np.array([c["update_s"] for c in table])),
        "update_tokens_per_s": max(c["rows"] * c["tokens"] / c["update_s"] for c in table),
    }


def decode_section(profile: Profile, model: Any, shape: Any) -> None:
    """Time single decode steps on a static cache that is full to the last token."""
    import torch
    from transformers import StaticCache

    grid = (
        cells((1, 2, 4), (16, 32, 64), 256)
        if profile.quick
        else cells((1, 4, 16, 64), (256, 1024, 4096), 64 * 4096)
    )
    table = []
    dtype = torch.float32 if profile.device == "cpu" else torch.bfloat16
    for num_rows, context in grid:
        if not profile.time_left("decode_cut_short", 20.0):
            break
        cache = StaticCache(config=model.config, max_cache_len=context)
        ids = torch.zeros((num_rows, context - 8), dtype=torch.long, device=profile.device)
        with torch.no_grad(), torch.autocast(profile.device, torch.bfloat16, enabled=dtype != torch.float32):
            prefill_s = profile.once(
                lambda ids=ids, cache=cache: model(
                    input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1
                )
            )
            steps = [
                profile.once(
                    lambda ids=ids, cache=cache: model(
                        input_ids=ids[:, :1], past_key_values=cache, use_cache=True
                    )
                )
                for _ in range(7)
            ]
        table.append(
            {
                "rows": num_rows,
                "context": context,
                "prefill_s": prefill_s,
                "step_s": statistics.median(steps[2:]),
            }
        )
        del cache
    work = np.array([[1.0, c["rows"], c["rows"] * c["context"]] for c in table])
    profile.result["decode"] = {
        "form": "tau_dec + beta_tok * rows + beta_hist * rows * context (eager, static cache)",
        "cells": table,
        **errors_of_half(work, np.array([c["step_s"] for c in table])),
    }


def switch_section(profile: Profile, trainer: Any) -> None:
    """Time sleep and wake of a trainer with its optimizer, twice: the first one pins memory."""
    import torch

    states = trainer.states
    away = torch.device("cpu" if profile.device != "cpu" else "cpu:0")
    num_bytes = 4 * states.num_params * (1 + len(states.moments()))
    before, rounds = profile.used_bytes(), []
    digest = trainer.digest()
    for _ in range(3):
        sleep_s = profile.once(lambda: states.move(away))
        asleep = profile.used_bytes()
        wake_s = profile.once(lambda: states.move(states.device))
        rounds.append({"sleep_s": sleep_s, "wake_s": wake_s, "asleep_bytes": asleep})
    profile.result["switch"] = {
        "moved_bytes": num_bytes,
        "awake_bytes": before,
        "rounds": rounds,
        "sleep_bytes_per_s": num_bytes / rounds[-1]["sleep_s"],
        "wake_bytes_per_s": num_bytes / rounds[-1]["wake_s"],
        "weights_unchanged": trainer.digest() == digest,
    }


def sync_section(profile: Profile, trainer: Any) -> None:
    """Time the weights into an engine's copy on the device, by tensor, and through host memory."""
    import torch

    narrow = torch.float32 if profile.device == "cpu" else torch.bfloat16
    copies = {name: torch.empty_like(tensor, dtype=narrow) for name, tensor in trainer.tensors()}

    def by_tensor() -> None:
        for name, tensor in trainer.tensors():
            copies[name].copy_(tensor)

    def through_host() -> None:
        for name, tensor in trainer.tensors():
            copies[name].copy_(tensor.cpu())

    profile.result["sync"] = {
        "num_tensors": len(copies),
        "num_bytes": sum(copy.numel() * copy.element_size() for copy in copies.values()),
        "by_tensor_s": profile.seconds(by_tensor),
        "through_host_s": profile.seconds(through_host),
    }


def gradient_section(profile: Profile, trainer: Any) -> None:
    """Time a gradient to the host and back onto the device: C_grad without a network."""
    import torch

    from bidirl.executor.backends.torch.merge import as_array

    gradient = trainer.states.take()
    on_device = torch.as_tensor(gradient)
    host = as_array(gradient)
    profile.result["gradient"] = {
        "num_bytes": 4 * trainer.num_params,
        "to_host_s": profile.seconds(lambda: as_array(gradient)),
        "add_from_host_s": profile.seconds(lambda: on_device + torch.from_numpy(host).to(on_device.device)),
        "add_on_device_s": profile.seconds(lambda: on_device + on_device),
    }


def measure(device: str, limit_s: float, *, quick: bool) -> dict[str, Any]:
    import torch
    import transformers

    from bidirl.executor.backends.torch.trainer import TorchTrainer

    shape: Any = SMALL if quick else LARGE
    profile = Profile(device, quick, time.perf_counter() + limit_s)
    since = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        build_tiny(shape, Path(folder), seed=0, max_tokens=8192)
        built_s = time.perf_counter() - since
        precision = Precision.FLOAT32 if device == "cpu" else Precision.BFLOAT16
        config = TrainerConfig(device=device, precision=precision, micro_tokens=1 << 20)
        trainer = TorchTrainer(Path(folder), config)
    profile.result["setup"] = {
        "device": torch.cuda.get_device_name() if device != "cpu" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "num_params": trainer.num_params,
        "precision": str(precision),
        "build_s": built_s,
        "load_s": time.perf_counter() - since - built_s,
    }
    for name, needed_s, section in (
        ("trainer", 60.0, lambda: trainer_section(profile, trainer, shape)),
        ("switch", 30.0, lambda: switch_section(profile, trainer)),
        ("sync", 10.0, lambda: sync_section(profile, trainer)),
        ("gradient", 10.0, lambda: gradient_section(profile, trainer)),
        ("decode", 30.0, lambda: decode_section(profile, trainer.states.model, shape)),
    ):
        if quick or profile.time_left(name, needed_s):
            try:
                section()
            except Exception as error:  # the other sections are worth having; lent device time is short
                profile.result[name] = f"failed: {type(error).__name__}: {str(error).splitlines()[:1]}"
            print(name, json.dumps(profile.result[name])[:2000], flush=True)
    profile.result["wall_s"] = time.perf_counter() - since
    return profile.result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny model and grid")
    parser.add_argument("--limit-s", type=float, default=420.0)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu_profile")
    given = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        print("gpu_profile: torch is not installed here; run it with .venv-engine/bin/python")
        return
    import torch

    if given.device == "cuda" and not torch.cuda.is_available():
        print("gpu_profile: no CUDA device is there; --device cpu --quick shows that it runs")
        return
    result = measure(given.device, given.limit_s, quick=given.quick)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "profile.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {given.out / 'profile.json'} ({result['wall_s']:.0f} s)")


if __name__ == "__main__":
    main()
