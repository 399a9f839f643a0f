"""Calibration on the first part of a run and prediction of the rest, on stand-ins; relations, not seconds."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.errors import InputError
from bidirl.executor.backends.assemble import Kind
from bidirl.executor.backends.paced import PacedEngine, PacedTrainer
from bidirl.executor.backends.stub import StubConfig, StubEngine, StubTrainer
from bidirl.executor.backends.vllm.meter import Iteration
from bidirl.executor.cli import app
from bidirl.executor.roles import Draft, Row
from bidirl.executor.validate import Simulated, Validation, errors_of, validate, with_models
from bidirl.executor.validate_fit import calibrated, fit_iteration, fit_segment, iteration_s
from bidirl.executor.validate_observe import Stopwatch, Timing
from bidirl.models.iteration import AffineIteration
from bidirl.models.stages import StageModels
from bidirl.planner.events import SegmentKind
from bidirl.planner.job import Job, load_job
from bidirl.planner.learn import PaceConfig
from bidirl.shell import guarded
from bidirl.sim.metrics import summarise
from bidirl.sim.run import simulate
from tests.real_jobs import TINY, tiny_job

TRUE = AffineIteration(4e-3, 2e-3, 3e-6, 5e-5, 0.0, 1e-7)


def _iterations(model: AffineIteration, num: int = 200, seed: int = 0) -> list[Iteration]:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(num):
        seqs, context = int(rng.integers(1, 65)), int(rng.integers(0, 200))
        prefill = int(rng.integers(0, 2)) * 32 * seqs
        row = Iteration(seqs, prefill, seqs, seqs * context + prefill, 0, 0.0)
        rows.append(replace(row, seconds=iteration_s(model, row)))
    return rows


def test_an_iteration_model_is_found_again() -> None:
    model, fit = fit_iteration(_iterations(TRUE))
    for name in ("tau_pre_s", "tau_dec_s", "beta_tok_pre_s", "beta_tok_dec_s", "beta_hist_dec_s"):
        assert getattr(model, name) == pytest.approx(getattr(TRUE, name), rel=1e-3)
    assert fit.p90_error < 1e-6


@given(st.integers(0, 20))
def test_stalls_move_the_level_and_not_the_shape(seed: int) -> None:
    rows = _iterations(TRUE, seed=seed)
    rng = np.random.default_rng(seed)
    for at in rng.choice(len(rows), 10, replace=False):
        rows[at] = replace(rows[at], seconds=20 * rows[at].seconds)
    model, fit = fit_iteration(rows)
    total = sum(row.seconds for row in rows)
    assert sum(iteration_s(model, row) for row in rows) == pytest.approx(total)
    assert model.tau_dec_s / model.beta_tok_dec_s == pytest.approx(
        TRUE.tau_dec_s / TRUE.beta_tok_dec_s, rel=0.1
    )
    assert fit.level > 1.0


def test_pulls_give_their_line_back() -> None:
    pulls = [
        Timing("update", k, 0, 0.0, 0.1 + 2e-4 * work, work, 10.0) for k, work in enumerate((100, 900, 500))
    ]
    cost, fit = fit_segment(pulls)
    assert (cost.tau_s, cost.alpha_s) == pytest.approx((0.1, 2e-4))
    assert fit.level == pytest.approx(1.0)
    with pytest.raises(InputError, match="trainer pulls to fit: 0"):
        fit_segment([])
    with pytest.raises(InputError, match="engine iterations to fit: 0"):
        fit_iteration([])


def _models(job: Job) -> StageModels:
    from bidirl.planner.build import build_plan, build_workload

    return build_plan(job, build_workload(job, 0)).models


def test_a_cost_that_was_not_seen_is_that_of_a_similar_one() -> None:
    models = _models(tiny_job())
    update = [Timing("update", k, 0, 0.0, 0.1 * work, work, work) for k, work in enumerate((1.0, 2.0))]
    seen = [Timing("sync", 0, 0, 0.0, 0.02), Timing("rollout_on_train_out", 0, 0, 0.0, 0.003)]
    found, _ = calibrated(models, _iterations(TRUE), [*update, *seen], origin="test")
    assert found.switch.grad_s == found.switch.rollout_on_train_in_s == found.sync.seconds(4) == 0.02
    assert found.switch.train_on_rollout_out_s == 0.003
    assert found.sources["switch.grad_s"].source.value == "transferred"
    again, _ = calibrated(found, _iterations(TRUE), update, origin="test")
    assert again.switch == found.switch  # measured before: kept


def test_a_simulated_journal_is_timed_as_it_was_made() -> None:
    switch = "models.switch={rollout_on_train_in_s = 1e-3, train_on_rollout_in_s = 1e-3}"
    job = tiny_job("policy.name=opportunistic", switch, rollout_gpus=1, gpus=3, steps=8)
    watch = Stopwatch()
    outcome = simulate(job, 0, sink=lambda _: watch)
    models = outcome.plan.models
    by_stage: dict[str, list[Timing]] = {}
    for timing in watch.timings:
        by_stage.setdefault(timing.stage, []).append(timing)
    for pull in by_stage["update"]:
        expected = models.trainer.pull_s("update", pull.work, pull.longest, pull.num_replicas)
        assert pull.seconds == pytest.approx(expected)
    for timing in by_stage["optimizer"]:
        assert timing.seconds == pytest.approx(models.trainer.optimizer_s)
    for timing in by_stage["rollout_on_train_in"]:
        assert timing.seconds == pytest.approx(models.switch.rollout_on_train_in_s)
    assert len(by_stage["sync"]) >= job.workload.num_steps


def test_paced_roles_do_their_work_and_wait() -> None:
    from time import monotonic

    config = StubConfig(max_num_seqs=2)
    pace = PaceConfig(iteration_s=0.01, sequence_s=0.005, token_s=0.002)
    prompt = np.array([1, 2], np.int32)
    engine, plain = PacedEngine(StubEngine(config), pace), StubEngine(config)
    for each in (engine, plain):
        each.submit([Draft(0, index, prompt, index, 3) for index in range(4)])
    start_s = monotonic()
    paced = engine.step()
    assert monotonic() - start_s >= 0.02  # two sequences of four are in the iteration
    assert len(paced) == len(plain.step())
    assert engine.num_unfinished == 4
    row = Row(Draft(0, 0, prompt, 0, 2, np.array([1, 1], np.int32), np.zeros(2, np.float32)), 1.0, 1.0)
    trainer = PacedTrainer(StubTrainer(config), pace)
    start_s = monotonic()
    piece = trainer.run(SegmentKind.UPDATE, 0, [row], num_tokens=2, num_sequences=1)
    assert monotonic() - start_s >= 0.008
    again = StubTrainer(config).run(SegmentKind.UPDATE, 0, [row], num_tokens=2, num_sequences=1)
    assert np.array_equal(piece.gradient, again.gradient)


def _foretell(job: Job, seed: int) -> Simulated:
    outcome = simulate(job, seed)
    return Simulated(outcome.record, outcome.summary)


def _validated(tmp_path: Path, *settings: str, **more: Any) -> Validation:
    return validate(
        tiny_job(*settings, rollout_gpus=2, gpus=3),
        0,
        Kind.STUB,
        tmp_path,
        simulate=_foretell,
        summarise=lambda record: summarise(record, sources={}),
        stub=StubConfig(step_s=1e-3, token_s=1e-4),
        **more,
    )


def test_the_rest_of_a_run_is_compared_stage_by_stage_and_as_a_whole(tmp_path: Path) -> None:
    found = _validated(tmp_path, "policy.name=opportunistic", calibration_steps=3)
    stages = {row.stage for row in found.rows}
    assert {"generation", "update", "optimizer", "sync"} <= stages
    assert {row.step for row in found.rows} == {3, 4, 5}
    assert all(row.measured_s > 0.0 and row.predicted_s >= 0.0 for row in found.rows)
    assert sum(row.measured_s for row in found.step_rows) == pytest.approx(found.makespan.measured_s)
    assert sum(row.predicted_s for row in found.step_rows) == pytest.approx(found.makespan.predicted_s)
    published = found.run.record.steps.published_s
    assert found.makespan.measured_s == pytest.approx(published[-1] - published[2])
    assert StageModels.load(tmp_path / "models.json") == found.models
    assert found.errors()["stages"].num_rows == sum(
        row.stage in ("generation", "old_logprob", "update") for row in found.rows
    )
    assert json.loads(json.dumps(found.to_json()))["pace"] is None


def test_iterations_account_for_every_token(tmp_path: Path) -> None:
    found = _validated(tmp_path, "policy.name=no_borrow", "policy.staleness=0", calibration_steps=3)
    by_step: dict[int, float] = {}
    for row in found.rows:
        if row.stage == "generation":
            by_step[row.step] = by_step.get(row.step, 0.0) + row.measured_s
    assert set(by_step) == {3, 4, 5}
    assert found.leases == {"measured": {}, "predicted": {}}


def test_too_few_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="calibration on 6 of 6 steps"):
        _validated(tmp_path, calibration_steps=6)
    with pytest.raises(InputError, match="calibration on 2 of 6 steps"):
        _validated(tmp_path, calibration_steps=2)


def test_no_rows_have_no_error() -> None:
    assert errors_of([]).num_rows == 0


def test_models_of_a_file_leave_nothing_laid_over_them(tmp_path: Path) -> None:
    job = load_job(TINY, ["models.sync_s=3.0"])
    _models(job).save(tmp_path / "m.json")
    changed = with_models(job, tmp_path / "m.json")
    assert changed.models.sync_s is None
    assert changed.models.file == str(tmp_path / "m.json")


def test_the_command_writes_table_figure_and_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--set", "workload.max_response_tokens=24", "--set", "workload.lengths={p50 = 8, p95 = 20}"]
    arguments = ["validate", str(TINY), "--backend", "fake", "--steps", "5", "--out", str(tmp_path), *small]
    assert guarded(app, arguments, "bidirl-run") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("calibrated on steps 1 to 2, steps 3 to 4 are predicted")
    names = {"models.json", "validate.json", "stages.csv", "validate.png"}
    assert names <= {path.name for path in tmp_path.iterdir()}
    data = json.loads((tmp_path / "validate.json").read_text())
    assert len(data["steps"]) == 2
