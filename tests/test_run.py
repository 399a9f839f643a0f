"""One run and its folder: complete, reproducible, readable, the same with and without a journal."""

import json
import math
from pathlib import Path

import pytest

from bidirl.errors import InputError, NoFeasiblePlan, RunFault
from bidirl.planner.job import load_job
from bidirl.sim import run as run_module
from bidirl.sim.run import alone_decode_s, run_to_folder, simulate
from bidirl.traces.tables import read_samples, read_steps
from tests.test_replay import SMALL, small_job

FILES = {
    "resolved.json",
    "summary.json",
    "steps.csv",
    "samples.csv",
    "journal.jsonl",
    "timeline.png",
    "trace.json",
}
SUMMARY_KEYS = {
    "tokens_per_s", "tokens_per_s_per_gpu", "step_time_s", "parts_s", "idle", "ledger", "lag", "span",
    "inclusion_by_length", "borrow", "resume", "bound", "sources", "wall",
}  # fmt: skip


def without_wall(summary: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in summary.items() if key != "wall"}


def test_the_folder_is_complete_and_says_the_same(tmp_path: Path) -> None:
    job = load_job(small_job(tmp_path))
    out = tmp_path / "new" / "out"
    outcome = run_to_folder(job, 3, out)
    assert {path.name for path in out.iterdir()} == FILES
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert set(summary) >= SUMMARY_KEYS
    assert without_wall(summary) == without_wall(outcome.summary)
    samples, steps = read_samples(out / "samples.csv"), read_steps(out / "steps.csv")
    assert samples["response_tokens"] == list(outcome.record.samples.response_tokens)
    assert steps["published_s"] == outcome.record.steps.published_s
    trace = json.loads((out / "trace.json").read_text(encoding="utf-8"))
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X", "C", "i"}
    assert summary["sources"]["sync.fixed_s"] in {"transferred", "roofline", "fitted", "measured", "assumed"}


def test_a_journal_changes_no_result(tmp_path: Path) -> None:
    job = load_job(small_job(tmp_path))
    assert without_wall(run_to_folder(job, 0, tmp_path / "out").summary) == without_wall(
        simulate(job, 0).summary
    )


def test_resolved_json_is_a_job_that_gives_the_same_run(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("200\n300\n700\n900\n", encoding="utf-8")
    text = SMALL.replace("lengths = { p50 = 300, p95 = 900 }", 'lengths = "lengths.txt"')
    text = text.replace("[partition]\nrollout_gpus = 2\n", "")
    path = tmp_path / "job.toml"
    path.write_text(text, encoding="utf-8")
    first = run_to_folder(load_job(path), 5, tmp_path / "out")
    written = (tmp_path / "out" / "resolved.json").read_text(encoding="utf-8")
    assert str(tmp_path) not in written
    assert json.loads(written)["provenance"].keys() == {"bidirl", "python", "numpy", "machine", "seed"}
    again = load_job(tmp_path / "out" / "resolved.json")
    assert again.partition is not None
    assert without_wall(simulate(again, 5).summary) == without_wall(first.summary)


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    job = load_job(small_job(tmp_path))
    for name in ("a", "b"):
        run_to_folder(job, 7, tmp_path / name)
    for name in FILES - {"summary.json"}:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_seeds_differ(tmp_path: Path) -> None:
    job = load_job(small_job(tmp_path))
    assert simulate(job, 0).record.samples.response_tokens != simulate(job, 1).record.samples.response_tokens


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    job = load_job(small_job(tmp_path))
    with pytest.raises(InputError, match="choose a folder"):
        run_to_folder(job, 0, tmp_path / "small.toml")


def test_a_full_disk_is_a_fault_on_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_module, "write_samples", full)
    with pytest.raises(RunFault, match="no space left on device while writing") as caught:
        run_to_folder(load_job(small_job(tmp_path)), 0, tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_no_feasible_plan_still_leaves_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def infeasible(*_: object) -> None:
        raise NoFeasiblePlan("no partition fits")

    monkeypatch.setattr(run_module, "build_plan", infeasible)
    with pytest.raises(NoFeasiblePlan):
        run_to_folder(load_job(small_job(tmp_path)), 0, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == {"error": "no partition fits"}
    assert (tmp_path / "out" / "resolved.json").exists()


def test_alone_decode_is_the_sum_of_its_iterations(tmp_path: Path) -> None:
    outcome = simulate(load_job(small_job(tmp_path)), 0)
    base_s, context_s = outcome.plan.models.iteration.decode(1)
    by_hand = math.fsum(base_s + context_s * (100 + k) for k in range(49))
    assert alone_decode_s(outcome.plan)(100, 50) == pytest.approx(by_hand, rel=1e-12)
    assert alone_decode_s(outcome.plan)(100, 1) == 0.0
