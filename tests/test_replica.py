"""The replica against the naive engine, against closed forms, and under every interruption."""

import copy
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from random import Random
from time import perf_counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.errors import InputError
from bidirl.models.iteration import AffineIteration
from bidirl.models.replica import EngineLimits, Mark, Replica, Request, Turn
from tests.reference_engine import ReferenceEngine

ITERATION = AffineIteration(
    tau_pre_s=0.02,
    tau_dec_s=0.01,
    beta_tok_pre_s=2e-5,
    beta_tok_dec_s=3e-5,
    beta_hist_pre_s=1e-9,
    beta_hist_dec_s=1e-7,
)
ROOMY = EngineLimits(kv_tokens=100_000)


@dataclass(frozen=True)
class Call:
    name: str
    at_s: float
    args: tuple[Any, ...] = ()


def close(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-9 * max(1.0, abs(one))


def make_requests(rng: Random, capacity: int, seq: int, group: int) -> list[Request]:
    """Draw one group whose samples fit into ``capacity`` tokens."""
    prompt = rng.randint(1, min(150, capacity // 3))
    requests = []
    for i in range(rng.randint(1, 5)):
        target = rng.randint(1, min(capacity // 4, 120))
        turns: tuple[Turn, ...] | None = None
        if target >= 3 and rng.random() < 0.3:
            first = rng.randint(1, target - 1)
            turns = (
                (first, rng.randint(0, min(20, capacity // 5)), rng.choice([0.0, 0.05, 0.7])),
                (target - first, 0, 0.0),
            )
        done = rng.randint(0, target - 1) if rng.random() < 0.2 else 0
        requests.append(Request(seq + i, group, prompt, done, target, turns))
    return requests


def make_script(rng: Random) -> tuple[EngineLimits, list[Call]]:
    """Draw limits (often too small for the load) and a list of calls in time order."""
    limits = EngineLimits(
        kv_tokens=rng.choice([200, 320, 600, 5000]),
        block_size=rng.choice([1, 4, 16]),
        max_num_seqs=rng.choice([1, 3, 8, 64]),
        max_num_batched_tokens=rng.choice([64, 100, 512]),
        prefix_caching=rng.random() < 0.7,
    )
    capacity = limits.num_blocks * limits.block_size
    calls: list[Call] = []
    at_s, seq, group = 0.0, 0, 0
    for _ in range(rng.randint(1, 8)):
        at_s += rng.choice([0.0, 0.01, 2 * rng.random()])
        name = rng.choice(
            ["submit"] * 4 + ["preempt", "preempt_seqs", "preempt_all", "pause", "refresh", "progress"]
        )
        args: tuple[Any, ...] = (rng.random() < 0.5,)
        if name == "submit":
            requests: list[Request] = []
            for _ in range(rng.randint(1, 4)):
                requests += make_requests(rng, capacity, seq + len(requests), group)
                group += 1
            seq += len(requests)
            args = (requests, rng.random() < 0.3)
        elif name == "preempt":
            args = ({rng.randrange(group + 1) for _ in range(2)},)
        elif name == "preempt_seqs":
            args = ({rng.randrange(seq + 1) for _ in range(4)},)
        elif name == "pause":
            args = (rng.random() < 0.5, rng.choice([0.0, 0.5]))
        calls.append(Call(name, at_s, args))
        if name == "pause":
            at_s += args[1]
    return limits, calls


def play(engine: Replica | ReferenceEngine, calls: list[Call], *, look: bool) -> tuple[list[Any], list[Any]]:
    """Make the calls; return the answers and the groups popped. ``look``: also look ahead all the time."""
    answers: list[Any] = []
    groups: list[Any] = []
    for call in calls:
        if look and isinstance(engine, Replica):
            while engine.peek() <= call.at_s:
                groups.append(engine.pop())
            engine.boundary(call.at_s)
            engine.progress(call.at_s)
        match call.name:
            case "submit":
                engine.submit(call.at_s, call.args[0], front=call.args[1])
            case "preempt":
                answers.append(engine.preempt(call.at_s, call.args[0])[:2])
            case "preempt_seqs":
                answers.append(engine.preempt(call.at_s, seqs=call.args[0])[:2])
            case "preempt_all":
                answers.append(engine.preempt(call.at_s)[:2])
            case "pause":
                answers.append((engine.pause(call.at_s), []))
                engine.resume(call.at_s + call.args[1], recompute=call.args[0])
            case "refresh":
                engine.resume(call.at_s, recompute=call.args[0])
            case "progress" if isinstance(engine, Replica):
                answers.append((engine.boundary(call.at_s), engine.progress(call.at_s)))
            case "progress":
                assert isinstance(engine, ReferenceEngine)
                answers.append(reference_progress(engine, call.at_s))
    return answers, groups


def reference_progress(engine: ReferenceEngine, now: float) -> tuple[float, list[tuple[int, int]]]:
    """Return the first boundary at or after ``now``, and progress at the last one at or before it."""
    state = copy.deepcopy(engine)
    state.advance(now)
    boundary = state.time
    floor = copy.deepcopy(engine)
    while floor.time < now:
        before = copy.deepcopy(floor)
        if not floor.step():
            arrivals = [a for a, _, _ in floor.away if a < now]
            if not arrivals:
                break
            floor.time = min(arrivals)
        if floor.time > now:
            return boundary, before.progress()
    return boundary, floor.progress()


@given(st.integers(0, 2**32 - 1))
def test_replica_equals_the_naive_engine(seed: int) -> None:
    limits, calls = make_script(Random(seed))
    replica = Replica(ITERATION, limits)
    reference = ReferenceEngine(ITERATION, limits)
    answers, groups = play(replica, calls, look=True)
    expected, _ = play(reference, calls, look=False)
    while replica.peek() < inf:
        groups.append(replica.pop())
    reference.run_out()
    assert len(answers) == len(expected)
    for ours, real in zip(answers, expected, strict=True):
        assert close(ours[0], real[0])
        assert sorted(ours[1]) == sorted(real[1])
    finished = replica.take_finished()
    assert [seq for seq, _ in finished] == [seq for seq, _ in reference.finished]
    assert all(close(a, b) for (_, a), (_, b) in zip(finished, reference.finished, strict=True))
    assert replica.num_preemptions == reference.num_preemptions
    assert replica.num_iterations == reference.num_iterations
    assert replica.decode_tokens == reference.decode_tokens
    assert replica.prefill_tokens == reference.prefill_tokens
    assert replica.recomputed_tokens == reference.recomputed_tokens
    assert close(replica.busy_s, reference.busy)
    assert replica.num_unfinished == replica.num_running == replica.kv_used_tokens == 0
    handed_out = {g for _, g, _ in groups}
    assert handed_out <= {g for _, g, _ in reference.groups_done}


@given(st.integers(0, 2**32 - 1))
def test_looking_ahead_changes_no_bit(seed: int) -> None:
    limits, calls = make_script(Random(seed))
    results = []
    for look in (False, True):
        replica = Replica(ITERATION, limits)
        answers, _ = play(replica, calls, look=look)
        while replica.peek() < inf:
            replica.pop()
        figures = (replica.busy_s, replica.recompute_s, replica.time_s, replica.num_iterations)
        results.append((answers, replica.take_finished(), figures))
    assert results[0] == results[1]


@given(st.integers(0, 2**32 - 1))
def test_busy_intervals_add_up_and_do_not_overlap(seed: int) -> None:
    limits, calls = make_script(Random(seed))
    replica = Replica(ITERATION, limits)
    play(replica, calls, look=True)
    busy = replica.take_busy()
    while replica.peek() < inf:
        replica.pop()
    busy += replica.take_busy()
    assert all(start < end for start, end in busy)
    assert all(a[1] <= b[0] for a, b in pairwise(busy))
    assert close(sum(end - start for start, end in busy), replica.busy_s)
    assert replica.take_busy() == []


@given(st.integers(0, 2**32 - 1))
def test_every_submitted_sample_is_in_one_place(seed: int) -> None:
    limits, calls = make_script(Random(seed))
    replica = Replica(ITERATION, limits)
    submitted = [r.seq for c in calls if c.name == "submit" for r in c.args[0]]
    out: list[int] = []
    for call in calls:
        answers, _ = play(replica, [call], look=False)
        if call.name.startswith("preempt"):
            out += [seq for seq, _ in answers[0][1]]
    while replica.peek() < inf:
        replica.pop()
    out += [seq for seq, _ in replica.take_finished()]
    assert Counter(out) == Counter(submitted)


def test_one_sequence_follows_the_closed_form() -> None:
    replica = Replica(ITERATION, ROOMY)
    replica.submit(5.0, [Request(0, 0, 100, 0, 50)])
    prefill_s = 0.02 + 2e-5 * 100 + 1e-9 * 5050
    decode_s = sum(0.01 + 3e-5 + 1e-7 * (100 + k) for k in range(49))
    assert replica.peek() == pytest.approx(5.0 + prefill_s + decode_s, rel=1e-12)
    time_s, group, seqs = replica.pop()
    assert (group, seqs) == (0, [0])
    assert time_s == replica.time_s
    assert replica.peek() == inf
    assert replica.take_busy() == [(5.0, time_s)]


def test_a_sample_of_one_token_ends_with_its_prefill() -> None:
    replica = Replica(ITERATION, ROOMY)
    replica.submit(0.0, [Request(0, 0, 10, 0, 1)])
    assert replica.peek() == pytest.approx(0.02 + 2e-4 + 55e-9)
    assert replica.num_iterations == 0, "looking ahead commits nothing"
    replica.pop()
    assert replica.num_iterations == replica.decode_tokens == 1


@given(st.integers(1, 4000), st.integers(1, 4000))
def test_a_larger_batch_never_finishes_a_sample_earlier(tokens: int, other: int) -> None:
    def finish_s(requests: list[Request]) -> float:
        replica = Replica(ITERATION, ROOMY)
        replica.submit(0.0, requests)
        while replica.peek() < inf:
            replica.pop()
        return dict(replica.take_finished())[0]

    one = Request(0, 0, 100, 0, tokens)
    assert finish_s([one, Request(1, 1, 100, 0, other)]) >= finish_s([one])


def test_a_group_shares_its_prompt_and_counts_it_once() -> None:
    replica = Replica(ITERATION, ROOMY)
    replica.submit(0.0, [Request(i, 0, 101, 0, 10) for i in range(4)])
    replica.resume(0.001, recompute=False)  # interrupts: the state stands after the first iteration
    assert replica.prefill_tokens == 101 + 3 * (101 - 96)
    assert replica.kv_used_tokens == 96 + 4 * 16
    without = Replica(ITERATION, EngineLimits(kv_tokens=100_000, prefix_caching=False))
    without.submit(0.0, [Request(i, 0, 101, 0, 10) for i in range(4)])
    without.resume(0.001, recompute=False)
    assert without.prefill_tokens == 4 * 101
    assert without.kv_used_tokens == 4 * 112


def test_full_kv_memory_preempts_the_last_sequence_and_recomputes_it() -> None:
    limits = EngineLimits(kv_tokens=16 * 11, block_size=16, prefix_caching=False)
    replica = Replica(ITERATION, limits, trace=True)
    replica.submit(0.0, [Request(0, 0, 64, 0, 60), Request(1, 1, 64, 0, 60)])
    assert replica.pop()[1] == 0
    assert replica.pop()[1] == 1
    # Ten usable blocks: each prompt takes four, both take a fifth, and the sixth is missing after 80 tokens.
    assert replica.num_preemptions == 1
    assert replica.recomputed_tokens == 80
    assert replica.recompute_s > 0
    marks = replica.take_marks()
    assert [(mark, seq) for _, mark, seq in marks if mark is Mark.PREEMPTED] == [(Mark.PREEMPTED, 1)]


def test_a_cached_prefix_makes_a_preempted_sequence_cheap() -> None:
    replica = Replica(ITERATION, EngineLimits(kv_tokens=16 * 11, block_size=16))
    replica.submit(0.0, [Request(0, 0, 64, 0, 20), Request(1, 1, 64, 0, 60), Request(2, 2, 16, 0, 5)])
    while replica.peek() < inf:
        replica.pop()
    assert replica.num_preemptions >= 0
    cached = replica.prefill_tokens
    replica = Replica(ITERATION, EngineLimits(kv_tokens=16 * 11, block_size=16, prefix_caching=False))
    replica.submit(0.0, [Request(0, 0, 64, 0, 20), Request(1, 1, 64, 0, 60), Request(2, 2, 16, 0, 5)])
    while replica.peek() < inf:
        replica.pop()
    assert cached <= replica.prefill_tokens


def test_preempted_samples_resume_elsewhere_with_their_prefix() -> None:
    one, two = Replica(ITERATION, ROOMY), Replica(ITERATION, ROOMY)
    requests = [Request(i, 0, 50, 0, 10 + 100 * i) for i in range(4)]
    one.submit(0.0, requests)
    at_s, unfinished, finished = one.preempt(1.0)
    assert at_s == one.time_s >= 1.0
    assert finished == [0]
    assert [seq for seq, _ in unfinished] == [1, 2, 3]
    assert one.num_unfinished == one.kv_used_tokens == 0
    two.submit(at_s, [Request(seq, 0, 50, done, 10 + 100 * seq) for seq, done in unfinished], front=True)
    assert two.pop()[2] == [1, 2, 3]
    assert two.recomputed_tokens == sum(done for _, done in unfinished) + 49 + 2 * (49 - 48)
    assert one.decode_tokens + two.decode_tokens == sum(r.target_tokens for r in requests)


def test_finished_samples_stay_until_their_group_is_complete_or_taken() -> None:
    replica = Replica(ITERATION, ROOMY)
    replica.submit(0.0, [Request(0, 0, 50, 0, 5), Request(1, 0, 50, 0, 500), Request(2, 0, 50, 0, 900)])
    _, unfinished, handed = replica.preempt(1.0, seqs={1})
    assert [seq for seq, _ in unfinished] == [1]
    assert handed == []
    assert replica.pop()[2] == [0, 2]


def test_an_interruption_that_changes_nothing_changes_no_bit() -> None:
    def finish(interruptions: int) -> list[tuple[int, float]]:
        replica = Replica(ITERATION, EngineLimits(kv_tokens=100_000, max_num_seqs=2))
        replica.submit(0.0, [Request(i, i, 50, 0, 400 + i) for i in range(2)])
        for k in range(interruptions):
            replica.preempt(0.1 * k, groups={99})
            replica.progress(0.1 * k)
        while replica.peek() < inf:
            replica.pop()
        return replica.take_finished()

    assert finish(0) == finish(30)


def test_progress_is_exact_between_boundaries() -> None:
    replica = Replica(ITERATION, ROOMY)
    replica.submit(0.0, [Request(0, 0, 10, 0, 100)])
    assert replica.progress(0.01) == [(0, 0)]
    assert replica.progress(0.021) == [(0, 1)]
    first = 0.02 + 2e-4 + 55e-9
    second = first + 0.01 + 3e-5 + 1e-6
    assert replica.progress(second * (1 + 1e-9)) == [(0, 2)]
    assert replica.progress(second * (1 - 1e-9)) == [(0, 1)]
    assert replica.num_iterations == 0


def test_a_paused_replica_stands_still() -> None:
    replica = Replica(ITERATION, ROOMY)
    replica.submit(0.0, [Request(0, 0, 10, 0, 100)])
    at_s = replica.pause(0.5)
    tokens = replica.progress(0.5)
    assert replica.peek() == inf
    assert replica.boundary(3.0) == 3.0
    replica.submit(2.0, [Request(1, 1, 10, 0, 100)])
    assert replica.progress(3.0)[0] == tokens[0]
    replica.resume(4.0, recompute=False)
    assert replica.peek() > 4.0
    assert replica.take_busy() == [(0.0, at_s)]


def test_new_weights_recompute_every_resident_context() -> None:
    replica = Replica(ITERATION, ROOMY)
    replica.submit(0.0, [Request(i, i, 100, 0, 200) for i in range(3)])
    replica.pause(1.0)
    before = replica.prefill_tokens
    held = sum(done + 99 for _, done in replica.progress(1.0))
    replica.resume(1.5, recompute=True)
    assert replica.num_running == replica.kv_used_tokens == 0
    while replica.peek() < inf:
        replica.pop()
    assert replica.recomputed_tokens == held
    assert replica.prefill_tokens == before + held + 3
    assert replica.decode_tokens == 600


def test_a_tool_keeps_the_sample_away_and_its_answer_is_prefilled() -> None:
    turns: tuple[Turn, ...] = ((10, 30, 2.0), (5, 0, 0.0))
    replica = Replica(ITERATION, EngineLimits(kv_tokens=100_000, prefix_caching=False))
    replica.submit(0.0, [Request(0, 0, 20, 0, 15, turns)])
    time_s, _, _ = replica.pop()
    assert replica.decode_tokens == 15
    assert replica.prefill_tokens == 20 + (20 + 10 + 30)
    assert replica.recomputed_tokens == 20 + 10 - 1
    busy = replica.take_busy()
    assert len(busy) == 2
    assert busy[1][0] - busy[0][1] == pytest.approx(2.0)
    assert time_s == busy[1][1]
    cached = Replica(ITERATION, ROOMY)
    cached.submit(0.0, [Request(0, 0, 20, 0, 15, turns)])
    cached.pop()
    assert cached.prefill_tokens == 20 + (60 - 16), "its own full block was still cached"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kv_tokens": 16}, "two blocks"),
        ({"kv_tokens": 1000, "max_num_seqs": 0}, "at least 1"),
        ({"kv_tokens": 1000, "block_size": 0}, "at least 1"),
        ({"kv_tokens": 1000, "max_num_batched_tokens": 100}, "below max_num_seqs"),
    ],
)
def test_limits_without_an_engine_are_refused(values: dict[str, int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        EngineLimits(**values)  # type: ignore[arg-type]


def test_requests_that_never_fit_are_refused_and_leave_no_trace() -> None:
    replica = Replica(ITERATION, EngineLimits(kv_tokens=160))
    with pytest.raises(InputError, match="needs 145 KV tokens"):
        replica.submit(0.0, [Request(0, 0, 45, 0, 1), Request(1, 0, 45, 0, 101)])
    assert replica.num_unfinished == 0
    assert replica.peek() == inf
    replica.submit(0.0, [Request(1, 0, 45, 0, 100)])
    assert replica.pop()[2] == [1]
    with pytest.raises(ValueError, match="generated 5 < target 5"):
        replica.submit(9.0, [Request(2, 0, 45, 5, 5)])
    with pytest.raises(ValueError, match="no group"):
        replica.pop()


@pytest.mark.bench
def test_cost_does_not_grow_with_the_response_length() -> None:
    def wall_s(scale: int) -> float:
        rng = Random(1)
        best = inf
        for _ in range(3):
            replica = Replica(ITERATION, EngineLimits(kv_tokens=10_000_000))
            requests = [Request(i, i // 8, 100, 0, scale * rng.randint(1, 50)) for i in range(1600)]
            start = perf_counter()
            replica.submit(0.0, requests)
            while replica.peek() < inf:
                replica.pop()
            best = min(best, perf_counter() - start)
        return best

    # 64 times the tokens; equal ends are rarer, so there are more events, but far from 64 times as many.
    assert wall_s(64) < 6 * wall_s(1)
