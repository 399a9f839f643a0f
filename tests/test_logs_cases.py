"""Public cases that are logs: what users printed in, what the reader and the advice make of it out.

Ids are those of the evidence that this project was started from; tests/test_cases.py lists where each is.
"""

import json
import os
from pathlib import Path

import pytest

from bidirl.planner.advise.advice import advise
from bidirl.planner.advise.compare import compare_logs
from bidirl.planner.advise.verdict import Limit
from bidirl.traces.logs import LogParser
from bidirl.traces.step_log import StepLog

DATA = Path(os.environ.get("BIDIRL_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))
KINDS = {"parse", "report", "monitor", "plan"}


def parsed(text: str) -> StepLog:
    parser = LogParser()
    parser.feed(text.encode())
    parser.close()
    (log,) = parser.steps()
    return log


def verl_steps(num: int, step: str) -> str:
    return "".join(f"step:{index + 1} - {step}\n" for index in range(num))


def test_c01_a_short_wait_is_trainer_bound() -> None:
    """C01: 96:32 GPUs, the trainer waits 22.06 of 282.75 s (7.8 %). Source: verl's README of fully async."""
    log = parsed(
        verl_steps(
            6,
            "timing_s/gen:22.06 - timing_s/ref:50.05 - timing_s/update_actor:206.63 - timing_s/step:282.75 - "
            "timing_s/timing_s/param_sync:4.0",
        )
    )
    assert log.column("wait_s")[0] == 22.06
    found = advise(log)
    assert found.verdict.limit is Limit.TRAINER
    assert found.evidence.share("wait") == pytest.approx(0.078, abs=5e-4)


def test_c07_gpus_that_differ_are_divided_out() -> None:
    """C07: 60 s and 187 tokens/s/GPU on 4 nodes, 21 s and 478 on 5. Source: NVIDIA-NeMo/RL#1381."""
    one, other = (
        parsed(verl_steps(4, f"timing_s/gen:1.0 - timing_s/step:{step} - perf/throughput:{rate}"))
        for step, rate in ((60.0, 187.0), (21.0, 478.0))
    )
    found = compare_logs(one, other, (32, 40))
    assert found.step is not None
    assert found.per_gpu is not None
    assert found.step.value == pytest.approx(2.86, abs=0.005)
    assert found.per_gpu.value == pytest.approx(2.56, abs=0.005)


def test_c11b_overlap_gains_at_most_the_shorter_stage() -> None:
    """C11b: 2252 and 1800 s in turn: at most 1.80x. Source: OpenRLHF#712."""
    log = parsed(verl_steps(4, "timing_s/gen:2252.0 - timing_s/update_actor:1800.0 - timing_s/step:4052.0"))
    (change,) = advise(log).changes
    assert change.high == pytest.approx(1.80, abs=0.005)


def test_c15_the_printed_idle_ratio_is_inverted() -> None:
    """C15: 52.1 % where the framework prints 0. Source: NVIDIA-NeMo/RL#1052."""
    log = parsed(
        "Training Results:\n  • Loss: 0.1032\nTiming:\n  • Total step time: 66.55s\n"
        "  • exposed_generation: 32.52s (48.9%)\n  • policy_training: 25.05s (37.6%)\n"
        "  • policy_and_reference_logprobs: 4.78s (7.2%)\n  • weight_sync: 0.13s (0.2%)\n"
        "  • Training Worker Idle Time Ratio: 0.00%\n"
    )
    assert log.column("trainer_wait_share")[0] == pytest.approx(0.521, abs=1e-3)


def test_c17_nested_timers_are_counted_once() -> None:
    """C17: 337.12 s of exposed rollout in a step of 412.324 s. Source: modal training-gym#191."""
    log = parsed(
        "perf 1: {'perf/sleep_time': 5.323812961578369, 'perf/update_weights_time': 2.5300958156585693, "
        "'perf/wake_up_time': 2.575822114944458, 'perf/data_preprocess_time': 0.056499481201171875, "
        "'perf/train_wait_time': 347.60552525520325, 'perf/log_probs_time': 17.18164873123169, "
        "'perf/actor_train_time': 46.9120090007782, 'perf/train_time': 64.71815633773804, "
        "'perf/step_time': 412.3236815929413}"
    )
    assert log.column("wait_s")[0] == pytest.approx(337.12, abs=2e-3)
    assert log.column("step_s")[0] == pytest.approx(412.324, abs=1e-3)
    assert not any("exceed the step" in note for note in log.notes)


def test_c18_unexplained_time_is_flagged_and_no_limit_is_named() -> None:
    """C18: 27.4 of 68 s (40 %) lie in no timer. Source: vime#244."""
    text = "".join(
        f"perf {index}: {{'perf/step_time': 68.0, 'perf/rollout_time': 23.8, "
        "'perf/actor_train_time': 16.8}\n"
        for index in range(6)
    )
    log = parsed(text)
    assert any("27.4 s of a step (40%" in note for note in log.notes)
    assert advise(log).verdict.limit is Limit.CANNOT_TELL


@pytest.mark.parametrize(
    "line",
    [
        "step:7 - timing_s/timing_s/param_sync:4.2",
        "timing_s/param_sync: 4.2000 seconds self.current_param_version: 7",
    ],
)
def test_c21_two_names_of_one_sync(line: str) -> None:
    """C21: both are 4.2 s of weight sync. Source: verl 1dda039."""
    log = parsed(line)
    assert log.column("weight_sync_s")[0] == 4.2
    assert log.column("step")[0] == 7


def test_c23_token_sums_tell_the_ranks() -> None:
    """C23: 4 ranks give a whole batch of 5120; an MFU of 1.018 is none. Source: verl#316, verl#1208."""
    log = parsed(
        "step:2 - global_seqlen/mean:547190.5 - global_seqlen/min:540000 - global_seqlen/max:552000 - "
        "response_length/mean:324.958 - prompt_length/mean:102.534 - mfu/actor:1.018 - timing_s/gen:50.0"
    )
    assert log.facts["min_dp_ranks"] == 4
    assert log.facts["min_batch_samples"] == 5120
    assert not log.has("mfu")


def test_every_case_that_is_a_log_is_named() -> None:
    """The table of tests/test_cases.py names each public case of a log, report, monitor or plan."""
    cases = DATA / "cases.jsonl"
    if not cases.exists():
        pytest.skip(f"{cases} is not there: the public samples are not part of the project")
    told = (Path(__file__).parent / "test_cases.py").read_text(encoding="utf-8").split('"""')[1]
    for case in map(json.loads, cases.read_text(encoding="utf-8").splitlines()):
        if case["kind"] in KINDS:
            assert case["id"] in told, case["id"]
