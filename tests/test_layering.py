"""Imports go one way: traces <- models <- planner <- {sim, executor}; read from the source, not executed."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "bidirl"
MODULES = sorted(PACKAGE.rglob("*.py"))

MAY_IMPORT = {
    "traces": {"traces"},
    "models": {"traces", "models"},
    "planner": {"traces", "models", "planner"},
    "sim": {"traces", "models", "planner", "sim"},
    "executor": {"traces", "models", "planner", "executor"},
}
HEAVY = {"torch", "vllm", "ray", "transformers"}
LAZY = {"pandas", "matplotlib", "scipy", "joblib"}


def imported(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (name.name for name in names)
        case ast.ImportFrom(module=module, names=names, level=0) if module:
            yield module
            if module == "bidirl":
                yield from (f"bidirl.{name.name}" for name in names)


def imports(tree: ast.AST) -> set[str]:
    return {name for node in ast.walk(tree) for name in imported(node)}


def imports_at_load(tree: ast.Module) -> set[str]:
    """Return what loading the module imports: not inside functions, not under ``if TYPE_CHECKING``."""
    found: set[str] = set()
    stack: list[ast.AST] = list(tree.body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack += node.orelse
            continue
        found.update(imported(node))
        stack += ast.iter_child_nodes(node)
    return found


def broken_rules(path: Path, text: str) -> list[str]:
    tree = ast.parse(text)
    place = path.relative_to(PACKAGE)
    layer = place.parts[0] if len(place.parts) > 1 else None
    allowed = {"traces"} if layer is None else MAY_IMPORT[layer]
    broken = []
    for name in sorted(imports(tree)):
        top, _, below = name.partition(".")
        target = below.partition(".")[0]
        composes = path.name == "cli.py" and layer in ("planner", "sim", "executor")
        if top in MAY_IMPORT:
            broken.append(f"{place} imports {name}: the root link, write bidirl.{name}")
        elif top == "bidirl" and target in MAY_IMPORT and target not in allowed and not composes:
            broken.append(f"{place} imports {name}: {layer} is below or beside it")
        elif top in HEAVY and place.parts[:2] != ("executor", "backends"):
            broken.append(f"{place} imports {name}: only executor/backends may")
    broken += [
        f"{place} imports {name} when loaded: import it where it is used"
        for name in sorted(imports_at_load(tree))
        if name.partition(".")[0] in LAZY
    ]
    if any(node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)):
        broken.append(f"{place} imports relatively: write bidirl.*")
    return broken


def test_package_has_exactly_the_layers() -> None:
    assert {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()} == set(MAY_IMPORT)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_keeps_to_its_layer(path: Path) -> None:
    assert broken_rules(path, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("traces/x.py", "from bidirl.models.iteration import AffineIteration"),
        ("models/x.py", "import bidirl.planner"),
        ("planner/x.py", "def f():\n    from bidirl.sim import driver"),
        ("sim/x.py", "from bidirl import executor"),
        ("executor/x.py", "from bidirl.sim.driver import run"),
        ("executor/x.py", "import torch.distributed"),
        ("sim/x.py", "import planner"),
        ("sim/x.py", "import pandas as pd"),
        ("sim/x.py", "from . import driver"),
        ("models/x.py", "try:\n    from scipy.stats import norm\nexcept ImportError:\n    pass"),
    ],
)
def test_a_wrong_import_is_found(module: str, text: str) -> None:
    assert len(broken_rules(PACKAGE / module, text)) == 1


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("sim/x.py", "from bidirl.planner.job import load_job"),
        ("sim/cli.py", "from bidirl.executor.driver import run"),
        ("executor/backends/x.py", "import torch"),
        ("sim/x.py", "def f():\n    import pandas"),
        ("sim/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pandas"),
        ("models/x.py", "from bidirl.errors import InputError"),
    ],
)
def test_a_right_import_is_not(module: str, text: str) -> None:
    assert broken_rules(PACKAGE / module, text) == []


@pytest.mark.parametrize("name", sorted(MAY_IMPORT))
def test_root_links_are_relative(name: str) -> None:
    link = ROOT / name
    assert link.is_symlink()
    assert link.readlink() == Path("bidirl") / name
