"""Is run B faster than run A, or are its answers shorter? Per step, per token, per GPU."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from bidirl.planner.advise.evidence import COLD_STEPS, MIN_STEPS
from bidirl.traces.step_log import StepLog

__all__ = ["Comparison", "Ratio", "compare_logs"]

EQUAL = 0.02
"""Speeds within this are called equal: less than a repeated run differs by."""
NUM_RESAMPLES = 1000
SEED = 11


@dataclass(frozen=True, slots=True)
class Ratio:
    """B over A with its interval; equal ends where a log has one step."""

    value: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        """Return plain data."""
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True, slots=True)
class Comparison:
    """What B is to A; above 1 B is faster. None where a log does not say enough."""

    sentence: str
    step: Ratio | None
    """Step time of A over that of B."""
    per_token: Ratio | None
    """Tokens per second of B over those of A, over the GPUs that each names."""
    per_gpu: Ratio | None
    """Tokens per second and GPU."""
    length: Ratio | None
    """Mean response of B over that of A."""
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        ratios = {
            "speedup_by_step": self.step,
            "speedup_by_token": self.per_token,
            "speedup_by_token_and_gpu": self.per_gpu,
            "length_ratio": self.length,
        }
        found = {name: None if ratio is None else ratio.to_json() for name, ratio in ratios.items()}
        return {"verdict": self.sentence, **found, "notes": list(self.notes)}


def compare_logs(
    one: StepLog, other: StepLog, gpus: tuple[int | None, int | None] = (None, None)
) -> Comparison:
    """Compare two runs; ``gpus`` where the logs do not name theirs.

    Time alone never says that a run is faster: answers may have become shorter (TRL sample: 236.7 to 149.6
    tokens), or there are more GPUs (needs C07). So the sentence is about tokens per second and GPU.
    """
    one, other = _steady(one), _steady(other)
    notes: list[str] = []
    counts = [given or _gpus(log) for given, log in zip(gpus, (one, other), strict=True)]
    step = _ratio(_seconds(one), _seconds(other))
    length = _ratio(other.column("response_mean_tokens"), one.column("response_mean_tokens"))
    rates = [_tokens_per_s(log, count) for log, count in zip((one, other), counts, strict=True)]
    per_token = None
    if rates[0] is not None and rates[1] is not None:
        per_token = _ratio(rates[1], rates[0])
    elif step is not None and length is not None:
        per_token = _from_lengths(one, other, step, length, notes)
    per_gpu = None
    if per_token is not None:
        if counts[0] and counts[1]:
            scale = counts[0] / counts[1]
            per_gpu = Ratio(per_token.value * scale, per_token.low * scale, per_token.high * scale)
        else:
            notes.append("the number of GPUs is not in the logs: give --gpus A,B for speed per GPU")
    if one.mode is not other.mode:
        notes.append(f"A is {one.mode}, B is {other.mode}: their steps need not hold the same work")
    if one.step_unit != other.step_unit:
        notes.append(f"a step of A is {one.step_unit}, of B {other.step_unit}")
    if min(len(one), len(other)) < MIN_STEPS:
        notes.append(f"a log has fewer than {MIN_STEPS} steps: its ratios have no interval")
    sentence = _sentence(step, per_token, per_gpu, length, min(len(one), len(other)))
    return Comparison(sentence, step, per_token, per_gpu, length, tuple(notes))


def _from_lengths(one: StepLog, other: StepLog, step: Ratio, length: Ratio, notes: list[str]) -> Ratio | None:
    """Return tokens per second, B over A, by step time, length and batch; None if steps are not alike."""
    batches = one.facts.get("batch_samples"), other.facts.get("batch_samples")
    scale = batches[1] / batches[0] if batches[0] and batches[1] else 1.0
    if not all(batches):
        if one.framework != other.framework or one.step_unit != other.step_unit:
            notes.append("the samples of a step are not in both logs, and their steps differ in kind")
            return None
        notes.append("the batches are taken as equal: the logs do not both name theirs")
    notes.append("tokens per second follow from step time and mean response; prompts are not counted")
    return Ratio(
        step.value * length.value * scale, step.low * length.low * scale, step.high * length.high * scale
    )


def _steady(log: StepLog) -> StepLog:
    return log.rows(slice(COLD_STEPS, None)) if len(log) >= MIN_STEPS + COLD_STEPS else log


def _gpus(log: StepLog) -> float | None:
    return log.facts.get("num_gpus")


def _seconds(log: StepLog) -> np.ndarray:
    return log.column("step_s")


def _tokens_per_s(log: StepLog, gpus: float | None) -> np.ndarray | None:
    """Return tokens per second of the run, by whatever the log gives for it; None if nothing does."""
    if log.has("total_tokens") and log.has("step_s"):
        return log.column("total_tokens") / log.column("step_s")
    if log.has("tokens_per_s_per_gpu") and gpus:
        return log.column("tokens_per_s_per_gpu") * gpus
    if log.has("tokens_per_s"):
        return log.column("tokens_per_s")
    return None


def _ratio(top: np.ndarray, bottom: np.ndarray) -> Ratio | None:
    """Return the ratio of medians with its bootstrap interval (90 %); the two runs are independent."""
    top, bottom = top[np.isfinite(top)], bottom[np.isfinite(bottom)]
    if not len(top) or not len(bottom) or np.median(bottom) <= 0.0:
        return None
    value = float(np.median(top) / np.median(bottom))
    if min(len(top), len(bottom)) < MIN_STEPS:
        return Ratio(value, value, value)
    rng = np.random.default_rng(SEED)
    tops = np.median(top[rng.integers(0, len(top), (NUM_RESAMPLES, len(top)))], axis=1)
    bottoms = np.median(bottom[rng.integers(0, len(bottom), (NUM_RESAMPLES, len(bottom)))], axis=1)
    low, high = np.quantile(tops / bottoms, [0.05, 0.95]).tolist()
    return Ratio(value, min(low, value), max(high, value))


def _sentence(
    step: Ratio | None, per_token: Ratio | None, per_gpu: Ratio | None, length: Ratio | None, fewest: int
) -> str:
    if step is None and per_token is None:
        longer = (
            ""
            if length is None
            else f" Its answers are {length.value:.2f}x as long: wall times alone would not tell either."
        )
        return f"Cannot tell whether B is faster: the logs share no step time and no token rate.{longer}"
    if per_token is None:
        assert step is not None
        lead = f"Cannot tell whether B is faster: its step takes {1.0 / step.value:.2f} times that of A, but "
        if length is not None:
            return f"{lead}how many tokens a step holds is not in both logs. Log the tokens of a step."
        return (
            f"{lead}no lengths or tokens are logged, so its answers may be shorter. "
            "Log the mean response length."
        )
    best = per_gpu or per_token
    unit = "tokens per second and GPU" if per_gpu else "tokens per second"
    words = f"{best.value:.2f}x the {unit} of A"
    if best.low != best.high:
        words += f" ({best.low:.2f} to {best.high:.2f})"
    reasons = []
    if step is not None:
        reasons.append(f"its step is {step.value:.2f}x as fast")
    if length is not None:
        reasons.append(f"its answers are {length.value:.2f}x as long")
    why = f" ({', '.join(reasons)})" if reasons else ""
    few = " One or two steps a log do not make this sure." if fewest < MIN_STEPS else ""
    is_sure = fewest >= MIN_STEPS
    if best.low > 1.0 + EQUAL:
        return f"B {'is' if is_sure else 'looks'} faster: {words}{why}.{few}"
    if best.high < 1.0 - EQUAL:
        shorter = step is not None and step.value > 1.0 + EQUAL and length is not None and length.value < 1.0
        slower = "B is slower" if is_sure else "B looks slower"
        lead = "B is not faster, its answers are shorter" if shorter else slower
        return f"{lead}: {words}{why}.{few}"
    if best.low >= 1.0 - EQUAL and best.high <= 1.0 + EQUAL:
        return f"B {'is' if is_sure else 'looks'} as fast as A: {words}{why}.{few}"
    return f"Cannot tell whether B is faster: {words}{why}; log more steps.{few}"
