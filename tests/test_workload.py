from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from bidirl.errors import InputError
from bidirl.traces.workload import Workload, WorkloadConfig

BASE: dict[str, Any] = {
    "prompts_per_step": 64,
    "samples_per_prompt": 8,
    "max_response_tokens": 2048,
    "lengths": "geo3k",
    "num_steps": 40,
}
TURNS: dict[str, Any] = {"mean": 4.0, "max": 10, "tool_s": {"mean": 1.0, "p95": 3.0}, "tool_tokens": 50}


def make(entropy: int = 7, **changes: Any) -> Workload:
    return Workload(WorkloadConfig.model_validate({**BASE, **changes}), Path(), entropy)


def lengths_of(workload: Workload, num_blocks: int = 40) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.concatenate([workload.block(i).response_tokens for i in range(num_blocks)])


def test_block_has_the_shapes_and_bounds_of_the_records() -> None:
    block = make(prompt_tokens={"mean": 100, "p95": 200}, image_tokens=30).block(3)
    assert block.first_group == 3 * 64
    assert block.response_tokens.shape == block.truncated.shape == (64, 8)
    assert block.prompt_tokens.shape == block.reward_s.shape == block.filtered.shape == (64,)
    assert block.response_tokens.min() >= 1
    assert block.response_tokens.max() <= 2048
    assert (block.response_tokens[block.truncated] == 2048).all()
    assert (block.image_tokens == 30).all()
    assert (block.prompt_tokens > 30).all()
    assert not block.filtered.any()
    assert block.turns is None


@pytest.mark.parametrize("cap", [1024, 2048, 4096])
def test_statistics_of_draws_are_those_of_the_law(cap: int) -> None:
    workload = make(max_response_tokens=cap)
    drawn = lengths_of(workload)
    law = workload.law(0)
    # 20,480 draws: four standard errors of a mean are below 2.5 % for a coefficient of variation below 0.8
    assert drawn.mean() == pytest.approx(law.mean_tokens, rel=0.025)
    assert np.median(drawn) == pytest.approx(law.quantile(0.5), rel=0.03)
    truncated = np.mean([workload.block(i).truncated.mean() for i in range(40)])
    assert truncated == pytest.approx(law.truncated_share, abs=0.015)


def test_caps_share_their_luck() -> None:
    short, long = lengths_of(make(max_response_tokens=1024), 3), lengths_of(make(max_response_tokens=4096), 3)
    assert (short == np.minimum(long, 1024)).all()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
def test_group_correlation_is_realised(share: float) -> None:
    # no cap in reach, so that log lengths are normal and the one-way ANOVA estimate of the share is unbiased
    x = np.log(lengths_of(make(group_correlation=share, max_response_tokens=10**6)))
    num_groups, n = x.shape
    between = n * x.mean(axis=1).var(ddof=1)
    within = x.var(axis=1, ddof=1).mean()
    assert num_groups == 2560
    assert (between - within) / (between + (n - 1) * within) == pytest.approx(share, abs=0.04)
    assert x.std() == pytest.approx(0.741, abs=0.02)


def test_full_correlation_makes_groups_equal() -> None:
    tokens = make(group_correlation=1.0).block(0).response_tokens
    assert (tokens == tokens[:, :1]).all()


def test_drift_moves_lengths_geometrically_then_stays() -> None:
    workload = make(drift={"to": 2.0, "over_steps": 10}, max_response_tokens=10**6)
    medians = [workload.law(i).quantile(0.5) / workload.law(0).quantile(0.5) for i in (0, 5, 10, 30)]
    assert medians == pytest.approx([1.0, 2.0**0.5, 2.0, 2.0])
    plain = make(max_response_tokens=10**6)
    ratio = workload.block(10).response_tokens / plain.block(10).response_tokens
    assert np.median(ratio) == pytest.approx(2.0, rel=0.01)


def test_drift_by_list_holds_its_last_factor() -> None:
    workload = make(drift=[1.0, 0.5])
    assert [workload.law(i).quantile(0.3) for i in (1, 2, 9)] == pytest.approx(
        [workload.law(1).quantile(0.3)] * 3
    )
    assert workload.law(1).quantile(0.3) == pytest.approx(0.5 * workload.law(0).quantile(0.3))


def test_filter_rate_and_reward_latency_are_realised() -> None:
    workload = make(filter_rate=0.25, reward_s={"mean": 2.0, "p95": 5.0})
    blocks = [workload.block(i) for i in range(100)]
    assert np.mean([b.filtered.mean() for b in blocks]) == pytest.approx(0.25, abs=0.025)
    reward_s = np.concatenate([b.reward_s for b in blocks])
    assert reward_s.mean() == pytest.approx(2.0, rel=0.08)
    assert np.quantile(reward_s, 0.95) == pytest.approx(5.0, rel=0.1)


@given(st.lists(st.integers(0, 10_000), min_size=2, max_size=6, unique=True), st.integers(0, 2**64))
def test_blocks_do_not_depend_on_the_order_of_asking(indices: list[int], entropy: int) -> None:
    one, other = make(entropy), make(entropy)
    forward = {i: one.block(i) for i in indices}
    for i in reversed(indices):
        assert (other.block(i).response_tokens == forward[i].response_tokens).all()
    first, second = indices[:2]
    assert (forward[first].response_tokens != forward[second].response_tokens).any()


@pytest.mark.parametrize(
    "added",
    [
        {"filter_rate": 0.5},
        {"reward_s": {"mean": 1.0, "p95": 2.0}},
        {"prompt_tokens": {"mean": 90, "p95": 170}},
        {"turns": TURNS},
        {"num_steps": 400, "mini_batches": 4, "reference": "off"},
    ],
)
def test_another_source_changes_no_stream(added: dict[str, Any]) -> None:
    plain, richer = (
        make(reward_s={"mean": 9.0, "p95": 10.0}),
        make(**{"reward_s": {"mean": 9.0, "p95": 10.0}, **added}),
    )
    assert (plain.block(5).response_tokens == richer.block(5).response_tokens).all()
    if "reward_s" not in added:
        assert (plain.block(5).reward_s == richer.block(5).reward_s).all()


def test_seeds_differ() -> None:
    assert (make(1).block(0).response_tokens != make(2).block(0).response_tokens).any()


def test_turns_sum_to_the_response_and_end_without_a_tool() -> None:
    workload = make(turns=TURNS)
    block = workload.block(2)
    turns = block.turns
    assert turns is not None
    starts, last = turns.offsets[:-1], turns.offsets[1:] - 1
    assert len(turns.offsets) == 64 * 8 + 1
    assert (np.add.reduceat(turns.response_tokens, starts) == block.response_tokens.ravel()).all()
    assert turns.response_tokens.min() >= 1
    assert (turns.tool_tokens[last] == 0).all()
    assert (turns.tool_s[last] == 0.0).all()
    inner = np.ones(len(turns.tool_s), dtype=bool)
    inner[last] = False
    assert (turns.tool_tokens[inner] == 50).all()
    assert turns.tool_s[inner].min() > 0.0
    counts = np.concatenate(
        [np.diff(t.offsets) for i in range(20) if (t := workload.block(i).turns) is not None]
    )
    assert counts.mean() == pytest.approx(4.0, abs=0.12)
    assert 1 <= counts.min() <= counts.max() <= 10


@given(st.integers(1, 12), st.floats(0.0, 1.0), st.integers(1, 30))
def test_turn_parts_conserve_tokens_even_when_short(most: int, position: float, cap: int) -> None:
    mean = 1.0 + position * (most - 1)
    turns = {"mean": mean, "max": most, "tool_s": 0.5, "tool_tokens": 3}
    block = make(turns=turns, max_response_tokens=cap, prompts_per_step=5).block(0)
    assert block.turns is not None
    sums = np.add.reduceat(block.turns.response_tokens, block.turns.offsets[:-1])
    assert (sums == block.response_tokens.ravel()).all()
    assert block.turns.response_tokens.min() >= 1


def test_prior_knows_the_law_with_drift_and_no_sample() -> None:
    workload = make(
        drift={"to": 1.5, "over_steps": 10}, prompt_tokens={"mean": 80, "p95": 120}, image_tokens=200
    )
    prior = workload.prior(10)
    assert len(prior.quantiles) == 64
    assert list(prior.quantiles) == sorted(prior.quantiles)
    assert np.mean(prior.quantiles) == pytest.approx(prior.mean_tokens, rel=0.01)
    assert prior.mean_tokens == pytest.approx(workload.law(10).mean_tokens)
    assert prior.mean_tokens > workload.prior(0).mean_tokens
    assert prior.max_tokens == 2048
    assert prior.prompt_mean_tokens == pytest.approx(280.0)
    assert workload.prior(10) is workload.prior(11)


def test_what_is_assumed_is_said() -> None:
    geo3k = make()
    assert geo3k.assumed
    assert "ASSUMED" in geo3k.label
    assert geo3k.prior(0).prompt_mean_tokens == 128 + 256
    gsm8k = make(lengths="gsm8k")
    assert not gsm8k.assumed
    assert gsm8k.prior(0).prompt_mean_tokens == pytest.approx(102.534)
    table = make(lengths={"mean": 500.0, "p95": 1200.0})
    assert table.assumed
    assert any("128 text tokens assumed" in note for note in table.notes)
    assert not make(lengths={"mean": 500.0, "p95": 1200.0}, prompt_tokens=90).assumed
    assert make(lengths={"mean": 500.0}, prompt_tokens=90).assumed


def test_lengths_from_a_file_beside_the_job(tmp_path: Path) -> None:
    (tmp_path / "seen.txt").write_text("10\n20\n30\n")
    for lengths in ({"file": "seen.txt"}, "seen.txt"):
        config = WorkloadConfig.model_validate({**BASE, "lengths": lengths})
        tokens = Workload(config, tmp_path, 0).block(0).response_tokens
        assert tokens.min() == 10
        assert tokens.max() == 30
    with pytest.raises(InputError, match=r"missing.csv: No such file"):
        make(lengths={"file": "missing.csv"})


def test_prompts_leave_room_for_the_response() -> None:
    block = make(prompt_tokens={"mean": 300, "p95": 900}, image_tokens=0, max_seq_tokens=2500).block(0)
    assert block.prompt_tokens.max() == 2500 - 2048
    with pytest.raises(InputError, match="leaves -148 tokens for a prompt"):
        make(max_seq_tokens=2156)


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"lengths": {"mean": Decimal("500.5"), "p95": Decimal(1200)}, "reward_s": Decimal("0.25")},
        {"lengths": {"file": "x.csv"}, "drift": [1.0, 1.5], "turns": TURNS},
        {"drift": {"to": 1.5, "over_steps": 100}, "prompt_tokens": {"mean": 100, "p95": 200}},
    ],
)
def test_config_survives_json(extra: dict[str, Any]) -> None:
    config = WorkloadConfig.model_validate({**BASE, **extra})
    assert WorkloadConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"prompts_per_step": 0}, "greater than or equal to 1"),
        ({"prompts_per_step": 2.0}, "valid integer"),
        ({"prompts_per_step": True}, "valid integer"),
        ({"samples_per_prompt": "8"}, "valid integer"),
        ({"max_response_tokens": -1}, "greater than or equal to 1"),
        ({"num_steps": None}, "valid integer"),
        ({"prompts": 64}, "Extra inputs are not permitted"),
        ({"mini_batches": 7}, "mini_batches=7 does not divide prompts_per_step=64"),
        ({"lengths": "geo3"}, "did you mean 'geo3k'?"),
        ({"lengths": 700}, "must be a packaged name, a table"),
        ({"lengths": {}}, "holds none of mean, p50, p95"),
        ({"lengths": {"mean": 500.0, "p90": 900.0}}, "Extra inputs are not permitted"),
        ({"lengths": {"mean": 2500.0, "p50": 900.0}}, "mean=2500 exceeds the cap 2048"),
        ({"lengths": {"p50": 900.0, "p95": 800.0}}, "p50=900 exceeds p95=800"),
        ({"lengths": {"mean": 900.0, "p95": 800.0}}, "mean=900 exceeds p95=800"),
        ({"lengths": {"mean": 900.0, "p95": 2048.0}}, "add truncated >= 0.05"),
        (
            {"lengths": {"mean": 900.0, "p95": 1500.0, "truncated": 0.2}},
            "p95 lies at the cap 2048, not at 1500",
        ),
        ({"lengths": {"mean": 300.0, "truncated": 0.5}}, "is below truncated * max = 1024"),
        ({"lengths": {"mean": 1900.0, "p50": 200.0, "p95": 1000.0}}, "mean=1900 exceeds p95"),
        ({"lengths": {"mean": 900.0, "p50": 200.0, "p95": 1000.0}}, "such laws have means of"),
        ({"lengths": {"mean": 2048.0}}, "every response is cut"),
        ({"lengths": {"mean": 500.0, "p50": 400.0, "sigma": 0.5}}, "one too many"),
        ({"lengths": {"mean": float("nan")}}, "finite number"),
        ({"lengths": {"file": ""}}, "at least 1 character"),
        ({"lengths": {"file": "x.csv", "mean": 3.0}}, "Extra inputs are not permitted"),
        ({"prompt_tokens": 12.5}, "valid integer"),
        ({"prompt_tokens": "many"}, "must be a whole number of tokens or a table"),
        ({"prompt_tokens": {"mean": 100}}, "Field required"),
        ({"prompt_tokens": {"mean": 100, "p95": 50}}, "p95 / mean must lie in 1 to 3.87"),
        ({"image_tokens": -5}, "greater than or equal to 0"),
        ({"group_correlation": 1.5}, "less than or equal to 1"),
        ({"drift": 1.5}, "must be a table { to = ..., over_steps = ... } or a list"),
        ({"drift": {"to": 0.0, "over_steps": 5}}, "greater than 0"),
        ({"drift": []}, "at least 1 item"),
        ({"drift": [1.0] * 41}, "drift lists 41 factors for num_steps=40"),
        ({"filter_rate": 1.0}, "less than 1"),
        ({"reward_s": -1.0}, "greater than or equal to 0"),
        ({"reward_capacity": 0}, "greater than or equal to 1"),
        ({"turns": {**TURNS, "mean": 11.0}}, "mean=11 exceeds max=10"),
        ({"turns": {"mean": 2.0, "max": 4, "tool_tokens": 5}}, "Field required"),
        ({"old_logprob": True}, "'on' or 'off'"),
        ({"reference": "yes"}, "'on' or 'off'"),
        ({"max_seq_tokens": 2048}, "below prompt + response + tool tokens = 2049"),
    ],
)
def test_malformed_sections_are_refused_in_one_line(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError) as caught:
        WorkloadConfig.model_validate({**BASE, **change})
    (error,) = caught.value.errors()
    assert expected in error["msg"]
    assert "\n" not in error["msg"]


def test_union_errors_name_the_right_branch() -> None:
    with pytest.raises(ValidationError) as caught:
        WorkloadConfig.model_validate({**BASE, "lengths": {"mean": "long"}})
    assert [error["loc"] for error in caught.value.errors()] == [("lengths", "table", "mean")]
