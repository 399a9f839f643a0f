"""Advice as JSON and as lines for a terminal."""

from collections.abc import Sequence
from typing import Any

from bidirl.planner.advise.advice import Advice, Advised

__all__ = ["advice_json", "advice_lines", "change_rows"]


def advice_json(advice: Advice) -> dict[str, Any]:
    """Return plain JSON data."""
    verdict = advice.verdict
    return {
        "source": advice.source,
        "verdict": verdict.sentence,
        "bottleneck": str(verdict.limit),
        "measure": verdict.measure,
        "evidence": list(verdict.evidence),
        "shares": {
            name: {"value": each.value, "low": each.low, "high": each.high}
            for name, each in advice.evidence.shares.items()
        },
        "step_s": advice.evidence.step_s,
        "num_steps": advice.evidence.num_steps,
        "idle": {pool: dict(causes) for pool, causes in verdict.idle.items()},
        "unknown": list(advice.unknown),
        "changes": [_change(each) for each in advice.changes],
        "refused": list(advice.refused),
        "notes": list(advice.notes),
        "num_models": advice.num_worlds,
    }


def _change(each: Advised) -> dict[str, Any]:
    return {
        "change": each.change,
        "gain": each.gain,
        "low": each.low,
        "high": each.high,
        "gain_per_gpu": each.per_gpu,
        "no_slower_share": each.sure_share,
        "step_s": each.step_s,
        "limit_after": each.limit,
        "how": each.how,
    }


def change_rows(changes: Sequence[Advised]) -> list[tuple[str, str, str, str]]:
    """Return table rows: change, gain with interval, per GPU, how."""
    rows = []
    for each in changes:
        if each.gain is None:
            rows.append((each.change, f"at most {each.high:.2f}x", "", each.how))
            continue
        gain = f"{each.gain:.2f}x ({each.low:.2f} to {each.high:.2f})"
        rows.append((each.change, gain, f"{each.per_gpu:.2f}x", each.how))
    return rows


def advice_lines(advice: Advice) -> list[str]:
    """Return the lines below the verdict: evidence, idle time, what is unknown, what was refused, notes."""
    lines = [f"evidence: {line}" for line in advice.verdict.evidence]
    for pool, causes in advice.verdict.idle.items():
        known = [
            f"{cause} {'not logged' if share is None else f'{share:.0%}'}" for cause, share in causes.items()
        ]
        lines.append(f"idle, {pool}: {', '.join(known)}")
    lines += [f"cannot be told: {line}" for line in advice.unknown]
    lines += [f"not advised: {line}" for line in advice.refused]
    lines += [f"note: {line}" for line in advice.notes]
    return lines
