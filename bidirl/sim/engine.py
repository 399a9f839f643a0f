"""One rollout engine against a request file: the ``engine`` command.

The engine is the same ``Replica`` that every simulated job uses, so what is proved here against real runs
holds there. Definitions, per request: TTFT = first token - arrival; TPOT = (last token - first token) /
(output tokens - 1), for outputs of two tokens and more; end-to-end latency = last token - arrival. Makespan =
last token of all - first arrival of all.
"""

import csv
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bidirl.errors import InputError
from bidirl.models.iteration import IterationModel
from bidirl.models.profiled import iteration_from_json
from bidirl.models.replica import EngineLimits, Mark, Replica, Request
from bidirl.sim.request_file import MeasuredTimes, Requests, read_requests

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "EngineReport",
    "EngineTimes",
    "MetricError",
    "engine_command",
    "errors_against",
    "read_engine_models",
    "read_requests",
    "simulate_requests",
]

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """Simulated times of each request, in the order of the file, and what the engine did."""

    scheduled_s: tuple[float, ...]
    first_token_s: tuple[float, ...]
    last_token_s: tuple[float, ...]
    running_changes: tuple[tuple[float, int], ...]
    """(time, +1 or -1) of each sequence that starts or stops holding KV memory, in order."""
    num_preemptions: int
    num_iterations: int
    recomputed_tokens: int

    def running_at(self, times_s: Sequence[float]) -> list[int]:
        """Return the running sequences at each time."""
        moments = [t for t, _ in self.running_changes]
        counts = [0, *accumulate(change for _, change in self.running_changes)]
        return [counts[bisect_right(moments, t)] for t in times_s]

    def waiting_at(self, arrival_s: Sequence[float], times_s: Sequence[float]) -> list[int]:
        """Return the requests that have arrived, not finished and do not run, at each time."""
        arrived, done = sorted(arrival_s), sorted(self.last_token_s)
        running = self.running_at(times_s)
        return [
            bisect_right(arrived, t) - bisect_right(done, t) - num
            for t, num in zip(times_s, running, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class MetricError:
    """One metric, measured and simulated; errors are simulated / measured - 1."""

    name: str
    measured_s: float
    """Mean over the requests; the makespan itself."""
    simulated_s: float
    mean_error: float
    percentile_errors: dict[int, float]
    """Error of the distribution's percentiles, by percentile; empty for the makespan."""
    request_error: float | None
    """Mean over the requests of the absolute relative error; None for the makespan."""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What the ``engine`` command found."""

    requests: Requests
    limits: EngineLimits
    times: EngineTimes
    errors: tuple[MetricError, ...]
    """Empty where the file has no measured timestamps."""

    def to_json(self) -> dict[str, Any]:
        """Return the summary as plain data."""
        return {
            "num_requests": len(self.requests),
            "limits": asdict(self.limits),
            "simulated": _means(self.requests, self.times.first_token_s, self.times.last_token_s),
            "num_preemptions": self.times.num_preemptions,
            "num_iterations": self.times.num_iterations,
            "recomputed_tokens": self.times.recomputed_tokens,
            "errors": {e.name: {k: v for k, v in asdict(e).items() if k != "name"} for e in self.errors},
        }

    def write_csv(self, path: Path) -> None:
        """Write one line per request: arrival, lengths and simulated times in seconds."""
        try:
            with path.open("w", newline="", encoding="utf-8") as file:
                out = csv.writer(file)
                out.writerow(
                    (
                        "request_id",
                        "arrival_s",
                        "input_toks",
                        "output_toks",
                        "scheduled_s",
                        "first_token_s",
                        "last_token_s",
                    )
                )
                r, t = self.requests, self.times
                out.writerows(
                    zip(
                        r.names, r.arrival_s, r.input_tokens, r.output_tokens,
                        t.scheduled_s, t.first_token_s, t.last_token_s, strict=True,
                    )
                )  # fmt: skip
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror}): choose another --out") from None

    def render(self, console: "Console") -> None:
        """Print the verdict, then the table of metrics."""
        from rich.table import Table

        means = _means(self.requests, self.times.first_token_s, self.times.last_token_s)
        makespan_s = max(self.times.last_token_s) - min(self.requests.arrival_s)
        console.print(
            f"{len(self.requests)} requests in {makespan_s:.1f} s, "
            f"{sum(self.requests.output_tokens) / makespan_s:,.0f} output tokens/s, "
            f"{self.times.num_preemptions} preemptions, "
            f"{self.times.recomputed_tokens:,} tokens computed again."
        )
        table = Table("metric", title=None if self.errors else "simulated")
        if not self.errors:
            table.add_column("mean", justify="right")
            for name, value in means.items():
                table.add_row(_label(name.removesuffix("_s")), "n/a" if value is None else f"{value:.4g} s")
            console.print(table)
            return
        heads = ("measured", "simulated", "error", *(f"p{p}" for p in PERCENTILES), "per request")
        for head in heads:
            table.add_column(head, justify="right")
        for e in self.errors:
            cells = [
                f"{100 * e.percentile_errors[p]:+.2f} %" if e.percentile_errors else "" for p in PERCENTILES
            ]
            each = "" if e.request_error is None else f"{100 * e.request_error:.2f} %"
            table.add_row(
                _label(e.name),
                f"{e.measured_s:.4g} s",
                f"{e.simulated_s:.4g} s",
                f"{100 * e.mean_error:+.2f} %",
                *cells,
                each,
            )
        console.print(table)


def simulate_requests(requests: Requests, iteration: IterationModel, limits: EngineLimits) -> EngineTimes:
    """Run the requests through one replica; each is a group of its own, served first come, first served."""
    replica = Replica(iteration, limits, trace=True)
    order = sorted(range(len(requests)), key=lambda i: (requests.arrival_s[i], i))
    for i in order:
        request = Request(i, i, requests.input_tokens[i], 0, requests.output_tokens[i])
        try:
            replica.submit(requests.arrival_s[i], [request])
        except InputError:
            total = requests.input_tokens[i] + requests.output_tokens[i]
            raise InputError(
                f"request {requests.names[i]}: {total} tokens exceed the engine's "
                f"{limits.num_blocks * limits.block_size} of KV memory: raise --kv-tokens or drop it"
            ) from None
    while replica.peek() < inf:
        replica.pop()
    last = dict(replica.take_finished())
    scheduled: dict[int, float] = {}
    first: dict[int, float] = {}
    changes = [(t, -1) for t in last.values()]
    for time_s, mark, seq in replica.take_marks():
        match mark:
            case Mark.SCHEDULED:
                scheduled.setdefault(seq, time_s)
                changes.append((time_s, 1))
            case Mark.FIRST_TOKEN:
                first.setdefault(seq, time_s)
            case Mark.PREEMPTED:
                changes.append((time_s, -1))
    rows = range(len(requests))
    return EngineTimes(
        scheduled_s=tuple(scheduled[i] for i in rows),
        first_token_s=tuple(first[i] for i in rows),
        last_token_s=tuple(last[i] for i in rows),
        running_changes=tuple(sorted(changes, key=lambda change: change[0])),
        num_preemptions=replica.num_preemptions,
        num_iterations=replica.num_iterations,
        recomputed_tokens=replica.recomputed_tokens,
    )


def errors_against(
    measured: MeasuredTimes, requests: Requests, times: EngineTimes, rows: Sequence[int] | None = None
) -> tuple[MetricError, ...]:
    """Compare simulated with measured times, over all requests or some ``rows`` (makespan: of those rows)."""
    rows = range(len(requests)) if rows is None else rows
    if not rows:
        raise InputError("0 requests: errors need at least one measured request")
    real = _metrics(requests, measured.first_token_s, measured.last_token_s, rows)
    ours = _metrics(requests, times.first_token_s, times.last_token_s, rows)
    start_s = min(requests.arrival_s[i] for i in rows)
    ends = (
        max(measured.last_token_s[i] for i in rows) - start_s,
        max(times.last_token_s[i] for i in rows) - start_s,
    )
    found = [MetricError("makespan", *ends, _relative(ends[1], ends[0]), {}, None)]
    for name, values in real.items():
        if not len(values):
            continue
        found.append(
            MetricError(
                name=name,
                measured_s=float(values.mean()),
                simulated_s=float(ours[name].mean()),
                mean_error=_relative(float(ours[name].mean()), float(values.mean())),
                percentile_errors={
                    p: _relative(float(np.percentile(ours[name], p)), float(np.percentile(values, p)))
                    for p in PERCENTILES
                },
                request_error=float(
                    np.mean([abs(_relative(a, b)) for a, b in zip(ours[name], values, strict=True)])
                ),
            )
        )
    return tuple(found)


def read_engine_models(path: Path) -> tuple[IterationModel, dict[str, Any]]:
    """Read the iteration model of a models file, and the engine limits that it names (maybe none)."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}): give a models file") from None
    except ValueError as error:
        raise InputError(f"{path}: is not JSON ({error}): give a models file") from None
    if not isinstance(data, dict) or "iteration" not in data:
        raise InputError(f"{path}: has no `iteration`: give a models file with an iteration model")
    try:
        if "schema" in data:
            from bidirl.models.stages import StageModels

            models = StageModels.from_json(data)
            return models.iteration, asdict(models.limits)
        limits = data.get("limits", {})
        if not isinstance(limits, dict):
            raise InputError("limits: must be an object of engine limits")
        for name, value in limits.items():
            if name not in EngineLimits.__dataclass_fields__:
                known = ", ".join(EngineLimits.__dataclass_fields__)
                raise InputError(f"limits.{name}: unknown key, the limits are {known}")
            wanted = bool if name == "prefix_caching" else int
            if type(value) is not wanted:
                raise InputError(
                    f"limits.{name}={value!r}: must be {'true or false' if wanted is bool else 'an integer'}"
                )
        return iteration_from_json(data["iteration"]), limits
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def engine_command(
    requests: Path,
    models: Path,
    kv_tokens: int | None = None,
    max_num_seqs: int | None = None,
    max_batched_tokens: int | None = None,
    out: Path | None = None,
) -> EngineReport:
    """Simulate a request file, write per-request times to ``out``, compare with measured times if it has any.

    Options given override the limits of the models file, which override vLLM's defaults. Raise InputError
    for malformed files and limits.
    """
    iteration, given = read_engine_models(models)
    options = {
        "kv_tokens": kv_tokens,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_batched_tokens,
    }
    given = given | {name: value for name, value in options.items() if value is not None}
    if "kv_tokens" not in given:
        raise InputError(
            f"{models}: names no kv_tokens: give --kv-tokens, the KV memory that the engine reports"
        )
    limits = EngineLimits(**given)
    table = read_requests(requests)
    times = simulate_requests(table, iteration, limits)
    errors = errors_against(table.measured, table, times) if table.measured else ()
    report = EngineReport(table, limits, times, errors)
    if out is not None:
        report.write_csv(out)
    return report


def _metrics(
    requests: Requests, first_s: Sequence[float], last_s: Sequence[float], rows: Sequence[int]
) -> dict[str, "np.ndarray[Any, np.dtype[np.float64]]"]:
    tokens = requests.output_tokens
    return {
        "ttft": np.array([first_s[i] - requests.arrival_s[i] for i in rows]),
        "tpot": np.array([(last_s[i] - first_s[i]) / (tokens[i] - 1) for i in rows if tokens[i] > 1]),
        "latency": np.array([last_s[i] - requests.arrival_s[i] for i in rows]),
    }


def _means(requests: Requests, first_s: Sequence[float], last_s: Sequence[float]) -> dict[str, float | None]:
    metrics = _metrics(requests, first_s, last_s, range(len(requests)))
    found: dict[str, float | None] = {"makespan_s": max(last_s) - min(requests.arrival_s)}
    return found | {
        f"{name}_s": float(values.mean()) if len(values) else None for name, values in metrics.items()
    }


def _relative(ours: float, real: float) -> float:
    """Return ours / real - 1; equal zeros agree."""
    if real == 0:
        return 0.0 if ours == 0 else inf
    return ours / real - 1


def _label(name: str) -> str:
    return {
        "ttft": "time to first token",
        "tpot": "time per output token",
        "latency": "end-to-end latency",
    }.get(name, name)
