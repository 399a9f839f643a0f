"""Drop values that no run can have, whoever wrote them: negative times, shares above 1, ages of the earth."""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

__all__ = ["LEAST", "MAX_TIME_S", "MAX_TOKENS", "within_bounds"]

Column = NDArray[np.float64]

MAX_TIME_S = 1e9
"""Thirty years: a longer time of a step is damage, and its sums overflow."""
MAX_TOKENS = 1e15
"""More tokens than any step has; above it whole numbers are no longer exact either."""


LEAST = 1e-12
"""Smaller positive times and lengths are damage: their inverse overflows, and no clock tells a picosecond."""


def within_bounds(columns: Mapping[str, Column]) -> tuple[dict[str, Column], list[str]]:
    """Return the columns with impossible values left out (NaN), and one line for each kind that was found."""
    found = dict(columns)
    notes: list[str] = []
    for name in columns:
        for is_wrong, words in _rules(name):
            wrong = is_wrong(found[name])
            if wrong.any():
                found[name] = np.where(wrong, np.nan, found[name])
                notes.append(f"{name} {words} in {wrong.sum()} steps: left out there")
    return found, notes


def _rules(name: str) -> list[tuple[Callable[[Column], NDArray[np.bool_]], str]]:
    rules: list[tuple[Callable[[Column], NDArray[np.bool_]], str]] = []
    if name.endswith(("_s", "_tokens", "_share")):
        rules.append((lambda column: column < 0, "is negative"))
    if name.endswith("_share"):
        rules.append((lambda column: column > 1, "exceeds 1"))
    if name.endswith("_s") and not name.endswith("_per_s"):
        rules.append((lambda column: column > MAX_TIME_S, "exceeds thirty years"))
    if name.endswith(("_s", "_tokens")):
        rules.append((lambda column: (column > 0) & (column < LEAST), f"is positive and below {LEAST:g}"))
    if name.endswith("_tokens"):
        rules.append((lambda column: column > MAX_TOKENS, f"exceeds {MAX_TOKENS:g}"))
    return rules
