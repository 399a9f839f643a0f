"""A fitted stage: the only thing that predicts a stage's time from a step's lengths; its JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bidirl.errors import InputError
from bidirl.models.estimate import Estimate, Source
from bidirl.models.fit.forms import TERMS, term_values
from bidirl.models.fit.regression import t_quantile

__all__ = ["COVERAGE", "FittedForm", "FittedStage", "Residuals", "StagePrediction"]

Column = NDArray[np.float64]

COVERAGE = 0.90
"""Nominal coverage of every interval."""
DRIFT_SHARE = 0.33
"""Drift of a machine's level after the fit, as a share of the noise of one step (standard deviations).
Source: docs/calibration.md, windows of 30 steps of the public step logs against what followed each."""
RANGE_SLACK = 0.02
"""Relative distance outside the fitted range that does not yet count as extrapolation."""


@dataclass(frozen=True, slots=True)
class FittedForm:
    """One form with its coefficients; ``weight`` is its share in the stage's prediction."""

    name: str
    weight: float
    terms: tuple[str, ...]
    references: tuple[float, ...]
    """Value of each term in the typical step of the log."""
    shares: tuple[float, ...]
    """Time of each term in the typical step, as a share of ``FittedStage.typical_s``."""
    covariance: tuple[tuple[float, ...], ...]
    """Of the shares."""
    level: float
    """Log of the machine's level in the last steps over that of the whole log."""
    noise: float
    """Standard deviation of the log of one step's time around the form."""

    @property
    def num_parameters(self) -> int:
        """Return the number of free coefficients."""
        return len(self.terms)


@dataclass(frozen=True, slots=True)
class Residuals:
    """How well the fit describes its own log: each step predicted without itself (relative errors)."""

    median_error: float
    p90_error: float
    cross_validated_error: float | None
    """Median error when each fifth of the log, in order, is predicted from the rest; none below 10 steps."""
    num_outliers: int
    """Steps beyond four scales of the noise; they hardly count."""
    num_cold: int
    """First steps that were left out because they were slow to start."""


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """Seconds per step, with nominal 90 % intervals."""

    value_s: Column
    low_s: Column
    high_s: Column
    extrapolated: NDArray[np.bool_]
    """Where a quantity lies outside the range of the fitted log."""


@dataclass(frozen=True, slots=True)
class FittedStage:
    """One stage's time as a function of a step's lengths, fitted to one run."""

    stage: str
    typical_s: float
    """Median seconds of the stage in the fitted steps."""
    forms: tuple[FittedForm, ...]
    ranges: Mapping[str, tuple[float, float]]
    """Smallest and largest value of each quantity in the fitted steps."""
    num_rows: int
    residuals: Residuals
    statements: tuple[str, ...]
    """What the log cannot tell, in words, and what would."""
    source: str
    data_hash: str
    """SHA-256 of the rows that were fitted."""

    @property
    def form(self) -> FittedForm:
        """Return the form with the largest weight."""
        return max(self.forms, key=lambda form: form.weight)

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the quantities that a prediction needs, sorted."""
        return tuple(
            sorted({need for form in self.forms for term in form.terms for need in TERMS[term].needs})
        )

    def coefficients(self) -> dict[str, Estimate]:
        """Return seconds per unit of each term of the best form, with intervals."""
        form = self.form
        found = {}
        for i, term in enumerate(form.terms):
            unit_s = self.typical_s * float(np.exp(form.level)) / form.references[i]
            half = t_quantile((1.0 + COVERAGE) / 2.0, self._dof) * form.covariance[i][i] ** 0.5
            value = form.shares[i] * unit_s
            found[term] = Estimate(
                value,
                max(0.0, form.shares[i] - half) * unit_s,
                (form.shares[i] + half) * unit_s,
                Source.FITTED,
                f"{form.name}, {self._origin}",
            )
        return found

    def typical(self) -> Estimate:
        """Return the mean time of steps like the typical one (not of a single step, which also has noise)."""
        mean, variance = 0.0, 0.0
        parts = [(form, float(np.log(sum(form.shares))) + form.level) for form in self.forms]
        mean = sum(form.weight * level for form, level in parts)
        for form, level in parts:
            unit = np.ones(len(form.terms)) / sum(form.shares)
            own = float(unit @ np.array(form.covariance) @ unit) + (DRIFT_SHARE * form.noise) ** 2
            variance += form.weight * (own + (level - mean) ** 2)
        half = t_quantile((1.0 + COVERAGE) / 2.0, self._dof) * variance**0.5
        value = self.typical_s * float(np.exp(mean))
        low, high = value * float(np.exp(-half)), value * float(np.exp(half))
        return Estimate(value, low, high, Source.FITTED, self._origin)

    def predict(self, columns: Mapping[str, Column]) -> StagePrediction:
        """Return the time of each step; NaN where a step lacks a quantity.

        ``columns`` holds arrays of one length by the names of ``StepLog`` (``StepLog.columns`` will do).
        Raises ``InputError`` where a needed quantity is not there at all.
        """
        missing = [name for name in self.needs if name not in columns]
        if missing:
            raise InputError(
                f"{self.stage} needs {missing[0]}, which is not given: add it, or fit a log without it"
            )
        given = {name: np.asarray(columns[name], dtype=float) for name in self.needs}
        rows = given or {name: np.asarray(column, dtype=float) for name, column in columns.items()}
        parts = []
        for form in self.forms:
            scaled = term_values(form.terms, rows) / np.array(form.references)
            shares = scaled @ np.array(form.shares)
            jacobian = scaled / shares[:, None]
            variance = np.einsum("ij,jk,ik->i", jacobian, np.array(form.covariance), jacobian)
            parts.append(
                (form, np.log(shares) + form.level, variance + form.noise**2 * (1.0 + DRIFT_SHARE**2))
            )
        mean = sum((form.weight * logs for form, logs, _ in parts), start=np.zeros(1))
        variance = sum(
            (form.weight * (var + (logs - mean) ** 2) for form, logs, var in parts), start=np.zeros(1)
        )
        half = t_quantile((1.0 + COVERAGE) / 2.0, self._dof) * np.sqrt(variance)
        value = self.typical_s * np.exp(mean)
        outside = np.zeros(len(value), dtype=bool)
        for name, column in given.items():
            low, high = self.ranges[name]
            outside |= (column < low * (1.0 - RANGE_SLACK)) | (column > high * (1.0 + RANGE_SLACK))
        return StagePrediction(value, value * np.exp(-half), value * np.exp(half), outside)

    def estimate(self, **quantities: float) -> Estimate:
        """Return the time of one step, flagged where its lengths lie outside the fitted ranges."""
        at = self.predict({name: np.array([value]) for name, value in quantities.items()} or {"": np.ones(1)})
        low, value, high = float(at.low_s[0]), float(at.value_s[0]), float(at.high_s[0])
        found = Estimate(
            value, low, high, Source.FITTED, f"{self.num_rows} steps of {self.source or 'a log'}"
        )
        return found.flagged(self._outside(quantities)) if at.extrapolated[0] else found

    def _outside(self, quantities: Mapping[str, float]) -> str:
        for name in self.needs:
            low, high = self.ranges[name]
            if not low * (1.0 - RANGE_SLACK) <= quantities[name] <= high * (1.0 + RANGE_SLACK):
                return f"{name} = {quantities[name]:g} lies outside the fitted {low:g} to {high:g}"
        return ""

    @property
    def _origin(self) -> str:
        return f"{self.num_rows} steps of {self.source or 'a log'}"

    @property
    def _dof(self) -> float:
        return float(max(3, self.num_rows - self.form.num_parameters))

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data; ``from_json`` reads it back to an equal value."""
        data = asdict(self)
        data["ranges"] = {name: list(bounds) for name, bounds in sorted(self.ranges.items())}
        data["coefficients"] = {name: found.to_mapping() for name, found in self.coefficients().items()}
        return data

    @classmethod
    def from_json(cls, data: object) -> FittedStage:
        """Read what ``to_json`` wrote; raise ``InputError`` naming the wrong key."""
        known = {spec.name for spec in fields(cls)} | {"coefficients"}
        if not isinstance(data, dict) or set(data) != known:
            odd = "not a table" if not isinstance(data, dict) else ", ".join(sorted(set(data) ^ known))
            raise InputError(f"fitted stage: wrong or missing {odd}: calibrate again")
        try:
            forms = tuple(_form(form) for form in data["forms"])
            return cls(
                stage=str(data["stage"]),
                typical_s=float(data["typical_s"]),
                forms=forms,
                ranges={str(k): (float(v[0]), float(v[1])) for k, v in data["ranges"].items()},
                num_rows=int(data["num_rows"]),
                residuals=Residuals(**data["residuals"]),
                statements=tuple(str(text) for text in data["statements"]),
                source=str(data["source"]),
                data_hash=str(data["data_hash"]),
            )
        except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise InputError(
                f"fitted stage {data['stage']!r}: malformed ({error}): calibrate again"
            ) from None


def _form(data: dict[str, Any]) -> FittedForm:
    unknown = [term for term in data["terms"] if term not in TERMS]
    if unknown:
        raise ValueError(f"unknown term {unknown[0]!r}")
    return FittedForm(
        name=str(data["name"]),
        weight=float(data["weight"]),
        terms=tuple(data["terms"]),
        references=tuple(float(x) for x in data["references"]),
        shares=tuple(float(x) for x in data["shares"]),
        covariance=tuple(tuple(float(x) for x in row) for row in data["covariance"]),
        level=float(data["level"]),
        noise=float(data["noise"]),
    )
