"""Keep predicted times calibrated during a run, and say when a machine has changed: a pure reducer.

State and observation in, state and (sometimes) new factors out; simulator and executor fold the same
function over what they measure. The model is a level that stays until it jumps: the mean of the log ratios
since the last change, and a two-sided cumulative sum that finds the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import exp, log, pi, sqrt
from statistics import median

from bidirl.errors import InputError

__all__ = ["Calibration", "Factors", "Observation", "Side", "Track", "observe"]

SLACK = 0.5
"""Allowance of the cumulative sum in noise scales: half of the smallest shift worth finding fast (one scale).
Source: Page 1954, "Continuous inspection schemes"; the choice k = shift / 2 is the usual one."""
THRESHOLD = 8.0
"""Height at which a sum is an alarm, in noise scales. Simulated (docs/calibration.md): less than one false
alarm in 1,000 observations, normal or Student-t (4); a jump of two scales is found after about 6 of them."""
CLIP = 3.0
"""Largest pull of one observation, in noise scales: one stall moves nothing."""
MIN_GAIN = 0.01
"""Least weight of a new observation in the level: creeping drift is followed over about 100 of them."""
NOISE_PRIOR = 0.03
"""Noise of a log ratio before any: 1 to 3 % in step logs, more for single pulls."""
NOISE_PRIOR_ROWS = 10.0
"""Observations that it counts for."""
NOISE_GAIN = 0.02
"""Least weight of a new observation in the noise."""
MIN_NOISE = 1e-3
MEMORY = 15
"""Ratios that are kept: an alarm rests on fewer, unless the jump is small."""
DEAD_BAND = 0.03
"""Smallest change of a factor that is worth telling: below it no gate decides otherwise (their margins are
larger), and every change is an event in the journal."""
SURE = 2.0
"""A change must also be so many standard errors of the level."""


class Side(StrEnum):
    """Which prediction an observation is about."""

    ROLLOUT = "rollout"
    TRAIN = "train"


@dataclass(frozen=True, slots=True)
class Observation:
    """One finished unit of work."""

    side: Side
    predicted_s: float
    """By the stage models alone, no factor applied."""
    measured_s: float


@dataclass(frozen=True, slots=True)
class Track:
    """What is known of one side."""

    level: float = 0.0
    """Log of measured over predicted, since the last change."""
    num: int = 0
    """Observations since the last change."""
    noise: float = NOISE_PRIOR
    seen: float = 0.0
    """Observations that the noise rests on."""
    up: float = 0.0
    down: float = 0.0
    """Cumulative sums, in noise scales."""
    up_num: int = 0
    down_num: int = 0
    """Observations since each sum left zero."""
    recent: tuple[float, ...] = ()
    """The last log ratios, as they came: after an alarm they say where the new level is."""
    told: float = 0.0
    """Log of the factor in force."""
    num_drifts: int = 0
    """Changes found so far."""


@dataclass(frozen=True, slots=True)
class Factors:
    """New factors on predicted times; the arguments of the event ``CoefficientsUpdated``."""

    rollout_factor: float
    train_factor: float
    drifted: Side | None
    """The side whose machine has changed, if that is why; None for slow learning."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """State of the calibration of one run."""

    rollout: Track = field(default_factory=Track)
    train: Track = field(default_factory=Track)


def observe(state: Calibration, seen: Observation) -> tuple[Calibration, Factors | None]:
    """Fold one observation in; return the new state, and factors where they should change.

    Raises ``InputError`` for times that are not positive.
    """
    if not (seen.predicted_s > 0.0 and seen.measured_s > 0.0):
        raise InputError(
            f"predicted {seen.predicted_s} s, measured {seen.measured_s} s: both must be positive; skip this "
            "unit"
        )
    before = state.rollout if seen.side is Side.ROLLOUT else state.train
    track = _updated(before, log(seen.measured_s / seen.predicted_s))
    drifted = track.num_drifts > before.num_drifts
    error = track.noise / sqrt(max(1, track.num))
    moved = abs(track.level - track.told)
    if moved > DEAD_BAND and (drifted or moved > SURE * error):
        track = replace(track, told=track.level)
    state = replace(state, rollout=track) if seen.side is Side.ROLLOUT else replace(state, train=track)
    if track.told == before.told:
        return state, None
    return state, Factors(exp(state.rollout.told), exp(state.train.told), seen.side if drifted else None)


def _updated(track: Track, ratio: float) -> Track:
    """Return a track after one more log ratio."""
    scale = track.noise * sqrt(1.0 + 1.0 / track.num) if track.num else 0.0
    z = 0.0 if track.num == 0 else max(-CLIP, min(CLIP, (ratio - track.level) / scale))
    up, down = max(0.0, track.up + z - SLACK), max(0.0, track.down - z - SLACK)
    recent = (*track.recent, ratio)[-MEMORY:]
    up_num, down_num = (track.up_num + 1 if up else 0), (track.down_num + 1 if down else 0)
    if max(up, down) > THRESHOLD:
        num = min(up_num if up >= down else down_num, MEMORY)
        return replace(
            track,
            level=median(recent[-num:]),
            num=num,
            up=0.0,
            down=0.0,
            up_num=0,
            down_num=0,
            recent=recent,
            num_drifts=track.num_drifts + 1,
        )
    num = track.num + 1
    step = ratio - track.level if track.num == 0 else z * scale
    noise, seen = track.noise, track.seen
    if track.num:
        seen += 1.0
        size = abs(z) * track.noise * sqrt(pi / 2.0)  # of a normal law with this mean deviation
        noise = max(MIN_NOISE, noise + max(NOISE_GAIN, 1.0 / (seen + NOISE_PRIOR_ROWS)) * (size - noise))
    return replace(
        track,
        level=track.level + max(MIN_GAIN, 1.0 / num) * step,
        num=num,
        noise=noise,
        seen=seen,
        up=up,
        down=down,
        up_num=up_num,
        down_num=down_num,
        recent=recent,
    )
