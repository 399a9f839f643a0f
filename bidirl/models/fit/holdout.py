"""Fit on the first steps of a run, predict the rest from their lengths, and compare with two baselines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bidirl.errors import InputError
from bidirl.models.fit.fitted import FittedStage
from bidirl.models.fit.fitting import PriorTime, fit_log
from bidirl.models.fit.forms import STAGES
from bidirl.traces.step_log import StepLog

__all__ = ["Holdout", "hold_out"]

Column = NDArray[np.float64]


@dataclass(frozen=True)
class Holdout:
    """Relative errors of one stage on the steps after the fitted ones, one entry a step."""

    errors: Column
    inside: NDArray[np.bool_]
    """Whether the step lies inside its nominal 90 % interval."""
    mean_errors: Column
    """Errors of the mean of the fitted steps."""
    last_errors: Column
    """Errors of the last fitted step."""
    extrapolated: NDArray[np.bool_]
    fitted: tuple[FittedStage, ...]
    """The fit, or the fits of several runs."""

    @property
    def num_steps(self) -> int:
        """Return the number of later steps that were predicted."""
        return len(self.errors)

    def to_json(self) -> dict[str, float]:
        """Return the five figures of the contract; baselines are medians of relative errors too."""
        return {
            "median_error": float(np.median(self.errors)),
            "p90_error": float(np.quantile(self.errors, 0.9)),
            "coverage": float(self.inside.mean()),
            "baseline_mean": float(np.median(self.mean_errors)),
            "baseline_last": float(np.median(self.last_errors)),
        }

    def joined(self, other: Holdout) -> Holdout:
        """Return the steps of both, as one sample."""
        return Holdout(
            np.concatenate([self.errors, other.errors]),
            np.concatenate([self.inside, other.inside]),
            np.concatenate([self.mean_errors, other.mean_errors]),
            np.concatenate([self.last_errors, other.last_errors]),
            np.concatenate([self.extrapolated, other.extrapolated]),
            self.fitted + other.fitted,
        )


def hold_out(
    log: StepLog,
    num_first: int,
    stages: Sequence[str] = STAGES,
    priors: Mapping[str, PriorTime] | None = None,
) -> dict[str, Holdout]:
    """Fit on the first ``num_first`` rows and judge the rest; later times are never read by the fit.

    A stage without times on both sides is left out. Raises ``InputError`` where nothing is left to judge.
    """
    if not 0 < num_first < len(log):
        raise InputError(
            f"--holdout-after {num_first}: {log.source or 'the log'} has {len(log)} steps, so it must lie in "
            f"1 to {len(log) - 1}; choose another number"
        )
    first, rest = log.rows(slice(0, num_first)), log.rows(slice(num_first, None))
    usable = [stage for stage in stages if first.has(stage) and rest.has(stage)]
    found: dict[str, Holdout] = {}
    for stage, fitted in fit_log(first, usable, priors).items() if usable else ():
        judged = _judge(stage, fitted, first, rest)
        if judged is not None:
            found[stage] = judged
    if not found:
        raise InputError(
            f"{log.source or 'the log'}: no stage has times before and after step {num_first}: "
            "choose another --holdout-after"
        )
    return found


def _judge(stage: str, fitted: FittedStage, first: StepLog, rest: StepLog) -> Holdout | None:
    at = fitted.predict({name: rest.column(name) for name in fitted.needs} or {"step": rest.column(stage)})
    measured = rest.column(stage)
    known = np.isfinite(measured) & (measured > 0.0) & np.isfinite(at.value_s)
    if not known.any():
        return None
    times = measured[known]
    before = first.column(stage)[np.isfinite(first.column(stage))]
    return Holdout(
        errors=np.abs(at.value_s[known] - times) / times,
        inside=(at.low_s[known] <= times) & (times <= at.high_s[known]),
        mean_errors=np.abs(float(before.mean()) - times) / times,
        last_errors=np.abs(float(before[-1]) - times) / times,
        extrapolated=at.extrapolated[known],
        fitted=(fitted,),
    )
