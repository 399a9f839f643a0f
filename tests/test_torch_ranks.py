"""A trainer over several processes says what one on one device says, and tells which rank is lost."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.learning import CASES, shape_of
from bidirl.errors import RunFault
from bidirl.executor.backends.torch.advantages import global_counts
from bidirl.executor.backends.torch.merge import Gathered, MergeKind, arrange, as_array
from bidirl.executor.backends.torch.tiny import build_tiny
from bidirl.planner.events import SegmentKind
from tests.test_torch_sharded import CONFIG, RANKS, play, rows
from tests.vllm_world import children

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("ranks") / "model"
    return build_tiny(shape_of(CASES["constant"]), where, seed=1, max_tokens=64)


@pytest.fixture(scope="module")
def ranked(folder: Path) -> Iterator[Any]:
    """Give a trainer on two processes; none is left of it."""
    from bidirl.executor.backends.torch.ranks import RankedTrainer

    before = children()
    trainer = RankedTrainer(folder, CONFIG, RANKS)
    yield trainer
    trainer.close()
    assert children() == before


def counts() -> dict[str, int]:
    num_tokens, num_sequences = global_counts(rows())
    return {"num_tokens": num_tokens, "num_sequences": num_sequences}


def gather(trainer: Any, kind: MergeKind) -> Gathered:
    gathered = Gathered(kind)
    for number, chunk in enumerate((rows()[:4], rows()[4:])):
        found = trainer.run(SegmentKind.REFERENCE, number, chunk, **counts()).logprobs
        known = [replace(row, reference=values) for row, values in zip(chunk, found, strict=True)]
        gathered.add(trainer.run(SegmentKind.UPDATE, number, known, **counts()))
    return gathered


def test_a_lost_rank_is_named_and_nothing_is_left(folder: Path) -> None:
    from bidirl.executor.backends.torch.ranks import RankedTrainer

    before = children()
    trainer = RankedTrainer(folder, CONFIG, RANKS)
    os.kill(trainer._processes[0].pid, signal.SIGKILL)
    with pytest.raises(RunFault, match="rank 1 ended without a word"):
        trainer.digest()
    with pytest.raises(RunFault, match="rank 1 ended without a word"):
        trainer.digest()
    trainer.close()
    assert children() == before


def test_a_rank_that_cannot_start_says_why(tmp_path: Path) -> None:
    from bidirl.executor.backends.torch.ranks import RankedTrainer

    before = children()
    with pytest.raises(Exception, match="nowhere"):
        RankedTrainer(tmp_path / "nowhere", CONFIG, RANKS)
    assert children() == before


def test_two_processes_say_what_one_device_says(ranked: Any, folder: Path) -> None:
    from bidirl.executor.backends.torch.trainer import TorchTrainer

    alone = TorchTrainer(folder, CONFIG)
    assert ranked.num_params == alone.num_params
    one, two = play(alone), play(ranked)
    assert two["norms"] == pytest.approx(one["norms"], rel=1e-4)
    for key in ("logprobs", "after"):
        for a, b in zip(two[key], one[key], strict=True):
            assert a == pytest.approx(b, abs=1e-4)
    for name, values in one["weights"].items():
        assert two["weights"][name] == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize("kind", list(MergeKind))
def test_a_gradient_that_has_left_its_ranks_counts_as_one_that_has_not(
    ranked: Any, tmp_path: Path, kind: MergeKind
) -> None:
    ranked.save(str(tmp_path / "before"))
    own = gather(ranked, kind)
    chunks = (0, 1)
    sent = [replace(gradient, values=as_array(gradient.values)) for gradient in own.gradients]
    assert all(gradient.values.shape == (ranked.num_params,) for gradient in sent)
    said = ranked.apply(arrange(kind, own.gradients, [], chunks))
    digest = ranked.digest()
    ranked.restore(str(tmp_path / "before"))
    assert ranked.digest() != digest
    assert ranked.apply(arrange(kind, [], sent, chunks)) == said
    assert ranked.digest() == digest


def test_gradients_that_nobody_holds_are_dropped(ranked: Any) -> None:
    for _ in range(3):
        gather(ranked, MergeKind.ORDERED)
    ranked.digest()
    assert len(ranked._rank.gradients) == 0


def test_weights_go_in_and_out_whole(ranked: Any) -> None:
    held = {name: tensor.clone().numpy() for name, tensor in ranked.tensors()}
    changed = {name: values + np.float32(0.25) for name, values in held.items()}
    ranked.load(iter(changed.items()))
    for name, tensor in ranked.tensors():
        np.testing.assert_array_equal(tensor.numpy(), changed[name])
    ranked.load(iter(held.items()))


def test_reading_only_some_weights_leaves_the_ranks_together(ranked: Any) -> None:
    found = ranked.tensors()
    next(found)
    found.close()
    assert len(ranked.digest()) == 64


def test_a_refused_call_leaves_the_trainer_usable(ranked: Any) -> None:
    with pytest.raises(RunFault, match="needs a reference segment"):
        ranked.run(SegmentKind.UPDATE, 0, rows(), **counts())
    with pytest.raises(RunFault, match="was not sent"):
        ranked.load(iter([]))
    assert len(ranked.digest()) == 64
