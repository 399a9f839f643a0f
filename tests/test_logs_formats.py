"""Each framework's log, in the documented formats, gives the normalised steps that it means."""

# ruff: noqa: E501  # lines of logs are as long as they are

import math
import random
from pathlib import Path

import numpy as np
import pytest

from bidirl.errors import InputError
from bidirl.traces.logs import LogParser, read_logs
from bidirl.traces.step_log import COLUMNS, Mode, StepLog
from tests.log_lines import MAKERS, Made, vllm

NUM_STEPS = 22


def parsed(data: bytes, format_: str = "auto") -> list[StepLog]:
    parser = LogParser(format_)
    parser.feed(data)
    parser.close()
    return parser.steps()


def made(name: str, seed: int = 0, num: int = NUM_STEPS) -> Made:
    return MAKERS[name](random.Random(seed), num)


def assert_rows(log: StepLog, rows: dict[int, dict[str, float]]) -> None:
    assert list(log.columns["step"]) == sorted(rows)
    for index, step in enumerate(sorted(rows)):
        for name, value in rows[step].items():
            assert log.column(name)[index] == pytest.approx(value, rel=1e-9), (step, name)


@pytest.mark.parametrize("name", MAKERS)
def test_every_step_is_read(name: str) -> None:
    log = made(name)
    (found,) = parsed("\n".join(log.lines).encode())
    assert_rows(found, log.rows)
    assert (
        found.framework
        == name.removesuffix("_new")
        .removesuffix("_async")
        .removesuffix("_sync")
        .replace("verl_fully", "verl")
        .partition("_plain")[0]
        .partition("_old")[0]
        .partition("_one")[0]
        .partition("_v1")[0]
    )
    assert found.unknown_keys == ()
    assert "detected as" in found.notes[0]
    assert [each for each in found.columns if each in COLUMNS] == [
        each for each in COLUMNS if each in found.columns
    ]
    assert found.step_unit


@pytest.mark.parametrize("name", MAKERS)
def test_no_part_is_left_unexplained(name: str) -> None:
    (found,) = parsed("\n".join(made(name).lines).encode())
    if "unexplained_share" in found.facts:
        assert abs(found.facts["unexplained_share"]) < 0.06


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_bytes_may_be_cut_anywhere(name: str, size: int) -> None:
    data = "\n".join(made(name, num=3).lines).encode()
    parser = LogParser()
    for start in range(0, len(data), size):
        parser.feed(data[start : start + size])
    parser.close()
    assert_rows(parser.steps()[0], made(name, num=3).rows)


def test_modes() -> None:
    modes = {name: parsed("\n".join(made(name).lines).encode())[0].mode for name in MAKERS}
    for name in ("verl_new", "verl_oldest", "slime", "nemo_rl_sync"):
        assert modes[name] is Mode.COLOCATED
    for name in ("verl_fully_async", "verl_one_step_off", "verl_v1", "nemo_rl_async", "prime_rl"):
        assert modes[name] is Mode.ASYNC


def test_a_restarted_counter_begins_a_run() -> None:
    first, second = made("verl_plain", 1), made("verl_plain", 2)
    found = parsed("\n".join([*first.lines, *second.lines]).encode())
    assert len(found) == 2
    assert_rows(found[0], first.rows)
    assert_rows(found[1], second.rows)


def test_a_resumed_run_repeats_steps() -> None:
    first, second = made("slime", 1), made("slime", 2)
    resumed = [line for line in second.lines if True][4 * 18 :]
    found = parsed("\n".join([*first.lines, *resumed]).encode())
    assert len(found) == 2
    assert list(found[1].columns["step"]) == [18, 19, 20, 21]


def test_growing_log_shows_steps_as_they_come() -> None:
    parser, log = LogParser(), made("verl_plain")
    seen = []
    for line in log.lines:
        parser.feed((line + "\n").encode())
        seen.append(parser.num_rows)
    assert seen == sorted(seen)
    assert seen[-1] == NUM_STEPS
    assert len(parser.steps()[0]) == NUM_STEPS


def test_engine_lines_alone_and_beside_steps() -> None:
    engine = vllm(random.Random(0), 5).lines
    slept = ["INFO 09-15 14:42:21 [executor_base.py:188] It took 1.500000 seconds to fall asleep."]
    (alone,) = parsed("\n".join([*engine, *slept]).encode())
    assert alone.framework == "vllm"
    assert len(alone) == 5
    assert alone.column("kv_used_share")[0] == pytest.approx(0.415)
    (beside,) = parsed("\n".join([*made("verl_plain").lines, *engine, *slept]).encode())
    assert beside.framework == "verl"
    assert beside.facts["engine_sleep_median_s"] == 1.5
    assert beside.facts["engine_num_running_max"] == 64


def test_testing_and_checkpoints_leave_the_step() -> None:
    inside = "step:1 - timing_s/gen:10 - timing_s/update_actor:20 - timing_s/testing:5 - timing_s/save_checkpoint:3 - timing_s/step:38.5"
    (log,) = parsed(inside.encode())
    assert log.column("step_s")[0] == 30.5
    outside = inside.replace("step:38.5", "step:30.5")
    (log,) = parsed(outside.encode())
    assert log.column("step_s")[0] == 30.5
    assert any("too short to contain" in note for note in log.notes)


def test_sync_print_is_the_same_quantity_as_the_doubled_key() -> None:
    text = (
        "[FullyAsyncTrainer] _fit_update_weights, timing_s/param_sync: 4.2000 seconds self.current_param_version: 7\n"
        "step:7 - timing_s/gen:10.5 - timing_s/step:50.0 - timing_s/update_actor:35.0 - timing_s/timing_s/param_sync:4.2\n"
    )
    (log,) = parsed(text.encode())
    assert len(log) == 1
    assert log.column("weight_sync_s")[0] == 4.2
    assert log.column("wait_s")[0] == 10.5
    assert not log.has("generation_s")
    (alone,) = parsed(text.splitlines()[0].encode())
    assert alone.column("weight_sync_s")[0] == 4.2


def test_mfu_above_one_is_rejected() -> None:
    (log,) = parsed(b"step:2 - timing_s/gen:10 - timing_s/step:20 - perf/mfu/actor:1.018")
    assert not log.has("mfu")
    assert any("1.018 exceeds 1" in note for note in log.notes)


def test_ranks_and_batch_follow_from_token_sums() -> None:
    ranks, batch, mean, prompt = 8, 4096, 700.25, 99.5
    per_rank = (mean + prompt) * batch / ranks
    text = (
        f"step:1 - global_seqlen/min:{per_rank - 999} - global_seqlen/max:{per_rank + 999} - "
        f"global_seqlen/mean:{per_rank + 0.125} - response_length/mean:{mean} - prompt_length/mean:{prompt} - timing_s/gen:9"
    )
    (log,) = parsed(text.encode())
    assert log.facts["min_dp_ranks"] == ranks
    assert log.facts["min_batch_samples"] == batch
    assert any("not a sequence length" in note for note in log.notes)
    (told,) = parsed(f"{text} - perf/total_num_tokens:{int(per_rank * ranks)}".encode())
    assert told.facts["num_dp_ranks"] == ranks
    assert told.facts["batch_samples"] == batch
    assert told.column("total_tokens")[0] == per_rank * ranks


def test_unexplained_time_is_flagged() -> None:
    text = "perf 3: {'perf/step_time': 68.0, 'perf/rollout_time': 23.8, 'perf/actor_train_time': 16.8}"
    (log,) = parsed(text.encode())
    assert any("27.4 s of a step (40%" in note for note in log.notes)


def test_a_buffered_step_gives_no_rate() -> None:
    lines = made("prime_rl").lines
    lines.append("02:59:00 SUCCESS Step 22 | Time: 0.58s | Reward: 0.4 | Throughput: 93525.9 tokens/s")
    (log,) = parsed("\n".join(lines).encode())
    assert math.isnan(log.column("tokens_per_s")[-1])
    assert np.isfinite(log.column("tokens_per_s")[:-1]).all()
    assert any("step 22" in note and "buffer" in note for note in log.notes)


def test_prime_rl_in_two_files(tmp_path: Path) -> None:
    log = made("prime_rl")
    orchestrator, trainer = tmp_path / "orchestrator.log", tmp_path / "trainer.log"
    orchestrator.write_text("\n".join(line for line in log.lines if "Loss" not in line))
    trainer.write_text("\n".join(line for line in log.lines if "Loss" in line))
    (found,) = read_logs([orchestrator, trainer])
    assert_rows(found, log.rows)


def test_nemo_idle_is_recomputed() -> None:
    text = (
        "⏱️  Timing:\n  • Total step time: 66.55s\n  • exposed_generation: 32.52s (48.9%)\n"
        "  • policy_training: 25.05s (37.6%)\n  • policy_and_reference_logprobs: 4.78s (7.2%)\n"
        "  • weight_sync: 0.13s (0.2%)\n  • Training Worker Idle Time Ratio: 0.00%\n"
    )
    (log,) = parsed(text.encode())
    assert log.column("trainer_wait_share")[0] == pytest.approx(32.52 / 62.48)


def test_contradictions_are_told_and_not_averaged() -> None:
    text = (
        "step:1 - timing_s/gen:10.0 - timing_s/update_actor:5.0 - timing_s/step:20.0\n"
        "step:1 - timing_s/gen:12.0 - perf/throughput:9.0\n"
    )
    (log,) = parsed(text.encode())
    assert log.column("generation_s")[0] == 10.0
    assert any("is logged as 10 and as 12" in note for note in log.notes)


def test_unknown_keys_are_listed() -> None:
    (log,) = parsed(b"step:1 - timing_s/gen:10.0 - timing_s/brand_new:3.0 - my/own_key:2")
    assert log.unknown_keys == ("my/own_key", "timing_s/brand_new")


def test_a_comment_is_no_step() -> None:
    text = b"# step:1 - timing_s/gen:10.0\nstep:2 - timing_s/gen:20.0\n  # step:3 - timing_s/gen:30.0\n"
    (log,) = parsed(text)
    assert list(log.columns["step"]) == [2]


def test_a_named_format_is_obeyed_and_an_unknown_one_refused() -> None:
    assert parsed(b"step:1 - timing_s/gen:10.0", "slime") == []
    assert parsed(b"step:1 - timing_s/gen:10.0", "verl")[0].framework == "verl"
    with pytest.raises(InputError, match="'vrel' is unknown: take one of auto, verl"):
        LogParser("vrel")
