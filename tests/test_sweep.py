"""Sweeps: the grid, its table, what is kept when it stops, and what is refused before it starts."""

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from bidirl.errors import InputError, RunFault
from bidirl.sim import sweep_store
from bidirl.sim.sweep import Sweep, plan_sweep
from bidirl.sim.sweep_run import Done, run_sweep
from bidirl.sim.sweep_store import Result, Scatter, Task, compute, local
from tests.test_replay import SMALL

VARY = ["policy.name=no_borrow,bidirl", "policy.staleness=0,0.5"]
SERIAL = local(1)
Compute = Callable[[Task], Result]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(
        SMALL.replace("num_steps = 5", "num_steps = 3").replace("over_steps = 4", "over_steps = 2")
    )
    return path


def done(sweep: Sweep, folder: Path, scatter: Scatter = SERIAL) -> Done:
    return run_sweep(sweep, folder, scatter, Console(stderr=True))


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def simulated(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Leave out what depends on the machine's speed: ``wall``, its events aside."""
    return [
        {name: value for name, value in row.items() if not name.startswith("wall.") or name == "wall.events"}
        for row in rows
    ]


def test_one_row_per_cell_and_seed_in_grid_order(job: Path, tmp_path: Path) -> None:
    done(plan_sweep(job, [], VARY, 2), tmp_path / "out")
    rows = table(tmp_path / "out")
    assert [(row["policy.name"], row["policy.staleness"], row["seed"]) for row in rows] == [
        (name, staleness, seed)
        for name in ("no_borrow", "bidirl")
        for staleness in ("0", "0.5")
        for seed in "01"
    ]
    names = list(rows[0])
    assert names[:4] == ["policy.name", "policy.staleness", "seed", "tokens_per_s"]
    assert names[-1] == "error"
    assert {"step_time_s.mean", "idle.by_cause.train.sync", "wall.events", "lag.enforced"} <= set(names)
    assert rows[0]["sources"] in {"transferred", "roofline", "assumed"}
    assert not [name for name in names if name.startswith("sources.")]
    kinds = [name.partition(".")[0] for name in names]
    assert all(kinds[i] == kinds[i - 1] or kinds[i] not in kinds[2:i] for i in range(3, len(kinds)))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "cells.jsonl", "sweep.csv", "sweep.json", "throughput.png", "speedup.png",
    }  # fmt: skip


def test_results_do_not_depend_on_processes(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_store, "POOL_START_S", 0.0)
    sweep = plan_sweep(job, [], ["policy.staleness=0,0.5,1"], 1)
    done(sweep, tmp_path / "one")
    done(sweep, tmp_path / "two", local(2))
    assert simulated(table(tmp_path / "one")) == simulated(table(tmp_path / "two"))


def test_order_of_return_does_not_matter(job: Path, tmp_path: Path) -> None:
    def backwards(function: Compute, tasks: Sequence[Task]) -> Iterator[Result]:
        yield from map(function, reversed(tasks))

    sweep = plan_sweep(job, [], VARY, 1)
    done(sweep, tmp_path / "one")
    done(sweep, tmp_path / "two", backwards)
    assert simulated(table(tmp_path / "one")) == simulated(table(tmp_path / "two"))


def test_an_interrupted_sweep_goes_on(job: Path, tmp_path: Path) -> None:
    started: list[str] = []

    def two_then_interrupted(function: Compute, tasks: Sequence[Task]) -> Iterator[Result]:
        for number, task in enumerate(tasks):
            if number == 2:
                raise KeyboardInterrupt
            started.append(task[0])
            yield function(task)

    def counting(function: Compute, tasks: Sequence[Task]) -> Iterator[Result]:
        for task in tasks:
            started.append(task[0])
            yield function(task)

    sweep, out = plan_sweep(job, [], VARY, 1), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        done(sweep, out, two_then_interrupted)
    with (out / "cells.jsonl").open("a") as file:
        file.write('{"key": "cut off')
    done(sweep, out, counting)
    assert len(started) == len(set(started)) == 4
    done(sweep, out, counting)
    assert len(started) == 4
    done(sweep, tmp_path / "fresh")
    assert simulated(table(out)) == simulated(table(tmp_path / "fresh"))


def test_a_changed_job_computes_only_what_changed(job: Path, tmp_path: Path) -> None:
    first = plan_sweep(job, [], ["policy.staleness=0,0.5"], 1)
    wider = plan_sweep(job, [], ["policy.staleness=0,0.5,1"], 1)
    other = plan_sweep(job, ["workload.num_steps=2"], ["policy.staleness=0"], 1)
    keys = [{cell.key for cell in sweep.cells} for sweep in (first, wider, other)]
    assert keys[0] < keys[1]
    assert not keys[2] & keys[1]


def test_the_contents_of_a_named_file_decide(job: Path, tmp_path: Path) -> None:
    lengths = tmp_path / "l.txt"
    lengths.write_text("100\n200\n")
    sets = [f"workload.lengths={lengths}"]
    one = plan_sweep(job, sets, ["policy.staleness=0"], 1).cells[0]
    lengths.write_text("100\n300\n")
    two = plan_sweep(job, sets, ["policy.staleness=0"], 1).cells[0]
    assert one.key != two.key
    assert str(tmp_path) not in json.dumps(two.resolved)


def test_cells_that_resolve_alike_run_once(job: Path, tmp_path: Path) -> None:
    sweep = plan_sweep(job, [], ["policy.name=colocated_sync", "policy.staleness=0,0.5,1"], 1)
    done(sweep, tmp_path / "out")
    assert len({cell.key for cell in sweep.cells}) == 1
    assert len((tmp_path / "out" / "cells.jsonl").read_text().splitlines()) == 1
    assert len({row["tokens_per_s"] for row in table(tmp_path / "out")}) == 1


def test_an_infeasible_cell_becomes_a_row(job: Path, tmp_path: Path) -> None:
    # Prompt and response together exceed it, which only the plan knows: the job itself breaks no rule.
    found = done(plan_sweep(job, [], ["engine.kv_tokens=1040,100000"], 1), tmp_path / "out")
    rows = table(tmp_path / "out")
    assert "KV tokens" in rows[0]["error"]
    assert rows[0]["tokens_per_s"] == ""
    assert rows[1]["error"] == ""
    assert float(rows[1]["tokens_per_s"]) > 0
    assert found.first_error is None
    assert "1 of 2 runs have no result" in found.notes[0]


def test_all_cells_infeasible_is_said(job: Path, tmp_path: Path) -> None:
    found = done(plan_sweep(job, [], ["engine.kv_tokens=1040,1056"], 1), tmp_path / "out")
    assert found.first_error is not None
    assert len(table(tmp_path / "out")) == 2


def test_a_combination_that_is_no_job_becomes_a_row(job: Path, tmp_path: Path) -> None:
    """tp = 4 does not divide 2 GPUs, but each value is right beside others."""
    vary = ["partition.rollout_gpus=2,4", "partition.rollout_tp=1,4"]
    done(plan_sweep(job, [], vary, 1), tmp_path / "out")
    errors = [row["error"] for row in table(tmp_path / "out")]
    assert [bool(error) for error in errors] == [False, True, False, False]
    assert "rollout_tp" in errors[1]


def test_a_fault_is_not_kept(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("oops")

    sweep = plan_sweep(job, [], ["policy.staleness=0"], 1)
    with monkeypatch.context() as patch:
        patch.setattr(sweep_store, "simulate", broken)
        found = done(sweep, tmp_path / "out")
    assert found.rows[0]["error"] == "bug in bidirl: ZeroDivisionError: oops"
    assert done(sweep, tmp_path / "out").first_error is None


def test_compute_keeps_the_first_line_of_a_refusal(job: Path) -> None:
    cell = plan_sweep(job, [], ["engine.kv_tokens=1040,1056"], 1).cells[0]
    assert cell.job is not None
    result = compute((cell.key, cell.job, 0))
    assert result.summary is None
    assert result.error is not None
    assert not result.is_fault


def test_figures_of_an_earlier_grid_go(job: Path, tmp_path: Path) -> None:
    done(plan_sweep(job, [], VARY, 1), tmp_path / "out")
    done(plan_sweep(job, [], ["policy.staleness=0,0.5"], 1), tmp_path / "out")
    assert not (tmp_path / "out" / "speedup.png").exists()
    assert (tmp_path / "out" / "throughput.png").exists()


def test_a_folder_that_cannot_be_written_is_a_fault(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bidirl.sim.sweep_run.write_rows", full)
    with pytest.raises(RunFault, match="no space left on device while writing"):
        done(plan_sweep(job, [], ["policy.staleness=0"], 1), tmp_path / "out")


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        (["policy.stalenes=0,1"], "--vary policy.stalenes=0,1: unknown key; did you mean staleness?"),
        (["nope.key=0,1"], "--vary nope.key=0,1: [nope]: unknown section"),
        (["policy.staleness="], "--vary policy.staleness=: an empty value"),
        (["policy.staleness=0,,1"], "--vary policy.staleness=0,,1: an empty value"),
        (["policy.staleness"], "--vary policy.staleness: not of the form"),
        (["policy.staleness=0,0"], "--vary policy.staleness=0,0: 0 is given twice"),
        (
            ["policy.staleness=0", "policy.staleness=1"],
            "--vary policy.staleness=1: policy.staleness is varied twice",
        ),
        (["policy.name=bidirl,bidir"], "--vary policy.name=bidir: no preset has this name"),
        (["policy.staleness=0,x"], "--vary policy.staleness=x: must be a number"),
        (
            ["partition.rollout_gpus=2,99", "policy.staleness=0,1"],
            "--vary partition.rollout_gpus=99: exceeds",
        ),
        (
            ["workload.lengths=none.txt,{p50 = 10, p95 = 50}"],
            "--vary workload.lengths=none.txt: no such file",
        ),
        ([], "--vary is missing"),
    ],
)
def test_a_bad_vary_is_refused_before_anything_runs(job: Path, vary: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        plan_sweep(job, [], vary, 1)
    assert str(caught.value).startswith(message)


def test_a_key_is_set_or_varied(job: Path) -> None:
    with pytest.raises(InputError, match=r"--set policy\.staleness=1 fixes policy\.staleness"):
        plan_sweep(job, ["policy.staleness=1"], ["policy.staleness=0,1"], 1)


def test_tables_can_be_varied(job: Path) -> None:
    sweep = plan_sweep(job, [], ["workload.lengths={p50 = 100, p95 = 400},{p50 = 300, p95 = 900}"], 1)
    assert [cell.values[0] for cell in sweep.cells] == ["{p50 = 100, p95 = 400}", "{p50 = 300, p95 = 900}"]
    assert len({cell.key for cell in sweep.cells}) == 2
