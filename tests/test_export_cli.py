"""The command ``bidirl-plan export``: exit codes, streams, and the commands of its document."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bidirl.planner.cli import app
from bidirl.planner.export import FRAMEWORKS
from bidirl.shell import guarded

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "export.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty current folder with the examples."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.usefixtures("folder")
def test_commands_of_the_document_run(capfd: pytest.CaptureFixture[str]) -> None:
    lines = [line for body in blocks("sh") for line in body.splitlines()]
    assert lines
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == "bidirl-plan"
        assert guarded(app, arguments) == 0, capfd.readouterr().err
    assert "python3 -m verl" in capfd.readouterr().out
    assert "max_staleness_steps" in Path("out/skyrl.sh").read_text(encoding="utf-8")
    for body in blocks("python"):
        exec(compile(body, "export.md", "exec"), {})


def test_the_document_names_every_framework() -> None:
    named = set(re.findall(r"`(\w+)`", DOCUMENT.read_text(encoding="utf-8")))
    assert FRAMEWORKS.keys() <= named


@pytest.mark.usefixtures("folder")
def test_what_cannot_be_exported_is_one_line_and_exit_code_2(capfd: pytest.CaptureFixture[str]) -> None:
    assert guarded(app, ["export", "examples/demo.toml", "--framework", "trl"]) == 2
    assert guarded(app, ["export", "absent.json", "--framework", "verl"]) == 2
    assert guarded(app, ["export", "examples/demo.toml", "--framework", "verl_sync"]) == 2
    found = capfd.readouterr()
    assert found.out == ""
    assert len(found.err.splitlines()) == 3
    assert "Traceback" not in found.err


def test_the_search_and_the_export_load_only_what_they_run() -> None:
    code = "import sys, bidirl.planner.cli; print('bidirl.planner.export' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "False"
