"""Fit the stages of a step log: which form each follows, how fast, how surely, and what stays unknown."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bidirl.errors import InputError
from bidirl.models.fit.fitted import FittedForm, FittedStage, Residuals
from bidirl.models.fit.forms import STAGES, TERMS, Form, forms_of, term_values
from bidirl.models.fit.regression import TAIL_DOFS, MapFit, fit_map, noise_scale
from bidirl.models.fit.statements import statements_of
from bidirl.traces.step_log import StepLog

__all__ = ["PriorTime", "fit_log", "fit_stage", "recent_weights"]

Column = NDArray[np.float64]

OLDEST_WEIGHT = 0.35
"""Weight of the oldest row beside the newest: machines drift, so recent steps say more about coming ones."""
LEVEL_HALF_LIFE_STEPS = 8.0
"""Half-life of the steps that say where the machine's level is at the end of the log."""
LEVEL_SHARE = 0.6
"""Prior standard deviation of that level as a share of one step's noise: eight steps half decide it."""
OUTLIER_SCALES = 4.0
"""Scales of the noise beyond which a step is an outlier, or a first step is cold."""
MIN_ROWS_FOR_COLD = 8
MAX_COLD = 3
"""At most so many leading steps are left out as cold."""
EVIDENCE_SHARE = 0.5
"""Share of the log evidence that counts when forms are weighed: steps in a row resemble each other, so that
n of them say less than n independent ones."""
OTHERS_LIMIT = 3.0
"""Largest log factor that one other stage contributes for or against a form: the stages of one trainer tend
to share their way of batching, but need not."""
MAX_SPREAD = 1e6
"""Factor from its median beyond which a time or a length is damage, not an outlier: logarithms of times are
fitted, and one such value would take the noise with it."""
CV_FOLDS = 5
NEGLIGIBLE = 0.01
"""Forms below this weight are left out of a fitted stage."""


@dataclass(frozen=True, slots=True)
class PriorTime:
    """What is believed of a stage's time in a typical step before the log is read (a roofline)."""

    value_s: float
    log_sd: float
    """Standard deviation of its log: ``ln(factor) / 1.645`` for a 90 % interval of that factor."""


@dataclass(frozen=True)
class _Rows:
    """Complete rows of one stage."""

    columns: Mapping[str, Column]
    times_s: Column
    num_cold: int = 0

    def part(self, chosen: NDArray[np.bool_] | slice, num_cold: int = 0) -> _Rows:
        columns = {name: column[chosen] for name, column in self.columns.items()}
        return _Rows(columns, self.times_s[chosen], num_cold)


@dataclass(frozen=True)
class _Candidate:
    form: Form
    references: Column
    fit: MapFit


def fit_log(
    log: StepLog, stages: Sequence[str] = STAGES, priors: Mapping[str, PriorTime] | None = None
) -> dict[str, FittedStage]:
    """Fit every stage that a log gives; stages of the trainer lend each other evidence on the form.

    Raises ``InputError`` if the log gives no stage at all.
    """
    present = [stage for stage in stages if _num_times(log, stage) > 0]
    if not present:
        raise InputError(
            f"{log.source or 'the log'} has no stage times ({', '.join(stages)}): give a log with timings"
        )
    rows = {stage: _warm(stage, _complete(log, stage)) for stage in present}
    given = priors or {}
    found = {stage: _candidates(stage, rows[stage], given.get(stage)) for stage in present}
    return {
        stage: _finish(
            log, stage, rows[stage], found[stage], _others(stage, found), (priors or {}).get(stage)
        )
        for stage in present
    }


def fit_stage(log: StepLog, stage: str, prior: PriorTime | None = None) -> FittedStage:
    """Fit one stage of a log by itself; raise ``InputError`` where the log does not give it."""
    if _num_times(log, stage) == 0:
        raise InputError(f"{log.source or 'the log'} has no {stage}: fit another stage, or give another log")
    rows = _warm(stage, _complete(log, stage))
    return _finish(log, stage, rows, _candidates(stage, rows, prior), {}, prior)


def _num_times(log: StepLog, stage: str) -> int:
    return int((np.isfinite(log.column(stage)) & (log.column(stage) > 0.0)).sum())


def _complete(log: StepLog, stage: str) -> _Rows:
    """Return the rows that give the stage and every quantity that its forms need."""
    timed = _sound(log.column(stage))
    given = {name: np.where(_sound(c), c, np.nan)[timed] for name, c in log.columns.items()}
    rows = _Rows(given, log.column(stage)[timed])
    needs = sorted({n for form in forms_of(stage, rows.columns) for t in form.terms for n in TERMS[t].needs})
    full = np.ones(len(rows.times_s), dtype=bool)
    for name in needs:
        full &= np.isfinite(rows.columns[name])
    if not full.any():
        return _Rows({"rows": np.ones(len(full))}, rows.times_s)
    columns = {name: rows.columns[name][full] for name in needs} or {"rows": np.ones(int(full.sum()))}
    return _Rows(columns, rows.times_s[full])


def _sound(values: Column) -> NDArray[np.bool_]:
    """Return which values are positive and within ``MAX_SPREAD`` of their median."""
    known = np.isfinite(values) & (values > 0.0)
    if not known.any():
        return known
    middle = float(np.median(values[known]))
    return np.asarray(known & (values >= middle / MAX_SPREAD) & (values <= middle * MAX_SPREAD))


def _warm(stage: str, rows: _Rows) -> _Rows:
    """Leave out leading steps that are slower than the robust fit of the rest allows."""
    for num_cold in range(MAX_COLD):
        if len(rows.times_s) < MIN_ROWS_FOR_COLD:
            break
        best = max(_candidates(stage, rows, None), key=_evidence)
        if best.fit.loo_residuals[0] <= OUTLIER_SCALES * best.fit.scale:
            break
        rows = rows.part(slice(1, None), num_cold + 1)
    return rows


def recent_weights(num: int) -> Column:
    """Return the weight of each of ``num`` rows in order: 1 for the newest, falling to the oldest."""
    age = np.arange(num)[::-1] / max(1, num - 1)
    return np.asarray(OLDEST_WEIGHT**age)


def _candidates(
    stage: str, rows: _Rows, prior: PriorTime | None, like: Sequence[_Candidate] = ()
) -> list[_Candidate]:
    """Fit every form that the rows allow, or the forms and tails of earlier candidates."""
    typical = float(np.median(rows.times_s))
    found = []
    tails = {each.form: (each.fit.tail_dof,) for each in like}
    for form in tails or forms_of(stage, rows.columns):
        values = term_values(form.terms, rows.columns)
        references = np.median(values, axis=0)
        fit = fit_map(
            values / references,
            rows.times_s / typical,
            np.array(form.shares),
            np.array(form.shares_sd),
            row_weights=recent_weights(len(rows.times_s)),
            scale_prior=None if prior is None else (prior.value_s / typical, prior.log_sd),
            tail_dofs=tails.get(form, TAIL_DOFS),
        )
        found.append(_Candidate(form, references, fit))
    return found


def _evidence(candidate: _Candidate) -> float:
    return candidate.fit.log_evidence


def _others(stage: str, found: Mapping[str, list[_Candidate]]) -> dict[str, float]:
    """Return what the other stages say of each form: log factors, limited."""
    said: dict[str, float] = {}
    for other, candidates in found.items():
        if other == stage or len(candidates) < 2:
            continue
        best = max(_evidence(candidate) for candidate in candidates)
        for candidate in candidates:
            behind = EVIDENCE_SHARE * (_evidence(candidate) - best)
            said[candidate.form.name] = said.get(candidate.form.name, 0.0) + max(-OTHERS_LIMIT, behind)
    return said


def _mixture(
    rows: _Rows, candidates: Sequence[_Candidate], others: Mapping[str, float]
) -> tuple[FittedForm, ...]:
    logs = np.array([EVIDENCE_SHARE * _evidence(c) + others.get(c.form.name, 0.0) for c in candidates])
    weights = np.exp(logs - logs.max())
    weights = np.where(weights / weights.sum() < NEGLIGIBLE, 0.0, weights)
    weights = weights / weights.sum()
    return tuple(
        FittedForm(
            name=c.form.name,
            weight=float(weight),
            terms=c.form.terms,
            references=tuple(float(x) for x in c.references),
            shares=tuple(float(x) for x in c.fit.coefficients),
            covariance=tuple(tuple(float(x) for x in row) for row in c.fit.covariance),
            level=_level(c.fit),
            noise=noise_scale(c.fit.loo_residuals, len(c.form.terms)),
        )
        for weight, c in zip(weights, candidates, strict=True)
        if weight > 0.0
    )


def _level(fit: MapFit) -> float:
    """Return the machine's level in the last steps: a shrunken, robust mean of their residuals."""
    num = len(fit.residuals)
    kernel = 0.5 ** (np.arange(num)[::-1] / LEVEL_HALF_LIFE_STEPS) * fit.pull / recent_weights(num)
    effective = float(kernel.sum() ** 2 / (kernel**2).sum())
    shrink = effective * LEVEL_SHARE**2 / (effective * LEVEL_SHARE**2 + 1.0)
    return shrink * float(kernel @ fit.residuals / kernel.sum())


def _finish(
    log: StepLog,
    stage: str,
    rows: _Rows,
    candidates: list[_Candidate],
    others: Mapping[str, float],
    prior: PriorTime | None,
) -> FittedStage:
    forms = _mixture(rows, candidates, others)
    best = max(candidates, key=_evidence)
    errors = np.abs(np.expm1(-best.fit.loo_residuals))
    return FittedStage(
        stage=stage,
        typical_s=float(np.median(rows.times_s)),
        forms=forms,
        ranges={name: (float(c.min()), float(c.max())) for name, c in sorted(rows.columns.items())},
        num_rows=len(rows.times_s),
        residuals=Residuals(
            median_error=float(np.median(errors)),
            p90_error=float(np.quantile(errors, 0.9)),
            cross_validated_error=_cross_validated(stage, rows, candidates, others, prior),
            num_outliers=int((np.abs(best.fit.residuals) > OUTLIER_SCALES * best.fit.scale).sum()),
            num_cold=rows.num_cold,
        ),
        statements=statements_of(stage, forms, rows.columns, len(rows.times_s)),
        source=log.source,
        data_hash=_hash(stage, rows),
    )


def _cross_validated(
    stage: str,
    rows: _Rows,
    candidates: Sequence[_Candidate],
    others: Mapping[str, float],
    prior: PriorTime | None,
) -> float | None:
    """Return the median relative error of blocks of steps, each predicted from the other blocks."""
    num = len(rows.times_s)
    if num < 2 * CV_FOLDS:
        return None
    errors = []
    for block in np.array_split(np.arange(num), CV_FOLDS):
        left = np.ones(num, dtype=bool)
        left[block] = False
        rest = rows.part(left)
        mixed = _mixture(rest, _candidates(stage, rest, prior, candidates), others)
        typical = float(np.median(rest.times_s))
        logs = np.zeros(len(block))
        for form in mixed:
            values = term_values(form.terms, rows.part(~left).columns) / np.array(form.references)
            logs += form.weight * np.log(values @ np.array(form.shares))
        errors.append(np.abs(typical * np.exp(logs) / rows.times_s[block] - 1.0))
    return float(np.median(np.concatenate(errors)))


def _hash(stage: str, rows: _Rows) -> str:
    """Return the SHA-256 of the fitted rows: the stage, and every column by name, in order."""
    digest = hashlib.sha256(stage.encode())
    for name, column in sorted({**rows.columns, stage: rows.times_s}.items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(column, dtype="<f8").tobytes())
    return digest.hexdigest()
