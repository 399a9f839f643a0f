"""Which measurements tell most about a linear model: D-optimal choice from a grid of candidates.

The noise is taken as a share of the time, so a row counts in units of its own predicted time. Cells are added
one by one, each the one that most enlarges the determinant of the information, and then exchanged while that
still enlarges it. Source: Fedorov 1972, Theory of Optimal Experiments (exchange algorithm); the model is
that of ``models.iteration`` and ``models.trainer``.
"""

import numpy as np
from numpy.typing import NDArray

from bidirl.errors import InputError

__all__ = ["d_optimal", "information", "spaced"]

Matrix = NDArray[np.float64]

RIDGE = 1e-6
"""Information before the first cell, as a share of one cell's: keeps the determinant above zero."""
GAIN = 1e-9
"""Relative growth of the determinant below which an exchange is not worth it."""


def information(rows: Matrix) -> float:
    """Return the logarithm of the determinant of the information of rows (n x k)."""
    gram = rows.T @ rows + RIDGE * np.eye(rows.shape[1])
    return float(np.linalg.slogdet(gram)[1])


def d_optimal(design: Matrix, seconds: NDArray[np.float64], num_cells: int) -> tuple[int, ...]:
    """Return the indices of ``num_cells`` distinct candidates that tell most, ascending.

    ``design`` (n x k) holds a candidate's multipliers of the coefficients, ``seconds`` (n) its believed time.

    Raises:
        InputError: fewer cells than coefficients, or more than candidates.
    """
    num, terms = design.shape
    if not terms <= num_cells <= num:
        raise InputError(
            f"{num_cells} cells for {terms} coefficients out of {num} candidates: needs at least one cell a "
            "coefficient and one candidate a cell"
        )
    rows = design / seconds[:, None]
    rows = rows / np.abs(rows).max(axis=0)  # scales of coefficients do not change the best design
    chosen: list[int] = []
    for _ in range(num_cells):
        free = [at for at in range(num) if at not in chosen]
        chosen.append(max(free, key=lambda at: information(rows[[*chosen, at]])))
    best = information(rows[chosen])
    improved = True
    while improved:
        improved = False
        for place in range(num_cells):
            for candidate in range(num):
                if candidate in chosen:
                    continue
                trial = [*chosen[:place], candidate, *chosen[place + 1 :]]
                found = information(rows[trial])
                if found > best + GAIN * abs(best):
                    chosen, best, improved = trial, found, True
    return tuple(sorted(chosen))


def spaced(low: int, high: int, num: int) -> tuple[int, ...]:
    """Return up to ``num`` distinct whole numbers from ``low`` to ``high``, evenly spaced in logarithm."""
    if high <= low:
        return (low,)
    points = np.geomspace(low, high, num).tolist()
    return tuple(sorted({round(point) for point in points}))
