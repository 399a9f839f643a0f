import json
from math import exp, log
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.errors import InputError
from bidirl.traces.length_fit import LengthStats, fit_length_law, spread_sigma
from bidirl.traces.length_sources import packaged_law, packaged_names, read_observed
from bidirl.traces.lengths import Component, LengthLaw, empirical, log_normal, mixture
from bidirl.traces.normal import normal_cdf, normal_scores

PACKAGE_DATA = Path(__file__).parents[1] / "bidirl" / "traces" / "data" / "lengths.json"
LAWS: dict[str, Any] = json.loads(PACKAGE_DATA.read_text(encoding="utf-8"))["laws"]
FITS = [(name, row) for name, entry in sorted(LAWS.items()) for row in entry["fits"]]
NORMAL = NormalDist()
MIDPOINTS = (np.arange(20_000) + 0.5) / 20_000


def statistic(law: LengthLaw, name: str) -> float:
    match name:
        case "mean":
            return law.mean_tokens
        case "truncated":
            return law.truncated_share
        case "sd":
            return float(law.sample(MIDPOINTS).std())
        case "batches_of_512_over_9000":
            return 1.0 - (1.0 - law.survival(9000)) ** 512
        case _:
            return law.quantile(int(name.removeprefix("p")) / 100)


def censored_mean(median: float, sigma: float, cap: float) -> float:
    score = (log(cap) - log(median)) / sigma
    whole = exp(log(median) + sigma * sigma / 2)
    return whole * NORMAL.cdf(score - sigma) + cap * NORMAL.cdf(-score)


@pytest.mark.parametrize(
    ("name", "row"), FITS, ids=lambda value: value if isinstance(value, str) else value["statistic"]
)
def test_packaged_laws_reproduce_the_published_statistics(name: str, row: dict[str, Any]) -> None:
    fitted = statistic(packaged_law(name, row["max_tokens"]), row["statistic"])
    # 6 %: the widest residual is the mean of DAPO at 7,168 (5.1 %), five steps of 2,875 to 4,698 tokens
    assert fitted == pytest.approx(row["published"], rel=0.06)


@pytest.mark.parametrize("cap", [512, 256])
def test_gsm8k_predicts_the_means_under_shorter_caps(cap: int) -> None:
    (row,) = [row for row in LAWS["gsm8k"]["checks"] if row["max_tokens"] == cap]
    assert packaged_law("gsm8k", cap).mean_tokens == pytest.approx(row["published"], rel=0.05)


def test_every_packaged_law_says_what_stands_behind_it() -> None:
    assert packaged_names() == ("dapo_math_17k", "geo3k", "gsm8k", "long_tail_agentic")
    assert {name: packaged_law(name, 2048).assumed for name in packaged_names()} == {
        "dapo_math_17k": False,
        "geo3k": True,
        "gsm8k": False,
        "long_tail_agentic": True,
    }
    assert all(packaged_law(name, 2048).source for name in packaged_names())
    assert any("ASSUMED" in note for note in packaged_law("geo3k", 2048).notes)
    with pytest.raises(InputError, match="is not packaged: use one of dapo_math_17k, geo3k"):
        packaged_law("gsm9k", 2048)


def test_normal_scores_match_the_exact_ones() -> None:
    u = np.array([1e-12, 1e-6, 0.01, 0.3, 0.5, 0.7, 0.999, 1 - 1e-9])
    exact = [NORMAL.inv_cdf(p) for p in u.tolist()]
    assert normal_scores(u) == pytest.approx(exact, abs=5e-6)
    assert normal_cdf(np.array(exact)) == pytest.approx(u)


@given(st.floats(20, 20_000), st.floats(0.05, 2.0), st.integers(1, 30_000))
def test_log_normal_mean_is_the_closed_form(median: float, sigma: float, cap: int) -> None:
    law = log_normal(median, sigma, cap, label="l", source="s")
    assert law.mean_tokens == pytest.approx(censored_mean(median, sigma, cap), rel=1e-5)
    assert law.truncated_share == pytest.approx(NORMAL.cdf((log(median) - log(cap)) / sigma), abs=1e-9)


@given(st.lists(st.floats(1e-9, 1 - 1e-9), min_size=1, max_size=50), st.integers(1, 5000))
def test_samples_stay_within_bounds_and_ascend(u: list[float], cap: int) -> None:
    for name in packaged_names():
        tokens = packaged_law(name, cap).sample(np.sort(np.array(u)))
        assert tokens.dtype == np.int64
        assert tokens.min() >= 1
        assert tokens.max() <= cap
        assert (np.diff(tokens) >= 0).all()


@given(st.floats(0.001, 0.999))
def test_quantile_and_survival_are_inverse_below_the_cap(p: float) -> None:
    for name in packaged_names():
        law = packaged_law(name, 10**9)
        assert law.survival(law.quantile(p)) == pytest.approx(1.0 - p, abs=1e-6)


def test_mixture_quantiles_are_exact_enough() -> None:
    parts = [Component(0.5, 1400.0, 0.3), Component(0.5, 8000.0, 0.5)]
    law = mixture(parts, 10**9, label="l", source="s")
    for p in (1e-7, 1e-4, 0.01, 0.2, 0.5, 0.8, 0.99, 1 - 1e-4, 1 - 1e-7):
        x = log(law.quantile(p))
        share = sum(c.weight * NORMAL.cdf((x - log(c.median_tokens)) / c.sigma) for c in parts)
        density = sum(c.weight / c.sigma * NORMAL.pdf((x - log(c.median_tokens)) / c.sigma) for c in parts)
        assert abs(share - p) / density < 2e-4  # error of ln tokens


def test_censoring_leaves_the_law_alone() -> None:
    law = packaged_law("geo3k", 4096)
    short = law.capped(1024)
    assert short.quantile(0.3) == law.quantile(0.3)
    assert short.quantile(0.9) == 1024.0
    assert short.survival(1023.0) == law.survival(1023.0)
    assert short.survival(1024.0) == 0.0
    assert short.truncated_share == pytest.approx(law.survival(1024.0))
    tokens, truncated = short.sample_scores(np.array([-1.0, 0.0, 3.0]))
    assert truncated.tolist() == [False, True, True]
    assert tokens[1:].tolist() == [1024, 1024]


def test_scaling_multiplies_uncensored_lengths() -> None:
    law = packaged_law("gsm8k", 4096)
    assert law.scaled(1.5).quantile(0.4) == pytest.approx(1.5 * law.quantile(0.4))
    assert law.scaled(1.0) is law


@pytest.mark.parametrize(
    "given_stats",
    [
        {"p50": 600.0, "p95": 1800.0},
        {"mean": 700.0, "p50": 600.0},
        {"mean": 700.0, "p95": 1800.0},
        {"mean": 700.0, "truncated": 0.02},
        {"p50": 600.0, "truncated": 0.02},
        {"p95": 1800.0, "truncated": 0.02},
        {"mean": 760.0, "p50": 600.0, "p95": 1800.0},
        {"mean": 760.0, "p50": 600.0, "p95": 1800.0, "truncated": 0.04},
        {"mean": 1000.0, "p50": 900.0, "p95": 2048.0, "truncated": 0.12},
        {"mean": 700.0, "sigma": 0.5},
        {"p95": 1500.0, "sigma": 0.5},
        {"mean": 700.0},
        {"p50": 700.0},
    ],
    ids=" ".join,
)
def test_tables_are_met_exactly(given_stats: dict[str, float]) -> None:
    stats = LengthStats(**{**dict.fromkeys(LengthStats._fields), "max_tokens": 2048, **given_stats})  # type: ignore[arg-type]
    law = fit_length_law(stats, label="l", source="s")
    for name, value in given_stats.items():
        if name != "sigma":
            assert statistic(law, name) == pytest.approx(value, rel=1e-4)
    assert law.assumed == (len(given_stats) == 1)
    assert any("assumed" in note for note in law.notes) == law.assumed


@given(st.floats(50, 3000), st.floats(0.1, 1.5), st.integers(200, 8000))
def test_a_fit_recovers_the_law_that_made_the_statistics(median: float, sigma: float, cap: int) -> None:
    truth = log_normal(median, sigma, cap, label="l", source="s")
    if truth.truncated_share > 0.04:
        return
    stats = LengthStats(truth.mean_tokens, None, truth.quantile(0.95), None, None, cap)
    fitted = fit_length_law(stats, label="l", source="s")
    assert fitted.quantile(0.5) == pytest.approx(truth.quantile(0.5), rel=0.02)


def test_a_stated_cap_is_the_statistics_and_not_the_runs() -> None:
    stats = LengthStats(700.0, None, 1800.0, None, None, 2048)
    law = fit_length_law(stats, label="l", source="s")
    assert law.mean_tokens == pytest.approx(700.0, rel=1e-4)
    assert law.capped(1024).mean_tokens < 700.0 < law.capped(8192).mean_tokens + 1.0


def test_spread_has_its_mean_and_p95() -> None:
    sigma = spread_sigma(2.0, 5.0)
    assert exp(log(2.0) - sigma**2 / 2 + NORMAL.inv_cdf(0.95) * sigma) == pytest.approx(5.0)
    assert spread_sigma(3.0, 3.0) == 0.0


def test_observed_lengths_are_reproduced_and_never_left() -> None:
    rng = np.random.default_rng(3)
    observed = np.rint(rng.lognormal(6.0, 0.5, 400)).astype(int)
    law = empirical(observed.tolist(), 10**6, label="l", source="s")
    drawn = law.sample(MIDPOINTS)
    assert drawn.min() == observed.min()
    assert drawn.max() == observed.max()
    assert drawn.mean() == pytest.approx(observed.mean(), rel=0.01)
    assert np.quantile(drawn, 0.9) == pytest.approx(np.quantile(observed, 0.9), rel=0.01)
    assert empirical([7], 100, label="l", source="s").sample(MIDPOINTS[:3]).tolist() == [7, 7, 7]


def test_observed_lengths_above_the_cap_are_cut_with_a_note() -> None:
    law = empirical([100, 200, 300, 5000], 1000, label="l", source="s")
    assert law.sample(np.array([0.99])).tolist() == [1000]
    assert law.notes == (
        "1 of 4 observed lengths exceed max_response_tokens=1000 and count as truncated there",
    )
    cut = empirical([100] * 8 + [512] * 2, 1000, label="l", source="s")
    assert "20% of the observed lengths equal their maximum 512" in cut.notes[0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "step,response_tokens\n1,10\n1,30\n2,20\n"),
        ("a.txt", "# seen in June\n10\n\n30\n20\n"),
        ("a.json", "[10, 30, 20]"),
        ("b.csv", "response_tokens\n10.0\n20.0\n30.0\n"),
        ("c.csv", "10\n20\n30\n"),
    ],
)
def test_files_of_lengths(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    law = read_observed(path, 100)
    assert law.label == "3 observed lengths"
    assert law.source == name
    assert law.sample(np.array([0.001, 0.5, 0.999])).tolist() == [10, 20, 30]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.txt", "", "holds no observed length"),
        ("a.txt", "# nothing\n", "holds no observed length"),
        ("a.csv", "response_tokens\n", "holds no observed length"),
        ("a.csv", "step,length\n1,2\n", "columns step, length: name the column of lengths response_tokens"),
        ("a.csv", "step,response_tokens\n1\n", "a.csv:2: 1 columns, response_tokens is column 2"),
        ("a.txt", "10\n-3\n", "a.txt:2: -3 is not a response length"),
        ("a.txt", "10\n0\n", "a.txt:2: 0 is not a response length"),
        ("a.txt", "10\n2.5\n", "a.txt:2: 2.5 is not a whole number of tokens"),
        ("a.txt", "10\nmany\n", "a.txt:2: 'many' is not a whole number"),
        ("a.txt", "10\nnan\n", "a.txt:2: nan is not a whole number"),
        ("a.txt", "10\ninf\n", "a.txt:2: inf is not a whole number"),
        ("a.json", "[10, true]", "item 1: True is not a whole number"),
        ("a.json", "[10, ", "a.json:1: not JSON"),
        ("a.json", '{"a": 1}', "a JSON dict: give a list of integers"),
        ("a.json", "[]", "holds no observed length"),
        ("a.json", "[1e300]", "is not a response length"),
        ("a.txt", b"\xff\xfe\x00", "not UTF-8 text"),
    ],
)
def test_malformed_files_are_refused_in_one_line(
    tmp_path: Path, name: str, text: str | bytes, expected: str
) -> None:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError) as caught:
        read_observed(path, 100)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_fast_enough_to_draw_beside_a_simulation() -> None:
    # A ratio, not seconds: 20,480 lengths from a mixture cost at most 60 times their random numbers.
    from time import perf_counter

    rng = np.random.default_rng(0)
    law = packaged_law("dapo_math_17k", 4096)
    law.sample(MIDPOINTS)

    def best(action: Any) -> float:
        times = []
        for _ in range(5):
            start = perf_counter()
            action()
            times.append(perf_counter() - start)
        return min(times)

    assert best(lambda: law.sample(MIDPOINTS)) < 60 * best(lambda: rng.standard_normal(20_480))
