"""Start-up stays light: no heavy library is loaded before it is needed."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"pandas", "matplotlib", "scipy", "joblib", "torch", "vllm", "ray", "transformers"}
ENTRY_MODULES = [
    "bidirl",
    "bidirl.planner.job",
    "bidirl.sim.cli",
    "bidirl.planner.cli",
    "bidirl.executor.cli",
]


def exists(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@pytest.mark.parametrize("module", [module for module in ENTRY_MODULES if exists(module)])
def test_import_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, json, {module}; print(json.dumps(sorted(sys.modules)))"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert loaded & HEAVY == set()
