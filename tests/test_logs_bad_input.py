"""Bad and odd files through the commands that read logs: one line and exit code 2, or an honest table."""

import gzip
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bidirl.planner.cli import app
from bidirl.shell import guarded
from bidirl.traces.logs import read_logs

Call = Callable[..., tuple[int, str, str]]
HEADER = "step,step_s,generation_s,update_s,response_mean_tokens\n"
ZERO = HEADER + "".join(f"{step},0,0,0,0\n" for step in range(12))
HUGE = "".join(
    f"step:{step} - timing_s/gen:6e307 - timing_s/update_actor:3e307 - timing_s/step:1.7e308\n"
    for step in range(8)
)
JOB = Path(__file__).parents[1] / "examples" / "demo.toml"


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Call:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = guarded(app, [str(each) for each in arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return run


def test_a_byte_order_mark_is_no_row(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("\ufeffstep,step_s,generation_s\n1,10,5\n2,11,6\n", encoding="utf-8")
    (log,) = read_logs([path])
    assert list(log.columns["step"]) == [1, 2]


def test_values_that_no_run_has_are_left_out_of_own_tables(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(HEADER + '1,-10,5,4,7\n2,12,1e12,4,7\n3,"1,000.5",5,n/a?,7\n')
    (log,) = read_logs([path])
    np.testing.assert_equal(log.columns["step_s"], [np.nan, 12.0, 1000.5])
    np.testing.assert_equal(log.columns["generation_s"], [5.0, np.nan, 5.0])
    for words in ("step_s is negative in 1", "generation_s exceeds thirty years", "'n/a?' is no number"):
        assert any(words in note for note in log.notes), words


def test_numbers_that_would_overflow_are_damage(call: Call, tmp_path: Path, recwarn: object) -> None:
    path = tmp_path / "huge.log"
    path.write_text(HUGE)
    for command in ("read", "calibrate", "advise"):
        code, out, err = call(command, path)
        assert (code, out, err.count("\n")) == (2, "", 1), command
    assert not list(recwarn)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "text",
    [
        '{"runs": 3}',
        '{"runs": [[1]]}',
        '{"runs": [{"notes": 3, "unknown_keys": 4, "facts": [], "steps": [{"step": "x"}]}]}',
        '{"runs": [{"steps": 3}]}',
        '{"name": "x", "dependencies": {}}',
        '{"runs": ' + "[" * 100_000,
        "",
        "\n\n",
        "\0" * 500,
    ],
)
@pytest.mark.parametrize("command", ["read", "calibrate", "advise"])
def test_other_files_are_one_line(call: Call, tmp_path: Path, text: str, command: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    code, out, err = call(command, path, "--json")
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_odd_types_in_our_json_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    run = {"framework": "verl", "mode": "?", "notes": 3, "unknown_keys": None, "facts": {"a": "b"}}
    path.write_text(json.dumps({"runs": [{**run, "steps": [{"step": 1, "step_s": 5}, {"step": 2}]}]}))
    (log,) = read_logs([path])
    assert (log.notes, log.unknown_keys, dict(log.facts)) == ((), (), {})
    np.testing.assert_equal(log.columns["step_s"], [5.0, np.nan])


def test_a_run_of_zeros_is_no_crash(call: Call, tmp_path: Path, recwarn: object) -> None:
    path = tmp_path / "zero.csv"
    path.write_text(ZERO)
    code, out, _ = call("advise", path)
    assert code == 0
    assert out.startswith("Cannot tell")
    assert not list(recwarn)  # type: ignore[call-overload]


@pytest.mark.parametrize("command", ["read", "advise"])
def test_a_place_that_cannot_be_written_is_one_line(call: Call, tmp_path: Path, command: str) -> None:
    path = tmp_path / "a.log"
    path.write_text("step:1 - timing_s/gen:60.5 - timing_s/update_actor:30.0 - timing_s/step:95.0\n")
    code, out, err = call(command, path, "--out", path / "under_a_file")
    assert (code, out) == (2, "")
    assert "cannot be written" in err.splitlines()[-1]
    assert "Traceback" not in err


def test_a_pipe_is_read(tmp_path: Path) -> None:
    """As ``<(command)`` of a shell gives it: it cannot be sought back."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    data = gzip.compress(b"step:1 - timing_s/gen:60.5 - timing_s/step:95.0\n")
    writer = threading.Thread(target=path.write_bytes, args=(data,))
    writer.start()
    (log,) = read_logs([path])
    writer.join()
    assert log.columns["step_s"][0] == 95.0


def test_an_empty_file_is_called_empty(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("")
    assert "the file is empty" in call("read", path)[2]


def test_shadow_needs_a_file_with_steps(call: Call, tmp_path: Path) -> None:
    empty = tmp_path / "empty.log"
    empty.write_text("")
    for place, words in ((tmp_path, "cannot be read (is a directory)"), (empty, "no step found")):
        code, out, err = call("advise", place, "--shadow", "--job", JOB)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert words in err


def test_settings_without_a_job_are_refused(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("step:1 - timing_s/gen:60.5 - timing_s/update_actor:30.0 - timing_s/step:95.0\n")
    for command in ("calibrate", "advise"):
        code, _, err = call(command, path, "--set", "a.b=1")
        assert (code, "add --job" in err) == (2, True)
    assert call("advise", path, path, "--job", JOB)[0] == 2


@pytest.mark.parametrize(
    "row",
    [
        "{step},10,{time},4,100,300\n",  # one time that no step has
        "{step},10,5,4,0,0\n",  # no lengths at all
        "{step},10,{even},4,{odd},300\n",  # times and lengths never in one step
    ],
)
def test_damaged_columns_are_fitted_as_far_as_they_go(
    call: Call, tmp_path: Path, row: str, recwarn: object
) -> None:
    path = tmp_path / "table.csv"
    path.write_text(
        HEADER.replace("\n", ",response_max_tokens\n")
        + "".join(
            row.format(
                step=step,
                time="1e-9" if step == 5 else 5.0 + step % 3,
                even=5 if step % 2 else "",
                odd="" if step % 2 else 100,
            )
            for step in range(12)
        )
    )
    for options in ((), ("--holdout-after", "6")):
        code, out, _ = call("calibrate", path, "--json", *options)
        assert code == 0
        assert "NaN" not in out
        assert "Infinity" not in out
        json.loads(out)
    assert not list(recwarn)  # type: ignore[call-overload]
