"""TRL's traps: numbers as text, no steps, several runs, milliseconds, the summary that is no step."""

# ruff: noqa: E501  # lines of logs are as long as they are

from bidirl.traces.step_log import Mode
from tests.test_logs_mutations import parsed

RUNTIME = (
    "{'train_runtime': '558.5', 'train_samples_per_second': '0.716', 'train_loss': '-0.0009', 'epoch': '1'}"
)


def test_rows_are_lines_and_equal_lines_are_one_row() -> None:
    line = "{'loss': '0.1', 'completions/mean_length': '200.5', 'step_time': '11.45'}"
    other = line.replace("11.45", "11.46")
    (log,) = parsed("\n".join([line, line, other]))
    assert list(log.column("step_s")) == [11.45, 11.46]
    assert not log.has("step")
    assert any("logging_steps" in note for note in log.notes)


def test_the_summary_ends_a_run_and_is_no_row() -> None:
    grpo = "{'reward': '0.5', 'completions/mean_length': '236.5', 'step_time': '11.25'}"
    asynchronous = "{'reward': '0.4', 'completions/mean_length': '149.5', 'queue_wait_time_s': '0.5'}"
    for text in ([grpo, RUNTIME, asynchronous, RUNTIME], [RUNTIME, grpo, RUNTIME, asynchronous]):
        first, second = parsed("\n".join(text))
        assert (first.mode, second.mode) == (Mode.COLOCATED, Mode.ASYNC)
        assert len(first) == len(second) == 1
    assert parsed(RUNTIME) == []


def test_milliseconds_become_seconds() -> None:
    (log,) = parsed(
        "{'loss': '0.1', 'scoring_time_ms': '1250', 'wait_scoring_ms': '50', 'queue_wait_time_s': '2'}"
    )
    assert log.column("scoring_s")[0] == 1.25
    assert log.column("scoring_wait_s")[0] == 0.05


def test_a_wait_for_one_sample_is_told() -> None:
    (log,) = parsed("{'loss': '0.1', 'queue_wait_time_s': '0.5', 'weight_sync_time_s': '5.25'}")
    assert any("n samples waits up to n times" in note for note in log.notes)
    (log,) = parsed(
        "{'loss': '0.1', 'perf/rollout_wait_s': '8.5', 'perf/step_s': '20', 'perf/fwd_bwd_s': '9'}"
    )
    assert log.column("wait_s")[0] == 8.5
    assert not any("n samples" in note for note in log.notes)


def test_numbers_without_quotes_and_with_a_step() -> None:
    text = "\n".join(
        str(
            {
                "train/global_step": step,
                "_step": 3 * step,
                "train/step_time": 10.5 + step,
                "train/num_tokens": 9,
            }
        )
        for step in (10, 20)
    )
    (log,) = parsed(text)
    assert list(log.column("step")) == [10, 20]
    assert list(log.column("step_s")) == [20.5, 30.5]


def test_timers_of_deepspeed_beside_steps_are_facts() -> None:
    timers = (
        "[2025-09-15 14:48:06,446] [INFO] [Rank 0] time (ms) | fwd: 4000.00 | bwd: 6000.00 | step: 500.00"
    )
    other = timers.replace("Rank 0", "Rank 1").replace("4000", "9000")
    row = "{'loss': '0.1', 'completions/mean_length': '200.5', 'step_time': '11.45'}"
    (log,) = parsed("\n".join([timers, other, row]))
    assert log.has("step_s")
    assert log.facts["deepspeed_fwd_median_s"] == 4.0
    (alone,) = parsed("\n".join([timers, other]))
    assert list(alone.column("update_s")) == [10.5]


def test_a_cut_timer_of_deepspeed_is_none() -> None:
    assert parsed("[Rank 0] time (ms) | bwd: 6000.00 | fwd: 4000.1") == []


def test_progress_and_sleep_are_facts() -> None:
    text = "\n".join(
        [
            "INFO 09-15 14:42:21 [executor_base.py:188] It took 1.500000 seconds to fall asleep.",
            "{'loss': '0.1', 'completions/mean_length': '200.5', 'step_time': '11.45'}",
            "  0%|          | 2/1562 [18:48<164:33:29, 350.25s/it]\r  0%|          | 3/1562 [18:48<164:33:29, 379.99s/it]",
            "Processed prompts: 100%|####| 64/64 [00:10<00:00, 6.25s/it]",
            "",
        ]
    )
    (log,) = parsed(text.replace("Processed prompts: 100%|####| 64/64 [00:10<00:00, 6.25s/it]\n", ""))
    assert log.facts["progress_bar_s_per_step"] == 379.99
    assert log.facts["engine_sleep_median_s"] == 1.5
    (log,) = parsed(text)
    assert log.facts.get("progress_bar_s_per_step") != 6.25
