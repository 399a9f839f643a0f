"""Every table of keys: all steps are read, harmless damage loses nothing, no damage makes a wrong number."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.traces.logs import LogParser
from bidirl.traces.logs.dialects import DIALECTS, FRAMEWORKS
from bidirl.traces.step_log import COLUMNS, Mode, StepLog
from tests.log_lines import MAKERS, Made
from tests.log_lines_more import MORE, NO_STEPS
from tests.test_logs_mutations import JUNK, WHOLE, assert_no_wrong_number, cut, parsed, wrapped

NUM_STEPS = 22

MODES = {
    "areal": Mode.ASYNC,
    "roll": Mode.ASYNC,
    "roll_agentic": Mode.COLOCATED,
    "skyrl": Mode.ASYNC,
    "skyrl_pairs": Mode.COLOCATED,
    "skyrl_timers": Mode.ASYNC,
    "openrlhf_sync": Mode.COLOCATED,
    "openrlhf_async": Mode.ASYNC,
    "trl_grpo": Mode.COLOCATED,
    "trl_async": Mode.ASYNC,
    "trl_async_new": Mode.ASYNC,
    "trl_deepspeed": Mode.UNKNOWN,
    "rlinf_async": Mode.ASYNC,
    "rlinf_json": Mode.COLOCATED,
    "tinker_json": Mode.UNKNOWN,
    "tinker_table": Mode.ASYNC,
}


DERIVED = {"step_s", "wait_s", "switch_s", "update_s", "checkpoint_s", "lag_mean", "lag_max"}
"""What several keys make: one of them may be lost without a trace."""


def made(name: str, num: int = NUM_STEPS, seed: int = 0) -> Made:
    return MORE[name](random.Random(seed), num)


def assert_all(log: StepLog, rows: dict[int, dict[str, float]], name: str) -> None:
    if name in NO_STEPS:
        assert not log.has("step")
        assert len(log) == len(rows)
    else:
        assert list(log.columns["step"]) == sorted(rows)
    for index, step in enumerate(sorted(rows)):
        for column, value in rows[step].items():
            assert log.column(column)[index] == pytest.approx(value, rel=1e-6), (step, column)


@pytest.mark.parametrize("name", MORE)
def test_every_step_is_read(name: str) -> None:
    log = made(name)
    (found,) = parsed("\n".join(log.lines))
    assert_all(found, log.rows, name)
    assert found.framework == name.partition("_")[0]
    assert found.mode is MODES[name]
    assert found.unknown_keys == (() if not name.startswith("roll") else found.unknown_keys)
    ours = [each for each in found.columns if each in COLUMNS]
    assert ours == [each for each in COLUMNS if each in found.columns]
    expected = {column for row in log.rows.values() for column in row if column in COLUMNS}
    assert expected <= set(ours)
    assert "rows" not in found.step_unit


@pytest.mark.parametrize("name", MORE)
def test_no_part_is_counted_twice(name: str) -> None:
    (found,) = parsed("\n".join(made(name).lines))
    assert found.facts.get("unexplained_share", 0.0) > -0.02
    assert not any("the parts exceed the step" in note for note in found.notes)


@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("size", [1, 61, 1000])
def test_bytes_may_be_cut_anywhere(name: str, size: int) -> None:
    log = made(name, 3)
    data = "\n".join(log.lines).encode()
    parser = LogParser()
    for start in range(0, len(data), size):
        parser.feed(data[start : start + size])
    parser.close()
    assert_all(parser.steps()[0], log.rows, name)


@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("how", WHOLE)
def test_harmless_damage_loses_nothing(name: str, how: str) -> None:
    log = made(name, 5, 3)
    (found,) = parsed("\n".join(WHOLE[how](log.lines)))
    assert_all(found, log.rows, name)


@pytest.mark.parametrize("name", ["roll", "openrlhf_sync", "openrlhf_async", "trl_grpo", "trl_async"])
@pytest.mark.parametrize("width", [80, 113, 211])
def test_lines_broken_by_a_terminal_are_joined(name: str, width: int) -> None:
    log = made(name, 5, width)
    (found,) = parsed("\n".join(wrapped(log.lines, width)))
    assert_all(found, log.rows, name)


@given(st.sampled_from(["areal", "rlinf_async", "tinker_table"]), st.integers(60, 200), st.integers(0, 9))
def test_tables_broken_by_a_terminal_give_no_wrong_number(name: str, width: int, seed: int) -> None:
    log = made(name, 3, seed)
    rows = {step: {k: v for k, v in row.items() if k not in DERIVED} for step, row in log.rows.items()}
    assert_no_wrong_number(parsed("\n".join(wrapped(log.lines, width))), rows, has_steps=False)


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, Made, list[str]]:
    """Draw a log and the same with a few of its lines damaged."""
    # A line "key = 28.2995" that was cut has no end that is missed, and its step line may be lost.
    name = draw(st.sampled_from(sorted(set(MORE) - {*NO_STEPS, "skyrl_pairs"})))
    log = made(name, 4, draw(st.integers(0, 50)))
    lines = list(log.lines)
    for _ in range(draw(st.integers(1, 5))):
        index = draw(st.integers(0, len(lines) - 1))
        match draw(st.sampled_from(["junk", "double", "prefix", "wrap", "cut"])):
            case "junk":
                lines.insert(index, draw(st.sampled_from(JUNK)))
            case "double":
                lines.insert(index, lines[index])
            case "prefix":
                lines[index] = f"(Worker pid={draw(st.integers(1, 99999))}) {lines[index]}"
            case "cut":
                lines[index] = cut(lines[index], draw(st.floats(0.0, 0.999)))
            case _:
                lines[index : index + 1] = wrapped([lines[index]], draw(st.integers(70, 200)))
    return name, log, lines


@given(damaged())
def test_damage_never_makes_a_wrong_number(case: tuple[str, Made, list[str]]) -> None:
    _, log, lines = case
    rows = {step: {k: v for k, v in row.items() if k not in DERIVED} for step, row in log.rows.items()}
    assert_no_wrong_number(parsed("\n".join(lines)), rows, has_steps=False)


@given(st.sampled_from(NO_STEPS), st.integers(0, 50), st.data())
def test_rows_without_steps_hold_only_numbers_of_the_log(name: str, seed: int, data: st.DataObject) -> None:
    log = made(name, 4, seed)
    lines = list(log.lines)
    index = data.draw(st.integers(0, len(lines) - 1))
    lines[index] = cut(lines[index], data.draw(st.floats(0.0, 0.999)))
    columns = {column for row in log.rows.values() for column in row} - {"update_s"}
    for found in parsed("\n".join(lines)):
        for column in columns:
            known = [row[column] for row in log.rows.values()]
            for value in found.column(column):
                assert math.isnan(value) or any(value == pytest.approx(each) for each in known), column


def test_no_framework_is_taken_for_another() -> None:
    for name, maker in (MAKERS | MORE).items():
        log = maker(random.Random(1), 2)
        (found,) = parsed("\n".join(log.lines))
        framework = "nemo_rl" if name.startswith("nemo") else name.partition("_")[0]
        assert found.framework == ("prime_rl" if framework == "prime" else framework), name
        for other in FRAMEWORKS:
            if other == found.framework:
                parser = LogParser(other)
                parser.feed("\n".join(log.lines).encode())
                parser.close()
                assert parser.steps()[0].framework == other


def test_tables_are_well_formed() -> None:
    for dialect in DIALECTS:
        assert dialect.step_unit
        assert dialect.evidence
        units = ("_s", "_tokens", "_share", "_gpu", "_total", "_percent", "_groups", "_samples", "_prompts")
        for name in dialect.columns:
            assert (
                name in COLUMNS or name.endswith(units) or "_" in name or name in ("epoch", "mfu", "engine")
            )


@pytest.mark.parametrize(
    ("header", "row", "framework", "expected"),
    [
        (
            "Step,run - timing/step,run - timing/wait_for_generation_buffer,run - timing/policy_train",
            "7,100.5,40.25,50.5",
            "skyrl",
            {"step_s": 100.5, "wait_s": 40.25, "update_s": 50.5},
        ),
        (
            "_step,timeperf/rollout,timeperf/train_step,timeperf/update_weights",
            "7,0.0,50.5,2.5",
            "areal",
            {"wait_s": 0.0, "update_s": 50.5, "step_s": 53.0},
        ),
        (
            "Step,train/timing/generation,train/timing/ppo_train,train/timing/step_total",
            "7,40.5,50.5,91.0",
            "openrlhf",
            {"generation_s": 40.5, "update_s": 50.5, "step_s": 91.0},
        ),
        (
            "train/global_step,train/step_time,train/completions/mean_length",
            "7,11.5,200.5",
            "trl",
            {"step_s": 11.5, "response_mean_tokens": 200.5},
        ),
        (
            "Step,time/step_generate,time/step_train,time/step_total",
            "7,40.5,50.5,92.0",
            "roll",
            {"generation_s": 40.5, "update_s": 50.5, "step_s": 92.0},
        ),
    ],
)
def test_exports_of_trackers_are_read(
    header: str, row: str, framework: str, expected: dict[str, float]
) -> None:
    (found,) = parsed(f"{header}\n{row}\n")
    assert found.framework == framework
    for column, value in expected.items():
        assert found.column(column)[0] == value
