"""Commands, options and defaults are a contract: this pins them, not the rendered help.

After an intended change, run once with BIDIRL_UPDATE_GOLDEN=1 and commit the file that it writes.
"""

import importlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parent / "golden"
CLIS = {
    "bidirl-sim": "bidirl.sim.cli",
    "bidirl-plan": "bidirl.planner.cli",
    "bidirl-run": "bidirl.executor.cli",
}
PRESENT = {
    command: module for command, module in CLIS.items() if importlib.util.find_spec(module) is not None
}


def parameter(option: Any) -> dict[str, Any]:
    default = option.default() if callable(option.default) else option.default
    return {
        "names": sorted(option.opts + option.secondary_opts),
        "kind": option.param_type_name,
        "required": option.required,
        "repeatable": bool(getattr(option, "multiple", False)) or option.nargs == -1,
        "default": default
        if default is None or isinstance(default, bool | int | float | str)
        else str(default),
    }


def commands(command: Any, path: str) -> dict[str, list[dict[str, Any]]]:
    if hasattr(command, "commands"):
        return {
            key: value
            for name, below in sorted(command.commands.items())
            for key, value in commands(below, f"{path} {name}").items()
        }
    return {path: sorted((parameter(option) for option in command.params), key=lambda row: str(row["names"]))}


@pytest.mark.parametrize("command", sorted(PRESENT))
def test_command_line_is_what_was_agreed(command: str) -> None:
    typer_main = importlib.import_module("typer.main")
    app = importlib.import_module(PRESENT[command]).app
    found = commands(typer_main.get_command(app), command)
    path = GOLDEN / f"{command}.json"
    if os.environ.get("BIDIRL_UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if not path.exists():
        pytest.skip(f"{path.name} is not written yet: run with BIDIRL_UPDATE_GOLDEN=1")
    assert found == json.loads(path.read_text(encoding="utf-8"))
