import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.errors import InputError
from bidirl.models import catalogue, memory
from bidirl.models.architecture import from_catalogue

LLAMA, VL_4B = from_catalogue("Llama-3.1-8B"), from_catalogue("Qwen3-VL-4B")


def test_kv_tokens_of_a_measured_engine() -> None:
    """vLLM 0.19 on an RTX 4090 at 0.9 and a budget of 2,048 tokens printed 41,408 KV tokens."""
    tokens = memory.kv_tokens(catalogue.gpu("RTX 4090"), LLAMA, 1, 0.9, max_num_batched_tokens=2048)
    assert tokens == pytest.approx(41_408, rel=0.01)
    assert tokens % 16 == 0


def test_tensor_parallelism_more_than_doubles_the_cache() -> None:
    a6000 = catalogue.gpu("A6000")
    one, two = (memory.kv_tokens(a6000, LLAMA, tp) for tp in (1, 2))
    assert two > 2 * one
    many = memory.kv_estimate(a6000, LLAMA, 16, memory.EngineOptions())
    assert many.value < memory.kv_tokens(a6000, LLAMA, 8) * 1.5  # 8 KV heads: beyond 8 GPUs they are copied
    assert many.low < many.value < many.high


def test_no_room_for_a_block_is_an_input_error() -> None:
    with pytest.raises(InputError, match=r"does not fit: lacks .* raise rollout_tp") as caught:
        memory.kv_tokens(catalogue.gpu("RTX 4090"), from_catalogue("Qwen3-14B"), 1)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=r"must be in \(0, 1\]"):
        memory.kv_tokens(catalogue.gpu("RTX 4090"), LLAMA, 1, 1.5)


def test_engine_items_fill_the_share() -> None:
    budget = memory.rollout_memory(catalogue.gpu("A6000"), VL_4B, 1, memory.EngineOptions())
    assert budget.fits
    assert budget.headroom_bytes == pytest.approx(0.0, abs=1.0)
    assert {item.name for item in budget.items} >= {"weights", "KV pool", "logits", "context and graphs"}


def test_logits_are_exact_and_states_are_sixteen_bytes_a_parameter() -> None:
    budget = memory.train_memory(catalogue.gpu("H100"), VL_4B, 1, 8, 4096)
    items = {item.name: item.num_bytes for item in budget.items}
    assert items["logits"] == 4096 * 151936 * 4
    state = items["master weights"] + items["gradients"] + items["optimizer moments"]
    assert state == pytest.approx(16 * VL_4B.num_params / 8)
    assert budget.fits
    assert "fits with" in budget.verdict()


@given(
    st.sampled_from(["Qwen3-0.6B", "Qwen3-8B", "Qwen3-30B-A3B"]), st.integers(1, 6), st.integers(64, 30000)
)
def test_more_gpus_and_smaller_micro_batches_need_less(name: str, log_gpus: int, tokens: int) -> None:
    shape, gpu = from_catalogue(name), catalogue.gpu("A6000")
    few = memory.train_memory(gpu, shape, 1, 2**log_gpus, tokens)
    more = memory.train_memory(gpu, shape, 1, 2 ** (log_gpus + 1), tokens)
    longer = memory.train_memory(gpu, shape, 1, 2**log_gpus, tokens + 1)
    assert more.total_bytes < few.total_bytes < longer.total_bytes
    assert few.total_bytes == sum(item.num_bytes for item in few.items)


def test_micro_batches_shrink_until_they_fit() -> None:
    a6000, shape = catalogue.gpu("A6000"), from_catalogue("Qwen3-8B")
    assert not memory.train_memory(a6000, shape, 1, 8, 16384).fits
    tokens = memory.fitting_micro_tokens(a6000, shape, 1, 8, at_least=2500, at_most=16384)
    assert tokens is not None
    assert 2500 <= tokens < 16384
    assert memory.train_memory(a6000, shape, 1, 8, tokens).fits
    assert memory.fitting_micro_tokens(a6000, shape, 1, 1, at_least=2500, at_most=16384) is None
    with pytest.raises(InputError, match="at least 1"):
        memory.train_memory(a6000, shape, 1, 0, 1)


def test_host_memory_of_sleeping_roles() -> None:
    budget = memory.host_memory(
        VL_4B, rollout_tp=1, train_gpus=12, gpus_per_node=8, capacity_bytes=512 * 2**30
    )
    assert budget.fits
    assert budget.total_bytes == pytest.approx(8 * (2 + 16 / 12) * VL_4B.num_params)
