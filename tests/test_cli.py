"""The command line as a user meets it: outputs, exit codes, one line per error."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bidirl.shell import guarded
from bidirl.sim.cli import app
from tests.test_replay import SMALL

Call = Callable[..., tuple[int, str, str]]
COMMAND = [sys.executable, "-c", "from bidirl.sim.cli import main; main()"]
ROOT = Path(__file__).parents[1]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(SMALL)
    return path


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Call:
    """Run a command in this process; return its exit code, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = guarded(app, [str(argument) for argument in arguments], "bidirl-sim")
        return code, *capfd.readouterr()

    return run


def test_run_prints_the_verdict_first(call: Call, job: Path) -> None:
    code, out, _ = call("run", job)
    assert code == 0
    assert out.startswith("bidirl: ")
    assert "tokens/s" in out.splitlines()[0]
    assert "Idle (share of the pool's device-seconds)" in out


def test_run_writes_nothing_without_out(call: Call, job: Path, tmp_path: Path) -> None:
    call("run", job, "--json")
    assert [path.name for path in tmp_path.iterdir()] == ["job.toml"]


def test_json_is_the_summary_and_nothing_else(call: Call, job: Path, tmp_path: Path) -> None:
    code, out, _ = call("run", job, "--json", "--out", tmp_path / "out", "--seed", 4)
    assert code == 0
    assert json.loads(out) == json.loads((tmp_path / "out" / "summary.json").read_text())


def test_policy_keeps_the_other_choices(call: Call, job: Path, tmp_path: Path) -> None:
    call(
        "run",
        job,
        "--policy",
        "no_borrow",
        "--set",
        "workload.num_steps=4",
        "--out",
        tmp_path / "out",
        "--json",
    )
    resolved = json.loads((tmp_path / "out" / "resolved.json").read_text())
    assert resolved["policy"]["name"] == "no_borrow"
    assert resolved["policy"]["staleness"] == "0.1"
    assert resolved["workload"]["num_steps"] == 4


def test_without_a_partition_the_planner_chooses_and_says_so(call: Call, job: Path) -> None:
    job.write_text(SMALL.replace("[partition]\nrollout_gpus = 2\n", ""))
    code, out, err = call("run", job, "--json")
    assert code == 0
    assert "the planner chose rollout_gpus = " in err
    assert json.loads(out)["gpus"]["total"] == 8


def test_replay_agrees_and_finds_a_change(call: Call, job: Path, tmp_path: Path) -> None:
    call("run", job, "--json", "--out", tmp_path / "out")
    journal = tmp_path / "out" / "journal.jsonl"
    code, out, _ = call("replay", journal)
    assert code == 0
    assert "events agree" in out
    lines = journal.read_text().splitlines()
    at = next(n for n, line in enumerate(lines) if '"kind_of":"StartChunks"' in line)
    lines[at] = lines[at].replace('"num_replicas":', '"num_replicas":1')
    journal.write_text("\n".join(lines) + "\n")
    code, out, err = call("replay", journal)
    assert code == 3
    assert f"line {at + 1}" in out
    assert out.count("num_replicas") >= 2
    assert "Traceback" not in out + err
    code, out, _ = call("replay", journal, "--json")
    assert code == 3
    assert json.loads(out)["difference"]["line"] == at + 1


def test_sweep_prints_verdict_and_table(call: Call, job: Path, tmp_path: Path) -> None:
    vary = ("--vary", "policy.name=no_borrow,bidirl", "--vary", "policy.staleness=0,1")
    code, out, err = call("sweep", job, *vary, "--out", tmp_path / "out", "--set", "workload.num_steps=4")
    assert code == 0
    assert out.startswith("best of 4 cells: ")
    assert "no_borrow" in out.splitlines()[2] + out.splitlines()[3]
    assert "runs are taken from" not in err
    code, out, err = call(
        "sweep", job, *vary, "--out", tmp_path / "out", "--set", "workload.num_steps=4", "--json"
    )
    assert code == 0
    assert len(json.loads(out)["rows"]) == 4
    assert "4 of 4 runs are taken from" in err


def test_sweep_without_any_result_exits_1(call: Call, job: Path, tmp_path: Path) -> None:
    code, out, err = call("sweep", job, "--vary", "engine.kv_tokens=1040,1056", "--out", tmp_path / "out")
    assert code == 1
    assert out.startswith("cannot tell")
    assert err.splitlines()[-1].startswith("no cell has a result: ")
    assert (tmp_path / "out" / "sweep.csv").exists()


def test_ray_without_ray_is_one_line(
    call: Call, job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    code, out, err = call(
        "sweep", job, "--vary", "policy.staleness=0", "--ray", "auto", "--out", tmp_path / "out"
    )
    assert (code, out) == (2, "")
    assert "pip install 'bidirl[ray]'" in err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["run", "nope.toml"], "nope.toml: cannot be read"),
        (["run", "JOB", "--seed", "-1"], "--seed"),
        (["run", "JOB", "--seed", "1.5"], "--seed"),
        (["run", "JOB", "--policy", "bidir"], "--policy bidir: no preset has this name"),
        (["run", "JOB", "--set", "policy.stalenes=1"], "did you mean staleness?"),
        (["run", "JOB", "--set", "x"], "--set x: not of the form"),
        (["run", "JOB", "--frob"], "No such option: --frob"),
        (["run"], "Missing argument"),
        (["frob"], "No such command 'frob'"),
        (["run", "JOB", "--out", "JOB"], "choose a folder that can be written"),
        (["sweep", "JOB", "--out", "DIR"], "Missing option '--vary'"),
        (["sweep", "JOB", "--vary", "policy.stalenes=1,2", "--out", "DIR"], "did you mean staleness?"),
        (["sweep", "JOB", "--vary", "policy.staleness=1", "--seeds", "0", "--out", "DIR"], "--seeds"),
        (["replay", "nope.jsonl"], "nope.jsonl: cannot be read"),
        (["replay", "JOB"], "is not the header of a journal"),
        (["engine", "nope.csv", "--models", "nope.json"], "nope.json: cannot be read"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    arguments: list[str], part: str, call: Call, job: Path, tmp_path: Path
) -> None:
    where = {"JOB": str(job), "DIR": str(tmp_path / "out")}
    code, out, err = call(*(where.get(argument, argument) for argument in arguments))
    assert (code, out) == (2, "")
    assert part in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_bug_shows_its_traceback(call: Call, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("bidirl.sim.run.simulate", broken)
    code, _, err = call("run", job)
    assert code == 3
    assert "ZeroDivisionError: oops" in err
    assert "please report" in err


def test_interrupt_exits_130(call: Call, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bidirl.sim.run.simulate", interrupted)
    code, _, err = call("run", job)
    assert code == 130
    assert "Traceback" not in err


def test_version(call: Call) -> None:
    code, out, _ = call("--version")
    assert code == 0
    assert out.startswith("bidirl ")


def test_a_reader_that_goes_away_is_no_error(job: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "run", str(job)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()
    assert process.wait() == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_stdout_is_one_line(job: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, "run", str(job)], stdout=full, stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT
        )
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1].startswith("no space left on device")


def test_ctrl_c_keeps_what_was_computed(job: Path, tmp_path: Path) -> None:
    values = ",".join(str(number / 100) for number in range(400))
    arguments = [
        "sweep",
        str(job),
        "--vary",
        f"policy.staleness={values}",
        "--jobs",
        "1",
        "--out",
        str(tmp_path / "o"),
    ]
    process = subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    cells = tmp_path / "o" / "cells.jsonl"
    for _ in range(600):
        if cells.exists() and cells.stat().st_size:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait() == 130
    assert "the same command goes on from there" in err
    assert "Traceback" not in err
    assert all("key" in json.loads(line) for line in cells.read_text().splitlines())


HEAVY = {"pandas", "matplotlib", "scipy", "joblib", "ray", "torch"}
LIST_MODULES = """
import json, sys
from bidirl.sim.cli import main
try:
    main()
except SystemExit:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


def modules_after(*arguments: str) -> set[str]:
    """Return the top-level modules that a command has imported."""
    command = [sys.executable, "-c", LIST_MODULES, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return {name.partition(".")[0] for name in json.loads(done.stderr.splitlines()[-1])}


def test_help_imports_nothing_heavy() -> None:
    assert modules_after("--help") & (HEAVY | {"numpy", "simpy", "pydantic"}) == set()


def test_a_run_without_out_imports_nothing_heavy(job: Path) -> None:
    assert modules_after("run", str(job)) & HEAVY == set()
