"""Advice from logs: verdicts, their evidence, and what may not be said without it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.errors import InputError
from bidirl.planner.advise.advice import advise
from bidirl.planner.advise.compare import compare_logs
from bidirl.planner.advise.doubts import doubts_of_log
from bidirl.planner.advise.evidence import evidence_of
from bidirl.planner.advise.figure import draw_advice, waterfall
from bidirl.planner.advise.report import advice_json, advice_lines
from bidirl.planner.advise.unknowns import RANGES, draw_unknowns
from bidirl.planner.advise.verdict import Limit, Tail, idle_table, judge
from bidirl.planner.cli import app
from bidirl.shell import guarded
from bidirl.traces.step_log import Mode, StepLog


def log_of(mode: Mode = Mode.ASYNC, num: int = 12, noise: float = 0.02, **columns: float) -> StepLog:
    """Return a run whose columns vary a little around the given values."""
    rng = np.random.default_rng(3)
    facts: dict[str, float] = {
        str(name): columns.pop(name) for name in ("num_gpus", "batch_samples") if name in columns
    }
    arrays = {name: value * (1.0 + noise * rng.standard_normal(num)) for name, value in columns.items()}
    return StepLog("verl", mode, "one step", arrays, facts=facts)


def limit_of(log: StepLog) -> Limit:
    return judge(evidence_of(log)).limit


@pytest.mark.parametrize(
    ("log", "limit"),
    [
        (log_of(wait_s=60.0, update_s=35.0, step_s=100.0), Limit.ROLLOUT),
        (log_of(wait_s=2.0, update_s=95.0, step_s=100.0), Limit.TRAINER),
        (log_of(wait_s=10.0, update_s=50.0, weight_sync_s=40.0, step_s=100.0), Limit.SYNC),
        (log_of(wait_s=10.0, update_s=50.0, switch_s=38.0, step_s=100.0), Limit.SWITCH),
        (log_of(wait_s=10.0, update_s=50.0, reward_s=38.0, step_s=100.0), Limit.REWARD),
        (log_of(wait_s=50.0, update_s=20.0, weight_sync_s=25.0, step_s=100.0), Limit.ROLLOUT),
        (log_of(generation_s=48.0, update_s=50.0, step_s=100.0), Limit.ALTERNATING),
        (log_of(Mode.COLOCATED, generation_s=70.0, update_s=28.0, step_s=100.0), Limit.ROLLOUT),
        (log_of(Mode.COLOCATED, generation_s=10.0, update_s=88.0, step_s=100.0), Limit.TRAINER),
        (log_of(Mode.COLOCATED, generation_s=50.0, update_s=48.0, step_s=100.0), Limit.BALANCED),
        (
            log_of(
                wait_s=60.0,
                update_s=35.0,
                step_s=100.0,
                rollouter_version_s=100.0,
                rollouter_active_s=98.0,
            ),
            Limit.ROLLOUT,
        ),
        (
            log_of(
                wait_s=2.0, update_s=95.0, step_s=100.0, rollouter_version_s=100.0, rollouter_active_s=50.0
            ),
            Limit.TRAINER,
        ),
    ],
)
def test_names_the_limit(log: StepLog, limit: Limit) -> None:
    assert limit_of(log) is limit


def test_tail_refuses_more_rollout_gpus() -> None:
    verdict = judge(evidence_of(log_of(wait_s=60.0, update_s=35.0, step_s=100.0)), Tail(90.0, 100.0))
    assert verdict.limit is Limit.TAIL
    assert "more rollout GPUs do not help" in verdict.sentence


@pytest.mark.parametrize(
    ("log", "missing"),
    [
        (log_of(num=1, wait_s=60.0, update_s=35.0, step_s=100.0), "log at least"),
        (log_of(num=2, wait_s=60.0, update_s=35.0, step_s=100.0), "log at least"),
        (log_of(wait_s=60.0), "log the step's time"),
        (log_of(wait_s=60.0, step_s=100.0), "time what runs between"),
        (log_of(wait_s=98.0, step_s=100.0), "time the trainer's update"),
        (log_of(update_s=98.0, step_s=100.0), "log the trainer's wait"),
        (log_of(wait_s=23.8, update_s=16.8, step_s=68.0), "time what runs between"),  # needs C18
        (log_of(Mode.COLOCATED, generation_s=98.0, step_s=100.0), "time training"),
    ],
)
def test_cannot_tell_names_the_measurement(log: StepLog, missing: str) -> None:
    verdict = judge(evidence_of(log))
    assert verdict.limit is Limit.CANNOT_TELL
    assert verdict.sentence.startswith("Cannot tell")
    assert missing in verdict.measure
    advice = advise(log)
    assert not advice.changes
    assert advice.unknown == (verdict.measure,)


def test_near_a_threshold_more_steps_are_asked_for() -> None:
    verdict = judge(evidence_of(log_of(noise=0.5, num=6, wait_s=10.0, update_s=80.0, step_s=100.0)))
    assert verdict.limit is Limit.CANNOT_TELL


def test_idle_table_of_users() -> None:
    assert idle_table(0.5, 0.02)[0] is Limit.ROLLOUT
    assert idle_table(0.02, 0.5)[0] is Limit.TRAINER
    assert idle_table(0.4, 0.4)[0] is Limit.SYNC
    assert idle_table(0.03, 0.02)[0] is Limit.BALANCED
    assert idle_table(None, 0.5)[0] is Limit.CANNOT_TELL


def test_overlap_bound_without_a_job() -> None:
    log = log_of(Mode.COLOCATED, noise=0.0, generation_s=2252.0, update_s=1800.0, step_s=4052.0)  # C11b
    [change] = advise(log).changes
    assert change.gain is None
    assert change.high == pytest.approx(1.80, abs=0.005)


def test_bounds_say_so() -> None:
    log = log_of(wait_s=60.0, update_s=30.0, weight_sync_s=5.0, step_s=100.0)
    changes = advise(log).changes
    assert changes
    assert all(change.gain is None and change.how.startswith("bound") for change in changes)


def test_json_has_the_promised_keys() -> None:
    data = advice_json(advise(log_of(wait_s=60.0, update_s=35.0, step_s=100.0)))
    assert {"verdict", "bottleneck", "evidence", "idle", "unknown", "changes", "notes"} <= set(data)
    json.dumps(data, allow_nan=False)
    assert {"change", "gain", "low", "high", "how"} <= set(data["changes"][0])


def test_doubts_of_a_log() -> None:
    steps = np.arange(30.0)
    growing = StepLog(
        "verl",
        Mode.ASYNC,
        "step",
        {
            "step_s": steps * 0 + 100.0,
            "weight_sync_s": 2.0 + 5.0 * steps,
            "response_mean_tokens": 500 + 20 * steps,
        },
    )
    words = " ".join(doubts_of_log(growing))
    assert "C53" in words
    assert "C93" in words
    assert doubts_of_log(log_of(weight_sync_s=2.0, step_s=100.0, response_mean_tokens=500.0)) == []


def test_engine_that_slows_down() -> None:
    steps = np.arange(30.0)
    columns = {"generation_s": 100.0 + 5.0 * steps, "response_mean_tokens": steps * 0 + 500.0}
    assert "C31" in " ".join(doubts_of_log(StepLog("verl", Mode.COLOCATED, "step", columns)))


@given(
    st.floats(0.0, 100.0),
    st.floats(0.0, 100.0),
    st.floats(0.0, 50.0),
    st.integers(1, 8),
    st.sampled_from(Mode),
)
def test_any_log_gets_a_sentence(wait: float, update: float, sync: float, num: int, mode: Mode) -> None:
    step = max(1.0, wait + update + sync)
    log = log_of(mode, num, wait_s=wait, update_s=update, weight_sync_s=sync, step_s=step)
    advice = advise(log)
    assert advice.verdict.sentence.endswith(".")
    json.dumps(advice_json(advice), allow_nan=False)
    assert all(isinstance(line, str) for line in advice_lines(advice))
    if num < 3:
        assert advice.verdict.limit is Limit.CANNOT_TELL


def test_shorter_answers_are_not_speed() -> None:
    """TRL sample: 11.45 to 8.7 s a step, but 236.7 to 149.6 tokens an answer."""
    one = log_of(step_s=11.45, response_mean_tokens=236.7, noise=0.01, num_gpus=2.0, batch_samples=8.0)
    other = log_of(step_s=8.7, response_mean_tokens=149.6, noise=0.01, num_gpus=2.0, batch_samples=8.0)
    found = compare_logs(one, other)
    assert found.step is not None
    assert found.step.value > 1.2
    assert found.sentence.startswith("B is not faster, its answers are shorter")


def test_more_gpus_are_not_speed() -> None:
    """Needs C07: 60 to 21 s on 4 and 5 nodes is 2.29x a GPU."""
    one = log_of(step_s=60.0, noise=0.0, num_gpus=32.0, response_mean_tokens=500.0, batch_samples=64.0)
    other = log_of(step_s=21.0, noise=0.0, num_gpus=40.0, response_mean_tokens=500.0, batch_samples=64.0)
    found = compare_logs(one, other)
    assert found.per_gpu is not None
    assert found.per_gpu.value == pytest.approx(60 / 21 * 4 / 5)
    assert "and GPU" in found.sentence


def test_comparison_needs_lengths() -> None:
    found = compare_logs(log_of(step_s=60.0), log_of(step_s=30.0))
    assert found.sentence.startswith("Cannot tell")
    assert found.per_token is None


def test_equal_runs_are_not_faster() -> None:
    log = log_of(step_s=60.0, response_mean_tokens=500.0, num_gpus=8.0)
    assert not compare_logs(log, log).sentence.startswith("B is faster")


def test_one_step_a_log_is_no_certain_speed() -> None:
    one = log_of(num=1, step_s=60.0, response_mean_tokens=500.0)
    other = log_of(num=1, step_s=30.0, response_mean_tokens=500.0)
    assert compare_logs(one, other).sentence.startswith("B looks faster")


def test_steps_of_two_frameworks_are_not_taken_as_equal() -> None:
    """Without the batch of both, a step of one framework says nothing about that of another."""
    one = log_of(step_s=60.0, response_mean_tokens=500.0)
    other = replace(log_of(step_s=10.0, response_mean_tokens=500.0), framework="trl")
    assert compare_logs(one, other).sentence.startswith("Cannot tell")


def test_two_runs_in_one_log_are_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "a.log"
    log.write_text(
        "".join(
            f"step:{step} - timing_s/gen:{gen} - timing_s/update_actor:50.0 - timing_s/step:{gen + 55} - "
            "response_length/mean:400.0\n"
            for gen in (100.0, 20.0)
            for step in range(1, 9)
        )
    )
    assert guarded(app, ["advise", str(log), "--json"]) == 0
    out, err = capfd.readouterr()
    data = json.loads(out)
    assert data["comparison"]["verdict"].startswith("B is faster")
    assert data["bottleneck"] == "trainer-bound"
    assert "holds 2 runs: run 1 of 2, run 2 of 2" in err
    assert guarded(app, ["advise", str(log)]) == 0
    assert capfd.readouterr().out.startswith("Run 2 (B) against run 1 (A): B is faster")
    assert guarded(app, ["advise", str(log), "--run", "run 1"]) == 0
    assert capfd.readouterr().out.startswith("This run is rollout-bound")


def test_unknowns_cover_their_ranges() -> None:
    drawn = draw_unknowns(16)
    assert drawn == draw_unknowns(16)
    for name, span in RANGES.items():
        values = [getattr(each, name) for each in drawn]
        assert span.low <= min(values) < max(values) <= span.high
        assert span.why


def verl_log(path: Path, num: int) -> Path:
    lines = [
        f"step:{i + 1} - timing_s/gen:{100 + i % 3}.0 - timing_s/update_actor:50.0 - timing_s/step:155.0 - "
        f"response_length/mean:400.0"
        for i in range(num)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = verl_log(tmp_path / "a.log", 8)
    assert guarded(app, ["advise", str(log), "--json"]) == 0
    data = json.loads(capfd.readouterr().out)
    assert data["bottleneck"] == "rollout-bound"
    assert guarded(app, ["advise", str(log)]) == 0
    assert capfd.readouterr().out.startswith("This run is rollout-bound")
    assert guarded(app, ["advise", str(log), str(log), "--gpus", "8,8", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["speedup_by_step"]["value"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--follow"], "add --shadow"),
        (["--shadow"], "add --job"),
        (["--set", "a.b=1"], "add --job"),
        (["--gpus", "8,8"], ""),
    ],
)
def test_command_mistakes(
    arguments: list[str], words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = verl_log(tmp_path / "a.log", 8)
    code = guarded(app, ["advise", str(log), *arguments])
    assert code == (2 if words else 0)
    assert words in capfd.readouterr().err


def test_gpu_counts_are_checked(tmp_path: Path) -> None:
    log = verl_log(tmp_path / "a.log", 8)
    for text in ("8", "8,x", "0,8"):
        assert guarded(app, ["advise", str(log), str(log), "--gpus", text]) == 2


def test_job_of_another_placement_is_refused(small_job: Path) -> None:
    from bidirl.planner.cli import simulated
    from bidirl.planner.job import load_job

    log = log_of(Mode.COLOCATED, generation_s=70.0, update_s=28.0, step_s=100.0)
    with pytest.raises(InputError, match=r"partition\.placement"):
        advise(log, load_job(small_job), simulated)


@pytest.fixture
def small_job(tmp_path: Path) -> Path:
    """Return a job of seconds: 2R:6T of 8 GPUs."""
    path = tmp_path / "job.toml"
    path.write_text(SMALL)
    return path


SMALL = """
[cluster]
gpu = "A6000"
num_nodes = 1
gpus_per_node = 8
host_memory_gib = 512
[model]
name = "Qwen3-VL-4B"
[workload]
prompts_per_step = 8
samples_per_prompt = 4
max_response_tokens = 512
lengths = { mean = 150.0, sigma = 0.8 }
num_steps = 10
prompt_tokens = 128
[partition]
rollout_gpus = 2
rollout_tp = 1
train_tp = 1
[policy]
name = "no_borrow"
staleness = 0.0
"""


def test_simulated_run_is_advised_right(small_job: Path, tmp_path: Path) -> None:
    """Advice given the log of a simulated run: its interval holds what the changed job then does."""
    from bidirl.planner.cli import simulated
    from bidirl.planner.job import load_job
    from bidirl.sim.run import run_to_folder, simulate
    from bidirl.traces.logs import read_logs

    job = load_job(small_job)
    run_to_folder(job, 0, tmp_path / "run")
    [log] = read_logs([tmp_path / "run" / "journal.jsonl"])
    before = simulate(job, 0).summary["step_time_s"]["mean"]
    advice = advise(log, job, simulated, most_worlds=8)
    assert advice.num_worlds >= 5
    assert advice.changes
    best = next(each for each in advice.changes if each.change.startswith("staleness"))
    bound = best.change.removeprefix("staleness ")
    changed = load_job(small_job, [f"policy.staleness={bound}"])
    measured = before / simulate(changed, 0).summary["step_time_s"]["mean"]
    assert best.low is not None
    assert best.low - 0.02 <= measured <= best.high + 0.02
    left = advice.evidence.step_s or 0.0
    assert left + sum(delta for _, delta in waterfall(advice.evidence, best)) == pytest.approx(
        sum(best.parts_s.values())
    )
    assert draw_advice(advice, job, simulated, tmp_path / "advice.png")
    assert (tmp_path / "advice.png").stat().st_size > 10_000


def test_far_below_the_hardware_is_a_configuration_error(small_job: Path) -> None:
    """Needs C30: no split is advised to a run that is 20 times slower than its GPUs."""
    from bidirl.planner.cli import simulated
    from bidirl.planner.job import load_job

    log = log_of(wait_s=300.0, update_s=290.0, step_s=600.0)
    advice = advise(log, load_job(small_job), simulated)
    assert advice.verdict.limit is Limit.MISCONFIGURED
    assert advice.changes == ()
    assert "configuration error" in advice.verdict.sentence


def test_a_stage_that_only_the_job_has_does_not_lengthen_the_step(small_job: Path) -> None:
    """The job has a reference stage by default; a log whose timed parts fill the step leaves it no room."""
    from bidirl.planner.advise.tryout import fit_worlds
    from bidirl.planner.cli import simulated
    from bidirl.planner.job import load_job

    job = load_job(small_job)
    log = log_of(noise=0.0, wait_s=12.0, old_logprob_s=2.0, update_s=10.0, weight_sync_s=1.0, step_s=25.2)
    worlds = fit_worlds(job, evidence_of(log).known(), simulated, 3)
    assert worlds
    for world in worlds:
        found = simulated(world.job, world.plan(world.job), world.seed)
        assert found.step_s + world.other_s + world.exposed_s == pytest.approx(25.2, rel=0.06)
    advice = advise(log, job, simulated, most_worlds=5)
    assert any("reference: the job has this stage" in note for note in advice.notes)


def test_a_job_without_any_wait_can_be_fitted(small_job: Path) -> None:
    """The simulated run never waits at first, and its parts do not name what took no time."""
    from bidirl.planner.advise.tryout import fit_worlds
    from bidirl.planner.cli import simulated
    from bidirl.planner.job import load_job

    job = load_job(small_job, ["policy.staleness=1.0", "partition.rollout_gpus=6"])
    log = log_of(noise=0.0, wait_s=6.0, update_s=40.0, step_s=47.0)
    assert fit_worlds(job, evidence_of(log).known(), simulated, 2)


def test_no_gain_is_promised_where_training_is_the_step(small_job: Path) -> None:
    """Needs C26: generation takes a tenth of a colocated step, so overlap gains nothing."""
    from bidirl.planner.cli import simulated
    from bidirl.planner.job import load_job

    settings = ['partition={placement="colocated"}', 'policy.name="colocated_sync"']
    log = log_of(
        Mode.COLOCATED, generation_s=1.0, old_logprob_s=0.9, reference_s=0.9, update_s=7.0, step_s=9.9
    )
    advice = advise(log, load_job(small_job, settings), simulated, most_worlds=6)
    assert advice.verdict.limit is Limit.TRAINER
    assert all(change.gain is not None and change.gain <= 1.02 for change in advice.changes)


def test_tail_bound_job_is_not_given_more_rollout_gpus(small_job: Path) -> None:
    """Needs C27, C50: one long sample is the step; more engines are refused, larger ones are tried."""
    from bidirl.planner.cli import simulated
    from bidirl.planner.job import load_job
    from bidirl.sim.run import simulate

    settings = [
        "partition.rollout_gpus=4",
        "workload.prompts_per_step=2",
        "workload.lengths={mean=300.0, p95=500.0}",
    ]
    job = load_job(small_job, settings)
    parts = simulate(job, 0).summary["parts_s"]
    log = log_of(
        wait_s=parts["wait"],
        update_s=parts["update"],
        old_logprob_s=parts["old_logprob"],
        reference_s=parts["reference"],
        weight_sync_s=0.01,
        step_s=sum(parts.values()) - parts["sync"],
    )
    advice = advise(log, job, simulated, most_worlds=6)
    assert advice.verdict.limit is Limit.TAIL
    assert any("more rollout GPUs" in line for line in advice.refused)
    assert not any("more rollout" in change.change for change in advice.changes)


def test_a_table_of_profiles_can_be_slowed() -> None:
    """Engine models without named coefficients take one factor on all their times."""
    from bidirl.models.iteration import AffineIteration
    from bidirl.planner.advise.scaling import SlowedIteration, slowed_iteration

    affine = AffineIteration(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    slowed = slowed_iteration(SlowedIteration(affine, 1.0), 2.0)
    assert slowed.decode(3) == slowed_iteration(affine, 2.0).decode(3) == (28.0, 12.0)
    assert slowed.mixed(1, 1.0, 1, 1, 1) == slowed_iteration(affine, 2.0).mixed(1, 1.0, 1, 1, 1)


def test_the_job_tells_the_mode_of_a_bare_table(small_job: Path) -> None:
    from bidirl.planner.cli import simulated
    from bidirl.planner.job import load_job

    settings = ['partition={placement="colocated"}', 'policy.name="colocated_sync"']
    log = log_of(Mode.UNKNOWN, generation_s=70.0, update_s=28.0)
    assert advise(log).verdict.limit is Limit.CANNOT_TELL
    assert advise(log, load_job(small_job, settings), simulated).verdict.limit is Limit.MISCONFIGURED
