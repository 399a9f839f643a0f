"""The rollout role on real vLLM: what a policy trained on its samples relies on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bidirl.errors import InvariantBroken, RunFault
from bidirl.executor.roles import Draft
from tests import vllm_world as world

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]

KV_TOKENS = 1024
"""Cache of the engine: 16 samples of usual length, 8 of the longest."""
TOLERANCE = 1e-4
"""Largest accepted |log-probability of vLLM - of torch| in float32 (measured 5e-6 at this size)."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return world.tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def module_engine(folder: Path) -> Iterator[Any]:
    from bidirl.executor.backends.vllm.engine import VllmEngine

    before = world.children()
    engine = VllmEngine(world.settings(folder, kv_tokens=KV_TOKENS))
    yield engine
    engine.close()
    assert world.children() == before
    engine.close()


@pytest.fixture
def engine(module_engine: Any, folder: Path) -> Any:
    """Give the module's engine with nothing held and version 1."""
    module_engine.preempt([group for group, _, _ in module_engine.progress()])
    while module_engine.num_unfinished:
        module_engine.step()
    module_engine.load(1, iter(world.weights(folder, 1).items()))
    return module_engine


def cut_run(
    engine: Any, work: list[Draft], cuts: list[int], groups: list[int]
) -> dict[tuple[int, int], Draft]:
    """Run, taking some groups off and submitting them again after each of ``cuts`` iterations."""
    engine.submit(work)
    ended = {}
    for cut in cuts:
        for _ in range(cut):
            ended.update({(draft.group, draft.index): draft for draft in engine.step()})
        engine.submit(engine.preempt(groups))
    return ended | world.finish(engine)


# ------------------------------------------------------------- agreement


def test_log_probabilities_agree_with_torch_before_and_after_each_sync(engine: Any, folder: Path) -> None:
    gaps = []
    for version in (1, 2, 3):
        tensors = world.weights(folder, version)
        if version > 1:
            engine.load(version, iter(tensors.items()))
        ended = world.run(engine, world.drafts(2))
        gaps.append(world.largest_gap(folder, tensors, ended))
        assert {draft.segments for draft in ended.values()} == {((0, version),)}
    print("largest gaps", gaps)
    assert max(gaps) < TOLERANCE


def test_a_load_copies(engine: Any, folder: Path) -> None:
    """The trainer goes on to change its tensors in place: the engine's must not move."""
    tensors = world.weights(folder, 5)
    engine.load(5, iter(tensors.items()))
    before = world.run(engine, world.drafts(2))
    for tensor in tensors.values():
        tensor.add_(1.0)
    engine._llm.reset_prefix_cache()
    assert world.same(before, world.run(engine, world.drafts(2)))


def test_read_only_arrays_load(engine: Any, folder: Path) -> None:
    arrays = {name: tensor.numpy() for name, tensor in world.weights(folder, 1).items()}
    before = world.run(engine, world.drafts(2))
    for array in arrays.values():
        array.setflags(write=False)
    engine.load(2, iter(arrays.items()))
    assert engine.version == 2
    assert world.same(before, world.run(engine, world.drafts(2)))


# ---------------------------------------------------- preempt and resume


@settings(max_examples=12)
@given(
    cuts=st.lists(st.integers(0, world.MAX_TOKENS // 2), min_size=1, max_size=3),
    groups=st.sets(st.integers(0, 3), min_size=1),
    greedy=st.booleans(),
)
def test_a_resumed_sample_equals_the_uninterrupted_one(
    module_engine: Any, folder: Path, cuts: list[int], groups: set[int], greedy: bool
) -> None:
    from dataclasses import replace

    engine = module_engine
    usual = engine.settings
    engine.settings = replace(usual, temperature=0.0 if greedy else 1.0)
    try:
        engine.load(1, iter(world.weights(folder, 1).items()))
        whole = world.run(engine, world.drafts(4))
        assert world.same(whole, cut_run(engine, world.drafts(4), cuts, sorted(groups)))
    finally:
        engine.settings = usual


def test_resuming_at_every_position(engine: Any) -> None:
    work = world.drafts(2, max_tokens=12)
    whole = world.run(engine, work)
    for cut in range(13):
        prefixes = [
            Draft(
                draft.group, draft.index, draft.prompt, draft.seed, draft.max_tokens,
                draft.tokens[:cut], draft.logprobs[:cut], draft.segments if cut else (),
            )
            for draft in whole.values()
        ]  # fmt: skip
        assert world.same(whole, world.run(engine, prefixes)), cut


def test_neighbours_do_not_change_a_sample(engine: Any) -> None:
    alone = world.run(engine, world.drafts(1, 1))
    among = world.run(engine, world.drafts(8))
    assert np.array_equal(alone[0, 0].tokens, among[0, 0].tokens)


def test_samples_of_a_group_differ_and_repeat(engine: Any) -> None:
    first = world.run(engine, world.drafts(2, 4))
    assert len({draft.tokens.tobytes() for draft in first.values()}) == 8
    assert world.same(first, world.run(engine, world.drafts(2, 4)))
    other = world.run(engine, world.drafts(2, 4, entropy=8))
    assert not any(np.array_equal(first[place].tokens, other[place].tokens) for place in first)


def test_sampling_follows_the_policy(engine: Any, folder: Path) -> None:
    """First tokens of many samples against the policy's softmax (chi-squared over the 20 likeliest)."""
    num_samples = 1500
    work = world.drafts(1, num_samples, max_tokens=1)
    tokens = np.concatenate([draft.tokens for draft in world.run(engine, work).values()])
    every = [Draft(0, 0, work[0].prompt, 0, 1, np.array([token], np.int32)) for token in range(world.VOCAB)]
    table = np.exp(first_token_table(folder, every[0]))
    best = np.argsort(table)[-20:]
    expected = num_samples * table[best]
    chi2 = float(((np.bincount(tokens, minlength=world.VOCAB)[best] - expected) ** 2 / expected).sum())
    assert chi2 < 45.3  # 99.9 % quantile with 20 degrees of freedom


def first_token_table(folder: Path, draft: Draft) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    model.load_state_dict(world.weights(folder, 1), strict=False)
    model.tie_weights()
    with torch.no_grad():
        return model(torch.tensor([draft.prompt.tolist()])).logits[0, -1].log_softmax(-1).numpy()


# ------------------------------------------------- versions and the cache


def test_stale_prefixes_are_forgotten_at_a_load(engine: Any, folder: Path) -> None:
    world.run(engine, world.drafts(4))
    tensors = world.weights(folder, 2)
    engine.load(2, iter(tensors.items()))
    ended = world.run(engine, world.drafts(4))
    assert world.largest_gap(folder, tensors, ended) < TOLERANCE


def test_a_kept_prefix_cache_would_be_seen(
    engine: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: neither the reset nor the salt. The check above must catch it."""
    monkeypatch.setattr(engine, "_forget_prefixes", lambda: None)
    monkeypatch.setattr(engine, "_salt", lambda: 0)
    world.run(engine, world.drafts(4, entropy=9))
    tensors = world.weights(folder, 2)
    engine.load(2, iter(tensors.items()))
    ended = world.run(engine, world.drafts(4, entropy=9))
    assert world.largest_gap(folder, tensors, ended) > 100 * TOLERANCE


def test_samples_held_across_a_load_go_on_under_the_new_version(engine: Any, folder: Path) -> None:
    engine.submit(world.drafts(2))
    for _ in range(6):
        engine.step()
    late = world.drafts(4)[4:]
    engine.submit(late)  # queued, not begun
    tensors = world.weights(folder, 2)
    engine.load(2, iter(tensors.items()))
    ended = world.finish(engine)
    for place, draft in ended.items():
        assert draft.segments == (((0, 1), (6, 2)) if place[0] < 2 else ((0, 2),))
        assert len(draft.tokens) == len(draft.logprobs) == world.MAX_TOKENS
    fresh = {place: draft for place, draft in ended.items() if place[0] >= 2}
    assert world.largest_gap(folder, tensors, fresh) < TOLERANCE
    assert world.largest_gap(folder, tensors, world.run(engine, world.drafts(2))) < TOLERANCE


def test_a_sample_resumed_under_new_weights_is_exact_there(engine: Any, folder: Path) -> None:
    """Taken off, weights loaded, submitted again: the prefix is computed again with the new weights."""
    engine.submit(world.drafts(2))
    for _ in range(6):
        engine.step()
    held = engine.preempt([0, 1])
    before = {(draft.group, draft.index): draft for draft in held}
    tensors = world.weights(folder, 2)
    engine.load(2, iter(tensors.items()))
    ended = world.run(engine, held)
    for place, draft in ended.items():
        assert draft.segments == ((0, 1), (6, 2))
        assert np.array_equal(draft.logprobs[:6], before[place].logprobs)
        gap = np.abs(draft.logprobs - world.torch_logprobs(folder, tensors, draft))
        assert gap[6:].max() < TOLERANCE < gap[:6].max()


# ----------------------------------------------------------------- limits


def test_length_and_end_token(engine: Any) -> None:
    from dataclasses import replace

    whole = world.run(engine, world.drafts(2))
    assert not any(draft.truncated for draft in whole.values())
    eos = int(whole[0, 0].tokens[5])
    usual = engine.settings
    engine.settings = replace(usual, eos_id=eos)
    try:
        ended = world.run(engine, world.drafts(2))
    finally:
        engine.settings = usual
    for place, draft in ended.items():
        hits = np.flatnonzero(whole[place].tokens == eos)
        length = int(hits[0]) + 1 if len(hits) else world.MAX_TOKENS
        assert np.array_equal(draft.tokens, whole[place].tokens[:length])
        assert draft.truncated == (len(hits) == 0)
        assert draft.finish_s > 0


def test_a_complete_prefix_ends_at_once(engine: Any) -> None:
    whole = world.run(engine, world.drafts(1))
    engine.submit(list(whole.values()))
    assert engine.num_unfinished == 2
    ended = {(draft.group, draft.index): draft for draft in engine.step()}
    assert world.same(whole, ended)
    assert engine.num_unfinished == 0


def test_mixed_lengths_more_samples_than_slots_and_little_memory(engine: Any) -> None:
    """40 samples for 32 slots and a cache of 16 such samples; ends come one by one."""
    work = world.drafts(20)
    for number, draft in enumerate(work):
        draft.max_tokens = 1 + number % world.MAX_TOKENS
    ended = world.run(engine, work)
    lengths = [len(ended[draft.group, draft.index].tokens) for draft in work]
    assert lengths == [draft.max_tokens for draft in work]


def test_a_full_cache_changes_nothing(engine: Any) -> None:
    """32 samples that start in two blocks and grow to four: some are taken back and computed again."""
    before = engine.meter.recomputed_tokens
    ended = world.run(engine, world.drafts(16, max_tokens=80))
    assert engine.meter.recomputed_tokens > before
    alone = world.run(engine, world.drafts(2, max_tokens=80))
    assert all(np.array_equal(ended[place].tokens, draft.tokens) for place, draft in alone.items())


def test_too_long_is_refused(engine: Any) -> None:
    with pytest.raises(RunFault, match="raise max_model_tokens"):
        engine.submit(world.drafts(1, max_tokens=1000))


def test_preempting_tells_what_was_there(engine: Any) -> None:
    engine.submit(world.drafts(3))
    for _ in range(4):
        engine.step()
    assert sorted(engine.progress()) == [(group, index, 4) for group in range(3) for index in range(2)]
    taken = engine.preempt([1, 7])
    assert [(draft.group, draft.index, len(draft.tokens)) for draft in taken] == [(1, 0, 4), (1, 1, 4)]
    assert engine.num_unfinished == 4
    assert all(draft.finish_s == 0.0 for draft in taken)


# ----------------------------------------------------------------- faults


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "twice"])
def test_wrong_weights_change_nothing(engine: Any, folder: Path, fault: str) -> None:
    before = world.run(engine, world.drafts(2))
    tensors = list(world.weights(folder, 2).items())
    name, tensor = tensors[-1]
    wrong = {
        "missing": tensors[:-1],
        "unknown": [*tensors, ("model.extra.weight", tensor)],
        "shape": [*tensors[:-1], (name, tensor[:1])],
        "twice": [*tensors, (name, tensor)],
    }[fault]
    with pytest.raises(RunFault, match="send"):
        engine.load(2, iter(wrong))
    assert engine.version == 1
    assert world.same(before, world.run(engine, world.drafts(2)))


def test_a_load_that_breaks_half_way_stops_the_engine_until_a_whole_one(engine: Any, folder: Path) -> None:
    model = engine._worker.weight_transfer_engine.model
    load = model.load_weights
    tensors = world.weights(folder, 2)

    def breaking(stream: Iterator[Any]) -> None:
        load(item for number, item in enumerate(stream) if number < 10)
        raise OSError("gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "load_weights", breaking)
        with pytest.raises(OSError, match="gone"):
            engine.load(2, iter(tensors.items()))
    engine.submit(world.drafts(1))
    with pytest.raises(RunFault, match="cannot go on"):
        engine.step()
    engine.preempt([0])
    assert engine.version == 1
    engine.load(2, iter(tensors.items()))
    assert world.largest_gap(folder, tensors, world.run(engine, world.drafts(2))) < TOLERANCE


def test_names_and_shapes_are_those_of_the_checkpoint() -> None:
    import torch

    from bidirl.executor.backends.vllm.transfer import checked

    expected = {"a": (2,), "b": (3, 1)}
    good = [("b", torch.zeros(3, 1)), ("a", torch.zeros(2))]
    assert checked(good, expected) == good
    assert checked([("x", torch.zeros(1))], {})
    tied = [*good, ("lm_head.weight", torch.zeros(1))]
    assert checked(tied, expected) == tied
    for wrong, said in [
        (good[:1], "missing"),
        ([*good, good[0]], "twice"),
        ([*good, ("c", torch.zeros(1))], "not in"),
        ([good[0], ("a", torch.zeros(3))], "shape"),
    ]:
        with pytest.raises(RunFault, match=said):
            checked(wrong, expected)


def test_sleep_is_honest_on_cpu(engine: Any) -> None:
    assert not engine.capabilities.sleep_frees_memory
    engine.submit(world.drafts(1))
    with pytest.raises(InvariantBroken, match="take them off first"):
        engine.sleep(1)
    held = engine.preempt([0])
    engine.sleep(1)
    engine.submit(held)
    with pytest.raises(InvariantBroken, match="wake it first"):
        engine.step()
    engine.wake()
    assert len(world.finish(engine)) == 2


def test_the_meter_adds_up(engine: Any) -> None:
    engine.meter.take()
    before = engine.meter.decode_tokens
    world.run(engine, world.drafts(4))
    iterations = engine.meter.take()
    assert engine.meter.decode_tokens - before == 8 * world.MAX_TOKENS
    assert len(iterations) == world.MAX_TOKENS
    assert iterations[0].prefill_tokens > 0
    assert [one.decode_tokens for one in iterations[1:]] == [8] * (world.MAX_TOKENS - 1)
    assert [one.context_tokens for one in iterations] == [
        8 * (world.PROMPT_TOKENS + step) for step in range(world.MAX_TOKENS)
    ]
    assert all(one.seconds > 0 for one in iterations)
