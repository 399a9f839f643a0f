"""``bidirl-run``: what it writes, its exit codes, and one line for every mistake."""

import csv
import json
from pathlib import Path

import pytest

from bidirl.executor.cli import app
from bidirl.shell import guarded

TINY = str(Path(__file__).parents[1] / "examples" / "tiny.toml")
SMALL = ["--set", "model.architecture.vocab_size=16", "--set", "workload.max_response_tokens=24"]
SHORT = ["--set", "workload.lengths={p50 = 8, p95 = 20}"]


def run(*arguments: str) -> int:
    return guarded(app, list(arguments), "bidirl-run")


def test_train_on_stage_models_is_the_simulator_s_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from bidirl.sim.cli import app as sim_app

    assert run("train", TINY, "--backend", "fake", "--out", str(tmp_path / "real")) == 0
    assert guarded(sim_app, ["run", TINY, "--out", str(tmp_path / "sim")]) == 0
    capsys.readouterr()
    names = {"resolved.json", "summary.json", "steps.csv", "samples.csv", "journal.jsonl", "trace.json"}
    for folder in ("real", "sim"):
        assert names <= {path.name for path in (tmp_path / folder).iterdir()}
    for name in ("journal.jsonl", "samples.csv", "steps.csv", "resolved.json"):
        assert (tmp_path / "real" / name).read_bytes() == (tmp_path / "sim" / name).read_bytes()


def test_json_is_all_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", TINY, "--backend", "fake", "--json", "--steps", "6", "--policy", "no_borrow") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ledger"]["samples"]["trained"] == 6 * 8 * 4


def test_a_plan_of_the_search_decides_partition_and_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from bidirl.planner.cli import app as plan_app

    four = ["--set", "cluster.gpus_per_node=4"]
    assert guarded(plan_app, ["search", TINY, "--top", "0", "--out", str(tmp_path), *four]) == 0
    chosen = json.loads((tmp_path / "plan.json").read_text())["plan"]
    out = tmp_path / "run"
    plan = str(tmp_path / "plan.json")
    assert run("train", TINY, "--plan", plan, "--backend", "fake", "--out", str(out), *four) == 0
    resolved = json.loads((out / "resolved.json").read_text())
    assert resolved["policy"]["name"] == chosen["policy"]["name"]
    if chosen["placement"] == "disaggregated":
        assert resolved["partition"]["rollout_gpus"] == chosen["rollout_gpus"]
    capsys.readouterr()


def test_neutral_says_what_is_proven(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zero = ["--set", "policy.staleness=0", "--set", "cluster.gpus_per_node=4"]
    code = run(
        "neutral",
        TINY,
        "--backend",
        "fake",
        "--steps",
        "6",
        "--json",
        "--out",
        str(tmp_path),
        *SMALL,
        *SHORT,
        *zero,
    )
    data = json.loads(capsys.readouterr().out)
    assert data == json.loads((tmp_path / "neutral.json").read_text())
    assert data["difference"] is None
    assert code == (0 if data["proven"] == "pinned" else 1)
    assert set(data["tokens_per_s"]) == {"pinned, alone", "pinned, lending", "latest, lending"}


def test_neutral_fails_when_something_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bidirl.executor.neutral.difference", lambda *_: "the weights of version 3 differ")
    assert run("neutral", TINY, "--backend", "fake", "--steps", "3", *SMALL, *SHORT) == 3
    assert "not identical: the weights of version 3 differ" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", TINY, "--steps", "0"], "--steps"),
        (["train", TINY, "--backend", "gpu"], "--backend"),
        (["train", TINY, "--set", "learn.tsk=1", "--backend", "fake"], "did you mean task"),
        (["train", TINY, "--set", "learn.kl_weight=0.1", "--backend", "fake"], "workload.reference"),
        (["train", TINY, "--set", "learn.reward='f'", "--backend", "fake"], "module:function"),
        (["train", TINY, "--plan", "nowhere.json", "--backend", "fake"], "nowhere.json"),
        (["neutral", TINY, "--policy", "bidirl"], "policy"),
        (["neutral", TINY, "--backend", "fake", "--set", "policy.name=colocated_sync"], "nothing is lent"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    errors = [line for line in lines if not line.startswith("note: ")]
    assert len(errors) == 1
    assert message in errors[0]


def test_rewards_are_a_column_of_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bidirl.executor import cli
    from bidirl.executor.backends.assemble import Kind
    from bidirl.executor.run import run_real

    def real(job: object, seed: int, *_: object, **more: object) -> object:
        return run_real(job, seed, Kind.STUB, sink=more["sink"])  # type: ignore[arg-type]

    monkeypatch.setattr(cli, "_real", real)
    assert run("train", TINY, "--out", str(tmp_path), "--steps", "4", *SMALL, *SHORT) == 0
    with (tmp_path / "steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4
    assert all(0 <= float(row["reward_mean"]) <= 1 for row in rows)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["learning"]["measured_s"]["sync"]["count"] == 4
