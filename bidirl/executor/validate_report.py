"""Tables and the figure of predicted against measured."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bidirl.executor.profile import Profile
from bidirl.executor.validate import StageRow, Validation
from bidirl.traces.tables import write_table

__all__ = ["profile_lines", "validation_lines", "verdict", "write_figure", "write_rows"]

MEDIAN_LIMIT, P90_LIMIT, TOTAL_LIMIT = 0.05, 0.12, 0.10
"""What a prediction is held to: median and 90th percentile of the errors of stage times; step time and
makespan."""


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def verdict(result: Validation) -> str:
    """Return the sentence that says whether the predictions are as good as they should be."""
    errors = result.errors()
    stages, steps = errors["stages"], errors["step"]
    kept = (
        stages.median <= MEDIAN_LIMIT
        and stages.p90 <= P90_LIMIT
        and abs(steps.total) <= TOTAL_LIMIT
        and result.makespan.error <= TOTAL_LIMIT
    )
    word = "as good as promised" if kept else "worse than promised"
    return (
        f"calibrated on steps 1 to {result.calibration_steps - 1}, steps {result.calibration_steps} to "
        f"{result.num_steps - 1} are predicted {word}: stages {_percent(stages.median)} median, "
        f"{_percent(stages.p90)} p90 (at most 5, 12); makespan {_percent(result.makespan.error)} (at most 10)"
    )


def validation_lines(result: Validation) -> Iterator[str]:
    """Yield the table of a validation as plain lines."""
    if result.pace is not None:
        pace = ", ".join(f"{name} = {value:g}" for name, value in result.pace.items())
        yield f"devices are paced by the job: {pace}"
    yield f"{'stage':22s}    n   measured  predicted      sum   median      p90"
    sums = _sums(result.rows)
    for name, errors in result.errors().items():
        if name in sums:
            measured_s, predicted_s = sums[name]
            yield (
                f"{name:22s} {errors.num_rows:4d} {measured_s:8.3f} s {predicted_s:8.3f} s "
                f"{100 * errors.total:+6.1f} % {_percent(errors.median):>8s} {_percent(errors.p90):>8s}"
            )
    step = result.errors()["step"]
    yield (
        f"{'steps (simulated)':22s} {step.num_rows:4d} {result.makespan.measured_s:8.3f} s "
        f"{result.makespan.predicted_s:8.3f} s {100 * step.total:+6.1f} % {_percent(step.median):>8s} "
        f"{_percent(step.p90):>8s}"
    )
    for direction in sorted({*result.leases["measured"], *result.leases["predicted"]}):
        shown = [result.leases[side].get(direction, {}) for side in ("measured", "predicted")]
        counts = [int(entry.get("count", 0)) for entry in shown]
        useful = [entry.get("useful_device_s", 0.0) for entry in shown]
        yield (
            f"leases {direction}: {counts[0]} measured, {counts[1]} predicted; useful device-seconds "
            f"{useful[0]:.2f}, {useful[1]:.2f}"
        )
    for pool in ("rollout", "train"):
        shares = [result.idle[side].get(pool) for side in ("measured", "predicted")]
        if None not in shares:
            yield f"idle share of the {pool} pool: {shares[0]:.3f} measured, {shares[1]:.3f} predicted"


def _sums(rows: Sequence[StageRow]) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for row in rows:
        measured_s, predicted_s = found.get(row.stage, (0.0, 0.0))
        found[row.stage] = measured_s + row.measured_s, predicted_s + row.predicted_s
    return found


def profile_lines(result: Profile) -> Iterator[str]:
    """Yield the table of a profile as plain lines."""
    yield f"{'cell':10s} {'samples':>8s} {'tokens':>7s} {'measured':>12s} {'predicted':>12s} {'error':>8s}"
    for cell in result.cells:
        note = "" if cell.is_fitted else "  not fitted"
        yield (
            f"{cell.stage:10s} {cell.num_samples:8d} {cell.tokens:7d} {1e3 * cell.measured_s:9.2f} ms "
            f"{1e3 * cell.predicted_s:9.2f} ms {_percent(cell.error):>8s}{note}"
        )
    for name, estimate in sorted(result.models.sources.items()):
        if name.startswith(("sync.apply", "switch.")) and estimate.source.value == "measured":
            yield (
                f"{name}: {1e3 * estimate.value:.2f} ms ({1e3 * estimate.low:.2f} to "
                f"{1e3 * estimate.high:.2f}; {estimate.note})"
            )


def write_rows(result: Validation, path: Path) -> None:
    """Write a row per stage, step and unit as CSV, the simulated steps last."""
    rows = [*result.rows, *result.step_rows]
    columns = ("stage", "step", "unit", "measured_s", "predicted_s")
    write_table(path, {name: [getattr(row, name) for row in rows] for name in columns})


def write_figure(result: Validation, path: Path) -> None:
    """Draw stage times and step times, measured and predicted."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    _draw_stages(left, result)
    steps = [row.step for row in result.step_rows]
    right.plot(steps, [row.measured_s for row in result.step_rows], "o-", label="measured")
    right.plot(steps, [row.predicted_s for row in result.step_rows], "s--", label="simulated")
    right.set(xlabel="step", ylabel="seconds between publications", ylim=(0, None))
    right.legend()
    errors = result.errors()["stages"]
    figure.suptitle(
        f"{len(result.rows)} stage times after step {result.calibration_steps - 1}: median "
        f"{_percent(errors.median)}, p90 {_percent(errors.p90)}; makespan {_percent(result.makespan.error)}"
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_stages(axes: Any, result: Validation) -> None:
    for stage in sorted({row.stage for row in result.rows}):
        rows = [row for row in result.rows if row.stage == stage]
        axes.loglog(
            [row.measured_s for row in rows],
            [max(row.predicted_s, 1e-6) for row in rows],
            "o",
            ms=4,
            label=stage,
        )
    ends = [min(row.measured_s for row in result.rows), max(row.measured_s for row in result.rows)]
    axes.plot(ends, ends, "k-", lw=0.8)
    axes.fill_between(ends, [0.9 * end for end in ends], [1.1 * end for end in ends], alpha=0.15, color="k")
    axes.set(xlabel="measured s", ylabel="predicted s")
    axes.legend(fontsize=7)
