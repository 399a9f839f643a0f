"""Functional forms of a stage's time in terms of a step's lengths, and which of them a log allows.

A form is a sum of at most three positive terms. Its prior says which share of a typical step's time each
term has; the scale is left to the data (or to a roofline).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["STAGES", "TERMS", "Form", "forms_of", "term_values"]

Column = NDArray[np.float64]
Columns = Mapping[str, Column]

STAGES: tuple[str, ...] = (
    "generation_s",
    "old_logprob_s",
    "reference_s",
    "values_s",
    "update_s",
    "weight_sync_s",
)
"""Stages that are fitted, by their column; validation and checkpoints are in none of them."""

SPREAD = 0.005
"""Relative spread below which a quantity counts as constant over a log: a term in it says nothing."""
PRESENT = 0.9
"""Share of the rows that must give a quantity for it to be used; rows without it are then left out."""


@dataclass(frozen=True, slots=True)
class Form:
    """One way in which a stage may cost time."""

    name: str
    terms: tuple[str, ...]
    """Names in ``TERMS``; the time is a sum of coefficient x term."""
    shares: tuple[float, ...]
    """Prior mean share of each term in the time of a typical step."""
    shares_sd: tuple[float, ...]


def _sequence_mean(columns: Columns) -> Column:
    return columns["response_mean_tokens"] + columns["prompt_mean_tokens"]


def _sequence_max(columns: Columns) -> Column:
    return columns["response_max_tokens"] + columns["prompt_mean_tokens"]


def _total_response(columns: Columns) -> Column:
    return columns["total_tokens"] * columns["response_mean_tokens"] / _sequence_mean(columns)


@dataclass(frozen=True, slots=True)
class _Term:
    needs: tuple[str, ...]
    values: Callable[[Columns], Column]


TERMS: Mapping[str, _Term] = {
    "fixed": _Term((), lambda columns: np.ones(len(next(iter(columns.values()))))),
    "response_mean_tokens": _Term(("response_mean_tokens",), lambda c: c["response_mean_tokens"]),
    "response_max_tokens": _Term(("response_max_tokens",), lambda c: c["response_max_tokens"]),
    "sequence_mean_tokens": _Term(("response_mean_tokens", "prompt_mean_tokens"), _sequence_mean),
    "sequence_max_tokens": _Term(("response_max_tokens", "prompt_mean_tokens"), _sequence_max),
    "total_tokens": _Term(("total_tokens",), lambda c: c["total_tokens"]),
    "total_response_tokens": _Term(
        ("total_tokens", "response_mean_tokens", "prompt_mean_tokens"), _total_response
    ),
}
"""What a time may be proportional to: the columns each needs, and its value per step (tokens, or 1)."""

CONSTANT = Form("constant", ("fixed",), (1.0,), (0.3,))


def term_values(names: tuple[str, ...], columns: Columns) -> NDArray[np.float64]:
    """Return the design: one row a step, one column a term; NaN where a step lacks a quantity."""
    return np.column_stack([TERMS[name].values(columns) for name in names])


def forms_of(stage: str, columns: Columns) -> tuple[Form, ...]:
    """Return the forms of a stage that the quantities of a log allow, the simplest first.

    Generation: an engine decodes in lockstep, so its time is one part per iteration (as many as the longest
    response has tokens) and one per token; little else. Scoring and updates: batches padded to the
    configured cap cost the same whatever the lengths (``constant``), packed ones follow the tokens, batches
    padded to their own longest sequence follow that; attention's square is left to the linear term (within
    a run's range of lengths the difference is below the noise).
    Source: design.md section 6 for the terms; shares ours. Generation's are even between its two parts;
    the errors on public runs are flat from 0.45 to 0.65 per iteration (docs/calibration.md).
    """
    if stage in ("weight_sync_s", "switch_s"):
        return (CONSTANT,)
    if stage == "generation_s":
        return (_generation(columns),)
    forms = [CONSTANT]
    work = _first(columns, "total_tokens", "sequence_mean_tokens", "response_mean_tokens")
    if work is not None:
        forms.append(Form("packed", ("fixed", work), (0.1, 0.9), (0.1, 0.15)))
    longest = _first(columns, "sequence_max_tokens")
    if longest is not None and _varies(columns["response_max_tokens"]):
        forms.append(Form("padded to the longest", ("fixed", longest), (0.1, 0.9), (0.1, 0.15)))
    return tuple(forms)


def _generation(columns: Columns) -> Form:
    work = _first(columns, "total_response_tokens", "response_mean_tokens", "total_tokens")
    longest = _first(columns, "response_max_tokens")
    if work is None and longest is None:
        return CONSTANT
    if longest is None:
        assert work is not None
        return Form("work", ("fixed", work), (0.3, 0.7), (0.3, 0.3))
    if work is None:
        return Form("tail", ("fixed", longest), (0.3, 0.7), (0.3, 0.3))
    return Form("work and tail", ("fixed", work, longest), (0.05, 0.45, 0.50), (0.05, 0.2, 0.2))


def _first(columns: Columns, *names: str) -> str | None:
    """Return the first term whose quantities enough rows give."""
    for name in names:
        needs = TERMS[name].needs
        if all(need in columns and np.isfinite(columns[need]).mean() >= PRESENT for need in needs):
            return name
    return None


def _varies(values: Column) -> bool:
    known = values[np.isfinite(values)]
    return bool(len(known) > 1 and known.std() > SPREAD * known.mean())
