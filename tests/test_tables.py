"""Tables: what is written reads back to the same values, and bad tables are refused in one line."""

import csv
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.errors import InputError
from bidirl.traces.run_record import Samples, Steps
from bidirl.traces.tables import (
    SAMPLE_COLUMNS,
    STEP_COLUMNS,
    columns_of,
    flatten,
    read_samples,
    read_steps,
    write_samples,
    write_steps,
    write_table,
)


def sample_columns(num_rows: int = 3) -> dict[str, list[Any]]:
    """Build columns with an unfinished and a dropped sample."""
    columns: dict[str, list[Any]] = {name: list(range(num_rows)) for name in SAMPLE_COLUMNS}
    columns["start_s"] = [0.1 * row for row in range(num_rows)]
    columns["finish_s"] = [math.nan if row == 1 else row / 3 for row in range(num_rows)]
    columns["dropped"] = ["filtered" if row == 2 else "" for row in range(num_rows)]
    return columns


STEPS: dict[str, list[Any]] = {
    "batch_ready_s": [1.0, 2.5],
    "train_start_s": [1.0, 2.5],
    "published_s": [2.0, 4.0],
    "prompt_tokens": [10, 20],
    "response_tokens": [30, 40],
    "num_groups": [2, 2],
    "parts": [{"wait": 1.0, "update": 1.0}, {"wait": 0.5, "update": 1.0, "sync": 0.5}],
}


def same(one: list[Any], other: list[Any]) -> bool:
    """Compare columns; nan equals nan."""
    return list(map(repr, one)) == list(map(repr, other))


def test_the_schema_is_the_records() -> None:
    assert list(SAMPLE_COLUMNS) == list(columns_of(Samples()))
    assert [*list(STEP_COLUMNS)[1:], "parts", "extra"] == list(columns_of(Steps()))


def test_samples_read_back_with_their_types(tmp_path: Path) -> None:
    columns = sample_columns()
    write_samples(tmp_path / "samples.csv", columns)
    back = read_samples(tmp_path / "samples.csv")
    assert list(back) == list(SAMPLE_COLUMNS)
    assert all(same(back[name], columns[name]) for name in SAMPLE_COLUMNS)
    assert all(isinstance(value, kind) for name, kind in SAMPLE_COLUMNS.items() for value in back[name])


def test_steps_read_back_with_their_parts(tmp_path: Path) -> None:
    write_steps(tmp_path / "steps.csv", STEPS)
    header = (tmp_path / "steps.csv").read_text().splitlines()[0]
    assert header.endswith("num_groups,part_wait_s,part_update_s,part_sync_s")
    back = read_steps(tmp_path / "steps.csv")
    assert back.pop("step") == [0, 1]
    assert back.pop("parts") == [{"wait": 1.0, "update": 1.0, "sync": 0.0}, STEPS["parts"][1]]
    assert back == {name: values for name, values in STEPS.items() if name != "parts"}


def test_tables_of_no_rows_read_back(tmp_path: Path) -> None:
    write_samples(tmp_path / "samples.csv", columns_of(Samples()))
    write_steps(tmp_path / "steps.csv", columns_of(Steps()))
    assert read_samples(tmp_path / "samples.csv") == {name: [] for name in SAMPLE_COLUMNS}
    assert read_steps(tmp_path / "steps.csv")["parts"] == []


def test_pandas_reads_the_table_as_it_is(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    write_samples(tmp_path / "samples.csv", sample_columns())
    frame = pandas.read_csv(tmp_path / "samples.csv")
    assert list(frame.columns) == list(SAMPLE_COLUMNS)
    assert frame["finish_s"].isna().tolist() == [False, True, False]
    assert frame["group"].dtype == np.int64


@given(st.lists(st.floats(allow_infinity=False), max_size=8))
def test_floats_keep_their_bits(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:
    path = tmp_path_factory.mktemp("bits") / "samples.csv"
    columns = sample_columns(len(values)) | {"start_s": values}
    write_samples(path, columns)
    assert same(read_samples(path)["start_s"], values)


def test_columns_of_different_length_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="zip"):
        write_table(tmp_path / "table.csv", {"a": [1, 2], "b": [1]})


HEADER = ",".join(SAMPLE_COLUMNS)
GOOD = "0,0,1,1,1,0,1,0,0,0,,0,0,0\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a CSV table"),
        ("group,index\n1,2\n", ":1: column 'prompt_tokens' is missing"),
        (HEADER + ",colour\n", ":1: column 'colour' is unknown"),
        (HEADER + ",group\n", ":1: column 'group' is unknown or doubled"),
        (HEADER + "\n0,0,1\n", ":2: 3 fields, the header has 14"),
        (
            HEADER + "\n0,0,1,1,1,0,1,0,0,0,,0,0,0\n0,0,x,1,1,0,1,0,0,0,,0,0,0\n",
            ":3: prompt_tokens='x' must be an int",
        ),
        (HEADER + "\n0,0,1.0,1,1,0,1,0,0,0,,0,0,0\n", ":2: prompt_tokens='1.0' must be an integer"),
        (HEADER + "\n0,0,1,1,1,soon,1,0,0,0,,0,0,0\n", ":2: start_s='soon' must be a number"),
        (HEADER + '\n0,"0,1\n', "not a CSV table"),
    ],
)
def test_bad_tables_are_refused_with_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "samples.csv"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_samples(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_steps(tmp_path / "none.csv")


def test_flatten_gives_dotted_names() -> None:
    summary = {
        "tokens_per_s": 1.5,
        "idle": {"train": 0.1, "by_cause": {"train": {"sync": 0.1}}},
        "lag": {"enforced": ["span"]},
    }
    assert flatten(summary) == {
        "tokens_per_s": 1.5,
        "idle.train": 0.1,
        "idle.by_cause.train.sync": 0.1,
        "lag.enforced": '["span"]',
    }


def test_writing_costs_about_what_the_csv_module_costs(tmp_path: Path) -> None:
    columns = sample_columns(20_000)
    begin = time.perf_counter()
    with (tmp_path / "plain.csv").open("w", newline="") as file:
        csv.writer(file).writerows(zip(*columns.values(), strict=True))
    plain = time.perf_counter() - begin
    begin = time.perf_counter()
    write_samples(tmp_path / "samples.csv", columns)
    assert time.perf_counter() - begin < 5 * plain
