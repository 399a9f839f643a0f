"""The parts of the training role that need no torch: advantages, counts, merges, tasks, cuts."""

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.errors import InputError, InvariantBroken, RunFault
from bidirl.executor.backends.torch.advantages import coefficient, global_counts, group_advantages
from bidirl.executor.backends.torch.batching import micro_batches
from bidirl.executor.backends.torch.merge import (
    Gathered,
    Gradient,
    MergeKind,
    add_up,
    arrange,
    check_ordered_memory,
    merge_stats,
)
from bidirl.executor.backends.torch.settings import LossConfig, PlantedFault, TrainerConfig
from bidirl.executor.backends.torch.tasks import EQUALS, PLUS, STOP, TASKS, make_task, user_reward
from bidirl.executor.backends.torch.tiny import hf_config
from bidirl.executor.roles import Draft, Piece, Row
from bidirl.models.architecture import ArchitectureNumbers
from bidirl.planner.learn import AdvantageScale, Normalisation, OldPolicy


def row(length: int, weight: float = 1.0) -> Row:
    draft = Draft(0, 0, np.zeros(1, np.int32), 0, length, np.zeros(length, np.int32))
    return Row(draft, 0.0, 0.0, weight)


# -- normalisation: C72, C73

LENGTHS, LOSSES = (100, 10, 10), (1.0, 2.0, 2.0)


def mean_loss(normalisation: Normalisation, order: tuple[int, ...], cuts: tuple[int, ...]) -> float:
    """Sum over chunks of the chunk's normalised sum: what a trainer's chunks add up to."""
    num_tokens, num_sequences = global_counts([row(length) for length in LENGTHS])
    chunks = np.split(np.array(order), sorted(cuts))
    return sum(
        sum(
            LOSSES[at]
            * LENGTHS[at]
            * coefficient(normalisation, 1.0, LENGTHS[at], num_tokens=num_tokens, num_sequences=num_sequences)
            for at in chunk
        )
        for chunk in chunks
    )


@given(st.permutations(range(3)), st.lists(st.integers(0, 3), max_size=3))
def test_c72_every_chunking_gives_the_global_mean(order: list[int], cuts: list[int]) -> None:
    assert mean_loss(Normalisation.TOKEN, tuple(order), tuple(cuts)) == pytest.approx(140 / 120)
    assert mean_loss(Normalisation.SEQUENCE, tuple(order), tuple(cuts)) == pytest.approx(5 / 3)


@pytest.mark.parametrize("num_chunks", [1, 2, 4, 8])
def test_c73_the_number_of_chunks_divides_nothing(num_chunks: int) -> None:
    share = coefficient(Normalisation.TOKEN, 1.0, 4, num_tokens=32, num_sequences=8)
    rows_per_chunk = 8 // num_chunks
    assert sum(sum(4 * share for _ in range(rows_per_chunk)) for _ in range(num_chunks)) == 1.0


def test_weight_zero_is_in_no_count() -> None:
    assert global_counts([row(3), row(5, weight=0.0), row(7)]) == (10, 2)
    assert coefficient(Normalisation.TOKEN, 0.0, 5, num_tokens=0, num_sequences=0) == 0.0
    assert coefficient(Normalisation.SEQUENCE, 1.0, 0, num_tokens=4, num_sequences=1) == 0.0


# -- advantages


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=16))
def test_advantages_are_centred_and_scaled(rewards: list[float]) -> None:
    found = group_advantages(rewards)
    assert abs(found.sum()) < 1e-6 * len(rewards)
    assert np.all(np.abs(found) <= np.sqrt(len(rewards)))
    assert np.argmax(found) == np.argmax(rewards) or max(found) == found[int(np.argmax(rewards))]


@given(st.floats(-1e9, 1e9), st.integers(1, 9))
def test_equal_rewards_give_exact_zeros(reward: float, n: int) -> None:
    assert group_advantages([reward] * n).tolist() == [0.0] * n


def test_advantages_by_hand() -> None:
    assert group_advantages([0.0, 1.0]) == pytest.approx([-0.7071, 0.7071], abs=1e-4)
    assert group_advantages([0.0, 1.0], AdvantageScale.NONE).tolist() == [-0.5, 0.5]


# -- merges


def pieces(num: int) -> list[Piece]:
    rng = np.random.default_rng(1)
    return [Piece(at, gradient=rng.standard_normal(64).astype(np.float32)) for at in range(num)]


def gathered(kind: MergeKind, some: list[Piece]) -> Gathered:
    held = Gathered(kind)
    for piece in some:
        held.add(Piece(piece.chunk, gradient=piece.gradient.copy()))
    return held


@given(st.permutations(range(6)), st.integers(0, 6))
def test_ordered_merge_is_bitwise_wherever_and_whenever_chunks_ran(order: list[int], cut: int) -> None:
    all_pieces = pieces(6)
    expected = add_up([piece.gradient for piece in all_pieces])
    sides = [
        gathered(MergeKind.ORDERED, [all_pieces[at] for at in part]) for part in (order[:cut], order[cut:])
    ]
    found = add_up(arrange(MergeKind.ORDERED, sides[0].gradients, sides[1].gradients, range(6)))
    assert found.tobytes() == expected.tobytes()


def test_a_wrong_order_of_the_merge_shows() -> None:
    held = gathered(MergeKind.ORDERED, pieces(6))
    right = add_up(arrange(MergeKind.ORDERED, held.gradients, (), range(6)))
    wrong = add_up(
        arrange(MergeKind.ORDERED, held.gradients, (), range(6), fault=PlantedFault.REVERSED_MERGE)
    )
    assert right.tobytes() != wrong.tobytes()
    assert right == pytest.approx(wrong, abs=1e-5)


@given(st.integers(0, 6))
def test_accumulated_merge_sends_one_gradient_a_side(cut: int) -> None:
    all_pieces = pieces(6)
    sides = [gathered(MergeKind.ACCUMULATED, part) for part in (all_pieces[:cut], all_pieces[cut:])]
    found = arrange(MergeKind.ACCUMULATED, sides[0].gradients, sides[1].gradients, range(6))
    assert len(found) == (1 if cut in {0, 6} else 2)
    assert add_up(found) == pytest.approx(add_up([piece.gradient for piece in all_pieces]), abs=1e-5)


def test_a_read_only_gradient_is_not_written_to() -> None:
    first, second = pieces(2)
    first.gradient.flags.writeable = False
    held = Gathered(MergeKind.ACCUMULATED)
    held.add(first)
    held.add(second)
    assert held.gradients[0].chunks == (0, 1)
    assert held.gradients[0].values.tobytes() == add_up([first.gradient, second.gradient]).tobytes()


@pytest.mark.parametrize("chunks", [range(3), range(5), (0, 1, 1, 2)])
def test_each_chunk_is_merged_once(chunks: tuple[int, ...]) -> None:
    with pytest.raises(InvariantBroken, match="each counts once"):
        arrange(MergeKind.ORDERED, gathered(MergeKind.ORDERED, pieces(4)).gradients, (), chunks)


def test_a_chunk_on_both_sides_is_refused() -> None:
    both = [Gradient((0,), np.zeros(1, np.float32))]
    with pytest.raises(InvariantBroken):
        arrange(MergeKind.ACCUMULATED, both, both, range(1))


def test_statistics_add_up_and_maxima_stay() -> None:
    assert merge_stats([{"tokens": 2.0, "x_max": 1.0}, {"tokens": 3.0, "x_max": 0.5}]) == {
        "tokens": 5.0,
        "x_max": 1.0,
    }


def test_ordered_merge_states_its_memory() -> None:
    assert check_ordered_memory(8, 1000, 1e6) == 32000.0
    with pytest.raises(InputError, match="use 'accumulated' or fewer chunks"):
        check_ordered_memory(64, 8_000_000_000, 80e9)


# -- micro-batches


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 200))
def test_micro_batches_hold_each_row_once_and_fit(lengths: list[int], micro_tokens: int) -> None:
    batches = micro_batches(lengths, micro_tokens)
    assert sorted(at for batch in batches for at in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[at] for at in batch) <= micro_tokens


# -- tasks


@pytest.mark.parametrize("name", sorted(TASKS))
def test_prompts_follow_from_seed_and_group(name: str) -> None:
    task = make_task(name, vocab_size=32, prompt_tokens=6)
    again = make_task(name, vocab_size=32, prompt_tokens=6)
    prompts = [task.prompt_of(3, group) for group in range(20)]
    assert all(prompt.dtype == np.int32 and len(prompt) == 6 for prompt in prompts)
    assert all(np.array_equal(again.prompt_of(3, at), prompts[at]) for at in reversed(range(20)))
    assert len({prompt.tobytes() for prompt in prompts}) > 5
    assert all(prompt.min() >= 0 and prompt.max() < 32 for prompt in prompts)


def test_rewards_by_hand() -> None:
    def tokens(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.array(values, np.int32)

    constant = make_task("constant", vocab_size=32, prompt_tokens=2)
    assert constant.reward(tokens(1, 2), tokens(5, 5, 1, 5)) == 0.75
    copy = make_task("copy", vocab_size=32, prompt_tokens=2)
    assert copy.reward(tokens(7, 7), tokens(7, 1)) == 0.5
    assert copy.reward(tokens(7, 7), tokens()) == 0.0
    arithmetic = make_task("arithmetic", vocab_size=13, prompt_tokens=4)
    question = tokens(7, PLUS, 8, EQUALS)
    assert arithmetic.stop_token == STOP
    assert arithmetic.reward(question, tokens(1, 5, STOP)) == 1.0
    assert arithmetic.reward(question, tokens(1, 5)) == pytest.approx(2 / 3)
    assert arithmetic.reward(question, tokens(5, 1, STOP)) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("name", "vocab", "prompt", "says"),
    [
        ("coppy", 32, 4, "they are arithmetic, constant, copy"),
        ("arithmetic", 8, 4, "needs 13 tokens"),
        ("copy", 32, 0, "at least one token"),
    ],
)
def test_a_wrong_task_is_refused_in_one_line(name: str, vocab: int, prompt: int, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        make_task(name, vocab_size=vocab, prompt_tokens=prompt)
    assert "\n" not in str(caught.value)


REWARDS = """
def good(prompt, response): return len(response) / len(prompt)
def bad(prompt, response): return float("nan")
def broken(prompt, response): raise KeyError("no such answer")
number = 3
"""


def test_a_users_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "my_broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    prompt, response = np.zeros(2, np.int32), np.zeros(3, np.int32)
    task = make_task("copy", vocab_size=4, prompt_tokens=2, reward="my_rewards:good")
    assert task.reward(prompt, response) == 1.5
    for name, says in (("bad", "returned nan"), ("broken", "KeyError")):
        with pytest.raises(RunFault, match=says):
            user_reward(f"my_rewards:{name}")(prompt, response)
    for path, says in (
        ("my_rewards", "module:function"),
        ("my_rewards:gone", "has no function gone"),
        ("my_rewards:number", "has no function"),
        ("my_broken:f", "ZeroDivisionError"),
        ("not_there:f", "cannot be imported"),
    ):
        with pytest.raises(InputError, match=says) as caught:
            user_reward(path)
        assert "\n" not in str(caught.value)


# -- settings


@pytest.mark.parametrize(
    "values",
    [{"clip_low": 1.0}, {"clip_high": -0.1}, {"kl_weight": float("nan")}, {"behaviour_cap": 0.0}],
)
def test_a_wrong_loss_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(InputError):
        LossConfig(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("values", [{"learning_rate": 0.0}, {"beta1": 1.0}, {"micro_tokens": 0}])
def test_a_wrong_trainer_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(InputError):
        TrainerConfig(**values)  # type: ignore[arg-type]


def test_the_loss_says_which_segments_it_needs() -> None:
    assert not LossConfig().needs_old
    assert not LossConfig().needs_reference
    assert LossConfig(old_policy=OldPolicy.DECOUPLED).needs_old
    assert LossConfig(kl_weight=0.1).needs_reference


def test_the_packaged_model_takes_the_engines_head_sizes() -> None:
    shape = ArchitectureNumbers(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=4,
        num_kv_heads=2,
        intermediate_size=64,
        vocab_size=32,
    )
    with pytest.raises(InputError, match="head_dim = 16"):
        hf_config(shape, max_tokens=32)
    config = hf_config(shape.model_copy(update={"head_dim": 32}), max_tokens=32, stop_token=12)
    assert (config["head_dim"], config["eos_token_id"]) == (32, 12)
