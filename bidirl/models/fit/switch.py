"""Role switches and engine sleeps fitted to measured ones, and the choice of a sleep level."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from math import exp, log, sqrt
from types import MappingProxyType
from typing import Any

import numpy as np

from bidirl.errors import InputError
from bidirl.models.estimate import Estimate, Source
from bidirl.models.fit.regression import fit_map, t_quantile
from bidirl.models.fit.sync import Refused
from bidirl.models.transfer import SwitchCosts

__all__ = [
    "OPERATIONS",
    "FittedSwitch",
    "SleepLevel",
    "SwitchRow",
    "choose_sleep_level",
    "fit_switch",
    "fitted_from_mapping",
    "leave_one_out",
    "screen_switch",
]

PRIOR_LINES: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "rollout_on_train_in_s": (3.55, 0.467e-9),
        "rollout_on_train_out_s": (2.92, 0.301e-9),
        "train_on_rollout_in_s": (1.20, 0.558e-9),
        "train_on_rollout_out_s": (1.36, 0.480e-9),
        "grad_s": (0.15, 0.119e-9),
        "sleep_1_s": (0.10, 0.60e-9),
        "wake_1_s": (1.14, 0.064e-9),
        "sleep_2_s": (0.11, 0.0125e-9),
        "wake_2_s": (1.43, 0.311e-9),
    }
)
"""Seconds, and seconds per weight byte, before any row. Source: the lines through data/switch_costs.csv
(arXiv 2607.09207 Table 5, two models; vllm-project/vllm#48337, two models); sleep level 1 is rounded to a
line that does not start below zero."""
OPERATIONS = tuple(PRIOR_LINES)
PRIOR_SPREAD = 1.0
"""Prior standard deviation of both terms over the line's: other systems differ by about as much."""
NOISE = 0.1
"""Least spread of log seconds that an interval claims: repeats of one machine differ by 3 %
(huggingface/trl#4086) to 20 % (THUDM/slime#1102)."""
MEMORY_BYTES_PER_S = 8e12
"""No operation touches the weights faster than the fastest board's memory (B200). Source: data/gpus.csv."""
HOST_BYTES_PER_S = 64e9
"""Sleep level 1 moves the weights over the host link; default: nominal PCIe 5 x16 of data/gpus.csv."""
SAME_SIZE = 0.02
"""Weights that differ by less than this share are one size."""
HOST_OPERATIONS = ("sleep_1_s", "wake_1_s")


@dataclass(frozen=True, slots=True)
class SwitchRow:
    """One measured switch, sleep or wake."""

    name: str
    operation: str
    """One of ``OPERATIONS``."""
    weight_bytes: float
    """Weights of one replica's GPU (sleep, wake) or of the model (switches), as in data/switch_costs.csv."""
    seconds: float
    link_bytes_per_s: float = HOST_BYTES_PER_S
    """Host link of one GPU; counts only for sleep level 1."""


def screen_switch(rows: Sequence[SwitchRow]) -> tuple[tuple[SwitchRow, ...], tuple[Refused, ...]]:
    """Split ``rows`` into usable ones and those faster than the memory or link they must cross."""
    kept, refused = [], []
    for row in rows:
        if row.operation not in PRIOR_LINES:
            known = ", ".join(OPERATIONS)
            reason = f"operation {row.operation!r} is unknown: use one of {known}"
            refused.append(Refused(row.name, f"row {row.name!r}: {reason}"))
            continue
        limit = row.link_bytes_per_s if row.operation in HOST_OPERATIONS else 0.0
        limit = limit or MEMORY_BYTES_PER_S
        discards = row.operation == "sleep_2_s"
        rate = row.weight_bytes / row.seconds if row.seconds > 0.0 else float("inf")
        if row.seconds <= 0.0 or (rate > limit and not discards):
            reason = (
                f"{row.operation} of {row.weight_bytes / 1e9:.1f} GB in {row.seconds} s is {rate / 1e9:.0f} "
                f"GB/s: at most {limit / 1e9:.0f} GB/s passes; the timer missed it, leave the row out"
            )
            refused.append(Refused(row.name, f"row {row.name!r}: {reason}"))
        else:
            kept.append(row)
    return tuple(kept), tuple(refused)


@dataclass(frozen=True, slots=True)
class FittedSwitch:
    """Fitted lines of the operations that have rows; only this predicts."""

    rows: tuple[SwitchRow, ...]
    lines: dict[str, tuple[float, float]]
    """Operation -> seconds, seconds per weight byte."""
    covariances: dict[str, tuple[tuple[float, ...], ...]]
    """Of both terms, in their units."""
    noises: dict[str, float]
    counts: dict[str, int]
    ranges: dict[str, tuple[float, float]]
    refused: tuple[Refused, ...]
    data_hash: str

    def seconds(self, operation: str, weight_bytes: float) -> Estimate:
        """Return the seconds of ``operation`` with a 90 % interval.

        A measured size (within ``SAME_SIZE``) keeps the geometric mean of its rows: ``measured``. An
        operation without rows takes the prior's line, within a factor of two: ``transferred``. Beyond
        twice the measured bytes the estimate is flagged. Raises ``InputError`` for an unknown operation.
        """
        if operation not in PRIOR_LINES:
            raise InputError(f"operation {operation!r} is unknown: use one of {', '.join(OPERATIONS)}")
        if operation not in self.lines:
            fixed_s, per_byte_s = PRIOR_LINES[operation]
            note = "line through two public models; no row of this operation"
            return Estimate.within(fixed_s + per_byte_s * weight_bytes, 2.0, Source.TRANSFERRED, note)
        same = [
            log(row.seconds)
            for row in self.rows
            if row.operation == operation and abs(row.weight_bytes / weight_bytes - 1.0) <= SAME_SIZE
        ]
        if same:
            value = exp(sum(same) / len(same))
            note = f"{len(same)} rows of {weight_bytes / 1e9:.1f} GB"
            return Estimate.within(value, exp(1.645 * NOISE), Source.MEASURED, note)
        fixed_s, per_byte_s = self.lines[operation]
        value = fixed_s + per_byte_s * weight_bytes
        gradient = np.array([1.0, weight_bytes]) / value
        variance = float(gradient @ np.array(self.covariances[operation]) @ gradient)
        dof = max(self.counts[operation] - 1, 1)
        factor = exp(min(t_quantile(0.95, dof) * sqrt(variance + self.noises[operation] ** 2), 3.0))
        estimate = Estimate.within(value, factor, Source.FITTED, f"{self.counts[operation]} measured rows")
        low, high = self.ranges[operation]
        if not low / 2.0 <= weight_bytes <= 2.0 * high:
            far = f"{weight_bytes / 1e9:.1f} GB, measured {low / 1e9:.1f} to {high / 1e9:.1f}"
            return estimate.flagged(far)
        return estimate

    def switch_costs(
        self, weight_bytes: float, engine_weight_bytes: float, host_free_bytes: float = float("inf")
    ) -> tuple[SwitchCosts, dict[str, Estimate]]:
        """Return the costs of one job, and their estimates under the names of ``StageModels``.

        ``weight_bytes`` of the model, ``engine_weight_bytes`` of one GPU of an engine. The broadcast into a
        lease costs what the gradients do; time sharing is the cheaper sleep level that host memory allows.
        """
        names = [field.name for field in fields(SwitchCosts)][:5]
        found = {name: self.seconds(name, weight_bytes) for name in names}
        found["broadcast_s"] = found["grad_s"]
        level = choose_sleep_level(self, engine_weight_bytes, host_free_bytes)
        found["time_share_in_s"], found["time_share_out_s"] = level.wake, level.sleep
        costs = SwitchCosts(**{name: estimate.value for name, estimate in found.items()})
        return costs, {f"switch.{name}": estimate for name, estimate in found.items()}

    def to_mapping(self) -> dict[str, object]:
        """Return plain JSON data."""
        return {"kind": "fitted-switch", **asdict(self)}


def fitted_from_mapping(data: Mapping[str, Any]) -> FittedSwitch:
    """Read what ``FittedSwitch.to_mapping`` wrote; raise ``InputError`` for anything else."""
    try:
        named = {key: value for key, value in data.items() if key != "kind"}
        if data["kind"] != "fitted-switch":
            raise ValueError(data["kind"])
        named["rows"] = tuple(SwitchRow(**row) for row in named["rows"])
        named["refused"] = tuple(Refused(**row) for row in named["refused"])
        for key in ("lines", "ranges"):
            named[key] = {name: (float(pair[0]), float(pair[1])) for name, pair in named[key].items()}
        named["covariances"] = {
            name: tuple(tuple(line) for line in matrix) for name, matrix in named["covariances"].items()
        }
        return FittedSwitch(**named)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"fitted switch data: {error}: give what to_mapping wrote") from None


@dataclass(frozen=True, slots=True)
class SleepLevel:
    """A sleep level of an engine with its costs, and why it was taken."""

    level: int
    sleep: Estimate
    wake: Estimate
    reason: str


def choose_sleep_level(
    fitted: FittedSwitch, weight_bytes: float, host_free_bytes: float = float("inf")
) -> SleepLevel:
    """Return the level with the smaller sum of sleep and wake; level 1 needs the weights' bytes in the host.

    Source: needs C61, vllm-project/vllm#48337.
    """
    levels = {n: (fitted.seconds(f"sleep_{n}_s", weight_bytes), fitted.seconds(f"wake_{n}_s", weight_bytes))
              for n in (1, 2)}  # fmt: skip
    sums = {n: sleep.value + wake.value for n, (sleep, wake) in levels.items()}
    if weight_bytes > host_free_bytes:
        free = f"{host_free_bytes / 1e9:.1f} are free"
        reason = f"level 1 needs {weight_bytes / 1e9:.1f} GB of host memory, {free}"
        return SleepLevel(2, *levels[2], reason)
    best = 1 if sums[1] <= sums[2] else 2
    return SleepLevel(best, *levels[best], f"{sums[best]:.2f} s against {sums[3 - best]:.2f} s")


def fit_switch(
    rows: Sequence[SwitchRow], prior: Mapping[str, tuple[float, float]] = PRIOR_LINES
) -> FittedSwitch:
    """Fit a line in weight bytes to each operation, MAP with ``prior`` (seconds, seconds per byte).

    Impossible rows are refused and listed. Raises ``InputError`` naming the first refused row if none is
    left.
    """
    kept, refused = screen_switch(rows)
    if not kept:
        reason = refused[0].reason if refused else "switch fit of 0 rows: needs one or more measured switches"
        raise InputError(reason)
    lines: dict[str, tuple[float, float]] = {}
    covariances: dict[str, tuple[tuple[float, ...], ...]] = {}
    noises, counts, ranges = {}, {}, {}
    for operation in OPERATIONS:
        own = [row for row in kept if row.operation == operation]
        if not own:
            continue
        fixed_s, per_byte_s = prior[operation]
        sizes = np.array([row.weight_bytes for row in own])
        design = np.stack([np.full(len(own), fixed_s), per_byte_s * sizes], axis=1)
        measured = np.array([row.seconds for row in own])
        fitted = fit_map(design, measured, np.ones(2), np.full(2, PRIOR_SPREAD))
        first, second = fitted.coefficients.tolist()
        lines[operation] = (fixed_s * first, per_byte_s * second)
        scale = np.array(prior[operation])
        covariance = fitted.covariance * np.outer(scale, scale)
        covariances[operation] = tuple(tuple(line) for line in covariance.tolist())
        noises[operation], counts[operation] = max(fitted.scale, NOISE), len(own)
        ranges[operation] = (float(sizes.min()), float(sizes.max()))
    digest = sha256(repr([asdict(row) for row in rows]).encode()).hexdigest()[:16]
    return FittedSwitch(kept, lines, covariances, noises, counts, ranges, refused, digest)


def leave_one_out(
    rows: Sequence[SwitchRow], prior: Mapping[str, tuple[float, float]] = PRIOR_LINES
) -> list[tuple[SwitchRow, Estimate]]:
    """Predict each usable row from a fit of the others; an operation's only row has nothing to learn from."""
    kept, _ = screen_switch(rows)
    if len(kept) < 2:
        raise InputError(f"leave-one-out of {len(kept)} usable switches: needs two or more; measure another")
    predicted = []
    for index, row in enumerate(kept):
        rest = kept[:index] + kept[index + 1 :]
        if any(other.operation == row.operation for other in rest):
            predicted.append((row, fit_switch(rest, prior).seconds(row.operation, row.weight_bytes)))
    return predicted
