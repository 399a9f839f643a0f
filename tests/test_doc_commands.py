"""Every command in docs/ works as it stands, and the reference names what the files hold."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from bidirl.executor.cli import app as run_app
from bidirl.planner.cli import app as plan_app
from bidirl.shell import guarded
from bidirl.sim.cli import app
from bidirl.sim.idle import CAUSES
from bidirl.traces.tables import SAMPLE_COLUMNS, STEP_COLUMNS
from tests.test_replay import SMALL

ROOT = Path(__file__).parents[1]
PROGRAMS = {"bidirl-sim": app, "bidirl-plan": plan_app, "bidirl-run": run_app}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
DOCUMENTS = sorted(
    path.name for path in (ROOT / "docs").glob("*.md") if "```sh\n" in path.read_text(encoding="utf-8")
)


def blocks(name: str, language: str) -> list[str]:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    return [body for found, body in BLOCK.findall(text) if found == language]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty current folder with the examples and a file of lengths."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "lengths.csv").write_text("response_tokens\n" + "\n".join(map(str, range(200, 2000, 50))))
    log = [
        "step,generation_s,old_logprob_s,update_s,response_mean_tokens,response_max_tokens,prompt_mean_tokens"
    ]
    log += [f"{i},{3 + i % 5 / 10},{0.5},{2 + i % 3 / 20},{300 + i % 5 * 10},1024,100" for i in range(40)]
    (tmp_path / "run.csv").write_text("\n".join(log) + "\n")
    shutil.copy(ROOT / "examples" / "demo.toml", tmp_path / "job.toml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("document", DOCUMENTS)
@pytest.mark.usefixtures("folder")
def test_commands_run_as_they_stand(document: str, capfd: pytest.CaptureFixture[str]) -> None:
    lines = [line for body in blocks(document, "sh") for line in body.splitlines()]
    assert lines
    if document == "howto.md":  # it reads what the tutorial's first command leaves
        lines.insert(0, blocks("tutorial.md", "sh")[0])
    for line in lines:
        program, *arguments = shlex.split(line)
        assert guarded(PROGRAMS[program], arguments) == 0, (line, capfd.readouterr().err)
    for body in blocks(document, "python"):
        exec(compile(body, document, "exec"), {})
        assert capfd.readouterr().out.strip()


def test_settings_in_the_documents_are_valid(folder: Path) -> None:
    for number, body in enumerate(blocks("howto.md", "toml")):
        base = SMALL.partition("[models.switch]")[0]
        if "[partition]" in body:
            base = base.replace("[partition]\nrollout_gpus = 2\n", "")
        job = folder / f"job{number}.toml"
        job.write_text(base + body)
        assert guarded(app, ["run", str(job), "--set", "workload.num_steps=2"]) == 0


def keys_of(value: Any) -> set[str]:
    return set(value) | {key for item in value.values() if isinstance(item, dict) for key in keys_of(item)}


def test_the_reference_names_every_key_and_column(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "small.toml").write_text(SMALL)
    capfd.readouterr()
    assert guarded(app, ["run", "small.toml", "--json"]) == 0
    summary = json.loads(capfd.readouterr().out)
    text = (ROOT / "docs" / "reference_summary.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", text))))
    summary["sources"], summary["lag"]["histogram"] = {}, {}
    summary["inclusion_by_length"] = {"q1": summary["inclusion_by_length"]["q1"]}
    assert keys_of(summary) - named == set()
    assert {*SAMPLE_COLUMNS, *STEP_COLUMNS, *CAUSES, "admission", "no_work", "wait_rollout"} - named == set()
