"""Layouts that a job or a plan may have beside tensor and pipeline parallelism, and unlike pools."""

import json
from pathlib import Path
from typing import Any

import pytest

from bidirl.planner.export import export_text, recipe_for
from bidirl.planner.export.plan_file import Layout, TrainStyle, read_plan
from bidirl.planner.job import load_job, resolved_json
from tests.export_plans import plan
from tests.search_cases import EXAMPLES

VERL = "actor_rollout_ref.actor"
ULYSSES = f"{VERL}.fsdp_config.ulysses_sequence_parallel_size"


def resolved(folder: Path, *overrides: str) -> Path:
    """Return a resolved.json of the A6000 job with overrides."""
    path = folder / "resolved.json"
    path.write_text(json.dumps(resolved_json(load_job(EXAMPLES / "paper_a6000.toml", overrides))))
    return path


def test_a_job_s_tensor_parallel_trainer_is_fully_sharded(tmp_path: Path) -> None:
    """[partition] prices full sharding, whatever its train_tp."""
    found = read_plan(resolved(tmp_path, "partition.train_tp=2", "partition.rollout_gpus=8"))
    assert (found.train_style, found.train, found.train_dp) == (TrainStyle.FSDP, Layout(tp=2), 4)
    verl = recipe_for(found, "verl")
    assert verl.settings[ULYSSES] == 2
    assert not any("megatron" in key for key in verl.settings)
    assert any(note.startswith("Differs: train tp 2") for note in verl.notes)
    assert recipe_for(found, "skyrl").settings["trainer.policy.sequence_parallel_size"] == 2
    assert recipe_for(found, "nemo_rl").settings["policy.dtensor_cfg.tensor_parallel_size"] == 2
    assert recipe_for(found, "areal").settings["actor.backend"] == "fsdp:d4t2"
    assert recipe_for(found, "openrlhf").settings["--ds.tensor_parallel_size"] == 2
    for name in ("roll", "slime"):
        assert any(note.startswith("Not expressed") for note in recipe_for(found, name).notes)


@pytest.mark.parametrize(
    ("framework", "style", "option", "value"),
    [
        ("verl", TrainStyle.FSDP, ULYSSES, 4),
        ("verl", TrainStyle.MEGATRON, f"{VERL}.megatron.context_parallel_size", 4),
        ("areal", TrainStyle.FSDP, "actor.backend", "fsdp:d2c4"),
        ("areal", TrainStyle.MEGATRON, "actor.backend", "megatron:d2c4"),
        ("nemo_rl", TrainStyle.FSDP, "policy.dtensor_cfg.context_parallel_size", 4),
        ("nemo_rl", TrainStyle.MEGATRON, "policy.megatron_cfg.context_parallel_size", 4),
        ("skyrl", TrainStyle.FSDP, "trainer.policy.sequence_parallel_size", 4),
        ("skyrl", TrainStyle.MEGATRON, "trainer.policy.megatron_config.context_parallel_size", 4),
        ("slime", TrainStyle.MEGATRON, "--context-parallel-size", 4),
        ("openrlhf", TrainStyle.FSDP, "--ds.ring_attn_size", 4),
        ("prime_rl", TrainStyle.FSDP, "trainer.model.cp", 4),
    ],
)
def test_context_parallelism(framework: str, style: TrainStyle, option: str, value: object) -> None:
    pools: dict[str, Any] = {"rollout_gpus": 8, "train_gpus": 8, "prompts_per_step": 64, "train_style": style}
    assert recipe_for(plan(train=Layout(cp=4), **pools), framework).settings[option] == value
    plain = plan(**pools)
    if option != "actor.backend":
        assert option not in recipe_for(plain, framework).settings


def test_an_engine_of_eight_gpus_with_experts_spread_over_them() -> None:
    found = plan(rollout=Layout(tp=1, ep=8), rollout_gpus=8, train_gpus=8)
    verl = recipe_for(found, "verl").settings
    sizes = [verl[f"actor_rollout_ref.rollout.{key}_size"] for key in ("data_parallel", "expert_parallel")]
    assert sizes == [8, 8]
    assert recipe_for(found, "slime").settings["--rollout-num-gpus-per-engine"] == 8


def test_pools_of_different_gpus_are_said(tmp_path: Path) -> None:
    unlike = ['cluster.rollout_gpu="H20"', 'cluster.train_gpu="H100"', "policy.name=no_borrow"]
    text = export_text(read_plan(resolved(tmp_path, *unlike)), "verl")
    assert "Generation is planned on H20" in " ".join(text.split())
    assert "GPU types" not in export_text(read_plan(resolved(tmp_path)), "verl")
