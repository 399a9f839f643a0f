"""Comparisons: paired intervals, verdicts that claim no more than they show, and the command."""

import csv
import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.errors import InputError, RunFault
from bidirl.planner.job import load_job
from bidirl.shell import guarded
from bidirl.sim.cli import app
from bidirl.sim.compare import (
    Comparison,
    comparison_of,
    comparison_rows,
    gain_of,
    plan_comparison,
    run_comparison,
)
from bidirl.sim.compare_plot import compare_figure
from bidirl.sim.report import compare_table, compare_verdict
from bidirl.sim.sweep_store import Result, local
from tests.test_replay import SMALL
from tests.test_report import summary_of, text_of

Call = Callable[..., tuple[int, str, str]]
FAST = ("--set", "workload.num_steps=4")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(SMALL)
    return path


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Call:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = guarded(app, [str(argument) for argument in arguments])
        return code, *capfd.readouterr()

    return run


def comparison(**tokens_per_s: tuple[float, ...]) -> Comparison:
    """Build a comparison from throughputs by seed."""
    summaries = {
        name: {seed: summary_of(wait=0.2, tokens_per_s=value) for seed, value in enumerate(values)}
        for name, values in tokens_per_s.items()
    }
    num_seeds = max(map(len, tokens_per_s.values()))
    return Comparison(tuple(tokens_per_s), tuple(range(num_seeds)), summaries)


# ------------------------------------------------------------------- intervals


def test_the_interval_is_students_on_logarithms_of_paired_ratios() -> None:
    """Ratios e^0.1, e^0.2, e^0.3: mean 0.2, s = 0.1, t(2 df, 97.5 %) = 4.3027 (any table of Student's t)."""
    one = {seed: math.exp(0.1 * (seed + 1)) * 100.0 for seed in range(3)}
    gain = gain_of(one, dict.fromkeys(range(3), 100.0))
    assert gain is not None
    reach = 4.302653 * 0.1 / math.sqrt(3)
    assert gain.ratio == pytest.approx(math.exp(0.2))
    assert (gain.low, gain.high) == pytest.approx((math.exp(0.2 - reach), math.exp(0.2 + reach)), rel=1e-6)


def test_pairing_removes_what_the_seeds_share() -> None:
    luck = [100.0, 300.0, 150.0, 220.0]
    found = comparison(first=tuple(luck), second=tuple(1.01 * each for each in luck))
    gain = found.gain("second", "first")
    assert gain is not None
    assert gain.is_sure
    assert found.winner() == "second"


def test_only_common_seeds_count_and_one_has_no_interval() -> None:
    gain = gain_of({0: 4.0, 1: 5.0}, {1: 2.5, 2: 1.0})
    assert gain is not None
    assert (gain.ratio, gain.low, gain.high, gain.by_seed) == (2.0, None, None, {1: 2.0})
    assert not gain.is_sure
    assert gain_of({0: 1.0}, {1: 1.0}) is None
    assert gain_of({0: 1.0}, {0: 0.0}) is None


POSITIVE = st.floats(1.0, 1e6)


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=2, max_size=6))
def test_swapping_the_two_inverts_the_gain(pairs: list[tuple[float, float]]) -> None:
    one, other = (dict(enumerate(values)) for values in zip(*pairs, strict=True))
    there, back = gain_of(one, other), gain_of(other, one)
    assert there is not None
    assert back is not None
    low, high = there.low or 0.0, there.high or 0.0
    assert low <= there.ratio * (1 + 1e-12)
    assert there.ratio <= high * (1 + 1e-12)
    assert there.ratio * back.ratio == pytest.approx(1.0)
    assert high * (back.low or 0.0) == pytest.approx(1.0)
    assert there.is_sure == back.is_sure or min(abs(low - 1), abs(high - 1)) < 1e-9


def test_equal_policies_are_seldom_called_different() -> None:
    """Without any difference the interval leaves out 1 in 5 % of comparisons (4 sigma of 2,000 trials)."""
    draw, trials = random.Random(5), 2_000
    wrong = 0
    for _ in range(trials):
        one, other = ({seed: math.exp(draw.gauss(0.0, 0.02)) for seed in range(5)} for _ in range(2))
        gain = gain_of(one, other)
        wrong += gain is not None and gain.is_sure
    assert abs(wrong / trials - 0.05) < 4 * math.sqrt(0.05 * 0.95 / trials)
    assert NormalDist().inv_cdf(0.975) < 2.7764  # 5 seeds need more than the normal law's reach


# -------------------------------------------------------------------- verdicts


def test_a_winner_must_surely_beat_each_other_policy() -> None:
    found = comparison(base=(100.0, 101.0, 99.0), good=(120.0, 121.0, 119.0), close=(119.0, 122.0, 118.0))
    assert found.ranked() == ["good", "close", "base"]
    assert found.winner() is None
    text = compare_verdict(found)
    assert text.startswith("cannot tell good (120 tokens/s) from close (1.003x, 95 % interval 0.9")
    assert "run more seeds; it is faster than base (1.200x, 95 % interval 1." in text


def test_a_sure_winner_is_named_with_its_intervals() -> None:
    text = compare_verdict(comparison(base=(100.0, 101.0, 99.0), good=(120.0, 121.0, 119.0)))
    assert text.startswith("good wins with 120 tokens/s: base (1.200x, 95 % interval 1.19")
    assert "cannot tell" not in text


def test_the_first_policy_can_win() -> None:
    found = comparison(base=(120.0, 121.0, 119.0), other=(100.0, 101.0, 99.0))
    assert found.winner() == "base"
    assert "0.833x (0.8" in text_of(compare_table(found))


def test_equal_runs_are_said_to_be_equal() -> None:
    text = compare_verdict(comparison(one=(100.0, 90.0), other=(100.0, 90.0)))
    assert text == "cannot tell one (95 tokens/s) from other (equally fast under every seed)"


def test_one_seed_gives_no_interval_and_no_winner() -> None:
    found = comparison(base=(100.0,), good=(200.0,))
    assert found.winner() is None
    assert compare_verdict(found).startswith("cannot tell, one seed gives no interval: good has 200 tokens/s")
    assert "2.000x" in text_of(compare_table(found))


def test_policies_without_a_result_stay_visible() -> None:
    results = [Result("a 0", summary_of(tokens_per_s=10.0), None), Result("b 0", None, "too small: add GPUs")]
    found = comparison_of(("a", "b"), (0,), results)
    assert compare_verdict(found) == (
        "cannot tell: a alone has a result; b has no result: too small: add GPUs"
    )
    assert "n/a" in text_of(compare_table(found))
    rows = comparison_rows(found)
    assert [row["error"] for row in rows] == [None, "too small: add GPUs"]
    assert rows[0]["speed_up"] == 1.0
    assert compare_verdict(comparison_of(("a", "b"), (0,), [])).startswith("cannot tell: no policy has a")
    assert compare_figure(found) is not None
    assert compare_figure(comparison_of(("a", "b"), (0,), [])) is None


def test_different_numbers_of_gpus_give_a_speed_up_per_gpu() -> None:
    """Case C07: 2.56x by tokens/s per GPU is not the speed-up of the job. Source: NVIDIA-NeMo/RL#1381."""
    sync, async_ = 187.0, 478.0
    runs = {
        "sync": summary_of(tokens_per_s=sync * 32, tokens_per_s_per_gpu=sync, gpus=_gpus(32)),
        "async": summary_of(tokens_per_s=async_ * 40, tokens_per_s_per_gpu=async_, gpus=_gpus(40)),
    }
    found = Comparison(tuple(runs), (0,), {name: {0: summary} for name, summary in runs.items()})
    assert "per GPU it is 2.556x sync (40 against 32 GPUs)" in compare_verdict(found)
    data = found.to_json()["policies"][1]
    assert data["speed_up"]["ratio"] == pytest.approx(2.556 * 40 / 32, rel=1e-3)
    assert data["speed_up_per_gpu"]["ratio"] == pytest.approx(2.556, rel=1e-3)


def _gpus(total: int) -> dict[str, int]:
    return {"rollout": total // 2, "train": total // 2, "total": total}


# --------------------------------------------------------------------- command


def test_compare_prints_verdict_and_table_and_writes_files(call: Call, job: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("compare", job, "--policies", "no_borrow, bidirl", "--seeds", 2, "--seed", 3, *FAST)
    code, text, err = call(*arguments, "--out", out)
    assert code == 0
    assert "Comparison (means over 2 seeds" in text
    assert "compare.csv, compare.png and resolved.json are in" in err
    assert {path.name for path in out.iterdir()} == {"compare.csv", "compare.png", "resolved.json"}
    with (out / "compare.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["policy"], row["seed"]) for row in rows] == [
        ("no_borrow", "3"),
        ("no_borrow", "4"),
        ("bidirl", "3"),
        ("bidirl", "4"),
    ]
    assert [float(row["speed_up"]) for row in rows[:2]] == [1.0, 1.0]
    for row, base in zip(rows[2:], rows, strict=False):
        assert float(row["speed_up"]) == float(row["tokens_per_s"]) / float(base["tokens_per_s"])
    provenance = json.loads((out / "resolved.json").read_text())["provenance"]
    assert provenance["seeds"] == [3, 4]
    assert list(provenance["policies"]) == ["no_borrow", "bidirl"]


def test_resolved_json_is_a_job_that_compares_the_same(call: Call, job: Path, tmp_path: Path) -> None:
    arguments = ("--policies", "train_on_rollout,bidirl,colocated_sync", "--seeds", 1, "--json")
    _, first, _ = call("compare", job, *arguments, *FAST, "--out", tmp_path / "out")
    _, again, _ = call("compare", tmp_path / "out" / "resolved.json", *arguments)
    assert json.loads(first) == json.loads(again)


def test_json_is_one_object_and_same_in_any_number_of_processes(job: Path) -> None:
    planned = plan_comparison(job, "no_borrow,bidirl", ["workload.num_steps=3"], 0, 2)
    from rich.console import Console

    quiet = Console(file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    found = run_comparison(planned, local(1), quiet)
    reverse = run_comparison(planned, lambda call, tasks: map(call, reversed(tasks)), quiet)
    assert json.dumps(found.to_json()) == json.dumps(reverse.to_json())
    alone = plan_comparison(job, "bidirl,no_borrow", ["workload.num_steps=3"], 1, 1)
    other = run_comparison(alone, local(1), quiet)
    assert other.values("bidirl", "tokens_per_s")[1] == found.values("bidirl", "tokens_per_s")[1]


def test_a_fault_of_one_run_is_a_fault(job: Path) -> None:
    from rich.console import Console

    planned = plan_comparison(job, "no_borrow,bidirl", [], 0, 1)
    broken = Result("bidirl 0", None, "bug in bidirl: ValueError: oops", is_fault=True)
    with pytest.raises(RunFault, match="bidirl 0: bug in bidirl"):
        run_comparison(planned, lambda *_: iter([broken]), Console(stderr=True))


def test_no_result_at_all_exits_1(call: Call, job: Path, tmp_path: Path) -> None:
    arguments = ("--policies", "no_borrow,bidirl", "--seeds", 1, "--set", "engine.kv_tokens=1040")
    code, out, err = call("compare", job, *arguments, "--out", tmp_path / "out")
    assert code == 1
    assert out.startswith("cannot tell: no policy has a result")
    assert err.splitlines()[-1].startswith("no policy has a result: ")
    assert (tmp_path / "out" / "compare.csv").exists()
    assert not (tmp_path / "out" / "compare.png").exists()


def test_without_a_partition_the_pools_are_told(call: Call, job: Path) -> None:
    job.write_text(SMALL.replace("[partition]\nrollout_gpus = 2\n", ""))
    code, _, err = call("compare", job, "--policies", "no_borrow,bidirl", "--seeds", 1, *FAST)
    assert code == 0
    assert "the planner chose rollout + training GPUs" in err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (
            ["--policies", "no_borow,bidirl"],
            "--policies no_borow: no preset has this name; did you mean no_b",
        ),
        (["--policies", "bidirl"], "one policy has nothing to compare with"),
        (["--policies", "bidirl,bidirl"], "bidirl is given twice"),
        (["--policies", "bidirl,"], "--policies '': no preset has this name"),
        (["--policies", "bidirl,no_borrow", "--set", "policy.name=oracle"], "leave the --set out"),
        (["--policies", "bidirl,no_borrow", "--set", "policy.stalenes=1"], "did you mean staleness?"),
        (["--policies", "no_borrow,bidirl", "--set", "partition.rollout_tp=4"], "rollout_gpus"),
        (["--policies", "no_borrow,bidirl", "--seeds", "0"], "--seeds"),
        ([], "Missing option '--policies'"),
    ],
)
def test_bad_input_is_exit_2_before_anything_runs(
    arguments: list[str], part: str, call: Call, job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bidirl.sim.compare.compute", None)
    code, out, err = call("compare", job, *arguments, "--out", tmp_path / "out")
    assert (code, out) == (2, "")
    assert part in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_a_policy_that_the_job_cannot_run_is_named(job: Path) -> None:
    sets = ["partition.placement=colocated", "policy.staleness=0"]
    with pytest.raises(InputError, match="policy bidirl lends between two pools") as caught:
        plan_comparison(job, "no_borrow,bidirl", sets, 0, 1)
    assert "no_borrow" not in str(caught.value)


def test_the_jobs_own_choices_stay(job: Path) -> None:
    planned = plan_comparison(job, "no_borrow,bidirl", ["policy.chunk_groups=2"], 0, 1)
    assert {planned_job.policy.chunk_groups for planned_job in planned.jobs.values()} == {2}
    assert planned.resolved["policy"] == {"name": "bidirl", "staleness": "0.1", "chunk_groups": 2}
    assert planned.jobs["bidirl"] == load_job(job, ["policy.chunk_groups=2", 'policy.name="bidirl"'])
