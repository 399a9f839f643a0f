"""Say in words what a log cannot tell about a stage, and which measurement would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from bidirl.models.fit.fitted import FittedForm
from bidirl.models.fit.forms import SPREAD

__all__ = ["statements_of"]

Column = NDArray[np.float64]

CAP_SHARE = 0.8
"""Share of steps at one longest response above which the log is called capped."""
UNSURE = 0.1
"""Weight of a second form from which on the log is said not to tell the forms apart."""
FEW_ROWS = 8
WORDS = {
    "constant": "padded to a fixed length",
    "packed": "packed",
    "padded to the longest": "padded to the longest sequence",
}


def statements_of(
    stage: str, forms: Sequence[FittedForm], columns: Mapping[str, Column], num_rows: int
) -> tuple[str, ...]:
    """Return one line for each thing that the rows leave open, the most important first.

    ``columns`` holds the fitted rows' quantities. Lines name the reason and the run that would decide.
    """
    found = []
    if num_rows < FEW_ROWS:
        found.append(f"{num_rows} steps move the scale only: how {stage} grows with lengths is the prior's")
    if stage == "generation_s":
        found += _generation(columns)
    second = sorted((form.weight for form in forms), reverse=True)[1:2]
    if second and second[0] > UNSURE:
        names = " or ".join(
            WORDS.get(form.name, form.name) for form in sorted(forms, key=lambda form: -form.weight)
        )
        found.append(
            f"this log cannot tell whether {stage} is {names}: {_moved(columns)}; steps of other lengths "
            "would"
        )
    if set(columns) <= {"rows"} and stage not in ("weight_sync_s", "switch_s"):
        found.append(f"the log gives no lengths: {stage} is a constant; a log with lengths would do better")
    return tuple(found)


def _generation(columns: Mapping[str, Column]) -> list[str]:
    found = []
    longest = columns.get("response_max_tokens")
    if longest is not None and len(longest) > 1:
        cap = float(longest.max())
        at_cap = float((longest > cap * (1.0 - SPREAD)).mean())
        if at_cap > CAP_SHARE:
            found.append(
                "this log cannot separate the seconds per iteration (tau) from a fixed part: the longest "
                f"response is {cap:g} tokens in {at_cap:.0%} of the steps; one run with another cap would"
            )
    mean = columns.get("response_mean_tokens")
    if mean is not None and len(mean) > 1 and mean.std() < 2.0 * SPREAD * mean.mean():
        found.append(
            "this log cannot separate the seconds per token (beta) from those per iteration (tau): the mean "
            f"response moved by {mean.std() / mean.mean():.1%}; a run with other lengths would"
        )
    return found


def _moved(columns: Mapping[str, Column]) -> str:
    mean = columns.get("response_mean_tokens", columns.get("total_tokens"))
    if mean is None or len(mean) < 2:
        return "lengths are hardly there"
    return f"lengths moved by {mean.std() / mean.mean():.1%}"
