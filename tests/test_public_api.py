"""Every public module says what it offers: all of it, and nothing that is not there."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(path for path in (ROOT / "bidirl").rglob("*.py") if not path.name.startswith("_"))
NEEDS_ENGINE = ("executor", "backends")


def public_definitions(tree: ast.Module) -> set[str]:
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")}


def declared(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return None


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_all_is_complete(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = declared(tree)
    assert names is not None, f"{path} has no __all__"
    assert len(names) == len(set(names))
    if path.name != "cli.py":  # its functions are commands, reached by the command line
        assert public_definitions(tree) <= set(names)


@pytest.mark.parametrize(
    "path",
    [path for path in MODULES if path.relative_to(ROOT / "bidirl").parts[:2] != NEEDS_ENGINE],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_all_exists(path: Path) -> None:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    module = importlib.import_module(name)
    assert [entry for entry in module.__all__ if not hasattr(module, entry)] == []


def test_version_is_stated_once() -> None:
    version = importlib.import_module("bidirl").__version__
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dynamic = ["version"]' in text
    assert version not in text.split("[project.optional-dependencies]", maxsplit=1)[0]
