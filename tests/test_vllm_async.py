"""vLLM in a process of its own, and samples that move between two engines."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bidirl.errors import InvariantBroken, RunFault
from bidirl.executor.roles import Draft
from tests import vllm_world as world

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return world.tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def other(folder: Path) -> Iterator[Any]:
    """Give an engine in another process."""
    from bidirl.executor.backends.vllm.async_engine import AsyncVllmEngine

    before = world.children()
    engine = AsyncVllmEngine(world.settings(folder))
    yield engine
    engine.close()
    deadline = time.monotonic() + 10
    while world.children() != before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert world.children() == before


@pytest.fixture(scope="module")
def here(folder: Path) -> Iterator[Any]:
    from bidirl.executor.backends.vllm.engine import VllmEngine

    engine = VllmEngine(world.settings(folder))
    yield engine
    engine.close()


def steps_until(engine: Any, tokens: int) -> None:
    """Step until each sample has some tokens."""
    while min(done for _, _, done in engine.progress()) < tokens:
        engine.step()


def test_it_generates_the_same_as_in_process(other: Any, here: Any) -> None:
    assert world.same(world.run(here, world.drafts(4)), world.run(other, world.drafts(4)))


def test_a_sample_that_moves_equals_one_that_stays(other: Any, here: Any, folder: Path) -> None:
    """Cut on one engine, go on in the other, cut there, and back."""
    for engine in (here, other):
        engine.load(1, iter(world.weights(folder, 1).items()))
    whole = world.run(here, world.drafts(4))
    ended: dict[tuple[int, int], Draft] = {}
    first, second = here, other
    held = world.drafts(4)
    for tokens in (3, 9, 15):
        first.submit(held)
        steps_until(first, tokens)
        held = first.preempt(range(4))
        ended |= {(draft.group, draft.index): draft for draft in first.step()}
        first, second = second, first
    assert world.same(whole, ended | world.run(first, held))


def test_a_load_reaches_the_other_process(other: Any, folder: Path) -> None:
    for version in (2, 3):
        tensors = world.weights(folder, version)
        other.load(version, iter(tensors.items()))
        ended = world.run(other, world.drafts(4))
        assert world.largest_gap(folder, tensors, ended) < TOLERANCE
        assert {draft.segments for draft in ended.values()} == {((0, version),)}


def test_samples_held_across_a_load_go_on(other: Any, folder: Path) -> None:
    other.load(1, iter(world.weights(folder, 1).items()))
    work = world.drafts(3, max_tokens=80)
    other.submit(work)
    steps_until(other, 4)
    other.load(2, iter(world.weights(folder, 2).items()))
    ended = world.finish(other)
    assert len(ended) == len(work)
    for draft in ended.values():
        assert len(draft.tokens) == len(draft.logprobs) == 80
        assert [version for _, version in draft.segments] in ([1], [1, 2])


def test_weights_that_do_not_fit_change_nothing(other: Any, folder: Path) -> None:
    other.load(1, iter(world.weights(folder, 1).items()))
    before = world.run(other, world.drafts(2))
    with pytest.raises(RunFault, match="did not arrive"):
        other.load(2, iter(list(world.weights(folder, 2).items())[1:]))
    assert other.version == 1
    assert world.same(before, world.run(other, world.drafts(2)))


@pytest.mark.parametrize("fault", ["another version", "nobody sends", "the sender is lost"])
def test_a_failed_transfer_leaves_the_old_weights(
    other: Any, folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bidirl.executor.backends import wire
    from bidirl.executor.backends.pair import Pair
    from bidirl.executor.backends.vllm import async_engine

    other.load(1, iter(world.weights(folder, 1).items()))
    before = world.run(other, world.drafts(2))
    with monkeypatch.context() as patch:
        if fault == "another version":
            send_all = wire.Sender.send_all
            patch.setattr(
                wire.Sender,
                "send_all",
                lambda self, addresses, version, tensors: send_all(self, addresses, version + 1, tensors),
            )
        elif fault == "nobody sends":
            patch.setattr(async_engine, "CALL_S", 2.0)
            patch.setattr(wire.Sender, "send_all", lambda *_: [])
        else:
            patch.setattr(wire, "BUCKET_BYTES", 1000)
            put, calls = Pair.put, []

            def breaking(self: Any, data: Any) -> None:
                calls.append(data)
                if len(calls) == 3:
                    raise RunFault("gone")
                put(self, data)

            patch.setattr(Pair, "put", breaking)
        with pytest.raises(RunFault, match="did not arrive"):
            other.load(2, iter(world.weights(folder, 2).items()))
    assert other.version == 1
    assert world.same(before, world.run(other, world.drafts(2)))


def test_complete_prefix_length_and_sleep(other: Any) -> None:
    whole = world.run(other, world.drafts(1))
    other.submit(list(whole.values()))
    assert {(draft.group, draft.index) for draft in other.step()} == set(whole)
    with pytest.raises(RunFault, match="raise max_model_tokens"):
        other.submit(world.drafts(1, max_tokens=1000))
    other.submit(world.drafts(1, max_tokens=80))
    with pytest.raises(InvariantBroken, match="take them off first"):
        other.sleep(1)
    (held, _) = other.preempt([0])
    assert len(held.tokens) == len(held.logprobs) < 80
    other.sleep(1)
    other.wake()
    assert not other.capabilities.sleep_frees_memory
    assert np.isfinite(held.logprobs).all()
