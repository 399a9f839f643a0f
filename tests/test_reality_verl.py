"""verl's tables: the fit, the order of the staleness ablation, and what the examples ship."""

from dataclasses import replace
from pathlib import Path

import pytest

from bidirl.models.stages import StageModels
from bidirl.sim.reality import verl, verl_more
from bidirl.sim.reality.table import published
from bidirl.sim.reality.verl import ARMS, BASE, FITTED, arm_system, colocated, printed
from bidirl.sim.reality.verl_example import EXAMPLES, example_models, example_toml
from bidirl.sim.reality.verl_fit import Lengths, System, bisect, level_for_update, times

ROOT = Path(__file__).resolve().parent.parent
SMALL = System(
    "Qwen2.5-Math-7B",
    Lengths(p50=300.0, p95=1500.0),
    rollout_gpus=8,
    train_gpus=8,
    max_response_tokens=4096,
    update_s=1e-4,
    prompts=32,
    samples=4,
    mini_batch_prompts=4,
    num_steps=4,
)


def test_each_arm_finds_its_one_row() -> None:
    for arm in ARMS.values():
        row = printed(arm)
        assert row.step_s > 100.0
        assert row.step_s == pytest.approx(row.wait_s + row.update_s + row.other_s)
    assert printed(ARMS[FITTED]).wait_s == 128.47


def test_a_version_is_512_prompts() -> None:
    """400 versions at the mean step are the printed hours, validation apart."""
    for row in published("verl_fully_async"):
        if row["table"] in ("E1_scaling_7B", "E3_staleness_128"):
            assert float(row["step_s"]) * 400 / 3600 == pytest.approx(float(row["t400_h"]), rel=0.12)


def test_the_frozen_numbers_fit_their_row() -> None:
    found, target = times(BASE), printed(ARMS[FITTED])
    assert found.wait_s == pytest.approx(target.wait_s, rel=0.02)
    assert found.update_s == pytest.approx(target.update_s, rel=0.005)


def test_the_engine_prior_meets_the_colocated_row() -> None:
    assert times(colocated(128)).wait_s / verl.GEN_SHARE == pytest.approx(177.85, rel=0.05)


def test_staleness_has_the_printed_order() -> None:
    """0 > 0.1 > {0.3, 0.5}, the last two close; levels are those of the rows' own update times."""
    steps = {}
    for staleness in ("0", "0.1", "0.3", "0.5"):
        arm = ARMS[f"E3 64:64 s={staleness}"]
        steps[staleness] = times(arm_system(arm)).step_s
        assert times(arm_system(arm)).update_s == pytest.approx(printed(arm).update_s, rel=0.01)
        assert steps[staleness] == pytest.approx(printed(arm).step_s, rel=0.16)
    assert steps["0"] > steps["0.1"] > max(steps["0.3"], steps["0.5"])
    assert steps["0.3"] == pytest.approx(steps["0.5"], rel=0.06)
    assert steps["0.1"] - steps["0.3"] > 3 * abs(steps["0.3"] - steps["0.5"])


def test_a_quarter_of_the_gpus_generates_as_slowly_as_printed() -> None:
    """Nothing of the 458 s was fitted: law, engine and seconds per token are those of another table."""
    alone = replace(
        verl_more.ONE_STEP,
        train_gpus=0,
        policy="colocated_sync",
        staleness="0",
        choices=(),
        num_steps=3,
    )
    assert times(alone).wait_s == pytest.approx(458.0, rel=0.15)


def test_video_lending_saves_what_was_measured() -> None:
    assert verl_more.video_step_s("no_borrow", 1) == pytest.approx(377.9, rel=0.002)
    assert verl_more.video_step_s("rollout_on_train", 1) == pytest.approx(307.8, rel=0.05)
    assert verl_more.video_step_s("no_borrow", 2) == pytest.approx(250.4, rel=0.02)


def test_assembly_is_waiting_to_verl() -> None:
    plain, with_it = times(SMALL), times(replace(SMALL, assembly_s=10.0))
    assert with_it.update_s == pytest.approx(plain.update_s)
    assert with_it.wait_s > plain.wait_s
    assert with_it.step_s <= plain.step_s + 10.0 + 1e-6


def test_drift_is_found_from_the_update() -> None:
    target = 1.3 * times(SMALL).update_s
    level = level_for_update(SMALL, target)
    assert level > 1.0
    assert times(replace(SMALL, level=level)).update_s == pytest.approx(target, rel=0.01)


def test_bisection_ends_at_the_ends() -> None:
    assert bisect(lambda x: x * x, 2.0, 0.0, 4.0, 40) == pytest.approx(2.0**0.5)
    assert bisect(lambda x: x, 9.0, 0.0, 4.0, 40) == pytest.approx(4.0)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_the_examples_are_what_the_tables_say(name: str) -> None:
    folder = ROOT / "examples"
    assert folder.joinpath(f"{name}.toml").read_text(encoding="utf-8") == example_toml(name)
    assert StageModels.load(folder / f"{name}.models.json").to_json() == example_models(name).to_json()
