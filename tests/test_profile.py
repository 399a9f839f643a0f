"""The designed experiment: which cells it takes, and what it makes of them."""

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.errors import InputError
from bidirl.executor.backends.assemble import Kind
from bidirl.executor.backends.stub import StubConfig
from bidirl.executor.cli import app
from bidirl.executor.profile import engine_cells, profile, trainer_cells
from bidirl.executor.profile_design import d_optimal, information, spaced
from bidirl.executor.run import real_plan
from bidirl.models.stages import StageModels
from bidirl.shell import guarded
from tests.real_jobs import TINY, tiny_job

GRID = np.array([(1.0, b, b * c) for b in (1, 4, 16, 64) for c in (4, 16, 64)])
BELIEVED = 1.0 + GRID[:, 1] / 64 + GRID[:, 2] / 4096


def _value(design: np.ndarray, seconds: np.ndarray, cells: tuple[int, ...]) -> float:
    rows = design / seconds[:, None]
    return information((rows / np.abs(rows).max(axis=0))[list(cells)])


@pytest.mark.parametrize("num", [3, 4, 5])
def test_the_chosen_cells_tell_as_much_as_the_best_of_all(num: int) -> None:
    found = _value(GRID, BELIEVED, d_optimal(GRID, BELIEVED, num))
    best = max(_value(GRID, BELIEVED, cells) for cells in combinations(range(len(GRID)), num))
    assert found >= best - 0.05


def test_a_line_is_measured_at_its_ends() -> None:
    work = np.array([1.0, 2.0, 3.0, 4.0, 10.0])
    design = np.stack([np.ones(5), work], axis=1)
    assert d_optimal(design, np.ones(5), 2) == (0, 4)


@given(st.integers(3, 8), st.floats(0.1, 10.0))
def test_the_unit_of_a_coefficient_changes_nothing(num: int, factor: float) -> None:
    scaled = GRID * np.array([1.0, factor, 1.0])
    plain, other = (_value(GRID, BELIEVED, d_optimal(grid, BELIEVED, num)) for grid in (GRID, scaled))
    assert plain == pytest.approx(other, abs=1e-6)


@given(st.integers(1, 50), st.integers(0, 500), st.integers(2, 9))
def test_spaced_points_are_ascending_and_keep_the_ends(low: int, more: int, num: int) -> None:
    points = spaced(low, low + more, num)
    assert points[0] == low
    assert points[-1] == low + more
    assert list(points) == sorted(set(points))


def test_too_few_cells_are_refused() -> None:
    with pytest.raises(InputError, match="2 cells for 3 coefficients"):
        d_optimal(GRID, BELIEVED, 2)


def test_cells_fit_the_engine_and_the_batch() -> None:
    job = tiny_job(rollout_gpus=1, gpus=2)
    plan = real_plan(job, 0)
    limits = plan.models.limits
    for cell in engine_cells(plan, 48, 0):
        assert cell.num_samples <= limits.max_num_seqs
        assert cell.num_samples * cell.tokens < limits.kv_tokens
    for cell in trainer_cells(plan, 48, 0):
        assert cell.num_samples <= plan.groups_per_step * plan.samples_per_group
        assert cell.tokens <= 48
    with pytest.raises(InputError, match="longest sample"):
        engine_cells(plan, 8, 0)


@pytest.mark.parametrize("lending", ["both", "none"])
def test_a_profile_has_every_cost_that_the_policy_can_meet(lending: str) -> None:
    preset = "bidirl" if lending == "both" else "no_borrow"
    job = tiny_job(f"policy.name={preset}", rollout_gpus=1, gpus=2)
    found = profile(job, 0, Kind.STUB, stub=StubConfig(step_s=5e-4, token_s=2e-6))
    switches = {"rollout_on_train_in", "train_on_rollout_out", "merge", "broadcast"}
    assert (switches <= set(found.num_costs)) == (lending == "both")
    assert "sync" in found.num_costs
    assert {cell.is_fitted for cell in found.cells} == {True, False}
    assert all(cell.measured_s > 0.0 for cell in found.cells)
    assert found.models.trainer.update.alpha_s > 0.0
    assert found.models.provenance["kind"] == "measured"


def test_the_command_writes_models_that_a_job_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from bidirl.sim.cli import app as sim_app

    out = tmp_path / "models.json"
    small = ["--set", "workload.max_response_tokens=24", "--set", "workload.lengths={p50 = 8, p95 = 20}"]
    arguments = ["profile", str(TINY), "--backend", "fake", "--out", str(out), "--json", *small]
    assert guarded(app, arguments, "bidirl-run") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads(out.with_suffix(".profile.json").read_text())
    assert StageModels.load(out).sources["sync.apply_s"].source.value == "measured"
    run = ["run", str(TINY), "--set", f"models.file={out}", "--json", *small]
    assert guarded(sim_app, run, "bidirl-sim") == 0
