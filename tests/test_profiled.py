"""Iteration tables: interpolation, padding, their JSON form and what it refuses."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.errors import InputError
from bidirl.models.iteration import AffineIteration
from bidirl.models.profiled import (
    ProfiledIteration,
    iteration_from_json,
    iteration_to_json,
    vllm_graph_sizes,
)

AFFINE = AffineIteration(0.02, 0.01, 2e-5, 3e-5, 1e-9, 1e-7)
PROFILED = ProfiledIteration(
    dense_tokens=(1, 100, 1000),
    dense_s=(0.01, 0.02, 0.1),
    output_seqs=(1, 10),
    output_s=(0.001, 0.002),
    decode_seqs=(1, 10),
    decode_base_s=(0.0, 0.0009),
    decode_context_token_s=(1e-7, 2e-7),
    mixed_base_s=(0.0, 0.0018),
    mixed_context_token_s=(2e-7, 4e-7),
    prefill_tokens=(100, 1000),
    prefill_base_s=(0.001, 0.002),
    prefill_visible_token_s=(1e-6, 1e-5),
)


def test_decode_sums_its_tables() -> None:
    base_s, token_s = PROFILED.decode(10)
    assert base_s == pytest.approx(0.01 + 0.01 * 9 / 99 + 0.002 + 0.0009)
    assert token_s == pytest.approx(2e-7)


def test_mixed_sums_its_tables_and_decodes_dearer_than_alone() -> None:
    alone = PROFILED.mixed(100, 100 * 50.5, 0, 0, 1)
    assert alone == pytest.approx(0.02 + 0.001 + 0.001 + 1e-6 * 50.5)
    beside = PROFILED.mixed(90, 90 * 45.5, 10, 5000, 11)
    assert beside > PROFILED.decode(10)[0] + 5000 * PROFILED.decode(10)[1]


def test_values_beyond_the_tables_continue_their_last_piece() -> None:
    assert PROFILED.mixed(1900, 0.0, 0, 0, 1) == pytest.approx(0.1 + 0.08 + 0.001 + 0.003)


def test_small_iterations_are_padded_to_graph_sizes() -> None:
    padded = replace(PROFILED, graph_sizes=(1, 2, 4, 8, 16))
    assert padded.decode(9)[0] > PROFILED.decode(9)[0]
    assert padded.decode(16)[0] == PROFILED.decode(16)[0]
    assert padded.decode(17)[0] == PROFILED.decode(17)[0]


def test_graph_sizes_stop_at_512_or_twice_the_sequences() -> None:
    assert vllm_graph_sizes(256)[-3:] == (480, 496, 512)
    assert vllm_graph_sizes(8) == (1, 2, 4, 8, 16)
    assert vllm_graph_sizes(4096)[-1] == 512


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 100_000))
def test_more_sequences_or_context_never_cost_less(one: int, more: int, context: int) -> None:
    def seconds(num: int, tokens: int) -> float:
        base_s, token_s = PROFILED.decode(num)
        return base_s + token_s * tokens

    assert seconds(one + more, context) >= seconds(one, context)
    assert seconds(one, context + more) >= seconds(one, context)


@pytest.mark.parametrize(
    "iteration", [AFFINE, PROFILED, replace(PROFILED, graph_sizes=(1, 2), overhead_s=0.001)]
)
def test_json_round_trip(iteration: AffineIteration | ProfiledIteration) -> None:
    data = json.loads(json.dumps(iteration_to_json(iteration)))
    assert iteration_from_json(data) == iteration


def good() -> dict[str, Any]:
    return dict(iteration_to_json(PROFILED))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "must be an object"),
        ({}, "kind=None: must be 'affine' or 'profiled'"),
        ({"kind": "table"}, "kind='table'"),
        ({"kind": "affine"}, "missing, give every coefficient"),
        (iteration_to_json(AFFINE) | {"tau": 1}, "tau: unknown key"),
        (iteration_to_json(AFFINE) | {"tau_pre_s": "1"}, "must be a number"),
        (iteration_to_json(AFFINE) | {"tau_pre_s": True}, "must be a number"),
        (iteration_to_json(AFFINE) | {"tau_pre_s": -1}, "finite and >= 0"),
        (iteration_to_json(AFFINE) | {"tau_pre_s": float("nan")}, "finite and >= 0"),
        (good() | {"dense_s": [1.0]}, "dense_s has 1 values for 3"),
        (good() | {"dense_s": 1.0}, "must be a list"),
        (good() | {"dense_s": [1.0, None, 1.0]}, "must be a number"),
        (good() | {"dense_tokens": [1, 1, 2]}, "must be ascending"),
        (good() | {"dense_tokens": [], "dense_s": []}, "not empty"),
        (good() | {"dense_tokens": [1, 2.0, 3]}, "must be an integer"),
        (good() | {"overhead_s": -1.0}, "finite and >= 0"),
        ({k: v for k, v in good().items() if k != "dense_s"}, "dense_s missing"),
    ],
)
def test_malformed_models_are_refused_in_one_line(data: object, words: str) -> None:
    with pytest.raises(InputError) as caught:
        iteration_from_json(data)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_without_json_form_is_refused() -> None:
    class Other(AffineIteration):
        pass

    class Strange:
        def decode(self, num_seqs: int) -> tuple[float, float]:
            return 1.0, 0.0

        def mixed(self, *args: float) -> float:
            return 1.0

    assert iteration_to_json(Other(1, 1, 1, 1, 1, 1))["kind"] == "affine"
    with pytest.raises(InputError, match="Strange has no JSON form"):
        iteration_to_json(Strange())
