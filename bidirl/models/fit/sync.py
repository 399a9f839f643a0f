"""Weight syncs fitted to measured ones; rows that no link can explain are refused first."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from math import ceil, exp, log2, sqrt
from typing import Any

import numpy as np

from bidirl.errors import InputError
from bidirl.models.estimate import Estimate, Source
from bidirl.models.fit.regression import fit_map, t_quantile
from bidirl.models.transfer import (
    APPLY_S_PER_BYTE,
    HOP_S_PER_BYTE,
    SYNC_FIXED_S,
    SYNC_LINK_EFFICIENCY,
    SYNC_TENSOR_S,
    SyncModel,
    check_bandwidth,
)

__all__ = [
    "FittedSync",
    "Refused",
    "SyncRow",
    "fit_sync",
    "fitted_from_mapping",
    "leave_one_out",
    "screen_sync",
]

TERMS = ("fixed", "bytes", "tensors", "hops", "apply")
PRIOR_SPREAD = (1.0, 1.0, 1.0, 0.5, 0.3)
"""Prior standard deviation of each term over ``transfer.sync_prior``'s. Systems differ by far more than their
rows scatter (a packed broadcast uses ten times the share of the link that a loop over tensors does), so the
first three are wide; hops and apply cannot be told from the others in most tables."""
NOISE = 0.1
"""Least spread of log seconds that an interval claims. Source: one verl setup with and without offload took
17.7 and 14.2 s, three others stated as ranges are 2 to 12 % wide."""


@dataclass(frozen=True, slots=True)
class SyncRow:
    """One measured sync of one system."""

    name: str
    num_bytes: float
    """Bytes of the weights, all of them, whatever the method sends."""
    num_tensors: int
    link_bytes_per_s: float
    """The slowest link of the path: what the hardware can carry at most."""
    seconds: float
    num_receivers: int = 1

    @property
    def bytes_per_s(self) -> float:
        """Return the rate that the row implies."""
        return self.num_bytes / self.seconds if self.seconds > 0.0 else float("inf")


@dataclass(frozen=True, slots=True)
class Refused:
    """A row that was left out, and the rule that it breaks."""

    name: str
    reason: str


def screen_sync(rows: Sequence[SyncRow]) -> tuple[tuple[SyncRow, ...], tuple[Refused, ...]]:
    """Split ``rows`` into usable ones and those whose rate exceeds their slowest link.

    Source: needs C56 (a public table holds a row of 760 GB/s over a network; its timer missed the transfer).
    """
    kept, refused = [], []
    for row in rows:
        try:
            check_bandwidth(row.num_bytes, row.seconds, row.link_bytes_per_s)
        except InputError as error:
            refused.append(Refused(row.name, f"row {row.name!r}: {error}"))
        else:
            kept.append(row)
    return tuple(kept), tuple(refused)


@dataclass(frozen=True, slots=True)
class FittedSync:
    """Fitted multipliers of the sync prior's terms; only this predicts."""

    multipliers: tuple[float, ...]
    """Of the prior's fixed seconds, seconds per byte, per tensor, per hop and of the apply."""
    covariance: tuple[tuple[float, ...], ...]
    noise: float
    """Spread of log seconds around the fit."""
    num_rows: int
    refused: tuple[Refused, ...]
    bytes_range: tuple[float, float]
    data_hash: str

    def seconds(
        self, num_bytes: float, num_tensors: int, link_bytes_per_s: float, num_receivers: int = 1
    ) -> Estimate:
        """Return the seconds of a sync with a 90 % interval; beyond twice the fitted bytes it is flagged."""
        row = SyncRow("", num_bytes, num_tensors, link_bytes_per_s, 1.0, num_receivers)
        terms = _terms(row)
        value = float(terms @ np.array(self.multipliers))
        gradient = terms / value
        variance = float(gradient @ np.array(self.covariance) @ gradient) + self.noise**2
        factor = exp(t_quantile(0.95, max(self.num_rows - 1, 1)) * sqrt(variance))
        estimate = Estimate.within(value, factor, Source.FITTED, f"{self.num_rows} measured syncs")
        low, high = self.bytes_range
        if not low / 2.0 <= num_bytes <= 2.0 * high:
            far = f"{num_bytes / 1e9:.1f} GB, measured {low / 1e9:.1f} to {high / 1e9:.1f}"
            return estimate.flagged(far)
        return estimate

    def sync_model(
        self, num_bytes: float, num_tensors: int, link_bytes_per_s: float
    ) -> tuple[SyncModel, dict[str, Estimate]]:
        """Return the model of one job's sync, and its coefficients under the names of ``StageModels``."""
        fixed, per_byte, tensors, hops, apply = self.multipliers
        model = SyncModel(
            fixed_s=SYNC_FIXED_S * fixed,
            s_per_byte=per_byte / (SYNC_LINK_EFFICIENCY * link_bytes_per_s),
            num_bytes=num_bytes,
            per_tensor_s=SYNC_TENSOR_S * tensors,
            num_tensors=num_tensors,
            per_hop_s=HOP_S_PER_BYTE * hops * num_bytes,
            apply_s=APPLY_S_PER_BYTE * apply * num_bytes,
        )
        note = f"{self.num_rows} measured syncs"
        deviation = np.sqrt(np.diag(np.array(self.covariance)))
        sources: dict[str, Estimate] = {}
        names = ("fixed_s", "s_per_byte", "per_tensor_s", "per_hop_s", "apply_s")
        for name, multiplier, sd in zip(names, self.multipliers, deviation, strict=True):
            value = float(getattr(model, name))
            unit = value / multiplier if multiplier > 0.0 else 0.0
            low, high = max(0.0, value - 1.645 * unit * sd), value + 1.645 * unit * sd
            sources[f"sync.{name}"] = Estimate(value, low, high, Source.FITTED, note)
        sources["sync.num_bytes"] = Estimate.exact(num_bytes, Source.ROOFLINE, "weights of the model")
        sources["sync.num_tensors"] = Estimate.within(num_tensors, 1.2, Source.ROOFLINE, "count by shape")
        return model, sources

    def to_mapping(self) -> dict[str, object]:
        """Return plain JSON data."""
        return {"kind": "fitted-sync", **asdict(self)}


def fitted_from_mapping(data: Mapping[str, Any]) -> FittedSync:
    """Read what ``FittedSync.to_mapping`` wrote; raise ``InputError`` for anything else."""
    try:
        named = {key: value for key, value in data.items() if key != "kind"}
        if data["kind"] != "fitted-sync":
            raise ValueError(data["kind"])
        named["refused"] = tuple(Refused(**row) for row in named["refused"])
        named["covariance"] = tuple(tuple(line) for line in named["covariance"])
        for key in ("multipliers", "bytes_range"):
            named[key] = tuple(named[key])
        return FittedSync(**named)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"fitted sync data: {error}: give what to_mapping wrote") from None


def _terms(row: SyncRow) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    hops = ceil(log2(row.num_receivers)) if row.num_receivers > 1 else 0
    return np.array(
        [
            SYNC_FIXED_S,
            row.num_bytes / (SYNC_LINK_EFFICIENCY * row.link_bytes_per_s),
            SYNC_TENSOR_S * row.num_tensors,
            HOP_S_PER_BYTE * hops * row.num_bytes,
            APPLY_S_PER_BYTE * row.num_bytes,
        ]
    )


def fit_sync(
    rows: Sequence[SyncRow], prior: Sequence[float] = (1.0,) * len(TERMS), widen: float = 1.0
) -> FittedSync:
    """Fit the syncs of one system and method; MAP with ``transfer.sync_prior``'s terms as prior.

    ``prior`` multiplies its terms (fixed, bytes, tensors, hops, apply), ``widen`` their spreads. Rows faster
    than their link are refused and listed in the result. Raises ``InputError`` naming the first refused row
    if none is left.
    """
    kept, refused = screen_sync(rows)
    if not kept:
        reason = refused[0].reason if refused else "sync fit of 0 rows: needs one or more measured syncs"
        raise InputError(reason)
    design = np.stack([_terms(row) for row in kept])
    measured = np.array([row.seconds for row in kept])
    mean = np.array(prior, dtype=float)
    fitted = fit_map(design, measured, mean, mean * np.array(PRIOR_SPREAD) * widen)
    sizes = [row.num_bytes for row in kept]
    return FittedSync(
        multipliers=tuple(fitted.coefficients.tolist()),
        covariance=tuple(tuple(line) for line in fitted.covariance.tolist()),
        noise=max(fitted.scale, NOISE),
        num_rows=len(kept),
        refused=refused,
        bytes_range=(min(sizes), max(sizes)),
        data_hash=sha256(repr([asdict(row) for row in rows]).encode()).hexdigest()[:16],
    )


def leave_one_out(
    rows: Sequence[SyncRow], prior: Sequence[float] = (1.0,) * len(TERMS), widen: float = 1.0
) -> list[tuple[SyncRow, Estimate]]:
    """Predict each usable row from a fit of the others; raise ``InputError`` for fewer than two."""
    kept, _ = screen_sync(rows)
    if len(kept) < 2:
        raise InputError(f"leave-one-out of {len(kept)} usable syncs: needs two or more; measure another one")
    predicted = []
    for index, row in enumerate(kept):
        fitted = fit_sync(kept[:index] + kept[index + 1 :], prior, widen)
        where = (row.num_bytes, row.num_tensors, row.link_bytes_per_s, row.num_receivers)
        predicted.append((row, fitted.seconds(*where)))
    return predicted
