"""The command ``bidirl-plan calibrate`` on small logs: files, JSON, errors of one line."""

import csv
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bidirl.models.estimate import Source
from bidirl.models.fit.file import load_fits
from bidirl.models.stages import StageModels
from bidirl.planner.build import build_plan, build_workload
from bidirl.planner.calibration.models import calibrate_plan, typical_row
from bidirl.planner.calibration.rollout import fit_rollout, row_prior
from bidirl.planner.calibration.trainer import predicted_s
from bidirl.planner.cli import app
from bidirl.planner.job import load_job
from bidirl.shell import guarded
from bidirl.traces.step_log import Mode, StepLog

COLUMNS = (
    "step",
    "generation_s",
    "old_logprob_s",
    "reference_s",
    "update_s",
    "weight_sync_s",
    "response_mean_tokens",
    "response_max_tokens",
    "prompt_mean_tokens",
)
JOB = """
[cluster]
gpu = "H100"
num_nodes = 1
gpus_per_node = 8
[model]
name = "Qwen3-8B"
[workload]
prompts_per_step = 64
samples_per_prompt = 8
max_response_tokens = 2048
lengths = { mean = 400, p95 = 900 }
prompt_tokens = 100
image_tokens = 0
num_steps = 4
old_logprob = "on"
reference = "on"
[partition]
rollout_gpus = 4
train_gpus = 4
rollout_tp = 1
train_tp = 1
[policy]
name = "no_borrow"
"""
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    def run(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = guarded(app, ["calibrate", *map(str, arguments)], "bidirl-plan")
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run


def columns(num: int = 40, seed: int = 0) -> dict[str, NDArray[np.float64]]:
    rng = np.random.default_rng(seed)
    mean, longest = rng.uniform(350.0, 450.0, num), rng.uniform(1200.0, 2048.0, num)
    tokens = mean + 100.0

    def noisy(values: object) -> NDArray[np.float64]:
        return np.asarray(values * np.exp(0.01 * rng.normal(size=num)))

    return {
        "step": np.arange(1.0, num + 1),
        "generation_s": noisy(0.04 * mean + 0.012 * longest),
        "old_logprob_s": noisy(0.4 + 0.004 * tokens),
        "reference_s": noisy(0.3 + 0.004 * tokens),
        "update_s": noisy(1.0 + 0.02 * tokens),
        "weight_sync_s": noisy(np.full(num, 2.0)),
        "response_mean_tokens": mean,
        "response_max_tokens": longest,
        "prompt_mean_tokens": np.full(num, 100.0),
    }


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "run.csv"
    table = columns()
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(zip(*(table[name] for name in COLUMNS), strict=True))
    return path


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def test_fits_alone_are_written_and_read_back(cli: Cli, log: Path, tmp_path: Path) -> None:
    out = tmp_path / "fits.json"
    code, text, _ = cli(log, "--out", out)
    assert code == 0
    assert "stages fitted" in text
    (run,) = load_fits(out)
    assert set(run.stages) >= {"generation_s", "update_s", "weight_sync_s"}
    assert run.num_steps == 40


def test_holdout_prints_the_contract(cli: Cli, log: Path) -> None:
    code, text, _ = cli(log, "--holdout-after", 25, "--json")
    assert code == 0
    data = json.loads(text)
    assert set(data) == {"holdout"}
    assert data["holdout"]["update_s"]["median_error"] < 0.03
    assert set(data["holdout"]["update_s"]) == {
        "median_error",
        "p90_error",
        "coverage",
        "baseline_mean",
        "baseline_last",
    }


def test_several_runs_are_fitted_one_by_one_and_can_be_chosen(cli: Cli, log: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text(log.read_text())
    code, text, err = cli(log, other, "--holdout-after", 25, "--json")
    assert code == 0
    assert "2 runs" in err
    assert len(json.loads(text)["runs"]) == 2
    code, text, _ = cli(log, other, "--holdout-after", 25, "--json", "--run", "other")
    assert code == 0
    assert "runs" not in json.loads(text)


def test_a_job_gets_models_that_its_file_section_reads(
    cli: Cli, log: Path, job: Path, tmp_path: Path
) -> None:
    out = tmp_path / "models.json"
    code, _, err = cli(log, "--job", job, "--out", out)
    assert code == 0
    assert "models are in" in err
    models = StageModels.load(out)
    assert models.sources["trainer.update.alpha_s"].source is Source.FITTED
    assert models.sources["iteration.tau_dec_s"].source is Source.FITTED
    assert models.provenance["kind"] == "fitted"
    assert (tmp_path / "models.fits.json").exists()
    job.write_text(JOB + f'[models]\nfile = "{out.name}"\n')
    loaded = load_job(job, [])
    plan = build_plan(loaded, build_workload(loaded, 0))
    assert plan.models.trainer == models.trainer


def test_calibrated_models_predict_what_the_log_measured(job: Path) -> None:
    loaded = load_job(job, [])
    plan = build_plan(loaded, build_workload(loaded, 0))
    table = columns(60)
    log = StepLog("test", Mode.ASYNC, "a step", table, source="test log")
    found = calibrate_plan(plan, log)
    after = replace(plan, models=found.models)
    lengths = row_prior(plan.prior(0), typical_row(log), 0)
    seconds = predicted_s(after, lengths, 512)
    for stage in ("old_logprob_s", "reference_s", "update_s"):
        assert seconds[stage] == pytest.approx(float(np.median(table[stage])), rel=0.03)
    again = fit_rollout(after, log, 512)
    assert again.prior_s == pytest.approx(float(np.median(table["generation_s"])), rel=0.05)
    assert found.models.sync.seconds(4) == pytest.approx(2.0, rel=0.03)


def test_three_steps_are_enough_to_move_the_scale_of_a_job(job: Path) -> None:
    loaded = load_job(job, [])
    plan = build_plan(loaded, build_workload(loaded, 0))
    log = StepLog("test", Mode.ASYNC, "a step", columns(3), source="test log")
    found = calibrate_plan(plan, log)
    prior_s = found.predicted_s["update_s"]
    measured = float(np.median(log.column("update_s")))
    assert abs(np.log(found.stages["update_s"].typical().value / measured)) < 0.1 * abs(
        np.log(prior_s / measured)
    )


def test_lengths_outside_the_log_flag_every_coefficient(job: Path) -> None:
    job.write_text(JOB.replace("mean = 400, p95 = 900", "mean = 1000, p95 = 1900"))
    loaded = load_job(job, [])
    plan = build_plan(loaded, build_workload(loaded, 0))
    found = calibrate_plan(plan, StepLog("test", Mode.ASYNC, "a step", columns(), source="test log"))
    assert found.models.sources["trainer.update.alpha_s"].extrapolated
    assert any("extrapolate" in note for note in found.notes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("missing.log",), "missing.log"),
        (("{log}", "--holdout-after", "0"), "--holdout-after 0"),
        (("{log}", "--holdout-after", "40"), "1 to 39"),
        (("{log}", "--holdout-after", "30", "--job", "{job}"), "leave --job out"),
        (("{log}", "--run", "nothing"), "--run nothing"),
        (("{log}", "--format", "nonsense"), "nonsense"),
        (("{log}", "--out", "/nowhere/models.json"), "cannot be written"),
    ],
)
def test_mistakes_are_one_line(
    cli: Cli, log: Path, job: Path, arguments: tuple[str, ...], words: str
) -> None:
    code, _, err = cli(*(each.format(log=log, job=job) for each in arguments))
    assert code == 2
    lines = [line for line in err.strip().splitlines() if not line.startswith("note:")]
    assert len(lines) == 1
    assert words in lines[0]


def test_several_runs_for_one_job_are_refused(cli: Cli, log: Path, job: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text(log.read_text())
    code, _, err = cli(log, other, "--job", job)
    assert code == 2
    assert "--run" in err


def test_commands_of_the_document_run(
    log: Path, job: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[1] / "docs" / "calibration.md").read_text(encoding="utf-8")
    lines = [
        line for body in re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S) for line in body.splitlines()
    ]
    assert lines
    monkeypatch.chdir(log.parent)
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == "bidirl-plan"
        assert guarded(app, arguments, program) == 0, (line, capfd.readouterr().err)
    assert job.exists()
