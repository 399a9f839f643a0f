"""Exports against the frameworks' own parsers and schemas, where the packages are at hand.

The packages are large and their dependencies larger, so nothing is installed: unpack the wheels into a
folder and name it. Without it these tests are skipped; ``test_export_text.py`` holds exports to the table.

    pip download --no-deps -d W verl==0.9.1 areal==1.0.4 openrlhf==0.11.2 skyrl==0.3.0
    for w in W/*.whl; do python -m zipfile -e $w F; done
    BIDIRL_FRAMEWORKS=F pytest tests/test_export_frameworks.py     (with omegaconf and lark installed)
"""

import argparse
import ast
import importlib
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bidirl.planner.export import export_text
from bidirl.planner.export.allocation import allocation_gpus
from bidirl.planner.export.areal import allocation_string
from bidirl.planner.export.options import OPTIONS
from bidirl.planner.export.plan_file import Layout, TrainStyle
from tests.export_plans import colocated, plan

FOLDER = os.environ.get("BIDIRL_FRAMEWORKS")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="BIDIRL_FRAMEWORKS names no folder of unpacked wheels")
PLANS = [
    plan(prompts_per_step=64),
    plan("2", prompts_per_step=64, lending="rollout_on_train"),
    plan(
        prompts_per_step=64,
        train_style=TrainStyle.MEGATRON,
        train=Layout(tp=2, pp=2, ep=2),
        rollout=Layout(tp=2),
        reference=True,
    ),
    colocated(prompts_per_step=64),
]


def found(pattern: str) -> Path:
    """Return the file of the unpacked wheels that matches."""
    return next(Path(FOLDER or "").glob(f"**/{pattern}"))


def omegaconf() -> Any:
    pytest.importorskip("omegaconf")
    return importlib.import_module("omegaconf").OmegaConf


def verl_defaults(*extra: str) -> Any:
    """Return verl's generated configuration, with further files over it."""
    conf = omegaconf()
    config = found("verl/trainer/config/_generated_ppo_trainer.yaml").parent
    megatron = conf.load(config / "_generated_ppo_megatron_trainer.yaml")
    parts = [megatron, conf.load(config / "_generated_ppo_trainer.yaml")]
    return conf.merge(*parts, *(conf.load(found(name)) for name in extra))


@pytest.mark.parametrize("framework", sorted(name for name in OPTIONS if name.startswith("verl_")))
def test_verl_has_each_option_and_loads_the_overrides(framework: str) -> None:
    conf = omegaconf()
    asynchronous = framework in ("verl_fully_async", "verl_dynamic_schedule")
    extra = ["fully_async_policy/config/fully_async_ppo_trainer.yaml"] if asynchronous else []
    defaults = verl_defaults(*extra)
    known = dict.fromkeys(keys(conf.to_container(defaults, resolve=False)))
    assert sorted(set(OPTIONS[framework]) - known.keys() - {"model_engine"}) == []
    made = PLANS[3] if framework == "verl_sync" else PLANS[1]
    lines = [line for line in export_text(made, framework).splitlines() if not line.startswith("#")]
    overrides = [word for word in shlex.split("\n".join(lines).replace("\\\n", " ")) if "=" in word]
    written = [word for word in overrides if not word.startswith("--")]
    conf.set_struct(defaults, True)
    conf.merge(defaults, conf.from_dotlist([word for word in written if "model_engine" not in word]))


def keys(tree: Any, place: str = "") -> Iterator[str]:
    for key, value in tree.items() if isinstance(tree, dict) else ():
        at = f"{place}.{key}" if place else str(key)
        yield at
        yield from keys(value, at)


def fields(path: Path) -> dict[str, dict[str, str]]:
    """Return class -> field -> annotation of a file of dataclasses; inherited fields included."""
    classes: dict[str, dict[str, str]] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            own: dict[str, str] = {}
            for base in node.bases:
                own |= classes.get(ast.unparse(base), {})
            for item in node.body:
                if isinstance(item, ast.AnnAssign):
                    own[ast.unparse(item.target)] = ast.unparse(item.annotation)
            classes[node.name] = own
    return classes


def has(classes: dict[str, dict[str, str]], root: str, option: str) -> bool:
    kind = root
    for name in option.split("."):
        annotation = classes.get(kind, {}).get(name)
        if annotation is None:
            return False
        kind = next((word for word in re.findall(r"\w+", annotation) if word in classes), "")
    return True


@pytest.mark.parametrize(
    ("framework", "file", "root"),
    [
        ("areal", "areal/api/cli_args.py", "PPOConfig"),
        ("skyrl", "skyrl/train/config/config.py", "SkyRLTrainConfig"),
    ],
)
def test_dataclasses_have_each_option(framework: str, file: str, root: str) -> None:
    classes = fields(found(file))
    assert [option for option in OPTIONS[framework] if not has(classes, root, option)] == []


def test_openrlhf_parses_the_command() -> None:
    text = found("openrlhf/cli/train_ppo_ray.py").read_text(encoding="utf-8")
    parser = argparse.ArgumentParser()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) != "parser.add_argument":
            continue
        if isinstance(node.args[0], ast.Constant):
            switch = any(ast.unparse(word.value) == "'store_true'" for word in node.keywords)
            kind = next((ast.unparse(word.value) for word in node.keywords if word.arg == "type"), "str")
            options: dict[str, Any] = (
                {"action": "store_true"} if switch else {"type": {"int": int, "float": float}.get(kind, str)}
            )
            parser.add_argument(str(node.args[0].value), **options)
    known = {name for action in parser._actions for name in action.option_strings}
    assert sorted(set(OPTIONS["openrlhf"]) - known) == []
    for made in PLANS:
        lines = [line for line in export_text(made, "openrlhf").splitlines() if not line.startswith("#")]
        parser.parse_args(shlex.split("\n".join(lines).replace("\\\n", " "))[3:])


def test_areal_parses_the_allocations() -> None:
    lark = pytest.importorskip("lark")
    text = found("areal/api/alloc_mode.py").read_text(encoding="utf-8")
    match = re.search(r'ALLOCATION_GRAMMAR = """(.*?)"""', text, re.DOTALL)
    assert match
    grammar = lark.Lark(match[1], start="start", parser="earley")
    for made in PLANS:
        allocation = allocation_string(made)
        grammar.parse(allocation)
        for part in allocation.replace("|", "+").split("+"):
            grammar.parse(part.replace("[rollout]", "").replace("[actor]", ""))
        total = made.train_gpus if made.colocated else made.rollout_gpus + made.train_gpus
        assert sum(allocation_gpus(allocation)) == total
