from dataclasses import dataclass
from statistics import NormalDist, fmean

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.models.iteration import AffineIteration
from bidirl.models.makespan import batch_cap, expected_max_tokens, rollout_makespan_s
from bidirl.models.replica import EngineLimits, Replica, Request

ITERATION = AffineIteration(0.0143, 0.0143, 6.5e-5, 8.5e-5, 4.8e-9, 2.46e-7)  # about a 4B model on an A6000
LIMITS = EngineLimits(kv_tokens=236_000)
GROUP = 8
Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Prior:
    quantiles: tuple[float, ...]
    max_tokens: int
    prompt_mean_tokens: float


def lognormal(mean: float, sigma: float, cap: int, prompt: float, num: int = 64) -> Prior:
    mu = np.log(mean) - sigma**2 / 2
    levels = [NormalDist().inv_cdf((i + 0.5) / num) for i in range(num)]
    return Prior(tuple(float(np.clip(np.exp(mu + sigma * z), 1, cap)) for z in levels), cap, prompt)


def replicas_s(limits: EngineLimits, lengths: Lengths, prompt: int, num_replicas: int) -> float:
    """Finish ``lengths[group, sample]`` on real replica models; groups go round robin."""
    end_s = 0.0
    for r in range(num_replicas):
        replica = Replica(ITERATION, limits)
        for g in range(r, lengths.shape[0], num_replicas):
            replica.submit(
                0.0,
                [Request(g * GROUP + i, g, prompt, 0, int(n), None) for i, n in enumerate(lengths[g])],
            )
        while replica.peek() < float("inf"):
            end_s = max(end_s, replica.pop()[0])
    return end_s


def draw(rng: np.random.Generator, mean: float, sigma: float, cap: int, groups: int) -> Lengths:
    mu = np.log(mean) - sigma**2 / 2
    normal = rng.standard_normal((groups, GROUP))
    lengths: Lengths = np.clip(np.exp(mu + sigma * normal), 1, cap).astype(np.int64)
    return lengths


def test_close_to_the_replica_model_over_random_cases() -> None:
    rng = np.random.default_rng(7)
    ratios = []
    for _ in range(24):
        mean, cap = float(rng.choice([200, 600, 1500])), int(rng.choice([2048, 8192]))
        sigma, prompt = float(rng.uniform(0.2, 1.0)), int(rng.choice([50, 300, 1000]))
        num_replicas = int(rng.choice([1, 2, 4, 8]))
        groups = num_replicas * int(rng.choice([2, 8, 24]))
        limits = EngineLimits(int(rng.choice([60_000, 236_000])), max_num_seqs=int(rng.choice([64, 256])))
        prior = lognormal(mean, sigma, cap, prompt)
        real = fmean(
            replicas_s(limits, draw(rng, mean, sigma, cap, groups), prompt, num_replicas) for _ in range(8)
        )
        guess = rollout_makespan_s(
            ITERATION, limits, prior, groups * GROUP, num_replicas, samples_per_group=GROUP
        )
        ratios.append(guess / real)
    assert fmean(ratios) == pytest.approx(1.0, abs=0.05)
    assert np.median(np.abs(np.array(ratios) - 1.0)) < 0.06
    assert max(ratios) < 1.4
    assert min(ratios) > 1 / 1.4


def test_known_lengths_have_a_closed_form() -> None:
    """64 equal lengths: one prefill, then L iterations of a full batch."""
    prior = Prior((500.0,) * 64, 500, 100.0)
    base_s, context_s = ITERATION.decode(64)
    decode_s = 500 * base_s + context_s * 64 * (500 * 100 + 500 * 499 / 2)
    prefill_s = ITERATION.mixed(6400, 6400 * 101 / 2, 0, 0, 1)
    guess = rollout_makespan_s(ITERATION, LIMITS, prior, 64, 1)
    assert guess == pytest.approx(decode_s + prefill_s, rel=1e-3)
    two_waves = rollout_makespan_s(ITERATION, EngineLimits(236_000, max_num_seqs=32), prior, 64, 1)
    base_s, context_s = ITERATION.decode(32)
    wave_s = 500 * base_s + context_s * 32 * (500 * 100 + 500 * 499 / 2)
    assert two_waves == pytest.approx(2 * wave_s, rel=0.05)


@given(
    st.sampled_from([200.0, 900.0, 3000.0]),
    st.floats(0.1, 1.2),
    st.integers(1, 2000),
    st.integers(1, 16),
)
def test_more_samples_take_longer_and_more_replicas_less(
    mean: float, sigma: float, num_samples: int, num_replicas: int
) -> None:
    prior = lognormal(mean, sigma, 8192, 200.0)
    one = rollout_makespan_s(ITERATION, LIMITS, prior, num_samples, num_replicas)
    assert one > 0.0
    assert rollout_makespan_s(ITERATION, LIMITS, prior, 4 * num_samples, num_replicas) >= 0.98 * one
    assert rollout_makespan_s(ITERATION, LIMITS, prior, num_samples, 4 * num_replicas) <= 1.05 * one


@given(st.floats(0.1, 1.2), st.integers(1, 64), st.floats(0.0, 1500.0))
def test_running_samples_need_less_than_fresh_ones(sigma: float, num: int, age: float) -> None:
    prior = lognormal(900.0, sigma, 2048, 200.0)
    fresh = rollout_makespan_s(ITERATION, LIMITS, prior, num, 2)
    running = rollout_makespan_s(ITERATION, LIMITS, prior, 0, 2, ages=[age] * num)
    assert 0.0 < running <= fresh * 1.6
    both = rollout_makespan_s(ITERATION, LIMITS, prior, num, 2, ages=[age] * num)
    assert both >= 0.95 * running


def test_nothing_to_do_takes_no_time() -> None:
    assert rollout_makespan_s(ITERATION, LIMITS, lognormal(900.0, 0.5, 2048, 200.0), 0, 4) == 0.0


def test_expected_maximum_of_known_laws() -> None:
    exponential = Prior(tuple(-1000.0 * np.log(1.0 - (i + 0.5) / 64) for i in range(64)), 100_000, 1.0)
    for num in (2, 16, 512, 4096):
        harmonic = sum(1.0 / k for k in range(1, num + 1))
        assert expected_max_tokens(exponential, num) == pytest.approx(1000.0 * harmonic, rel=0.25)
    capped = lognormal(900.0, 1.0, 2048, 1.0)
    assert expected_max_tokens(capped, 10_000) == 2048
    assert expected_max_tokens(capped, 1) == fmean(capped.quantiles)


def test_batch_cap_is_the_smaller_of_sequences_and_memory() -> None:
    prior = Prior((1000.0,) * 64, 1000, 500.0)
    assert batch_cap(EngineLimits(1_000_000, max_num_seqs=64), prior) == 64
    assert batch_cap(EngineLimits(100_000), prior) == 100  # 500 prompt + 500 mean age
    assert batch_cap(EngineLimits(100_000), prior, 5) == 166  # the prompt is shared by five
    assert batch_cap(EngineLimits(100), prior) == 1
