"""The paper's numbers: every row is answered or said to be unanswerable; nothing is fitted but one number."""

import csv
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from bidirl.planner.build import build_plan, build_workload
from bidirl.shell import guarded
from bidirl.sim.cli import app
from bidirl.sim.reality import paper, reviewers
from bidirl.sim.reality.excluded import excluded, memory_reason
from bidirl.sim.reality.paper import NOT_SIMULATED, REASONS, Comparison, PaperRow, compare_with_paper
from bidirl.sim.reality.paper_cells import (
    ASYNC_BASELINES,
    SEED,
    Setting,
    num_steps,
    planned_split,
    rates,
    scaled_trainer,
    splits,
    unsupported_reason,
)
from bidirl.sim.reality.paper_report import paper_markdown
from bidirl.sim.reality.paper_rows import (
    ANSWERS,
    COLOCATED,
    FIT_KEY,
    Answer,
    Effort,
    Key,
    Points,
    Span,
    speed_up,
)
from bidirl.sim.reality.reviewers import Case, plan_of
from bidirl.sim.reality.table import published

ROOT = Path(__file__).parents[1]
SMALL = Effort(2, Points.ENDS)
SCALE = 1.5


def canned(verdict: str = "inside") -> Comparison:
    ours = {"inside": Span(1.3, 1.4), "outside": Span(1.0, 1.4)}[verdict]
    row = PaperRow(
        "speedup", "H100 default", "x", 1.23, 1.47, ours, Span(1.2, 1.2), ours, ours, 3, reason="why"
    )
    fitted = PaperRow(*FIT_KEY, "x", 1.45, 1.45, Span(1.45, 1.45), num_settings=1, used_for_fit=True)
    other = PaperRow("mean reward gap", "s=1", "", 0.02, 0.02, None, reason="learning, not time")
    return Comparison(1.5, (row, fitted, other))


def test_every_printed_row_is_answered_or_listed() -> None:
    rows = [(row["quantity"], row["setting"]) for row in published("bidirl_paper_numbers")]
    assert len(rows) == len(set(rows))
    assert {key for key in rows if key not in ANSWERS} == {key for key in rows if key[0] in NOT_SIMULATED}
    assert set(ANSWERS) - {COLOCATED} <= set(rows)
    assert set(REASONS) <= set(ANSWERS)


@pytest.mark.parametrize(
    ("span", "inside"),
    [
        (Span(1.11, 1.61), True),
        (Span(1.10, 1.61), False),
        (Span(1.11, 1.62), False),
        (Span(1.3, 1.3), True),
    ],
)
def test_inside_is_the_printed_range_and_a_tenth(span: Span, inside: bool) -> None:
    row = PaperRow("speedup", "H100 default", "x", 1.23, 1.47, span)
    assert row.inside is inside
    assert row.verdict == ("inside" if inside else "outside")


def test_the_fit_finds_the_scale_that_gives_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(scale: float, effort: Effort) -> Answer:
        assert effort.measured_steps == 1
        return Answer(Span(1.45 + (scale - 1.7), 2.0), 1)

    monkeypatch.setattr(paper, "ANSWERS", {FIT_KEY: answer})
    assert paper.fit_trainer_scale(Effort(1)) == pytest.approx(1.7, abs=1 / 16)


def test_rows_keep_their_place_and_those_that_miss_get_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(scale: float, effort: Effort) -> Answer:
        return Answer(Span(0.5, scale), 2, Span(1.0, 1.0))

    monkeypatch.setattr(paper, "ANSWERS", dict.fromkeys(ANSWERS, answer))
    monkeypatch.setattr(paper, "fit_trainer_scale", lambda _: 1.25)
    heard: list[str] = []
    found = compare_with_paper(Effort(1), heard.append)
    keys: list[Key] = [(row.quantity, row.setting) for row in found.rows]
    assert keys[:-1] == [(row["quantity"], row["setting"]) for row in published("bidirl_paper_numbers")]
    assert keys[-1] == COLOCATED
    for row in found.rows:
        if row.ours is None:
            assert row.reason
        else:
            assert row.ours == Span(0.5, 1.25)
            assert row.prior == Span(0.5, 1.0)
            assert row.inside is False
            assert row.reason
    assert len(heard) == len(ANSWERS) + 1
    assert [row.used_for_fit for row in found.rows].count(True) == 1


def test_the_scale_touches_compute_of_the_trainer_only() -> None:
    job = Setting().job("bidirl", 8, 2)
    models = build_plan(job, build_workload(job, SEED)).models
    scaled = scaled_trainer(models, 2.0)
    assert scaled.trainer.update.alpha_s == 2.0 * models.trainer.update.alpha_s
    assert scaled.trainer.update.tau_s == models.trainer.update.tau_s
    back = replace(
        scaled.trainer,
        **{name: getattr(models.trainer, name) for name in ("old_logprob", "reference", "update")},
    )
    assert replace(scaled, trainer=back) == models


def test_baselines_refuse_what_the_paper_says_they_refuse() -> None:
    half = Setting(staleness="0.5")
    assert [bool(unsupported_reason(policy, half, 8)) for policy in ASYNC_BASELINES] == [False, True, True]
    assert unsupported_reason("areal", Setting(), 12)
    assert not unsupported_reason("areal", Setting(), 8)
    assert set(rates(half, ASYNC_BASELINES, 8, 1.0, 1)) == {"verl_fully_async"}


@pytest.mark.parametrize(("staleness", "expected"), [("0", 3), ("0.5", 4), ("1", 4), ("4", 10)])
def test_head_and_tail_are_run_on_top(staleness: str, expected: int) -> None:
    assert num_steps(Setting(staleness=staleness), 2) == expected


def test_a_longer_response_leaves_less_to_borrow_on_the_equal_split() -> None:
    """The paper: 1.55, 1.45, 1.27 for 1K, 2K, 4K."""
    short, long = (speed_up(Setting(max_response_tokens=1024 * kilo), SCALE, SMALL)[1] for kilo in (1, 4))
    assert short > long > 1.0


def test_borrowing_does_not_beat_colocated_on_policy() -> None:
    """The paper: about equal at s = 0."""
    answer = ANSWERS[COLOCATED](SCALE, SMALL)
    assert 0.8 < answer.main.low < 1.1


def test_the_planned_split_is_one_of_those_tried() -> None:
    setting = Setting()
    assert splits(setting) == (4, 8, 12)
    assert planned_split(setting, SCALE) in splits(setting)
    assert planned_split(setting, 8.0) == 4  # a slow trainer gets the GPUs


def test_the_command_prints_rows_and_writes_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(paper, "compare_with_paper", lambda effort, tell: canned("outside"))
    assert guarded(app, ["paper", "--quick", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("0 of 1 predicted rows lie inside")
    assert "outside: speedup, H100 default: why" in shown
    assert "FITTED on one row" in shown
    with (tmp_path / "paper.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["verdict"] for row in rows] == ["outside", "fitted", "not by simulation"]
    assert float(rows[0]["ours_low"]) == 1.0
    assert (tmp_path / "paper.md").read_text(encoding="utf-8") == paper_markdown(canned("outside"))
    assert guarded(app, ["paper", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["num_fitted_parameters"] == 1
    assert data["rows"][0]["ours"] == {"low": 1.0, "high": 1.4}
    assert data["rows"][2]["inside"] is None


def test_the_table_has_a_row_for_each_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "compare_with_paper", lambda effort: canned())
    table = paper.table()
    assert [row.measured for row in table.rows] == [1.23, 1.47, 1.45, 0.02]
    assert [row.predicted for row in table.rows] == [1.3, 1.4, 1.45, None]
    assert table.num_fitted == 1
    assert "1.45" in table.to_markdown()


# ------------------------------------------------------------------ reviewers


def test_networks_and_switches_are_scaled_apart() -> None:
    case = Case(Setting(), "bidirl", 8, 1.0, 1)
    base, slow = plan_of(case), plan_of(replace(case, network=0.25, switch=3.0))
    receivers = base.rollout_replicas
    assert slow.models.sync.seconds(receivers) > base.models.sync.seconds(receivers)
    assert slow.models.switch.grad_s == pytest.approx(3.0 * base.models.switch.grad_s)
    wide = plan_of(replace(case, choices=(("max_chunks_per_pull", 2),)))
    assert wide.policy.max_chunks_per_pull == 2
    assert wide.models == base.models


def test_a_case_runs_and_its_gain_is_over_the_same_job() -> None:
    case = Case(Setting(prompts=16), "no_borrow", 8, 1.0, 1)
    assert reviewers._gain(case) == 0.0


def test_excluded_configurations_have_reasons_with_numbers() -> None:
    section = excluded(1.0, 1)
    assert {row[1] for row in section.rows} == {"unsupported", "out of memory"}
    assert all(any(sign.isdigit() for sign in row[2]) for row in section.rows)
    assert not memory_reason(Setting(), 8)
    assert "does not fit" in memory_reason(Setting(model="Qwen3-32B"), 8)


# ------------------------------------------------------------------ docs/validation.md


@pytest.fixture(scope="module")
def validation() -> ModuleType:
    spec = importlib.util.spec_from_file_location("validation", ROOT / "benchmarks" / "validation.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_names_every_row_and_parameter() -> None:
    text = (ROOT / "docs" / "validation.md").read_text(encoding="utf-8")
    for row in published("bidirl_paper_numbers"):
        assert f"{row['quantity']}: {row['setting']}" in text
    for one in paper.parameters(1.0):
        assert f"| {one.name} |" in text
    for name in ("validation.png", "validation_paper.png"):
        assert f"({name})" in text
        assert (ROOT / "docs" / name).exists()


def test_the_overview_counts_what_was_fitted(validation: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "compare_with_paper", lambda effort: canned())
    line = validation.overview({"paper": paper.table()}).splitlines()[-1]
    assert line.startswith("| The paper's numbers | 4 | 1 | 10 |")
    assert "5.7%" in line
