"""Name what limits a run, from its summary; or say that it cannot be told and what would decide."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from bidirl.sim.text import percent

__all__ = ["Diagnosis", "Limit", "diagnose"]

Summary = Mapping[str, Any]

OVERHEAD_SHARE = 0.2
"""A sync, switch or reward part this large of the step is named as the limit: halving it gains 10 %."""

BUSY_IDLE = 0.1
"""A pool that waits less than this share is busy: layouts are coarse, the last tenth is rarely reachable."""

LEAD = 0.05
"""The pools' waiting shares must differ by this much before one side is called the limit: moving the
smallest unit of devices changes the shares of a 16-GPU job by about this much."""

MIN_STEPS = 3
"""Fewer measured steps do not carry a diagnosis: one long sample moves them."""

TAIL_SHARE = 0.8
"""From this share of the step on, the longest samples alone explain it: more rollout GPUs will not help."""

TURNS_SHARE = 0.6
"""Where one pool does both in turn: the part of the step from which one of the two is the limit."""

OVERHEADS = {
    "weight sync": ("sync", "drain"),
    "role switches": ("switch", "switch_in", "switch_out", "merge", "broadcast"),
    "rewards": ("reward",),
    "checkpoints": ("checkpoint",),
}


class Limit(StrEnum):
    """What limits the throughput of a run."""

    ROLLOUT = "rollout"
    TRAINING = "training"
    TAIL = "the longest samples"
    OVERHEAD = "overhead"
    IN_TURN = "both pools in turn"
    NOTHING = "neither pool"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The limit and the numbers that show it (or, where it cannot be told, what would decide)."""

    limit: Limit
    because: str

    def __str__(self) -> str:
        """Return the end of a verdict sentence."""
        match self.limit:
            case Limit.CANNOT_TELL:
                return f"cannot tell what limits it ({self.because})"
            case Limit.NOTHING:
                return f"limited by {self.limit}: the split is balanced ({self.because})"
            case Limit.OVERHEAD:
                return f"limited by {self.because}"
            case _:
                return f"limited by {self.limit} ({self.because})"


def diagnose(summary: Summary) -> Diagnosis:
    """Name the limit of a run from its parts and idle shares.

    Waiting of a pool is its time without work; overhead on the trainer's time line stops both pools, so it
    comes first. A diagnosis of a window with start-up in it is refused.
    """
    step_s = summary["step_time_s"]["mean"]
    if summary.get("note"):
        return Diagnosis(Limit.CANNOT_TELL, str(summary["note"]))
    if not step_s:
        return Diagnosis(Limit.CANNOT_TELL, "no step was measured: run more steps")
    num_steps = summary.get("measured", {}).get("num_steps", MIN_STEPS)
    if num_steps < MIN_STEPS:
        return Diagnosis(Limit.CANNOT_TELL, f"{num_steps} measured steps are too few: run more steps")
    parts: Mapping[str, float] = summary["parts_s"]
    overhead = {
        name: sum(parts.get(part, 0.0) for part in group) / step_s for name, group in OVERHEADS.items()
    }
    worst = max(overhead, key=overhead.__getitem__)
    if overhead[worst] >= OVERHEAD_SHARE:
        return Diagnosis(Limit.OVERHEAD, f"{worst} ({percent(overhead[worst])} of the step)")
    tail_s = summary["bound"].get("tail_s") or 0.0
    tail = Diagnosis(Limit.TAIL, f"alone they need {percent(tail_s / step_s)} of the step")
    gpus = summary.get("gpus", {})
    if not gpus.get("rollout", 1) or not gpus.get("train", 1):
        return _diagnose_turns(
            parts.get("wait", 0.0) / step_s, tail if tail_s >= TAIL_SHARE * step_s else None
        )
    by_cause = summary["idle"]["by_cause"]
    rollout = by_cause["rollout"].get("admission", 0.0) + by_cause["rollout"].get("no_work", 0.0)
    train = by_cause["train"].get("wait_rollout", 0.0)
    shares = f"rollout pool waits {percent(rollout)}, training pool {percent(train)}"
    if max(rollout, train) < BUSY_IDLE:
        return Diagnosis(Limit.NOTHING, shares)
    long_tail = tail_s >= TAIL_SHARE * step_s
    if train - rollout > LEAD:
        return tail if long_tail else Diagnosis(Limit.ROLLOUT, shares)
    if rollout - train > LEAD:
        return Diagnosis(Limit.TRAINING, shares)
    if rollout + train < 2 * BUSY_IDLE:
        return Diagnosis(Limit.NOTHING, shares)
    if long_tail:
        return tail
    return Diagnosis(Limit.IN_TURN, f"{shares}: a larger staleness bound or lending would overlap them")


def _diagnose_turns(wait: float, tail: Diagnosis | None) -> Diagnosis:
    """Name the limit where one pool generates and trains in turn; ``wait`` is the generation's share."""
    shares = f"generation takes {percent(wait)} of the step"
    if wait >= TURNS_SHARE:
        return tail or Diagnosis(Limit.ROLLOUT, shares)
    if 1.0 - wait >= TURNS_SHARE:
        return Diagnosis(Limit.TRAINING, shares)
    return Diagnosis(Limit.IN_TURN, shares)
