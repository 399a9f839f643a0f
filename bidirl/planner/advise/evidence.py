"""What a log says of a run's steps, as medians and shares with intervals; nothing is concluded here."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from bidirl.planner.advise.worlds import Known
from bidirl.traces.step_log import Mode, StepLog

__all__ = ["COLD_STEPS", "MIN_STEPS", "PARTS", "Evidence", "Share", "evidence_of"]

Column = NDArray[np.float64]

MIN_STEPS = 3
"""Fewer steps carry no verdict: one long sample moves them."""
COLD_STEPS = 1
"""First steps left out where enough follow: they hold compilation and an empty pipeline (needs C16)."""
NUM_RESAMPLES = 400
SEED = 7
COVERAGE = 0.9

TRAIN = ("old_logprob_s", "reference_s", "values_s", "update_s")
PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "generation": ("generation_s",),
        "wait": ("wait_s",),
        "training": TRAIN,
        "weight sync": ("weight_sync_s",),
        "role switches": ("switch_s",),
        "rewards": ("reward_s",),
        "data": ("advantage_s", "data_s", "training_prep_s", "logprob_prep_s", "checkpoint_s"),
    }
)
"""Parts of a step and the columns that they sum. ``data`` is what runs between the stages."""
OFF_PATH = "generation"
"""The part that lies beside a step of an asynchronous run, not in it."""


@dataclass(frozen=True, slots=True)
class Share:
    """A share of the step with its interval over the steps (bootstrap of the median, 90 %)."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return per cent with the interval where there is one."""
        if self.low == self.high:
            return f"{100 * self.value:.0f} %"
        return f"{100 * self.value:.0f} % ({100 * self.low:.0f} to {100 * self.high:.0f})"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One run's steady steps in numbers."""

    mode: Mode
    num_steps: int
    step_s: float | None
    """Median seconds of a step; None where neither a timer nor a whole set of parts says it."""
    seconds: Mapping[str, float]
    """Median seconds of each logged column that is a time."""
    shares: Mapping[str, Share]
    """Of the step, by the names of ``PARTS``; ``unexplained`` is what no timer holds."""
    tokens: Mapping[str, float]
    """Medians of the token columns."""
    rollout_idle: Share | None
    step_error: float
    """Standard error of ``step_s`` as a share of it."""
    truncated_share: float | None
    """Median share of responses at the cap."""
    is_summed: bool
    """Whether ``step_s`` is the sum of the parts, for want of a step timer."""

    def share(self, part: str) -> float:
        """Return a share of the step, 0 where it is not logged."""
        found = self.shares.get(part)
        return 0.0 if found is None else found.value

    def known(self) -> Known:
        """Return the medians that a world must agree with.

        Raises:
            ValueError: no step time is known.
        """
        if self.step_s is None:
            raise ValueError("no step time")
        get = self.seconds.get
        colocated = self.mode is Mode.COLOCATED
        update = sum(value for name in ("update_s", "values_s") if (value := get(name)) is not None)
        generation = get("generation_s")
        if colocated and generation is None:
            generation = get("wait_s")
        return Known(
            self.step_s,
            generation_s=generation if colocated else None,
            wait_s=None if colocated else get("wait_s"),
            old_logprob_s=get("old_logprob_s"),
            reference_s=get("reference_s"),
            update_s=update or None,
            weight_sync_s=get("weight_sync_s"),
            response_mean_tokens=self.tokens.get("response_mean_tokens"),
            truncated_share=self.truncated_share,
            step_error=self.step_error,
            role_change_s=0.0 if colocated and get("switch_s") is not None else None,
        )


def evidence_of(log: StepLog) -> Evidence:
    """Return the evidence of one run; its first step is left out where enough follow."""
    if len(log) >= MIN_STEPS + COLD_STEPS:
        log = log.rows(slice(COLD_STEPS, None))
    columns = {name: column for name, column in log.columns.items() if np.isfinite(column).any()}
    parts = _parts(columns, len(log))
    step, is_summed = _step(log, parts)
    seconds = {name: _median(column) for name, column in columns.items() if name.endswith("_s")}
    tokens = {name: _median(column) for name, column in columns.items() if name.endswith("_tokens")}
    if step is None:
        idle = _rollout_idle(columns)
        return Evidence(log.mode, len(log), None, seconds, {}, tokens, idle, 0.0, None, is_summed=False)
    on_path = {name: part for name, part in parts.items() if not (name == OFF_PATH and _overlaps(log, parts))}
    cut = _median(columns["truncated_share"]) if "truncated_share" in columns else None
    shares = {name: _share(part, step) for name, part in parts.items()}
    if not is_summed and (log.mode is not Mode.ASYNC or "wait" in parts):
        rest = step - np.sum([np.nan_to_num(part) for part in on_path.values()], axis=0)
        shares["unexplained"] = _share(np.maximum(0.0, rest), step)
    return Evidence(
        log.mode,
        int(np.isfinite(step).sum()),
        _median(step),
        seconds,
        shares,
        tokens,
        _rollout_idle(columns),
        _standard_error(step),
        cut,
        is_summed,
    )


def _overlaps(log: StepLog, parts: Mapping[str, Column]) -> bool:
    """Return whether generation lies beside the step: in asynchronous runs, or with a wait of its own."""
    return log.mode is Mode.ASYNC or "wait" in parts


def _parts(columns: Mapping[str, Column], num: int) -> dict[str, Column]:
    found = {}
    for part, names in PARTS.items():
        there = [columns[name] for name in names if name in columns]
        if part == "training" and not there and "train_s" in columns:
            there = [columns["train_s"]]
        if there:
            stacked = np.vstack(there)
            total = np.nansum(stacked, axis=0)
            total[np.isnan(stacked).all(axis=0)] = np.nan
            found[part] = total.reshape(num)
    return found


def _step(log: StepLog, parts: Mapping[str, Column]) -> tuple[Column | None, bool]:
    """Return the seconds of each step, and whether they are sums of parts."""
    if log.has("step_s"):
        return log.column("step_s"), False
    path = "generation" if log.mode is Mode.COLOCATED and "wait" not in parts else "wait"
    if path not in parts or "training" not in parts:
        return None, False
    rest = [part for name, part in parts.items() if name not in ("generation", "wait")]
    return np.sum([parts[path], *map(np.nan_to_num, rest)], axis=0), True


def _rollout_idle(columns: Mapping[str, Column]) -> Share | None:
    """Return the share of time in which the rollout pool has no work, where its own timers say so.

    A pause counter counts the drain of the last sample as activity, so this is a lower bound (needs C13).
    """
    if "rollouter_active_s" in columns and "rollouter_version_s" in columns:
        whole = columns["rollouter_version_s"]
        return _share(np.maximum(0.0, whole - columns["rollouter_active_s"]), whole)
    if "rollout_wait_s" in columns and "step_s" in columns:
        return _share(np.minimum(columns["rollout_wait_s"], columns["step_s"]), columns["step_s"])
    return None


def _median(column: Column) -> float:
    return float(np.nanmedian(column))


def _share(part: Column, step: Column) -> Share:
    """Return the ratio of medians with its bootstrap interval over the steps that have both."""
    both = np.isfinite(part) & np.isfinite(step) & (step > 0.0)
    part, step = part[both], step[both]
    if not len(step):
        return Share(0.0, 0.0, 0.0)
    value = float(np.median(part) / np.median(step))
    if len(step) == 1:
        return Share(value, value, value)
    index = np.random.default_rng(SEED).integers(0, len(step), (NUM_RESAMPLES, len(step)))
    ratios = np.median(part[index], axis=1) / np.median(step[index], axis=1)
    low, high = np.quantile(ratios, [0.5 - COVERAGE / 2, 0.5 + COVERAGE / 2]).tolist()
    return Share(value, min(low, value), max(high, value))


def _standard_error(step: Column) -> float:
    """Return the standard error of the median over the median (1.25 sd / sqrt n, normal noise)."""
    known = step[np.isfinite(step)]
    if len(known) < 2 or not np.median(known) > 0.0:
        return 0.0
    spread = 1.4826 * float(np.median(np.abs(known - np.median(known))))
    return float(1.2533 * spread / len(known) ** 0.5 / np.median(known))
