"""What ``calibrate`` says: the JSON of its results, and the same as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bidirl.models.fit.file import FittedRun
from bidirl.models.fit.fitted import FittedStage
from bidirl.models.fit.holdout import Holdout

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["fits_json", "fits_table", "holdout_json", "holdout_table", "pooled", "remarks", "verdict"]

FEWEST_JUDGED = 5
"""Steps below which a fit's errors on its own log say nothing."""


def pooled(runs: Sequence[Mapping[str, Holdout]]) -> dict[str, Holdout]:
    """Return the later steps of all runs as one sample per stage."""
    found: dict[str, Holdout] = {}
    for run in runs:
        for stage, held in run.items():
            found[stage] = held if stage not in found else found[stage].joined(held)
    return found


def holdout_json(names: Sequence[str], runs: Sequence[Mapping[str, Holdout]]) -> dict[str, Any]:
    """Return the contract's figures; of several runs the steps of all together, then each run's."""
    figures = {stage: held.to_json() for stage, held in pooled(runs).items()}
    found: dict[str, Any] = {"holdout": figures}
    if len(runs) > 1:
        found["runs"] = {
            name: {stage: held.to_json() for stage, held in run.items()}
            for name, run in zip(names, runs, strict=True)
        }
    return found


def fits_json(runs: Sequence[FittedRun], out: str | None, notes: Sequence[str]) -> dict[str, Any]:
    """Return the fits of all runs, the file that holds them, and the notes."""
    return {"out": out, "runs": [run.to_json() for run in runs], "notes": list(notes)}


def verdict(runs: Sequence[FittedRun]) -> str:
    """Return one sentence: what was fitted, and how well."""
    stages = [stage for run in runs for stage in run.stages.values() if stage.num_rows >= FEWEST_JUDGED]
    if not stages:
        return "stages fitted from a few steps: the scale is right, errors cannot be judged"
    worst = max(stages, key=lambda stage: stage.residuals.median_error)
    several = f"{len(runs)} runs, each by itself: " if len(runs) > 1 else ""
    return (
        f"{several}{len(stages)} stages fitted; worst median error {worst.residuals.median_error:.1%} "
        f"({worst.stage})"
    )


def fits_table(run: FittedRun) -> Table:
    """Return a run's stages with their coefficients and errors."""
    from rich.table import Table

    table = Table(title=f"{run.source}: {run.num_steps} steps")
    for name in (
        "stage",
        "form",
        "typical s",
        "coefficients",
        "median error",
        "p90",
        "cross-validated",
        "left out",
    ):
        table.add_column(name, justify="left" if name in ("stage", "form", "coefficients") else "right")
    for stage in run.stages.values():
        residuals = stage.residuals
        crossed = residuals.cross_validated_error
        table.add_row(
            stage.stage,
            _form(stage),
            f"{stage.typical_s:.3g}",
            ", ".join(f"{term} {found.value:.3g}" for term, found in stage.coefficients().items()),
            f"{residuals.median_error:.1%}" if stage.num_rows >= FEWEST_JUDGED else "",
            f"{residuals.p90_error:.1%}" if stage.num_rows >= FEWEST_JUDGED else "",
            "" if crossed is None else f"{crossed:.1%}",
            f"{residuals.num_cold} cold" if residuals.num_cold else "",
        )
    return table


def holdout_table(name: str, run: Mapping[str, Holdout]) -> Table:
    """Return the errors of a run's stages on the later steps."""
    from rich.table import Table

    table = Table(title=f"{name}: predicted later steps")
    for column in (
        "stage",
        "steps",
        "median error",
        "p90",
        "coverage of 90 %",
        "mean of first",
        "last of first",
    ):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for stage, held in run.items():
        figures = held.to_json()
        table.add_row(
            stage,
            str(held.num_steps),
            *(
                f"{figures[key]:.1%}"
                for key in ("median_error", "p90_error", "coverage", "baseline_mean", "baseline_last")
            ),
        )
    return table


def remarks(stages: Mapping[str, FittedStage]) -> list[str]:
    """Return what the log cannot tell, one line each."""
    return [f"{stage}: {line}" for stage, fitted in stages.items() for line in fitted.statements]


def _form(stage: FittedStage) -> str:
    if len(stage.forms) == 1:
        return stage.form.name
    return " / ".join(
        f"{form.name} {form.weight:.0%}" for form in sorted(stage.forms, key=lambda each: -each.weight)
    )
