"""What the log of a job cannot tell, as ranges: every prediction is made once per draw from them.

The width of every predicted interval comes from here and from nothing else.
"""

from dataclasses import dataclass, fields
from math import exp, log
from statistics import NormalDist

import numpy as np

__all__ = ["DRIFT_SD", "RANGES", "Range", "Unknowns", "draw_unknowns"]

SEED = 20260829
DRIFT_SD = 0.10
"""Standard deviation of the logarithm of (mean response after / before) a change of the run. Root mean square
over the 22 public pairs of runs that print both: 18 of NeMo-RL's performance summary (on to off policy: 8B
+4 to +10 %, others within 1 %), verl V1's three (-3 to +1 %), TRL GRPO to AsyncGRPO (-37 %)."""


@dataclass(frozen=True, slots=True)
class Range:
    """Where a number that no log tells may lie, and why."""

    low: float
    high: float
    is_log: bool
    """Drawn evenly in the logarithm, else evenly."""
    why: str

    def at(self, share: float) -> float:
        """Return the value at a share of the range."""
        if self.is_log:
            return exp(log(self.low) + share * (log(self.high) - log(self.low)))
        return self.low + share * (self.high - self.low)


RANGES: dict[str, Range] = {
    "sigma": Range(
        0.6,
        1.4,
        is_log=False,
        why="log spread of response lengths where only a mean is known: packaged public laws",
    ),
    "truncated": Range(
        3e-4,
        1e-2,
        is_log=True,
        why="share of responses at a cap that is far above the mean, in place of the spread there, since "
        "the tail decides. Public runs whose cap is 3 to 7 times the mean print 0 to 0.004",
    ),
    "correlation": Range(
        0.0, 0.6, is_log=False, why="how alike the lengths of one prompt are: no public run prints it"
    ),
    "fixed_share": Range(
        0.0,
        1.0,
        is_log=False,
        why="share of an update that more GPUs do not shorten: verl's colocated runs on 32, 64 and 128 GPUs "
        "imply 0 (update 270 to 133 s), 0.3 and 0.5 (old log-probs 108, 70, 54 s) and 0.7 (133 to 114 s)",
    ),
    "decode_tilt": Range(
        0.5, 2.0, is_log=True, why="decode seconds that grow with the batch over those that do not"
    ),
    "pool_tilt": Range(
        0.5,
        2.0,
        is_log=True,
        why="speed of rollout over that of training, where only the step is timed: spread of the priors",
    ),
    "role_share": Range(
        0.0,
        0.25,
        is_log=False,
        why="share of a colocated generation timer that is the change of roles: 0.23 in verl's one-step-off "
        "table (gen 321 s, generate_sequences 247 s), 0 where sleep is timed apart",
    ),
    "exposed_share": Range(
        0.0,
        0.2,
        is_log=False,
        why="share of an asynchronous step logged as waiting that is padding and ordering samples: "
        "verl's require_batches ablation still logs 15 to 21 % of trainer-bound steps as wait, AReaL 0",
    ),
    "other_kept": Range(
        0.0, 1.0, is_log=False, why="share of the step's unexplained seconds that stays after a change"
    ),
    "sync_factor": Range(0.5, 2.0, is_log=True, why="weight sync over its prior: spread of public syncs"),
    "switch_place": Range(
        0.0, 1.0, is_log=False, why="place of a role switch within the interval of its prior"
    ),
}
"""What is drawn, Latin hypercube; a number that the log or the job gives is not drawn."""


@dataclass(frozen=True, slots=True)
class Unknowns:
    """One draw."""

    sigma: float
    truncated: float
    correlation: float
    fixed_share: float
    decode_tilt: float
    pool_tilt: float
    role_share: float
    exposed_share: float
    other_kept: float
    sync_factor: float
    switch_place: float
    drift: float
    """Mean response after the change over before."""
    noise: float
    """Place of the measured step within its own uncertainty, standard normal."""


def draw_unknowns(num_draws: int) -> list[Unknowns]:
    """Return the draws; the same for every log, so that changes are compared under the same luck."""
    rng = np.random.default_rng(SEED)
    names = [spec.name for spec in fields(Unknowns)]
    columns: dict[str, list[float]] = {}
    for name in names:
        shares = ((rng.permutation(num_draws) + rng.random(num_draws)) / num_draws).tolist()
        if name in RANGES:
            columns[name] = [RANGES[name].at(share) for share in shares]
        else:
            scores = [NormalDist().inv_cdf(min(0.999, max(0.001, share))) for share in shares]
            columns[name] = [exp(DRIFT_SD * z) for z in scores] if name == "drift" else scores
    return [Unknowns(**{name: columns[name][i] for name in names}) for i in range(num_draws)]
