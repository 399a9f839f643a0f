"""The trainer on real torch: log-probabilities, gradients under any cut, merges, checkpoints, learning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from benchmarks.learning import CASES, learn, shape_of
from bidirl.errors import InputError, RunFault
from bidirl.executor.backends.torch.advantages import global_counts
from bidirl.executor.backends.torch.merge import Gathered, MergeKind, add_up, arrange
from bidirl.executor.backends.torch.settings import LossConfig, PlantedFault, Summation, TrainerConfig
from bidirl.executor.backends.torch.tiny import build_tiny
from bidirl.executor.roles import Draft, Row, Trainer
from bidirl.planner.events import SegmentKind
from bidirl.planner.learn import Normalisation, OldPolicy, Precision

if TYPE_CHECKING:
    from bidirl.executor.backends.torch.trainer import TorchTrainer

    def has_every_method(trainer: TorchTrainer) -> Trainer:
        return trainer


torch = pytest.importorskip("torch")
pytestmark = pytest.mark.engine

VOCAB = 64
CASE = replace(CASES["constant"], vocab_size=VOCAB)
UPDATE = SegmentKind.UPDATE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(shape_of(CASE), tmp_path_factory.mktemp("model"), seed=1, max_tokens=64)


def trainer_of(folder: Path, fault: PlantedFault = PlantedFault.NONE, **choices: Any) -> Any:
    from bidirl.executor.backends.torch.trainer import TorchTrainer

    return TorchTrainer(folder, TrainerConfig(**choices), fault=fault)


@pytest.fixture(scope="module")
def trainer(folder: Path) -> Any:
    return trainer_of(folder)


@pytest.fixture(scope="module")
def rows(trainer: Any) -> list[Row]:
    """Return 24 rows of unequal length whose behaviour is near the model's own."""
    rng = np.random.default_rng(0)
    found = []
    for at in range(24):
        prompt = rng.integers(VOCAB, size=int(rng.integers(1, 6)), dtype=np.int32)
        tokens = rng.integers(VOCAB, size=int(rng.integers(1, 20)), dtype=np.int32)
        draft = Draft(at // 4, at % 4, prompt, at, 20, tokens)
        found.append(Row(draft, 0.0, float(rng.normal())))
    for row, logprobs in zip(found, trainer.logprobs(found), strict=True):
        noise = rng.normal(scale=0.1, size=len(logprobs))
        row.draft.logprobs = (logprobs + noise).astype(np.float32)
    return found


def update(trainer: Any, rows: Sequence[Row], chunk: int = 0, whole: Sequence[Row] | None = None) -> Any:
    num_tokens, num_sequences = global_counts(whole or rows)
    return trainer.run(UPDATE, chunk, rows, num_tokens=num_tokens, num_sequences=num_sequences)


def chunked(trainer: Any, rows: Sequence[Row], size: int) -> list[Any]:
    return [
        update(trainer, rows[at : at + size], number, rows)
        for number, at in enumerate(range(0, len(rows), size))
    ]


# -- model and log-probabilities


def test_packaged_model_repeats_and_depends_on_the_seed(folder: Path, tmp_path: Path) -> None:
    same = build_tiny(shape_of(CASE), tmp_path / "same", seed=1, max_tokens=64)
    other = build_tiny(shape_of(CASE), tmp_path / "other", seed=2, max_tokens=64)
    name = "model.safetensors"
    assert (same / name).read_bytes() == (folder / name).read_bytes()
    assert (other / name).read_bytes() != (folder / name).read_bytes()
    assert json.loads((same / "config.json").read_text())["model_type"] == "qwen3"


def test_logprobs_are_those_of_the_plain_model(trainer: Any, rows: list[Row]) -> None:
    model = trainer.states.model
    for row, found in zip(rows, trainer.logprobs(rows), strict=True):
        ids = torch.from_numpy(np.concatenate([row.draft.prompt, row.draft.tokens]).astype(np.int64))[None]
        with torch.no_grad():
            every = torch.log_softmax(model(input_ids=ids).logits[0], -1)
        at = torch.arange(len(row.draft.prompt) - 1, ids.shape[1] - 1)
        assert found == pytest.approx(every[at, ids[0, at + 1]].numpy(), abs=1e-5)
        assert found.dtype == np.float32


def test_logprobs_do_not_depend_on_neighbours(trainer: Any, rows: list[Row]) -> None:
    together = trainer.logprobs(rows)
    for row, found in zip(rows, together, strict=True):
        assert trainer.logprobs([row])[0] == pytest.approx(found, abs=1e-5)


def test_logits_cut_small_give_the_same(folder: Path, trainer: Any, rows: list[Row]) -> None:
    small = trainer_of(folder, logit_tokens=7, micro_tokens=50)
    for a, b in zip(small.logprobs(rows), trainer.logprobs(rows), strict=True):
        assert a == pytest.approx(b, abs=1e-5)
    assert update(small, rows).gradient == pytest.approx(update(trainer, rows).gradient, abs=1e-6)


def test_rows_without_a_token_are_harmless(trainer: Any, rows: list[Row]) -> None:
    empty = Row(Draft(9, 0, np.array([1], np.int32), 0, 0), 0.0, 1.0)
    assert len(trainer.logprobs([empty, rows[0]])[0]) == 0
    with_it, without = update(trainer, [empty, *rows], whole=rows), update(trainer, rows)
    assert with_it.gradient.tobytes() == without.gradient.tobytes()


# -- gradients


@pytest.mark.parametrize("normalisation", list(Normalisation))
@pytest.mark.parametrize("size", [1, 3, 6, 12])
def test_gradient_does_not_depend_on_the_cut(
    folder: Path, rows: list[Row], normalisation: Normalisation, size: int
) -> None:
    trainer = trainer_of(folder, loss=LossConfig(normalisation=normalisation))
    whole = update(trainer, rows).gradient
    parts = add_up([piece.gradient for piece in chunked(trainer, rows, size)])
    assert np.abs(parts - whole).max() <= 1e-6 * np.abs(whole).max()


def test_order_of_arrival_changes_rounding_only(trainer: Any, rows: list[Row]) -> None:
    """C76: which sample arrived first decides nothing."""
    expected = update(trainer, rows).gradient
    shuffled = [rows[at] for at in np.random.default_rng(5).permutation(len(rows))]
    found = add_up([piece.gradient for piece in chunked(trainer, shuffled, 6)])
    assert np.abs(found - expected).max() <= 1e-6 * np.abs(expected).max()


def test_ordered_merge_is_bitwise_on_any_placement(folder: Path, trainer: Any, rows: list[Row]) -> None:
    other = trainer_of(folder)
    other.logprobs(rows[:5])  # another history
    expected = add_up([piece.gradient for piece in chunked(trainer, rows, 4)])
    for on_other in ({0}, {1, 2, 5}, {3, 4}, set(range(6))):
        sides = Gathered(MergeKind.ORDERED), Gathered(MergeKind.ORDERED)
        for number in reversed(range(6)):
            side = number in on_other
            part = rows[number * 4 : number * 4 + 4]
            sides[side].add(update((trainer, other)[side], part, number, rows))
        merged = arrange(MergeKind.ORDERED, sides[0].gradients, sides[1].gradients, range(6))
        assert add_up(merged).tobytes() == expected.tobytes()


def test_exact_summation_is_bitwise_for_any_cut_order_and_merge(folder: Path, rows: list[Row]) -> None:
    trainer = trainer_of(folder, summation=Summation.EXACT)
    whole = update(trainer, rows)
    shuffled = [rows[at] for at in np.random.default_rng(5).permutation(len(rows))]
    for order, size in ((rows, 1), (rows, 5), (shuffled, 7), (shuffled, 24)):
        parts = [piece.gradient for piece in chunked(trainer, order, size)]
        assert add_up(parts).tobytes() == whole.gradient.tobytes()
        assert add_up(parts[::-1]).tobytes() == whole.gradient.tobytes()
    plain = update(trainer_of(folder), rows).gradient
    assert np.abs(whole.gradient - plain).max() <= 1e-6 * np.abs(plain).max()
    other = trainer_of(folder, summation=Summation.EXACT)
    trainer.apply([whole.gradient])
    other.apply([piece.gradient for piece in chunked(other, shuffled, 7)])
    assert trainer.digest() == other.digest()


def test_exact_summation_refuses_what_it_cannot_hold(folder: Path) -> None:
    trainer = trainer_of(folder, summation=Summation.EXACT)
    with pytest.raises(RunFault, match="use summation = 'float32'"):
        trainer.apply([np.full(trainer.num_params, 300.0)])


def test_chunk_wise_normalisation_shows(folder: Path, trainer: Any, rows: list[Row]) -> None:
    whole = update(trainer, rows).gradient
    faulty = trainer_of(folder, PlantedFault.CHUNK_NORMALISED)
    wrong = add_up([piece.gradient for piece in chunked(faulty, rows, 4)])
    assert np.abs(wrong - whole).max() > np.abs(whole).max()


def test_zero_advantage_gives_exactly_no_gradient(trainer: Any, rows: list[Row]) -> None:
    flat = [replace(row, advantage=0.0) for row in rows]
    assert not update(trainer, flat).gradient.any()
    half = [*rows[:12], *flat[12:]]
    alone = update(trainer, rows[:12], whole=rows).gradient
    assert update(trainer, half).gradient == pytest.approx(alone, abs=1e-6)


def test_filtered_rows_change_nothing(folder: Path, rows: list[Row]) -> None:
    trainer = trainer_of(folder, loss=LossConfig(kl_weight=0.1))
    known = [replace(row, reference=row.draft.logprobs) for row in rows]
    filtered = [replace(row, weight=0.0, advantage=9.0) for row in known[:8]]
    expected = update(trainer, known[8:])
    found = update(trainer, [*filtered, *known[8:]])
    assert found.gradient.tobytes() == expected.gradient.tobytes()
    assert found.stats == expected.stats
    assert not update(trainer, filtered).gradient.any()


def test_loss_by_hand(trainer: Any, rows: list[Row]) -> None:
    """The statistics of PPO's clip, recomputed in numpy."""
    piece = update(trainer, rows)
    now = trainer.logprobs(rows)
    num_tokens, _ = global_counts(rows)
    loss = clipped = 0.0
    for row, logprobs in zip(rows, now, strict=True):
        ratio = np.exp(logprobs.astype(np.float64) - row.draft.logprobs)
        free, bound = ratio * row.advantage, np.clip(ratio, 0.8, 1.2) * row.advantage
        loss -= float(np.minimum(free, bound).sum()) / num_tokens
        clipped += int((bound < free).sum())
    assert piece.stats["loss"] == pytest.approx(loss, abs=1e-6)
    assert piece.stats["clipped"] == clipped > 0
    assert piece.stats["tokens"] == num_tokens
    assert piece.stats["mismatch_max"] == pytest.approx(
        max(float(np.abs(a - row.draft.logprobs).max()) for a, row in zip(now, rows, strict=True)), abs=1e-5
    )


def test_decoupled_needs_and_uses_the_old_segment(folder: Path, rows: list[Row]) -> None:
    trainer = trainer_of(folder, loss=LossConfig(old_policy=OldPolicy.DECOUPLED, behaviour_cap=1.05))
    with pytest.raises(RunFault, match="old-logprob segment"):
        update(trainer, rows)
    found = trainer.run(SegmentKind.OLD_LOGPROB, 0, rows, num_tokens=1, num_sequences=1)
    known = [replace(row, old=old) for row, old in zip(rows, found.logprobs, strict=True)]
    stats = update(trainer, known).stats
    assert stats["ratio"] == pytest.approx(
        stats["tokens"], rel=1e-5
    )  # the proximal policy is the present one
    loss = 0.0
    for row in known:
        assert row.old is not None
        weight = np.minimum(np.exp(row.old.astype(np.float64) - row.draft.logprobs), 1.05)
        loss -= float((weight * row.advantage).sum()) / stats["tokens"]
    assert stats["loss"] == pytest.approx(loss, abs=1e-5)
    assert stats["capped"] > 0


def test_reference_stays_version_0(folder: Path, rows: list[Row]) -> None:
    trainer = trainer_of(folder, loss=LossConfig(kl_weight=0.5))
    before = trainer.logprobs(rows)
    known = [replace(row, reference=values) for row, values in zip(rows, before, strict=True)]
    assert update(trainer, known).stats["kl"] == pytest.approx(0.0, abs=1e-6)
    for _ in range(2):
        trainer.apply([update(trainer, known).gradient])
    moved = trainer.digest()
    found = trainer.run(SegmentKind.REFERENCE, 0, rows, num_tokens=1, num_sequences=1).logprobs
    assert all(a.tobytes() == b.tobytes() for a, b in zip(found, before, strict=True))
    assert trainer.digest() == moved
    assert update(trainer, known).stats["kl"] > 1e-4


# -- optimizer, weights, checkpoints


def test_apply_is_adamw_on_the_clipped_sum(folder: Path, rows: list[Row]) -> None:
    trainer = trainer_of(folder, max_gradient_norm=0.01, learning_rate=1e-3)
    gradients = [piece.gradient for piece in chunked(trainer, rows, 8)]
    before = {name: tensor.clone() for name, tensor in trainer.tensors()}
    norm = trainer.apply(gradients)["gradient_norm"]
    assert norm == pytest.approx(float(np.linalg.norm(add_up(gradients))), rel=1e-5)
    at = 0
    total = add_up(gradients) * (0.01 / (norm + 1e-6))
    for name, tensor in trainer.tensors():
        gradient = total[at : at + tensor.numel()].reshape(tensor.shape)
        at += tensor.numel()
        expected = before[name].numpy() - 1e-3 * gradient / (np.abs(gradient) + 1e-8)  # first step of Adam
        assert tensor.numpy() == pytest.approx(expected, abs=1e-6)


def test_a_gradient_that_is_not_finite_leaves_the_weights(folder: Path) -> None:
    trainer = trainer_of(folder)
    before = trainer.digest()
    with pytest.raises(RunFault, match="must be finite"):
        trainer.apply([np.full(trainer.num_params, np.nan, np.float32)])
    assert trainer.digest() == before


def test_load_takes_the_weights_of_another(folder: Path, rows: list[Row]) -> None:
    first, second = trainer_of(folder), trainer_of(folder)
    first.apply([update(first, rows).gradient])
    assert first.digest() != second.digest()
    second.load(first.tensors())
    assert first.digest() == second.digest()
    third = trainer_of(folder)
    arrays = {name: tensor.numpy().copy() for name, tensor in first.tensors()}
    for array in arrays.values():
        array.flags.writeable = False  # as views of memory that others read are
    third.load(iter(arrays.items()))
    assert third.digest() == first.digest()
    named = list(first.tensors())
    for wrong, says in (
        (named[1:], "was not sent"),
        ([*named, ("foreign", named[0][1])], "none of this model's"),
        ([(named[0][0], named[0][1][:1]), *named[1:]], "has shape"),
    ):
        with pytest.raises(RunFault, match=says):
            second.load(iter(wrong))


def test_restored_trainer_goes_on_bit_for_bit(folder: Path, rows: list[Row], tmp_path: Path) -> None:
    first = trainer_of(folder)
    place = str(tmp_path / "v1")
    first.apply([update(first, rows).gradient])
    first.save(place)
    first.save(place)  # over an older one
    first.apply([update(first, rows).gradient])
    second = trainer_of(folder)
    second.restore(place)
    second.apply([update(second, rows).gradient])
    assert first.digest() == second.digest()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v1"]
    as_model = trainer_of(tmp_path / "v1")  # a checkpoint is a model folder too
    as_model.restore(place)


def test_a_checkpoint_of_an_untrained_trainer(folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(folder)
    trainer.save(str(tmp_path / "v0"))
    other = trainer_of(folder)
    other.restore(str(tmp_path / "v0"))
    assert other.states.num_steps == 0
    assert other.digest() == trainer.digest()


def test_a_damaged_checkpoint_is_found(folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(folder)
    place = tmp_path / "v0"
    trainer.save(str(place))
    data = bytearray((place / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (place / "model.safetensors").write_bytes(data)
    with pytest.raises(RunFault, match="differs from its hash"):
        trainer.restore(str(place))
    with pytest.raises(RunFault, match="cannot be read"):
        trainer.restore(str(tmp_path / "gone"))


def test_a_crash_between_the_renames_loses_nothing(folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(folder)
    trainer.save(str(tmp_path / "v0"))
    (tmp_path / "v0").rename(tmp_path / "v0.old")
    trainer.restore(str(tmp_path / "v0"))


def test_moving_the_states_loses_nothing(folder: Path, rows: list[Row]) -> None:
    """What sleep and wake do on a GPU, from host to host."""
    trainer = trainer_of(folder)
    trainer.apply([update(trainer, rows).gradient])
    expected, before = update(trainer, rows).gradient, trainer.digest()
    trainer.states.move(torch.device("cpu:0"))  # not the name of its own device: it sleeps there
    assert not any(parameter.numel() for parameter in trainer.states.model.parameters())
    assert trainer.digest() == before
    trainer.states.move(trainer.states.device)
    assert update(trainer, rows).gradient.tobytes() == expected.tobytes()
    trainer.apply([expected])
    other = trainer_of(folder)
    for gradient in (update(other, rows).gradient, expected):
        other.apply([gradient])
    assert trainer.digest() == other.digest()


def test_bfloat16_is_near(folder: Path, trainer: Any, rows: list[Row]) -> None:
    narrow = trainer_of(folder, precision=Precision.BFLOAT16)
    for a, b in zip(narrow.logprobs(rows), trainer.logprobs(rows), strict=True):
        assert a == pytest.approx(b, abs=0.1)
    gradient, exact = update(narrow, rows).gradient, update(trainer, rows).gradient
    assert gradient.dtype == np.float32
    cosine = float(gradient @ exact) / float(np.linalg.norm(gradient) * np.linalg.norm(exact))
    assert cosine > 0.99


def test_wrong_places_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read as a causal model"):
        trainer_of(tmp_path)
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="no CUDA device"):
            trainer_of(folder, device="cuda")


# -- learning


def test_constant_task_is_learned() -> None:
    curve = [reward for reward, _ in learn(replace(CASES["constant"], num_steps=40), TrainerConfig())]
    assert np.mean(curve[:3]) < 0.1
    assert np.mean(curve[-5:]) > 0.9


def test_several_updates_a_step_keep_the_ratio_in_view() -> None:
    case = replace(CASES["constant"], num_steps=6, mini_batches=2)
    stats = [stats for _, stats in learn(case, TrainerConfig())]
    assert (
        max(part["mismatch_max"] for part in stats) > 1e-3
    )  # the second update sees a policy one update older


# -- the GPU script, on a CPU


def test_gpu_profile_runs_on_a_cpu(tmp_path: Path) -> None:
    from benchmarks.gpu_profile import measure

    result = measure("cpu", 60.0, quick=True)
    assert {"setup", "trainer", "switch", "sync", "gradient", "decode"} <= set(result)
    assert [name for name, value in result.items() if isinstance(value, str)] == []
    assert result["switch"]["weights_unchanged"]
    assert result["trainer"]["update"]["num_predicted"] == 4
