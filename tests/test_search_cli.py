"""``bidirl-plan search``: the answer, its report, and what is refused with which reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from bidirl.planner.cli import app, simulated
from bidirl.planner.job import load_job
from bidirl.planner.plan_json import plan_from_json
from bidirl.planner.policy import Lending
from bidirl.planner.search.candidates import Objective
from bidirl.planner.search.run import search_job
from bidirl.shell import guarded
from tests.search_cases import EXAMPLES

JOB = str(EXAMPLES / "paper_a6000.toml")
SMALL = ["--set", "workload.prompts_per_step=8", "--set", "workload.max_response_tokens=512"]


def planned(*arguments: str, capfd: pytest.CaptureFixture[str], code: int = 0) -> Any:
    assert guarded(app, ["search", JOB, *SMALL, *arguments, "--json"], "bidirl-plan") == code
    return json.loads(capfd.readouterr().out)


def test_a_search_writes_a_plan_that_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = planned("--top", "2", "--out", str(tmp_path), capfd=capfd)
    written = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert written == data
    assert {path.name for path in tmp_path.iterdir()} == {
        "plan.json",
        "candidates.csv",
        "rejected.csv",
        "landscape.png",
    }
    plan = data["plan"]
    gpus = plan["rollout_gpus"] + plan["train_gpus"]
    assert gpus <= 16
    assert plan["rollout"]["tp"] * plan["rollout"]["pp"] * plan["rollout"]["dp"] == plan["rollout_gpus"]
    pool = plan["train_gpus"] or plan["rollout_gpus"]
    train = plan["train"]
    assert train["tp"] * train["pp"] * train["cp"] * train["dp"] == pool
    assert plan_from_json(data["envelope"]).rollout_gpus == plan["rollout_gpus"]
    again = tmp_path / "job.json"
    again.write_text(json.dumps(data["job"]))
    assert load_job(again).partition is not None
    simulated_rows = [each for each in data["candidates"] if "simulated" in each]
    steps = [each["simulated"]["step_s"] for each in simulated_rows]
    assert steps == sorted(steps)
    assert {"none", "both"} <= {each["lending"] for each in simulated_rows}
    assert any(each["placement"] == "colocated" for each in simulated_rows)


def test_the_answers_of_a_plan(capfd: pytest.CaptureFixture[str]) -> None:
    data = planned("--top", "1", capfd=capfd)
    found = data["answers"]
    assert found["bottleneck"]["is_sure"] or found["bottleneck"]["decide_by"]
    assert found["bottleneck"]["evidence"]
    assert {each["direction"] for each in found["break_even"]} == {"rollout_on_train", "train_on_rollout"}
    for window in found["break_even"]:
        assert set(window["by_sleep_level_s"]) == {"1", "2"}
    assert found["bounds"]["generation_free_speedup"] >= 1.0
    assert 0.0 < found["bounds"]["sync_share"] < 1.0
    assert found["goodput"]["cannot_tell"].startswith("no failure rate: give faults.replica_mtbf_s")
    if "partition_and_borrowing" in found:
        four = found["partition_and_borrowing"]
        product = four["partition_gain"] * four["borrowing_gain"] * four["interaction"]
        assert four["both_gain"] == pytest.approx(product)
    reasons = [each["reason"] for each in data["rejected"]]
    assert all(reasons)
    assert all(any(letter.isdigit() for letter in reason) for reason in reasons)  # each with its numbers


def test_a_failure_rate_has_an_answer(capfd: pytest.CaptureFixture[str]) -> None:
    data = planned("--top", "0", "--set", "faults.replica_mtbf_s=100000", capfd=capfd)
    found = data["answers"]["goodput"]
    assert 0.9 < found["goodput"] < 1.0
    assert found["checkpoint_interval_steps"] >= 1
    assert [each["replicas"] for each in found["spares"]] == list(range(len(found["spares"])))


def test_both_objectives_are_answered(capfd: pytest.CaptureFixture[str]) -> None:
    time, hours = (planned("--top", "0", "--objective", goal, capfd=capfd) for goal in ("time", "gpu_hours"))
    fast, cheap = time["priced"][0], hours["priced"][0]
    assert fast["step_s"] <= cheap["step_s"]
    assert cheap["gpu_seconds"] <= fast["gpu_seconds"]
    assert time["answers"]["gpu_hour_optimal"]["label"] == cheap["label"]
    assert hours["answers"]["time_optimal"]["label"] == fast["label"]


def test_a_framework_s_rules_bind(capfd: pytest.CaptureFixture[str]) -> None:
    data = planned("--top", "0", "--framework", "verl", capfd=capfd)
    assert data["frameworks"]["verl"] == []
    ranks = data["plan"]["train"]["dp"]
    assert 8 * 8 % ranks == 0
    assert any("verl: " in each["reason"] for each in data["rejected"])
    assert guarded(app, ["search", JOB, "--framework", "vrel"], "bidirl-plan") == 2
    assert capfd.readouterr().err.startswith("framework 'vrel' is unknown: choose one of areal")


def test_what_does_not_fit_is_refused_with_numbers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = guarded(
        app, ["search", JOB, "--set", 'model.name="Qwen3-235B-A22B"', "--out", str(tmp_path)], "bidirl-plan"
    )
    assert code == 1
    err = capfd.readouterr().err.strip().splitlines()[-1]
    assert err.startswith("no rollout pool of the cluster's 16 GPUs is legal")
    assert "GiB" in err
    data = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert data["error"] == err
    assert "plan" not in data
    assert any("memory" in each["reason"] or "GiB" in each["reason"] for each in data["rejected"])


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("cluster.num_nodes=0", "must be at least 1"),
        ("cluster.gpus_per_node=2.5", "cluster.gpus_per_node"),
        ('cluster.gpu="H1000"', "is not in the catalogue"),
        ("cluster.gpu={memory_gib=-1}", "memory_gib"),
        ('model.name="Qwen9"', "is not in the catalogue"),
        ("model.architecture={num_layers=0}", "num_layers"),
        ('cluster.gpu={name="thing"}', "in the catalogue"),
    ],
)
def test_malformed_clusters_and_models_get_one_line(
    setting: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert guarded(app, ["search", JOB, "--set", setting, "--top", "0"], "bidirl-plan") == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert any(words in line for line in lines), lines
    assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize("setting", ["cluster.gpus_per_node=1", "cluster.gpus_per_node=2"])
def test_tiny_clusters_have_an_answer_or_a_reason(setting: str, capfd: pytest.CaptureFixture[str]) -> None:
    """One GPU cannot be two pools, but the roles may take turns on it."""
    job = str(EXAMPLES / "tiny.toml")
    arguments = ["search", job, "--set", setting, "--set", "workload.num_steps=4", "--top", "1", "--json"]
    if setting.endswith("=1"):
        arguments += ["--set", 'partition.placement="colocated"', "--set", 'policy.name="colocated_sync"']
    assert guarded(app, arguments, "bidirl-plan") == 0, capfd.readouterr().err
    data = json.loads(capfd.readouterr().out)
    assert (data["plan"]["placement"] == "colocated") is (
        setting.endswith("=1") or not data["plan"]["train_gpus"]
    )


def test_pools_of_different_gpus_do_not_lend() -> None:
    settings = ['cluster.rollout_gpu="H20"', 'cluster.train_gpu="H100"', "cluster.price_per_gpu_hour=2"]
    job = load_job(JOB, [*SMALL[1::2], *settings])
    found = search_job(job, Objective.TIME, 1, simulated)
    assert found.best is not None
    assert all(each.candidate.lending is Lending.NONE for each in found.ranked)
    assert any("different GPUs" in reason for reason in found.no_lending.values())


def test_a_search_repeats_exactly() -> None:
    job = load_job(JOB, SMALL[1::2])
    one, two = (search_job(job, Objective.TIME, 1, simulated) for _ in range(2))
    assert [(each.candidate, each.step_s) for each in one.ranked] == [
        (each.candidate, each.step_s) for each in two.ranked
    ]
