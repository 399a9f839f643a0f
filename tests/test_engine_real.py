"""The engine command: request files, reports, and two public vLLM runs request by request."""

import csv
import json
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks import engine_fit
from bidirl.errors import InputError
from bidirl.models.iteration import AffineIteration
from bidirl.models.profiled import iteration_to_json
from bidirl.models.replica import EngineLimits
from bidirl.sim.engine import (
    EngineReport,
    MetricError,
    engine_command,
    errors_against,
    read_requests,
    simulate_requests,
)

PROFILES = engine_fit.data_folder() / "profiles"
needs_data = pytest.mark.skipif(
    not PROFILES.is_dir(), reason=f"no public data at {PROFILES}: set BIDIRL_DATA to their folder"
)
AFFINE = AffineIteration(0.02, 0.01, 2e-5, 3e-5, 1e-9, 1e-7)
HEADER = "arrival_s,input_toks,output_toks"


def models_file(folder: Path, **more: Any) -> Path:
    path = folder / "models.json"
    path.write_text(json.dumps({"iteration": iteration_to_json(AFFINE), **more}))
    return path


def requests_file(folder: Path, text: str) -> Path:
    path = folder / "requests.csv"
    path.write_text(text)
    return path


def by_name(errors: tuple[MetricError, ...]) -> dict[str, MetricError]:
    return {e.name: e for e in errors}


# -- real runs


@needs_data
def test_rtx4090_run_is_predicted_from_the_profile_alone() -> None:
    requests, times = engine_fit.simulate("rtx4090")
    assert requests.measured is not None
    errors = by_name(errors_against(requests.measured, requests, times))
    assert abs(errors["makespan"].mean_error) < 0.02
    assert abs(errors["tpot"].mean_error) < 0.02
    assert abs(errors["latency"].mean_error) < 0.03
    assert abs(errors["ttft"].mean_error) < 0.03
    assert errors["latency"].request_error is not None
    assert errors["latency"].request_error < 0.03


@needs_data
def test_rtx4090_running_and_waiting_follow_the_measured_curve() -> None:
    requests, times = engine_fit.simulate("rtx4090")
    with (PROFILES / "vllm_run_rtx4090_llama-31-8b_timeseries.csv").open() as file:
        rows = list(csv.DictReader(file))
    ticks = [float(row["t"]) for row in rows]
    running = np.array([int(row["running"]) for row in rows])
    waiting = np.array([int(row["waiting"]) for row in rows])
    assert np.abs(np.array(times.running_at(ticks)) - running).mean() < 0.1 * running.mean()
    assert (
        np.abs(np.array(times.waiting_at(requests.arrival_s, ticks)) - waiting).mean() < 0.05 * waiting.mean()
    )


@needs_data
def test_rtxpro6000_fitted_on_half_predicts_the_other_half() -> None:
    requests, times = engine_fit.simulate("rtxpro6000")
    assert requests.measured is not None
    rest = range(engine_fit.NUM_FITTED, len(requests))
    errors = by_name(errors_against(requests.measured, requests, times, rest))
    assert all(abs(e.mean_error) < 0.03 for e in errors.values())


@needs_data
def test_the_packaged_rtx4090_model_is_what_the_profile_gives() -> None:
    made = json.loads(json.dumps(engine_fit.rtx4090()))
    kept = json.loads(engine_fit.model_path("rtx4090").read_text())
    assert made["limits"] == kept["limits"]
    for name, values in made["iteration"].items():
        if isinstance(values, list):
            assert kept["iteration"][name] == pytest.approx(values, rel=1e-3), name


def test_the_packaged_models_say_where_they_come_from() -> None:
    for run, word in {
        "rtx4090": "No constant comes from a run",
        "rtxpro6000": "fitted (3 parameters)",
    }.items():
        assert word in json.loads(engine_fit.model_path(run).read_text())["source"]


# -- the command


def test_command_writes_times_and_compares(tmp_path: Path) -> None:
    text = f"request_id,{HEADER},first_token_ts,last_token_ts\na,0,100,50,0.1,1.0\nb,0.2,10,1,0.4,0.4\n"
    out = tmp_path / "times.csv"
    report = engine_command(
        requests_file(tmp_path, text), models_file(tmp_path), kv_tokens=10_000, max_num_seqs=8, out=out
    )
    assert report.limits == EngineLimits(kv_tokens=10_000, max_num_seqs=8)
    rows = list(csv.DictReader(out.open()))
    assert [row["request_id"] for row in rows] == ["a", "b"]
    assert all(
        float(r["arrival_s"])
        <= float(r["scheduled_s"])
        < float(r["first_token_s"])
        <= float(r["last_token_s"])
        for r in rows
    )
    assert set(by_name(report.errors)) == {"makespan", "ttft", "tpot", "latency"}
    assert report.errors[0].measured_s == 1.0
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["num_requests"] == 2
    assert "end-to-end latency" in rendered(report)


def test_command_without_measured_times_reports_means(tmp_path: Path) -> None:
    models = models_file(tmp_path, limits={"kv_tokens": 10_000})
    report = engine_command(requests_file(tmp_path, HEADER + "\n0,10,1\n"), models)
    assert report.errors == ()
    assert report.to_json()["simulated"]["tpot_s"] is None
    assert "makespan" in rendered(report)


def rendered(report: EngineReport) -> str:
    console = Console(file=StringIO(), width=120)
    report.render(console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_a_model_compared_with_itself_has_no_error(tmp_path: Path) -> None:
    requests = read_requests(requests_file(tmp_path, HEADER + "\n0,100,20\n0.3,50,9\n0.1,40,30\n"))
    limits = EngineLimits(kv_tokens=1000, max_num_seqs=2)
    times = simulate_requests(requests, AFFINE, limits)
    lines = [
        f"{a},{p},{n},{f!r},{e!r}"
        for a, p, n, f, e in zip(
            requests.arrival_s,
            requests.input_tokens,
            requests.output_tokens,
            times.first_token_s,
            times.last_token_s,
            strict=True,
        )
    ]
    text = "\n".join([HEADER + ",first_token_ts,last_token_ts", *lines])
    again = read_requests(requests_file(tmp_path, text))
    assert again.measured is not None
    assert all(e.mean_error == 0 for e in errors_against(again.measured, again, times))
    ticks = [0.05 * k for k in range(30)]
    assert max(times.running_at(ticks)) == 2
    assert min(times.waiting_at(requests.arrival_s, ticks)) == 0
    assert max(times.waiting_at(requests.arrival_s, ticks)) == 1


MEASURED = HEADER + ",first_token_ts,last_token_ts\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        (HEADER + "\n", "no request"),
        ("arrival_s,input_toks\n0,1\n", "column output_toks is missing"),
        ("arrival,input_toks,output_toks\n0,1,1\n", "column arrival_s is missing"),
        (HEADER + ",arrival_s\n0,1,1,0\n", "appears 2 times"),
        (HEADER + "\n0,1\n", ":2: has 2 fields"),
        (HEADER + "\n0,1,1\n0,1,1,1\n", ":3: has 4 fields"),
        (HEADER + "\nx,1,1\n", "arrival_s='x' is not a number"),
        (HEADER + "\n-1,1,1\n", "must be finite and >= 0"),
        (HEADER + "\nnan,1,1\n", "must be finite and >= 0"),
        (HEADER + "\ninf,1,1\n", "must be finite and >= 0"),
        (HEADER + "\n0,1.5,1\n", "input_toks='1.5' is not an integer"),
        (HEADER + "\n0,,1\n", "input_toks='' is not an integer"),
        (HEADER + "\n0,0,1\n", "input_toks=0 must be at least 1"),
        (HEADER + "\n0,1,0\n", "output_toks=0 must be at least 1"),
        (HEADER + "\n0,1,-3\n", "output_toks=-3 must be at least 1"),
        (HEADER + ",last_token_ts\n0,1,1,1\n", "last_token_ts alone"),
        (MEASURED + "0,1,1,,\n", "first_token_ts='' is not a number"),
        (MEASURED + "1,1,1,0.5,2\n", "must not decrease"),
        (MEASURED + "0,1,1,2,1\n", "must not decrease"),
        (HEADER + "\n0,5000,1\n", "request 0: 5001 tokens exceed the engine's 976"),
        (HEADER + '\n0,"1,1\n', "is not a CSV file"),
    ],
)
def test_malformed_request_files_are_refused_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = requests_file(tmp_path, text)
    with pytest.raises(InputError) as caught:
        engine_command(path, models_file(tmp_path), kv_tokens=1000)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "has no `iteration`"),
        ("{}", "has no `iteration`"),
        ('{"iteration": {"kind": "affine"}}', "missing"),
        ('{"iteration": {"kind": "affine"}, "limits": []}', "must be an object"),
        ('{"iteration": {"kind": "affine"}, "limits": {"kv": 1}}', "limits.kv: unknown key"),
        ('{"iteration": {"kind": "affine"}, "limits": {"kv_tokens": "1"}}', "must be an integer"),
        ('{"iteration": {"kind": "affine"}, "limits": {"kv_tokens": true}}', "must be an integer"),
        ('{"schema": "other", "iteration": {}}', "schema = 'other'"),
    ],
)
def test_malformed_models_files_are_refused_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "models.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        engine_command(requests_file(tmp_path, HEADER + "\n0,1,1\n"), path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_files_limits_and_outputs_are_named(tmp_path: Path) -> None:
    requests = requests_file(tmp_path, HEADER + "\n0,1,1\n")
    models = models_file(tmp_path)
    with pytest.raises(InputError, match=r"nothing\.csv: cannot be read"):
        engine_command(tmp_path / "nothing.csv", models, kv_tokens=1000)
    with pytest.raises(InputError, match=r"nothing\.json: cannot be read"):
        engine_command(requests, tmp_path / "nothing.json")
    with pytest.raises(InputError, match="give --kv-tokens"):
        engine_command(requests, models)
    with pytest.raises(InputError, match="below max_num_seqs"):
        engine_command(requests, models, kv_tokens=1000, max_batched_tokens=10)
    with pytest.raises(InputError, match="choose another --out"):
        engine_command(requests, models, kv_tokens=1000, out=tmp_path)
