import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from bidirl.errors import InputError
from bidirl.models.architecture import from_catalogue
from bidirl.models.cluster import ClusterConfig
from bidirl.models.estimate import Source
from bidirl.models.memory import EngineOptions
from bidirl.models.stages import StageModels, WorkloadSizes, predict_stage_models

CLUSTER = ClusterConfig(gpu="A6000", num_nodes=2, gpus_per_node=8, inter_node_gbit_per_s=200)
SIZES = WorkloadSizes(prompt_mean_tokens=300.0, response_mean_tokens=900.0, max_total_tokens=2500)


def _predict(
    name: str = "Qwen3-VL-4B", cluster: ClusterConfig = CLUSTER, layout: dict[str, int] | None = None
) -> StageModels:
    sizes = {"rollout_tp": 1, "train_tp": 1, "rollout_gpus": 4, "train_gpus": 12} | (layout or {})
    return predict_stage_models(cluster, from_catalogue(name), EngineOptions(), workload=SIZES, **sizes)


def test_every_coefficient_has_a_source() -> None:
    models = _predict()
    for section in ("iteration", "trainer", "sync", "switch"):
        part = getattr(models, section)
        for spec in fields(part):
            value = getattr(part, spec.name)
            if is_dataclass(value):
                keys = [f"{section}.{spec.name}.{inner.name}" for inner in fields(value)]
            elif spec.name in ("forward_bytes", "update_bytes", "micro_tokens", "replicas_per_node"):
                continue  # sizes, not coefficients
            else:
                keys = [f"{section}.{spec.name}"]
            for key in keys:
                assert key in models.sources, key
    assert models.sources["switch.grad_s"].source is Source.MEASURED
    assert models.limits.kv_tokens == models.sources["limits.kv_tokens"].value


@pytest.mark.parametrize("name", ["Qwen3-VL-4B", "Qwen3-30B-A3B"])
def test_json_round_trip(name: str, tmp_path: Path) -> None:
    models = _predict(name, layout={"rollout_tp": 4, "train_tp": 4})
    path = tmp_path / "models.json"
    models.save(path)
    assert StageModels.load(path) == models
    assert json.loads(path.read_text())["version"] == 1


def _set(data: dict[str, Any], dotted: str, value: object) -> None:
    *path, last = dotted.split(".")
    for part in path:
        data = data[part]
    if value is None:
        del data[last]
    else:
        data[last] = value


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("schema", "x", "schema = 'x'"),
        ("version", 2, "version = 2"),
        ("colour", 1, "unknown key 'colour'"),
        ("trainer", None, "trainer is NoneType"),
        ("trainer.update", 3, "trainer.update is int"),
        ("trainer.update.alpha_s", None, "trainer.update.alpha_s is missing"),
        ("trainer.update.alpha_s", -1.0, "trainer.update.alpha_s = -1.0"),
        ("trainer.update.alpha_s", True, "must be a finite float"),
        ("trainer.update.alpha_s", float("nan"), "must be a finite float"),
        ("trainer.micro_tokens", 1.5, "must be a finite int"),
        ("limits.prefix_caching", 1, "must be a finite bool"),
        ("limits.kv_tokens", 3, "kv_tokens=3"),
        ("sync.fixed_s", "1", "sync.fixed_s = '1'"),
        ("switch.grad_s", None, "switch.grad_s is missing"),
        ("sources.switch.x", 4, "sources.switch.x"),
        ("iteration.tau_dec_s", None, "iteration.tau_dec_s is missing"),
    ],
)
def test_malformed_models_file_is_one_line(key: str, value: object, message: str, tmp_path: Path) -> None:
    data = _predict().to_json()
    if key.startswith("sources."):
        data["sources"][key.removeprefix("sources.")] = value
    else:
        _set(data, key, value)
    path = tmp_path / "models.json"
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=message.replace("[", r"\[")) as caught:
        StageModels.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        StageModels.load(tmp_path / "absent.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        StageModels.load(tmp_path / "broken.json")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"rollout_tp": 0}, "rollout_tp = 0"),
        ({"train_tp": 5}, "train_gpus = 12"),
        ({"rollout_gpus": 3, "rollout_tp": 2}, "rollout_gpus = 3"),
    ],
)
def test_wrong_layouts(layout: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _predict(layout=layout)


def test_a_network_is_asked_for_only_where_it_is_used() -> None:
    one = ClusterConfig(gpu="A6000", num_nodes=1, gpus_per_node=8)
    assert _predict(cluster=one, layout={"rollout_gpus": 4, "train_gpus": 4}).trainer.replicas_per_node == 8
    silent = ClusterConfig(gpu="A6000", num_nodes=2, gpus_per_node=8)
    with pytest.raises(InputError, match=r"cluster\.inter_node_gbit_per_s"):
        _predict(cluster=silent)


def test_given_kv_tokens_win() -> None:
    models = predict_stage_models(
        CLUSTER,
        from_catalogue("Qwen3-VL-4B"),
        EngineOptions(kv_tokens=41_408),
        rollout_tp=1,
        train_tp=1,
        rollout_gpus=4,
        train_gpus=12,
        workload=SIZES,
    )
    assert models.limits.kv_tokens == 41_408
    assert models.sources["limits.kv_tokens"].source is Source.MEASURED
