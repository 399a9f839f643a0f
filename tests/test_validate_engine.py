"""A short real run, calibrated and predicted: relations between numbers of one run, never seconds."""

from pathlib import Path

import pytest

from bidirl.executor.backends.assemble import Kind
from bidirl.executor.validate import Simulated, validate
from bidirl.planner.job import Job, load_job
from bidirl.sim.metrics import summarise
from bidirl.sim.run import simulate

COPY = Path(__file__).parents[1] / "examples" / "copy.toml"


@pytest.mark.engine
def test_a_real_run_is_calibrated_and_predicted(tmp_path: Path) -> None:
    def foretell(job: Job, seed: int) -> Simulated:
        outcome = simulate(job, seed)
        return Simulated(outcome.record, outcome.summary)

    job = load_job(COPY, ["workload.num_steps=6", "workload.prompts_per_step=8"])
    found = validate(
        job,
        0,
        Kind.VLLM,
        tmp_path,
        simulate=foretell,
        summarise=lambda record: summarise(record, sources={}),
        calibration_steps=3,
    )
    stages = {row.stage for row in found.rows}
    assert {"generation", "update", "optimizer", "sync"} <= stages
    iteration = found.fits["iteration"]
    assert iteration.coefficients["tau_pre_s"].value > 0.0
    assert iteration.num_rows > 10
    assert found.models.trainer.update.compute_s(2000.0) >= found.models.trainer.update.compute_s(100.0) > 0.0
    assert found.models.sync.seconds(1) > 0.0
    # a step that generates holds at least one engine's generation of it, or overlaps another step's
    assert found.makespan.measured_s > 0.0
    assert found.makespan.predicted_s > 0.0
    assert sum(row.measured_s for row in found.step_rows) == pytest.approx(found.makespan.measured_s)
