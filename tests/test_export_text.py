"""What an export writes: only known options, readable text, bounds never looser, and what is missing said."""

import json
import shlex
import tomllib
from decimal import Decimal
from fractions import Fraction
from math import floor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.errors import InputError
from bidirl.planner.export import FRAMEWORKS, export_text, recipe_for
from bidirl.planner.export.options import OPTIONS, VERSIONS
from bidirl.planner.export.plan_file import ExportPlan, Layout, TrainStyle
from bidirl.planner.export.recipe import Recipe, Syntax, Value
from bidirl.planner.export.shapes import pool_shapes
from bidirl.planner.export.staleness import verl_budget
from bidirl.planner.policy import VersionMode, preset
from tests.export_plans import colocated, plan, plans

DISAGGREGATED = sorted(FRAMEWORKS.keys() - {"verl_sync"})
HALF_AND_HALF: dict[str, Any] = {"rollout_gpus": 8, "train_gpus": 8, "prompts_per_step": 64}
"""Pools of whole nodes, which every framework takes."""


def read_yaml(lines: list[str]) -> dict[str, Any]:
    """Read the block mappings with JSON scalars that an export consists of."""
    tree: dict[str, Any] = {}
    places: list[str] = []
    for line in lines:
        key, _, value = line.strip().partition(":")
        del places[(len(line) - len(line.lstrip())) // 2 :]
        places.append(key)
        if value:
            tree[".".join(places)] = json.loads(value)
    return tree


def flat(tree: dict[str, Any], place: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        at = f"{place}.{key}" if place else key
        found |= flat(value, at) if isinstance(value, dict) else {at: value}
    return found


def words(lines: list[str]) -> list[str]:
    return shlex.split("\n".join(lines).replace("\\\n", " "))


def read_back(text: str, syntax: Syntax) -> dict[str, Any]:
    """Return the options that a reader of the framework's syntax finds in a text."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    match syntax:
        case Syntax.YAML:
            return read_yaml(lines)
        case Syntax.TOML:
            return flat(tomllib.loads("\n".join(lines)))
        case Syntax.HYDRA:
            pairs = [word for word in words(lines)[3:] if not word.startswith("--config")]
            return dict(pair.split("=", 1) for pair in pairs)
        case Syntax.FLAGS:
            found: dict[str, Any] = {}
            for word in words(lines)[2:]:
                if word.startswith("--"):
                    found[word] = True
                elif found:
                    found[list(found)[-1]] = word
            return found


def as_read(value: Value, syntax: Syntax) -> Any:
    if syntax in (Syntax.YAML, Syntax.TOML):
        return float(value) if isinstance(value, Decimal) else value
    match value:
        case True if syntax is Syntax.FLAGS:
            return True
        case None:
            return "null"
        case Decimal() if value == int(value) and "." not in str(value):
            return f"{value}.0"
    return str(value)


def recipe_or_refusal(made: ExportPlan, framework: str) -> Recipe | str:
    try:
        return recipe_for(made, framework)
    except InputError as error:
        return str(error)


@given(plans(), st.sampled_from(sorted(FRAMEWORKS)))
def test_known_options_and_readable_text_or_one_line(made: ExportPlan, framework: str) -> None:
    recipe = recipe_or_refusal(made, framework)
    if isinstance(recipe, str):
        assert "\n" not in recipe
        assert ": " in recipe
        return
    assert set(recipe.settings) <= OPTIONS[framework].keys()
    text = export_text(made, framework)
    assert max(map(len, (line for line in text.splitlines() if line.startswith("#")))) <= 110
    read = read_back(text, recipe.syntax)
    assert read == {key: as_read(value, recipe.syntax) for key, value in recipe.settings.items()}


@pytest.mark.parametrize("framework", DISAGGREGATED)
def test_a_plain_plan_reaches_every_framework(framework: str) -> None:
    text = export_text(plan(**HALF_AND_HALF), framework)
    assert VERSIONS[framework] in text.replace("\n#   ", " ")
    assert text.endswith("\n")
    assert not text.endswith("\n\n")


def test_the_table_names_a_version_for_each_option() -> None:
    for table in OPTIONS.values():
        for source in table.values():
            assert source.project.count("/") == 1
            assert source.version
            assert source.path
    used = {name: set(recipe_for(plan(**HALF_AND_HALF), name).settings) for name in DISAGGREGATED}
    assert all(len(names) >= 10 for names in used.values())


BOUNDS = {
    "areal": "rollout.max_head_offpolicyness",
    "nemo_rl": "grpo.async_grpo.max_trajectory_age_steps",
    "openrlhf": "--train.async_queue_size",
    "prime_rl": "orchestrator.max_off_policy_steps",
    "roll": "async_generation_ratio",
    "skyrl": "trainer.fully_async.max_staleness_steps",
    "verl_fully_async": "async_training.staleness_threshold",
    "verl_v1_separate_async": "trainer.v1.separate_async.num_warmup_batches",
}


@pytest.mark.parametrize("framework", sorted(BOUNDS))
@pytest.mark.parametrize("staleness", ["1", "1.5", "2", "3.25"])
def test_a_bound_is_never_looser_and_rounding_is_said(framework: str, staleness: str) -> None:
    recipe = recipe_for(plan(staleness, **HALF_AND_HALF), framework)
    written = recipe.settings[BOUNDS[framework]]
    assert isinstance(written, int | Decimal)
    assert floor(Decimal(staleness)) <= written <= Decimal(staleness)
    assert (written == Decimal(staleness)) is not any(note.startswith("Rounded") for note in recipe.notes)


@pytest.mark.parametrize("framework", ["areal", "nemo_rl", "openrlhf", "prime_rl", "roll", "skyrl", "slime"])
def test_a_fraction_below_one_is_refused_where_only_steps_exist(framework: str) -> None:
    with pytest.raises(InputError, match=r"staleness = 0\.5: .*(whole steps|from 1|always runs 1)"):
        recipe_for(plan("0.5", **HALF_AND_HALF), framework)


@pytest.mark.parametrize("framework", sorted(set(DISAGGREGATED) - {"prime_rl"}))
def test_on_policy_is_expressed(framework: str) -> None:
    recipe = recipe_for(plan("0", **HALF_AND_HALF), framework)
    if framework in BOUNDS and BOUNDS[framework] in recipe.settings:
        assert recipe.settings[BOUNDS[framework]] == 0
    if framework == "slime":
        assert recipe.command == "python3 train.py"
    if framework == "nemo_rl":
        assert recipe.settings["grpo.async_grpo.enabled"] is False
    if framework == "openrlhf":
        assert "--train.async_enable" not in recipe.settings


def test_prime_rl_always_runs_ahead() -> None:
    with pytest.raises(InputError, match="always runs 1 step ahead"):
        recipe_for(plan("0", **HALF_AND_HALF), "prime_rl")


def test_slime_prefetches_one_rollout_and_says_so() -> None:
    recipe = recipe_for(plan("3"), "slime")
    assert recipe.command == "python3 train_async.py"
    assert any("staleness 3 became 1" in note for note in recipe.notes)


def test_verl_v1_lets_the_lag_pass_and_no_more() -> None:
    threshold = "trainer.v1.sampler.max_off_policy_threshold"
    assert recipe_for(plan("1.5", expiry="drop"), "verl-v1-separate-async").settings[threshold] == 3
    assert recipe_for(plan("1.5"), "verl-v1-separate-async").settings[threshold] is None


@given(
    st.integers(1, 512),
    st.integers(0, 40).map(lambda tenths: Decimal(tenths) / 10),
    st.sampled_from([1, 2, 4]),
)
def test_verl_floats_that_lose_a_group_are_noted(groups: int, bound: Decimal, updates: int) -> None:
    made = plan(str(bound), prompts_per_step=groups * updates, mini_batches=updates)
    recipe = recipe_for(made, "verl_fully_async")
    exact = floor((1 + Fraction(bound)) * groups * updates)
    batches, syncs = (
        recipe.settings[f"async_training.{name}"]
        for name in ("require_batches", "trigger_parameter_sync_step")
    )
    assert isinstance(batches, int)
    assert isinstance(syncs, int)
    assert batches * syncs * groups == groups * updates
    noted = any("multiplies in floats" in note for note in recipe.notes)
    assert noted == (verl_budget(groups * batches, bound, syncs) != exact)


@pytest.mark.parametrize("framework", DISAGGREGATED)
def test_what_cannot_be_expressed_is_said(framework: str) -> None:
    made = plan(lending="both", **HALF_AND_HALF)
    text = " ".join(recipe_for(made, framework).notes)
    assert "Not expressed: lending train_on_rollout" in text
    lends = framework in ("verl_dynamic_schedule", "verl_v1_separate_async")
    assert ("Not expressed: lending rollout_on_train" in text) is not lends
    pinned = preset("no_borrow", version_mode=VersionMode.PINNED, batch_order="issue_order")
    made = plan(**HALF_AND_HALF, mini_batches=1)
    object.__setattr__(made, "policy", pinned)
    assert "version_mode = pinned" in " ".join(recipe_for(made, framework).notes)


@pytest.mark.parametrize("framework", ["verl_fully_async", "roll", "skyrl", "areal"])
def test_layouts_that_fsdp_lacks_are_said(framework: str) -> None:
    made = plan(**HALF_AND_HALF, train=Layout(tp=2, pp=2), train_style=TrainStyle.FSDP)
    assert any("Not expressed: train layout" in note for note in recipe_for(made, framework).notes)


def test_verl_picks_the_trainer_that_suits() -> None:
    assert recipe_for(plan(), "verl").framework == "verl_fully_async"
    assert recipe_for(plan(lending="rollout_on_train"), "verl").framework == "verl_dynamic_schedule"
    assert recipe_for(colocated(), "VERL").framework == "verl_sync"


def test_an_unknown_framework_gets_the_nearest_name() -> None:
    with pytest.raises(InputError, match="did you mean skyrl"):
        recipe_for(plan(), "sky_rl")


@pytest.mark.parametrize("framework", ["areal", "nemo_rl", "openrlhf", "roll", "skyrl", "slime"])
def test_colocated_plans_share_gpus(framework: str) -> None:
    recipe_for(colocated(prompts_per_step=64), framework)
    with pytest.raises(InputError, match="verl_sync"):
        recipe_for(colocated(), "verl_fully_async")


@given(plans())
def test_pool_shapes_fit_side_by_side(made: ExportPlan) -> None:
    try:
        rollout, train = pool_shapes(made, "verl")
    except InputError:
        return
    assert rollout.num_nodes * rollout.gpus_per_node == made.rollout_gpus
    assert train.num_nodes * train.gpus_per_node == made.train_gpus
    free = [made.gpus_per_node] * made.num_nodes
    for index in range(rollout.num_nodes):
        free[index] -= rollout.gpus_per_node
    for index in range(train.num_nodes):
        free[-1 - index] -= train.gpus_per_node
    assert min(free) >= 0
