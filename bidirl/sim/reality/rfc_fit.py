"""All parameter sets under which the re-implementation's no_borrow rows come out, and what they predict.

A set is drawn (lengths, sync, shape of the rollout time), then the two remaining numbers, the speeds of
rollout and trainer, are solved from no_borrow at s = 0 and s = 4. The equations have up to two solutions: a
trainer-bound and a rollout-bound one. Nothing else is ever fitted.
"""

import csv
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib.resources import files
from itertools import chain, pairwise
from math import exp, log
from pathlib import Path
from typing import Literal

import numpy as np

from bidirl.errors import InputError
from bidirl.planner.policy import AdmissionRule
from bidirl.sim.reality.rfc_job import (
    POLICIES,
    STALENESS,
    ParameterSet,
    measured_rates,
    rfc_summary,
)

__all__ = [
    "FIT_TOLERANCE",
    "NUM_DRAWS",
    "RANGES",
    "Fit",
    "ScanRow",
    "draw_sets",
    "fit",
    "load_scan",
    "predict",
    "scan",
    "write_scan",
]

Regime = Literal["trainer-bound", "rollout-bound"]

NUM_DRAWS = 20
"""Draws of the four free numbers; each gives at most two fitted sets."""
SEED = 129
RANGES: dict[str, tuple[float, float]] = {
    "response_tokens": (250.0, 1300.0),
    "sigma": (0.35, 1.1),
    "sync_s": (0.5, 12.0),
    "fixed_factor": (0.1, 1.0),
}
"""Drawn log-uniformly. Lengths: public short-answer runs (GSM8K 130 to 325 tokens) up to what a cap of 2048
leaves of long ones; sync: published full syncs of 4B to 8B models take 1 to 10 s; fixed seconds of an
iteration: from our A6000 roofline down to a tenth, where a replica's time is proportional to its samples."""
FIT_TOLERANCE = 0.02
"""Sets count as fitting within this of both rows (the issue's number)."""
_SOLVED = 0.004
"""Where the search for a root stops, well inside the tolerance."""
_SHARES = (0.5, 0.6, 0.7, 0.8, 0.88, 0.95)
"""Rollout's shares of the step at s = 0 among which the rollout-bound root is bracketed."""
_SAME_SHARE = 0.01
"""Roots closer than this are one."""
_SCAN_FILE = "rfc_scan.csv"
RULES = (AdmissionRule.COUNTING, AdmissionRule.BUDGET_DOUBLE_COUNTED)
"""``budget_at_sync`` gives counting's numbers to the last digit here (no drops), so it is not scanned."""
SWITCH_FACTORS = (1.0, 0.5)


@dataclass(frozen=True, slots=True)
class Fit:
    """A parameter set that reproduces the two fitted rows."""

    draw: int
    regime: Regime
    chosen: ParameterSet


@dataclass(frozen=True, slots=True)
class ScanRow:
    """What one set predicts under one admission rule: tokens/s by (policy, staleness)."""

    found: Fit
    admission: AdmissionRule
    rates: dict[tuple[str, str], float]

    def error(self, policy: str, staleness: str) -> float:
        """Return ``predicted / published - 1``."""
        return self.rates[policy, staleness] / measured_rates()[policy, staleness] - 1.0

    @property
    def fits(self) -> bool:
        """Whether both fitted rows are within the tolerance under this rule."""
        return all(abs(self.error("no_borrow", staleness)) <= FIT_TOLERANCE for staleness in ("0", "4"))


def draw_sets(num_draws: int = NUM_DRAWS) -> list[ParameterSet]:
    """Return the drawn numbers, speeds still 1 (Latin hypercube: each range is covered evenly)."""
    rng = np.random.default_rng(SEED)
    columns = {}
    for name, (low, high) in RANGES.items():
        place = (rng.permutation(num_draws) + rng.random(num_draws)) / num_draws
        columns[name] = [exp(log(low) + p * (log(high) - log(low))) for p in place.tolist()]
    drawn = [{name: float(f"{columns[name][i]:.4g}") for name in RANGES} for i in range(num_draws)]
    return [ParameterSet(**numbers, rollout_factor=1.0, train_factor=1.0) for numbers in drawn]


def fit(draw: int, start: ParameterSet) -> Iterator[Fit]:
    """Solve the speeds from no_borrow at s = 0 and s = 4; yield the solutions, the trainer-bound one first.

    At s = 0 rollout and training alternate, so the step is their sum plus the sync, exactly: given the
    rollout's share of it both speeds follow. The share is then the root of the s = 4 row.
    """
    unit = rfc_summary(replace(start, sync_s=0.0), "no_borrow", "0")
    step_s, wait_s = float(unit["step_time_s"]["mean"]), float(unit["parts_s"]["wait"])
    wanted = measured_rates()
    first_s = float(unit["tokens_per_s"]) * step_s / wanted["no_borrow", "0"]
    last_s = float(unit["tokens_per_s"]) * step_s / wanted["no_borrow", "4"]
    free_s = first_s - start.sync_s
    if free_s <= 0.0 or last_s <= start.sync_s:
        return

    def with_share(share: float) -> ParameterSet:
        speeds = share * free_s / wait_s, (1.0 - share) * free_s / (step_s - wait_s)
        return replace(start, rollout_factor=speeds[0], train_factor=speeds[1])

    @cache
    def miss(share: float) -> float:
        rate = float(rfc_summary(with_share(share), "no_borrow", "4")["tokens_per_s"])
        return rate / wanted["no_borrow", "4"] - 1.0

    found: list[float] = []
    even = 1.0 - (last_s - start.sync_s) / free_s
    for low, high in chain([(max(0.02, even - 0.05), even + 0.05)], _falling(miss)):
        share = _root(miss, low, high)
        if share is None or any(abs(share - other) < _SAME_SHARE for other in found):
            continue
        found.append(share)
        chosen = with_share(share)
        idle = rfc_summary(chosen, "no_borrow", "4")["idle"]["by_cause"]
        waits, blocked = idle["train"]["wait_rollout"], idle["rollout"]["admission"]
        yield Fit(draw, "trainer-bound" if blocked > waits else "rollout-bound", chosen)


def _falling(miss: Callable[[float], float]) -> Iterator[tuple[float, float]]:
    """Yield the last bracket in which the rate falls through the target."""
    for low, high in reversed(list(pairwise(_SHARES))):
        if miss(low) > 0.0 >= miss(high):
            yield low, high
            return


def _root(miss: Callable[[float], float], low: float, high: float) -> float | None:
    """Return a share whose rate is right (Illinois method); None where the bracket holds none."""
    at_low, at_high = miss(low), miss(high)
    if at_low * at_high > 0.0:
        return None
    for _ in range(12):
        share = (low * at_high - high * at_low) / (at_high - at_low)
        value = miss(share)
        if abs(value) <= _SOLVED:
            return share
        if value * at_high < 0.0:
            low, at_low = high, at_high
        else:
            at_low /= 2.0
        high, at_high = share, value
    return None


def predict(found: Fit, admission: AdmissionRule, *known: ScanRow) -> ScanRow:
    """Simulate the nine cells; one that equals a cell of a ``known`` row of the same set is taken from it.

    At s = 0 the admission rules agree (nothing is left at a sync), and without borrowing the switch costs
    do not matter.
    """

    def rate(policy: str, staleness: str) -> float:
        for row in known:
            same_rule = admission is row.admission or staleness == "0"
            same_costs = found.chosen == row.found.chosen or policy == "no_borrow"
            if same_rule and same_costs:
                return row.rates[policy, staleness]
        return round(float(rfc_summary(found.chosen, policy, staleness, admission)["tokens_per_s"]), 1)

    return ScanRow(found, admission, {(p, s): rate(p, s) for p in POLICIES for s in STALENESS})


def scan(num_draws: int = NUM_DRAWS, progress: Callable[[str], None] = lambda _: None) -> list[ScanRow]:
    """Fit all draws and predict; a draw whose length law does not exist under the cap gives nothing."""
    rows: list[ScanRow] = []
    for number, start in enumerate(draw_sets(num_draws)):
        try:
            fits = list(fit(number, start))
        except InputError:
            fits = []
        progress(f"draw {number + 1}/{num_draws}: {len(fits)} sets")
        for one in fits:
            known: list[ScanRow] = []
            for factor in SWITCH_FACTORS:
                same = replace(one, chosen=replace(one.chosen, switch_factor=factor))
                for admission in RULES:
                    known.append(predict(same, admission, *known))
            rows += known
    return rows


def _columns() -> list[str]:
    names = [one.name for one in fields(ParameterSet)]
    return ["draw", "regime", "admission", *names, *(f"{p}_s{s}" for p in POLICIES for s in STALENESS)]


def write_scan(rows: list[ScanRow]) -> str:
    """Return the scan as CSV text."""
    lines = [",".join(_columns())]
    for row in rows:
        numbers = [f"{value:.6g}" for value in asdict(row.found.chosen).values()]
        rates = [f"{row.rates[p, s]:.1f}" for p in POLICIES for s in STALENESS]
        lines.append(",".join([str(row.found.draw), row.found.regime, row.admission, *numbers, *rates]))
    return "\n".join(lines) + "\n"


@cache
def load_scan() -> tuple[ScanRow, ...]:
    """Return the committed scan (``python -m bidirl.sim.reality.rfc_fit`` writes it anew, some minutes)."""
    text = files("bidirl.sim.reality").joinpath(_SCAN_FILE).read_text(encoding="utf-8")
    rows = []
    for line in csv.DictReader(text.splitlines()):
        chosen = ParameterSet(**{one.name: float(line[one.name]) for one in fields(ParameterSet)})
        regime: Regime = "trainer-bound" if line["regime"] == "trainer-bound" else "rollout-bound"
        rates = {(p, s): float(line[f"{p}_s{s}"]) for p in POLICIES for s in STALENESS}
        rows.append(ScanRow(Fit(int(line["draw"]), regime, chosen), AdmissionRule(line["admission"]), rates))
    return tuple(rows)


def _main() -> None:
    """Write the scan anew beside this module."""

    def tell(line: str) -> None:
        sys.stderr.write(line + "\n")

    Path(__file__).with_name(_SCAN_FILE).write_text(write_scan(scan(progress=tell)), encoding="utf-8")


if __name__ == "__main__":
    _main()
