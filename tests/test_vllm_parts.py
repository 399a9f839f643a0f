"""The parts of the vLLM adapter that need no engine."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.errors import InputError, InvariantBroken
from bidirl.executor.backends.vllm.args import (
    EngineSettings,
    checkpoint_shapes,
    engine_arguments,
    environment,
    kv_bytes,
    settings_from_job,
)
from bidirl.executor.backends.vllm.flights import Flight, Flights, is_complete, is_truncated
from bidirl.executor.backends.vllm.meter import Meter
from bidirl.executor.backends.vllm.noise import Noise, sample_seed
from bidirl.executor.roles import Draft
from bidirl.planner.sections import EngineConfig

PROMPT = np.arange(5, dtype=np.int32)


def draft(group: int = 0, index: int = 0, *, tokens: tuple[int, ...] = (), max_tokens: int = 8) -> Draft:
    segments = ((0, 3),) if tokens else ()
    logprobs = np.full(len(tokens), -1.0, np.float32)
    return Draft(group, index, PROMPT, 1, max_tokens, np.array(tokens, np.int32), logprobs, segments)


def folder(where: Path, **changes: int) -> Path:
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    (where / "config.json").write_text(json.dumps(shape | {"head_dim": 32} | changes))
    return where


# ---------------------------------------------------------------- noise


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**20), st.integers(1, 70), st.integers(0, 5))
def test_noise_is_a_function_of_its_key_alone(seed: int, position: int, size: int, others: int) -> None:
    noise = Noise()
    alone = noise.gumbel([(seed, position)], size)[0]
    keys = [(seed ^ number, position + 1) for number in range(others)]
    among = noise.gumbel([*keys, (seed, position)], size)[-1]
    assert np.array_equal(alone, among)
    assert np.array_equal(alone, Noise().gumbel([(seed, position)], size + 9)[0, :size])
    assert np.isfinite(alone).all()


def test_noise_differs_between_positions_and_seeds() -> None:
    rows = Noise().gumbel([(1, 0), (1, 1), (2, 0), (2, 1)], 64)
    assert len({row.tobytes() for row in rows}) == 4


def test_noise_draws_from_the_softmax() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.15, 0.09, 0.01]))
    num_draws = 40_000
    rows = Noise().gumbel([(seed, 7) for seed in range(num_draws)], 5)
    counts = np.bincount((logits + rows).argmax(1), minlength=5)
    expected = num_draws * np.exp(logits)
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    assert chi2 < 18.5  # 99.9 % quantile with 4 degrees of freedom


def test_noise_has_the_moments_of_a_gumbel() -> None:
    values = Noise().gumbel([(seed, 0) for seed in range(500)], 512)
    assert float(values.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(values.var()) == pytest.approx(np.pi**2 / 6, rel=0.02)


def test_sample_seeds_do_not_collide() -> None:
    places = [(group, index) for group in range(500) for index in range(8)]
    seeds = {sample_seed(entropy, *place) for entropy in range(4) for place in places}
    assert len(seeds) == 4 * 500 * 8
    assert all(0 <= seed < 2**64 for seed in seeds)


# -------------------------------------------------------------- flights


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=12), st.integers(0, 12))
def test_a_flight_cut_anywhere_equals_the_whole(parts: list[tuple[int, int]], cut: int) -> None:
    """(tokens of an iteration, version step): landing and flying on keeps tokens, numbers and segments."""
    whole, flight = Flight(draft(max_tokens=99)), Flight(draft(max_tokens=99))
    version = token = 0
    for number, (count, step) in enumerate(parts):
        version += step
        tokens = list(range(token, token + count))
        token += count
        for one in (whole, flight):
            one.extend(tokens, [-0.5 * one_token for one_token in tokens], version)
        if number == cut:
            flight = Flight(flight.landed())
    first, second = whole.landed(), flight.landed()
    assert np.array_equal(first.tokens, second.tokens)
    assert np.array_equal(first.logprobs, second.logprobs)
    assert first.segments == second.segments
    assert [start for start, _ in first.segments] == sorted({start for start, _ in first.segments})


def test_landing_shares_no_memory_and_keeps_types() -> None:
    start = draft(tokens=(4, 5))
    flight = Flight(start)
    flight.extend([6], [-2.0], 3)
    end = flight.landed(finish_s=1.5, truncated=True)
    end.tokens[0] = 9
    assert start.tokens.tolist() == [4, 5]
    assert end.tokens.dtype == np.int32
    assert end.logprobs.dtype == np.float32
    assert (end.segments, end.finish_s, end.truncated) == (((0, 3),), 1.5, True)


def test_flights_hold_a_place_once() -> None:
    flights = Flights()
    request = flights.add(draft(1))
    with pytest.raises(InvariantBroken, match="twice"):
        flights.add(draft(1))
    again = flights.requeue(request)
    assert again != request
    assert flights.of([1]) == [again]
    flights.take(again)
    flights.add(draft(1))
    assert flights.progress() == [(1, 0, 0)]


def test_a_prefix_needs_its_log_probabilities() -> None:
    bad = draft(tokens=(1, 2))
    bad.logprobs = bad.logprobs[:1]
    with pytest.raises(InvariantBroken, match="one length"):
        Flights().add(bad)
    with pytest.raises(InvariantBroken, match="incomplete"):
        Flight(draft()).extend([1, 2], [-1.0], 0)


def test_completion_and_truncation() -> None:
    assert is_complete(draft(tokens=(1, 2), max_tokens=2), None)
    assert is_complete(draft(tokens=(1, 2), max_tokens=9), 2)
    assert not is_complete(draft(tokens=(2, 1), max_tokens=9), 2)
    assert not is_complete(draft(), 2)
    assert not is_truncated(Flight(draft(tokens=(1,))), None)
    assert is_truncated(Flight(draft(tokens=(1,))), 2)
    assert not is_truncated(Flight(draft(tokens=(2,))), 2)


# ---------------------------------------------------------------- meter


def test_meter_counts_recomputed_response_tokens() -> None:
    flights, meter = Flights(), Meter()
    resumed = flights.add(draft(1, tokens=(7, 7, 7, 7)))
    running = flights.add(draft(2, tokens=(7,)))
    meter.record({resumed: 6, running: 1, "gone": 1}, flights, 2, 0.5)
    (iteration,) = meter.take()
    assert (iteration.prefill_tokens, iteration.decode_tokens, iteration.context_tokens) == (6, 1, 9 + 6)
    assert iteration.recomputed_tokens == meter.recomputed_tokens == 3
    assert meter.recompute_s == pytest.approx(0.5 * 3 / 7)
    assert (meter.decode_tokens, meter.take()) == (2, [])


# ------------------------------------------------------------ arguments


def test_memory_is_always_given_in_bytes(tmp_path: Path) -> None:
    settings = EngineSettings(str(folder(tmp_path)), 64, kv_tokens=100, block_size=32)
    # 4 blocks for 100 tokens and a spare one; keys and values of 2 layers, 1 head of 32 float32 numbers.
    assert kv_bytes(settings) == 5 * 32 * 2 * 2 * 32 * 4
    arguments = engine_arguments(settings)
    assert arguments["kv_cache_memory_bytes"] == kv_bytes(settings)
    assert arguments["enable_chunked_prefill"] is False
    assert arguments["max_num_batched_tokens"] >= arguments["max_model_len"]


def test_job_limits_become_settings(tmp_path: Path) -> None:
    engine = EngineConfig(max_num_seqs=16, max_num_batched_tokens=512, block_size=16)
    settings = settings_from_job(engine, folder(tmp_path), max_model_tokens=80, eos_id=2)
    assert (settings.block_size, settings.max_num_seqs) == (32, 16)
    assert (settings.kv_tokens, settings.eos_id) == (1280, 2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "int4"}, "dtype = int4"),
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"kv_tokens": 10}, "kv_tokens = 10"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        EngineSettings("x", 64, **changes)  # type: ignore[arg-type]


def test_a_folder_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no readable model configuration"):
        kv_bytes(EngineSettings(str(tmp_path), 64))


def test_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_attention_heads": 6}')
    with pytest.raises(InputError, match="rollout_tp = 4: the model's 6 attention heads do not divide"):
        settings_from_job(EngineConfig(), tmp_path, max_model_tokens=64, tp=4)


def test_environment_compiles_nothing_on_cpu() -> None:
    assert environment()["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in environment(device="cuda")
    assert environment(num_ranks=2)["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"


def test_checkpoint_shapes_come_from_the_header(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(24))
    assert checkpoint_shapes(tmp_path) == {"a.weight": (2, 3)}
