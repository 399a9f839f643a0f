"""Reading what is to be exported, and the check of allocation strings."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bidirl.errors import InputError
from bidirl.planner.export import export_command
from bidirl.planner.export.allocation import allocation_gpus, check_allocation
from bidirl.planner.export.plan_file import Layout, TrainStyle, read_plan
from bidirl.planner.job import load_job, resolved_json
from bidirl.planner.policy import Lending

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "examples" / "demo.toml"
CASES = ROOT / "shared" / "data" / "cases.jsonl"


def plan_json(**changes: Any) -> dict[str, Any]:
    """Return a plan of ``bidirl-plan search`` for the demo job, with keys of its plan replaced."""
    job = resolved_json(load_job(DEMO))
    plan = {
        "placement": "disaggregated",
        "rollout_gpus": 4,
        "train_gpus": 12,
        "rollout": {"tp": 2, "pp": 1, "dp": 2, "ep": 1},
        "train": {"style": "megatron", "tp": 2, "pp": 1, "dp": 6, "ep": 1},
        "policy": job["policy"],
        "staleness": "0.5",
        "num_nodes": 2,
        "gpus_per_node": 8,
        "engine": job["engine"],
        "bottleneck": "trainer",
    }
    return {"schema": "bidirl-plan", "version": 1, "job": job, "plan": plan | changes, "ranking": []}


def written(folder: Path, data: Any) -> Path:
    file = folder / "plan.json"
    file.write_text(json.dumps(data))
    return file


def test_a_plan_of_the_search_is_read_and_extra_keys_are_skipped(tmp_path: Path) -> None:
    plan = read_plan(written(tmp_path, plan_json()))
    assert (plan.rollout, plan.train, plan.train_style) == (Layout(2), Layout(2), TrainStyle.MEGATRON)
    assert str(plan.staleness) == "0.5"
    assert plan.policy.lending is Lending.BOTH
    assert (plan.rollout_replicas, plan.train_dp) == (2, 6)


def test_a_resolved_job_and_a_job_file_are_read_too(tmp_path: Path) -> None:
    resolved = tmp_path / "resolved.json"
    resolved.write_text(json.dumps(resolved_json(load_job(DEMO))))
    assert read_plan(resolved) == read_plan(DEMO)
    assert read_plan(DEMO).train_style is TrainStyle.FSDP


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout_gpus": None}, "plan.rollout_gpus is None, must be a whole number from 1"),
        ({"rollout_gpus": 2.0}, "plan.rollout_gpus is 2.0"),
        ({"train": {"style": "ddp"}}, "plan.train.style is 'ddp', must be one of fsdp, megatron"),
        ({"train": None}, "plan.train must be a table"),
        ({"rollout": {"tp": 8}}, "rollout_gpus=4 hold no whole replicas of tp 8 x pp 1"),
        ({"train_gpus": 14}, "the pools need 18 GPUs, the cluster has 16"),
        ({"staleness": "much"}, "plan.staleness is 'much'"),
        ({"policy": {"in_flight": "sometimes"}}, "plan.policy.in_flight breaks a rule"),
        ({"placement": "colocated"}, "staleness 0.5 with placement = colocated"),
    ],
)
def test_what_is_wrong_is_named_on_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_plan(written(tmp_path, plan_json(**changes)))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_key_and_another_schema_are_named(tmp_path: Path) -> None:
    data = plan_json()
    del data["plan"]["train_gpus"]
    with pytest.raises(InputError, match=r"plan\.train_gpus is missing"):
        read_plan(written(tmp_path, data))
    with pytest.raises(InputError, match="version 2"):
        read_plan(written(tmp_path, plan_json() | {"version": 2}))
    (tmp_path / "broken.json").write_text("{")
    failed = {"schema": "bidirl-plan", "version": 1, "error": "no layout fits", "job": data["job"]}
    with pytest.raises(
        InputError, match=r"holds no plan \(no layout fits\): change the job and search again"
    ):
        read_plan(written(tmp_path, failed))
    with pytest.raises(InputError, match="is no JSON"):
        read_plan(tmp_path / "broken.json")
    with pytest.raises(InputError, match="No such file"):
        read_plan(tmp_path / "absent.json")


def test_a_job_without_partition_sends_to_the_search(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    text = DEMO.read_text(encoding="utf-8")
    job.write_text(re.sub(r"\[partition\][^\[]*", "", text))
    with pytest.raises(InputError, match=r"no \[partition\] to export: run bidirl-plan search"):
        read_plan(job)


def test_the_text_is_written_where_asked(tmp_path: Path) -> None:
    out = tmp_path / "out" / "verl.sh"
    text = export_command(written(tmp_path, plan_json()), "verl", out)
    assert out.read_text(encoding="utf-8") == text
    assert "async_training.staleness_threshold=0.5" in text
    assert "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2" in text
    with pytest.raises(InputError, match="give a file that can be written"):
        export_command(DEMO, "verl", tmp_path)


def test_allocation_strings_of_case_c10() -> None:
    modes = ["sglang.d4p1t1+d4p1t1", "sglang:d2t2+fsdp:d4", "sglang.d2p1t1+d2p1t1"]
    if CASES.exists():
        rows = map(json.loads, CASES.read_text(encoding="utf-8").splitlines())
        case = next(row for row in rows if row["id"] == "C10")
        assert case["input"] == {"gpus": 4, "modes": modes}
    assert [sum(allocation_gpus(mode)) for mode in modes] == [8, 8, 4]
    for mode in modes[:2]:
        with pytest.raises(InputError, match=r"needs 8 GPUs \(4 \+ 4\), there are 4"):
            check_allocation(mode, 4)
    assert check_allocation(modes[2], 4) == 4


@pytest.mark.parametrize(
    ("allocation", "parts"),
    [
        ("sglang[r]:d2+fsdp[a]:d4|fsdp[c]:d4", (2, 4)),
        ("vllm:d2t4+megatron:(attn:d1p2t4|ffn:d1p2e4)", (8, 8)),
        ("vllm:d1t8p2 + megatron:d2t4p2e4", (16, 16)),
        ("fsdp:d4c2", (8,)),
    ],
)
def test_more_forms_of_allocation_strings(allocation: str, parts: tuple[int, ...]) -> None:
    assert allocation_gpus(allocation) == parts


@pytest.mark.parametrize("allocation", ["", "vllm:", "vllm:x4", "d0", "vllm:d4+", "fsdp[a]:d4|fsdp[c]:d2"])
def test_strings_that_are_no_allocation(allocation: str) -> None:
    with pytest.raises(InputError, match="allocation"):
        allocation_gpus(allocation)
