"""Peaks against published ones, states of both trainer styles, and what a second role adds."""

import pytest

from bidirl.errors import InputError
from bidirl.models import catalogue, memory
from bidirl.models.architecture import from_catalogue
from bidirl.models.memory import LossPath
from bidirl.models.memory_roles import (
    engine_residue_bytes,
    lent_memory,
    megatron_memory,
    profiled_image_tokens,
    routing_bytes,
    sharded_peak_bytes,
    sleep_levels,
)

GIB = 2.0**30

PEAKS = [
    # model, path, GPUs, tokens, GiB. Source: PrimeIntellect-ai/prime-rl benchmarks/results @559b4477, rows of
    # full training with recomputed activations; one sequence a GPU.
    ("Qwen3-0.6B", LossPath.FUSED, 1, 65536, 19.6),
    ("Qwen3-0.6B", LossPath.UNFUSED, 1, 8192, 31.7),
    ("Qwen3-0.6B", LossPath.UNFUSED, 1, 16384, 52.8),
    ("Qwen3-4B", LossPath.FUSED, 8, 16384, 17.1),
    ("Qwen3-4B", LossPath.FUSED, 8, 65536, 36.1),
    ("Qwen3-4B", LossPath.UNFUSED, 8, 16384, 54.6),
    ("Qwen3-4B", LossPath.UNFUSED, 8, 65536, 171.5),
    ("Qwen3-30B-A3B", LossPath.FUSED, 8, 16384, 74.6),
    ("Qwen3-30B-A3B", LossPath.FUSED, 8, 65536, 105.4),
    ("Qwen3-30B-A3B", LossPath.UNFUSED, 8, 16384, 106.4),
]


@pytest.mark.parametrize(("name", "path", "gpus", "tokens", "peak_gib"), PEAKS)
def test_published_peaks_within_a_tenth(
    name: str, path: LossPath, gpus: int, tokens: int, peak_gib: float
) -> None:
    peak = sharded_peak_bytes(from_catalogue(name), num_gpus=gpus, micro_tokens=tokens, path=path)
    assert peak / GIB == pytest.approx(peak_gib, rel=0.10)


def test_sleeping_engines_keep_what_was_measured() -> None:
    """NVIDIA-NeMo/RL#223, Llama-3.2-1B."""
    assert engine_residue_bytes(1) / 2**20 == 774
    assert engine_residue_bytes(2) / 2**20 == 2440


def test_megatron_states_are_six_bytes_and_a_share_of_twelve() -> None:
    model, gpu = from_catalogue("Qwen2.5-7B"), catalogue.gpu("H100")
    items = {
        item.name: item.num_bytes
        for item in megatron_memory(gpu, model, tp=2, pp=2, ep=1, num_gpus=16, micro_tokens=4096).items
    }
    assert items["weights and gradients"] == pytest.approx(6 * model.num_params / 4)
    assert items["optimizer shard"] == pytest.approx(12 * model.num_params / 16)
    assert "logits" not in items  # the first stage of a pipeline has none
    with pytest.raises(InputError, match="multiple of tp x pp"):
        megatron_memory(gpu, model, tp=4, pp=1, ep=1, num_gpus=6, micro_tokens=1)


def test_expert_parallelism_cuts_the_experts_only() -> None:
    model, gpu = from_catalogue("Qwen3-30B-A3B"), catalogue.gpu("H100")
    one, eight = (
        megatron_memory(gpu, model, tp=1, pp=1, ep=ep, num_gpus=8, micro_tokens=4096) for ep in (1, 8)
    )
    saved = one.items[0].num_bytes - eight.items[0].num_bytes
    assert saved == pytest.approx(6 * model.routed_params * 7 / 8)
    assert one.items[1].num_bytes == pytest.approx(eight.items[1].num_bytes)


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-4B", "Qwen3-30B-A3B"])
@pytest.mark.parametrize("tokens", [100, 4096])
@pytest.mark.parametrize("path", list(LossPath))
def test_logits_are_exact(name: str, tokens: int, path: LossPath) -> None:
    model = from_catalogue(name)
    seen = min(tokens, memory.FUSED_CHUNK_TOKENS) if path is LossPath.FUSED else tokens
    assert memory.logit_items(model, tokens, 1, path)[0].num_bytes == seen * model.vocab_size * 4


def test_an_engine_beside_a_waiting_trainer_needs_its_context_too() -> None:
    gpu, model = catalogue.gpu("H100"), from_catalogue("Qwen3-8B")
    assert lent_memory(gpu, model, memory.EngineOptions(), rollout_tp=1, train_gpus=8).fits
    greedy = memory.EngineOptions(gpu_memory_utilization=0.99)
    assert not lent_memory(gpu, model, greedy, rollout_tp=1, train_gpus=8).fits


def test_c61_both_sleep_levels() -> None:
    for gigabytes, one, two in ((16.381, 12.76, 6.84), (1.192, 1.44, 1.92)):
        levels = sleep_levels(gigabytes * 1e9)
        assert sum(levels[1]) == pytest.approx(one)
        assert sum(levels[2]) == pytest.approx(two)


def test_c71_routing_travels_with_the_sample() -> None:
    assert routing_bytes(4096, 48, 8) == 1_572_864


def test_c91_the_profiler_reserves_the_largest_image() -> None:
    assert profiled_image_tokens(12, 16384, 768) == (196_608, 9_216)
