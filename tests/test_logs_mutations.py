"""Damaged logs: whatever happens to the lines, nothing crashes and no number is read that is not there."""

# ruff: noqa: E501  # lines of logs are as long as they are

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.traces.logs import LogParser
from bidirl.traces.step_log import StepLog
from tests.log_lines import MAKERS, Made

NUM_STEPS = 5
TOLERANCE = {"tokens_per_s_per_gpu": 0.02}
JUNK = (
    "",
    "    ",
    "INFO 11-02 10:00:00 [loggers.py:1] some other message",
    "Traceback (most recent call last):",
    '  File "/opt/x.py", line 12, in <module>',
    "ValueError: bad value: 12",
    "wandb: Synced 5 W&B file(s)",
    "{'not': 'ours', 'value': 12}",
    "2025-11-02 10:00:00,123 - module - WARNING - retry 3 of 5",
    "Training Progress:   3%|▎         | 12/435 [1:00:00<35:15:00, 300.06s/it]",
    "(raylet) Spilled 12345 MiB, 12 objects, write throughput 123 MiB/s.",
    "=> global step 12 done - loss 0.5",
    "| name | value |",
    "hello world",
    "\ufffd\ufffd\x00binary",
)


def parsed(text: str) -> list[StepLog]:
    parser = LogParser()
    parser.feed(text.encode("utf-8", "surrogatepass"))
    parser.close()
    return parser.steps()


def assert_no_wrong_number(
    logs: list[StepLog], rows: dict[int, dict[str, float]], *, has_steps: bool = True
) -> None:
    """Compare what was read; a rate that lost its last digits only is told apart by nothing and does no harm."""
    for log in logs:
        for index in range(len(log)):
            step = log.column("step")[index]
            if math.isnan(step):
                continue
            if not has_steps and int(step) not in rows:
                continue
            for name, value in rows[int(step)].items():
                found = log.column(name)[index]
                assert math.isnan(found) or found == pytest.approx(value, rel=TOLERANCE.get(name, 1e-9)), (
                    step,
                    name,
                    found,
                    value,
                )


def wrapped(lines: list[str], width: int) -> list[str]:
    """Break lines as a terminal does that copies each screen line as one."""
    return [line[start : start + width] for line in lines for start in range(0, max(len(line), 1), width)]


def coloured(lines: list[str]) -> list[str]:
    return [f"\x1b[36m(TaskRunner pid=7, ip=10.0.0.1)\x1b[0m \x1b[1m{line}\x1b[0m" for line in lines]


def lost_escapes(lines: list[str]) -> list[str]:
    return [f"[36m(TaskRunner pid=7)[0m {line}" for line in lines]


def repeated(lines: list[str]) -> list[str]:
    return [f"{line} [repeated 3x across cluster]" for line in lines]


def with_bars(lines: list[str]) -> list[str]:
    return [f"Training:  3%|#   | 3/99 [00:10<10:00]\r{line}\r" for line in lines]


WHOLE: dict[str, Callable[[list[str]], list[str]]] = {
    "coloured": coloured,
    "lost_escapes": lost_escapes,
    "bars": with_bars,
    "windows": lambda lines: [line + "\r" for line in lines],
    "doubled": lambda lines: [each for line in lines for each in (line, line)],
    "junk": lambda lines: [
        each for index, line in enumerate(lines) for each in (line, JUNK[index % len(JUNK)])
    ],
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("how", WHOLE)
def test_harmless_damage_loses_nothing(name: str, how: str) -> None:
    log = MAKERS[name](random.Random(3), NUM_STEPS)
    (found,) = parsed("\n".join(WHOLE[how](log.lines)))
    assert list(found.column("step")) == sorted(log.rows)
    assert_no_wrong_number([found], log.rows)
    for step, row in log.rows.items():
        index = list(found.column("step")).index(step)
        assert all(found.column(column)[index] == pytest.approx(value) for column, value in row.items()), step


@pytest.mark.parametrize(
    "name", ["verl_new", "verl_plain", "verl_fully_async", "verl_v1", "slime", "prime_rl"]
)
@pytest.mark.parametrize("width", [72, 80, 100, 113, 120, 160, 211])
def test_lines_broken_by_a_terminal_are_joined(name: str, width: int) -> None:
    log = MAKERS[name](random.Random(width), NUM_STEPS)
    (found,) = parsed("\n".join(wrapped(log.lines, width)))
    assert list(found.column("step")) == sorted(log.rows)
    for step, row in log.rows.items():
        index = list(found.column("step")).index(step)
        for column, value in row.items():
            assert found.column(column)[index] == pytest.approx(value), (step, column)


def cut(line: str, share: float) -> str:
    return line[: int(len(line) * share)]


@st.composite
def damaged(draw: st.DrawFn) -> tuple[Made, list[str]]:
    """Draw a log and the same with a few of its lines damaged."""
    name = draw(st.sampled_from(sorted(MAKERS)))
    log = MAKERS[name](random.Random(draw(st.integers(0, 50))), NUM_STEPS)
    lines = list(log.lines)
    for _ in range(draw(st.integers(1, 5))):
        index = draw(st.integers(0, len(lines) - 1))
        match draw(st.sampled_from(["junk", "double", "drop", "swap", "key", "prefix", "wrap"])):
            case "junk":
                lines.insert(index, draw(st.sampled_from(JUNK)))
            case "double":
                lines.insert(index, lines[index])
            case "drop":
                # A block without its header cannot be told from the one before it: take the log as begun there.
                if "Step" not in lines[index] and len(lines) > 1:
                    del lines[index]
            case "swap":
                other = min(index + 1, len(lines) - 1)
                if name.startswith(("verl", "slime", "prime")):
                    lines[index], lines[other] = lines[other], lines[index]
            case "key":
                parts = lines[index].split(" - ")
                if len(parts) > 4:
                    del parts[draw(st.integers(1, len(parts) - 1))]
                lines[index] = " - ".join(parts)
            case "prefix":
                lines[index] = f"(Worker pid={draw(st.integers(1, 99999))}) {lines[index]}"
            case _:
                lines[index : index + 1] = wrapped([lines[index]], draw(st.integers(70, 200)))
    return log, lines


@given(damaged())
def test_damage_never_makes_a_wrong_number(case: tuple[Made, list[str]]) -> None:
    log, lines = case
    found = parsed("\n".join(lines))
    # A dropped line or key leaves timers that only some steps have unsubtracted, or pending waits unclaimed.
    derived = {"step_s", "switch_s", "rollout_wait_s"}
    rows = {step: {k: v for k, v in row.items() if k not in derived} for step, row in log.rows.items()}
    assert_no_wrong_number(found, rows)


@given(
    st.sampled_from(["verl_plain", "verl_fully_async"]), st.integers(0, NUM_STEPS - 1), st.floats(0.05, 0.999)
)
def test_a_line_cut_short_gives_no_wrong_number(name: str, which: int, share: float) -> None:
    log = MAKERS[name](random.Random(9), NUM_STEPS)
    steps = [index for index, line in enumerate(log.lines) if "step:" in line]
    lines = list(log.lines)
    lines[steps[which]] = cut(lines[steps[which]], share)
    rows = {step: {k: v for k, v in row.items() if k != "step_s"} for step, row in log.rows.items()}
    assert_no_wrong_number(parsed("\n".join(lines)), rows, has_steps=False)


@given(st.sampled_from(["slime", "prime_rl", "nemo_rl_async", "nemo_rl_sync"]), st.data())
def test_a_cut_line_of_other_frameworks_gives_no_wrong_number(name: str, data: st.DataObject) -> None:
    log = MAKERS[name](random.Random(4), NUM_STEPS)
    lines = list(log.lines)
    index = data.draw(st.integers(0, len(lines) - 1))
    lines[index] = cut(lines[index], data.draw(st.floats(0.0, 0.999)))
    derived = {"step_s", "wait_s", "update_s", "switch_s", "lag_max", "lag_mean", "rollout_wait_s"}
    rows = {step: {k: v for k, v in row.items() if k not in derived} for step, row in log.rows.items()}
    assert_no_wrong_number(parsed("\n".join(lines)), rows, has_steps=False)


@given(st.text(max_size=2000))
def test_any_text_is_read_without_a_crash(text: str) -> None:
    parsed(text)


@given(
    st.lists(
        st.sampled_from([*JUNK, "step:1 - ", "perf 1: {", "{'", "Step 3 |", "• x: 1.00s", "│ a/b │ 1 │"]),
        max_size=20,
    )
)
def test_any_mixture_of_fragments_is_read_without_a_crash(lines: list[str]) -> None:
    parsed("\n".join(lines))


@given(st.binary(max_size=3000))
def test_any_bytes_are_read_without_a_crash(data: bytes) -> None:
    for head in (
        b"",
        b"step:1 - timing_s/gen:2\n",
        b"\x18\0\0\0\0\0\0\0aaaa\x09\0\0\0\0\0\0\0\0\x1a\x0dbrain.Event:2aaaa",
    ):
        parser = LogParser()
        parser.feed(head + data)
        parser.close()
        parser.steps()
