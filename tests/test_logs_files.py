"""Files of all kinds: compressed logs, exports, event files, our own tables, journals, and the command."""

import bz2
import gzip
import json
import lzma
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bidirl.errors import InputError
from bidirl.planner.cli import app
from bidirl.shell import guarded
from bidirl.traces.logs import read_logs
from bidirl.traces.step_log import COLUMNS, Mode
from tests.log_lines import MAKERS

DATA = Path(os.environ.get("BIDIRL_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))
ROWS = MAKERS["verl_plain"](random.Random(0), 22).rows


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "run.log"
    path.write_text("\n".join(MAKERS["verl_plain"](random.Random(0), 22).lines))
    return path


def csv_lines(path: Path) -> list[list[str]]:
    return [line.split(",") for line in path.read_text().splitlines()]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_logs_are_known_by_content(log: Path, pack: Callable[[bytes], bytes]) -> None:
    plain = read_logs([log])[0]
    packed = log.with_suffix(".packed")
    packed.write_bytes(pack(log.read_bytes()))
    (found,) = read_logs([packed])
    np.testing.assert_array_equal(found.columns["step_s"], plain.columns["step_s"])


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_damaged_archive_gives_what_could_be_read(log: Path, pack: Callable[[bytes], bytes]) -> None:
    noise = (
        random.Random(1).randbytes(1 << 18).hex().encode()
    )  # so that more than one block of steps is whole
    data = pack(log.read_bytes() + b"\n" + noise)
    log.write_bytes(data[: len(data) // 2])
    if pack is bz2.compress:  # its blocks are large: none is whole
        with pytest.raises(InputError, match="no step found"):
            read_logs([log])
    else:
        assert len(read_logs([log])[0]) > 0


def test_own_csv_and_json_are_read_back(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, data = tmp_path / "steps.csv", tmp_path / "steps.json"
    assert guarded(app, ["read", str(log), "--out", str(table), "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert guarded(app, ["read", str(log), "--out", str(data)]) == 0
    assert csv_lines(table)[0][: len(COLUMNS)] == list(COLUMNS)
    original = read_logs([log])[0]
    for path in (table, data):
        (back,) = read_logs([path])
        assert (back.framework, back.mode, back.step_unit) == ("verl", Mode.COLOCATED, original.step_unit)
        assert back.columns.keys() == original.columns.keys()
        for name, column in original.columns.items():
            np.testing.assert_array_equal(back.columns[name], column)
    capsys.readouterr()
    assert guarded(app, ["read", str(data), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == first


def test_json_leaves_absent_quantities_out(capsys: pytest.CaptureFixture[str], log: Path) -> None:
    assert guarded(app, ["read", str(log), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert set(run) >= {"framework", "mode", "step_unit", "facts", "notes", "unknown_keys", "steps"}
    assert "testing_s" not in run["steps"][0]
    assert "testing_s" in run["steps"][1]
    assert "lag_mean" not in run["steps"][0]
    assert [step["step"] for step in run["steps"]] == sorted(ROWS)


def test_terminal_says_the_verdict_first(capsys: pytest.CaptureFixture[str], log: Path) -> None:
    assert guarded(app, ["read", str(log)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("22 steps of verl (colocated), ")
    assert "note: detected as verl" in out


def test_wandb_exports(tmp_path: Path) -> None:
    history = tmp_path / "history.csv"
    keys = {"timing_s/gen": "generation_s", "timing_s/update_actor": "update_s", "timing_s/step": "step_s"}
    rows = {step: [10.5 + step, 20.25, 40.75 + step] for step in range(1, 25)}
    history.write_text(
        "_step,_timestamp,"
        + ",".join(keys)
        + "\n"
        + "".join(f"{step},1700000000.5,{','.join(map(str, values))}\n" for step, values in rows.items())
    )
    chart = tmp_path / "chart.csv"
    names = [
        f'"{run} - {key}{end}"' for run in ("a-1", "b 2") for key in keys for end in ("", "__MIN", "__MAX")
    ]
    chart.write_text(
        '"Step",'
        + ",".join(names)
        + "\n"
        + "".join(
            f'"{step}",' + ",".join(f'"{value}","0","1"' for _ in range(2) for value in values) + "\n"
            for step, values in rows.items()
        )
    )
    lines = tmp_path / "history.jsonl"
    lines.write_text(
        "".join(
            json.dumps({"_step": step, **dict(zip(keys, values, strict=True))}) + "\n"
            for step, values in rows.items()
        )
    )
    for path, num_runs in ((history, 1), (chart, 2), (lines, 1)):
        found = read_logs([path])
        assert len(found) == num_runs
        for each in found:
            assert list(each.columns["step"]) == list(rows)
            for index, name in enumerate(keys.values()):
                assert [values[index] for values in rows.values()] == list(each.columns[name])


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _message(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _record(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + b"crc0" + data + b"crc1"


def _event(step: int, tag: str, value: float, *, as_tensor: bool) -> bytes:
    if as_tensor:
        scalar = _message(8, b"\x08\x01" + _message(5, struct.pack("<f", value)))
    else:
        scalar = b"\x15" + struct.pack("<f", value)
    body = b"\x09" + struct.pack("<d", 1.7e9) + b"\x10" + _varint(step)
    return _record(body + _message(5, _message(1, _message(1, tag.encode()) + scalar)))


def test_tensorboard_events(tmp_path: Path) -> None:
    data = _record(b"\x09" + struct.pack("<d", 1.7e9) + _message(3, b"brain.Event:2"))
    for step in range(1, 301):
        data += _event(step, "timing_s/gen", 100.5 + step, as_tensor=True)
        data += _event(step, "timing_s/step", 300.25 + step, as_tensor=False)
        data += _event(step, "actor/new_thing", 1.0, as_tensor=False)
    path = tmp_path / "events.out.tfevents.1700000000.host.1.0"
    path.write_bytes(data + b"\x10\0\0\0\0\0\0\0half")
    for given in (path, tmp_path):
        (found,) = read_logs([given])
        assert list(found.columns["step"]) == list(range(1, 301))
        assert found.column("generation_s")[9] == 110.5
        assert found.column("step_s")[299] == 600.25


def test_steps_csv_and_journal_of_a_run_agree(tmp_path: Path) -> None:
    from bidirl.sim.cli import app as sim

    job = Path(__file__).parents[1] / "examples" / "tiny.toml"
    assert guarded(sim, ["run", str(job), "--out", str(tmp_path / "run")]) == 0
    (table,) = read_logs([tmp_path / "run" / "steps.csv"])
    (journal,) = read_logs([tmp_path / "run" / "journal.jsonl"])
    for name in ("step", "step_s", "wait_s", "old_logprob_s", "update_s", "weight_sync_s"):
        np.testing.assert_allclose(
            journal.column(name), table.column(name), rtol=1e-9, atol=1e-9, err_msg=name
        )
    assert table.column("total_tokens")[0] > 0


def test_a_table_of_timers_without_a_framework(tmp_path: Path) -> None:
    path = tmp_path / "table.md"
    path.write_text(
        "# results of a README\n"
        "| training mode | Resource allocation | step | gen | old_log_prob | update_actor | acc |\n"
        "|:-:|:-:|:-:|:-:|:-:|:-:|:-:|\n"
        "| colocate sync | 32 | 700.5 | 350.25 | 100.5 | 240.0 | max: 0.3 |\n"
        "| fully_async_policy | 16:16 | 300.75 | 20.5 | | 310.0 | 0.4 |\n"
    )
    colocated, asynchronous = read_logs([path])
    assert (colocated.mode, asynchronous.mode) == (Mode.COLOCATED, Mode.ASYNC)
    assert colocated.column("generation_s")[0] == 350.25
    assert asynchronous.column("wait_s")[0] == 20.5
    assert not asynchronous.has("generation_s")
    assert any("parts exceed the step" in note for note in asynchronous.notes)


def test_bad_input_is_one_line(tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noise = tmp_path / "noise.log"
    noise.write_text("hello\n" * 50 + "Training Results\n")
    for arguments, words in (
        ([str(noise)], "no step found (seen: 1 x Training Results"),
        ([str(tmp_path / "none.log")], "cannot be read"),
        ([str(log), "--format", "vrel"], "'vrel' is unknown: take one of auto, verl"),
    ):
        assert guarded(app, ["read", *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
    assert guarded(app, ["read", str(noise), str(log), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert len(run["steps"]) == 22
    assert any("noise.log: no step found" in note for note in run["notes"])


@pytest.mark.parametrize(
    ("name", "index", "expected"),
    [
        (
            "nemorl_1052",
            0,
            {"step_s": 66.55, "wait_s": 32.52, "update_s": 25.05, "trainer_wait_share": 32.52 / 62.48},
        ),
        ("slime_metricdoc_example", 0, {"wait_s": 337.12, "step_s": 412.324, "switch_s": 7.8996}),
        ("verl_316", 0, {"generation_s": 262.359, "update_s": 157.615, "testing_s": 78.133}),
        ("verl_7412", 0, {"step_s": 1163.9566, "weight_sync_s": 5.827, "total_tokens": 1717338}),
        ("verl_docgist-qwen3-8b-megatron", 0, {"step_s": 1268.488, "total_tokens": 5322462}),
        ("verl_docgist-qwen3-8b-megatron", 1, {"step_s": 927.6806, "total_tokens": 4259630}),
        ("primerl_1318", 0, {"step_s": 73.77, "lag_max": 0, "tokens_per_s": 2408.9}),
        ("primerl_2280", 0, {"step_s": 3.2, "rollout_wait_s": 3.0, "filtered_share": 95 / 128}),
    ],
)
def test_public_samples(name: str, index: int, expected: dict[str, float]) -> None:
    path = DATA / "logs" / f"{name}.txt"
    if not path.exists():
        pytest.skip(f"{path} is not there: the public samples are not part of the project")
    found = read_logs([path])[index]
    for column, value in expected.items():
        assert found.column(column)[0] == pytest.approx(value, rel=2e-5), column


def test_ranks_of_the_public_sample() -> None:
    path = DATA / "logs" / "verl_316.txt"
    if not path.exists():
        pytest.skip(f"{path} is not there: the public samples are not part of the project")
    (found,) = read_logs([path])
    assert found.facts["min_dp_ranks"] == 4
    assert found.facts["min_batch_samples"] == 5120
