"""The normalised table of a run's log: one row a step, one meaning a column, whatever framework wrote it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

__all__ = ["COLUMNS", "Mode", "StepLog"]

COLUMNS: tuple[str, ...] = (
    "step",
    "step_s",
    "generation_s",
    "wait_s",
    "old_logprob_s",
    "reference_s",
    "values_s",
    "update_s",
    "weight_sync_s",
    "switch_s",
    "response_mean_tokens",
    "response_max_tokens",
    "response_min_tokens",
    "truncated_share",
    "prompt_mean_tokens",
    "total_tokens",
    "lag_mean",
    "lag_max",
    "tokens_per_s_per_gpu",
)
"""The contract of ``bidirl-plan read``, in its order. Seconds are of wall time, exclusive of each other:
``wait_s`` is the trainer's time without data, ``generation_s`` the time in which responses are generated,
``step_s`` the whole step without validation and checkpoints. Shares lie in [0, 1]."""

Column = NDArray[np.float64]


class Mode(StrEnum):
    """How rollout and training share time in the run that wrote a log."""

    COLOCATED = "colocated"
    """In turns: generation is on the critical path."""
    ASYNC = "async"
    """Side by side: the trainer waits for samples, or it does not."""
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class StepLog:
    """One run's steps.

    ``columns`` holds arrays of one length, by the names of ``COLUMNS`` and then further quantities
    (``testing_s``, ``queue_depth``, ... with their unit in the name); NaN where a step does not say. A
    column that no step has is not there.
    """

    framework: str
    mode: Mode
    step_unit: str
    """What one row is ("one parameter version", "one PPO iteration", ...)."""
    columns: Mapping[str, Column]
    facts: Mapping[str, float] = field(default_factory=dict)
    """Numbers that hold for the whole run: ``num_gpus``, ``batch_samples``, ... where the log gives them."""
    unknown_keys: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Contradictions and doubtful values, one line each: what was found and what was done about it."""
    source: str = ""
    """File and run it was read from."""

    def __post_init__(self) -> None:
        lengths = {len(column) for column in self.columns.values()}
        if len(lengths) > 1:
            raise ValueError(f"columns of {sorted(lengths)} rows in one table")

    def __len__(self) -> int:
        return next((len(column) for column in self.columns.values()), 0)

    def column(self, name: str) -> Column:
        """Return a column, all NaN if no step has it."""
        found = self.columns.get(name)
        return np.full(len(self), np.nan) if found is None else found

    def has(self, name: str) -> bool:
        """Say whether any step gives a quantity."""
        return name in self.columns and bool(np.isfinite(self.columns[name]).any())

    def rows(self, chosen: slice | Sequence[int] | NDArray[np.bool_] | NDArray[np.int64]) -> StepLog:
        """Return the same table with some of its rows."""
        index = np.arange(len(self))[chosen]
        return replace(self, columns={name: column[index] for name, column in self.columns.items()})
