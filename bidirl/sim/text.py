"""Numbers as text for terminals: rounded, with units, ``n/a`` where unknown."""

import math

__all__ = ["count", "decimal", "divide", "percent", "seconds", "times"]

UNKNOWN = "n/a"


def count(value: float | None) -> str:
    """Return an amount with thousands separators; three digits below 100."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def decimal(value: float | None) -> str:
    """Return a number with two decimals."""
    return f"{value:.2f}" if value is not None and math.isfinite(value) else UNKNOWN


def seconds(value: float | None, unit: str = " s") -> str:
    """Return seconds: one decimal from 10 s on, three digits below; ``unit=""`` under a header."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return (f"{value:,.1f}" if abs(value) >= 10 or value == 0 else f"{value:.3g}") + unit


def percent(share: float | None, digits: int = 0) -> str:
    """Return a share in per cent."""
    return f"{100 * share:.{digits}f} %" if share is not None and math.isfinite(share) else UNKNOWN


def times(value: float | None) -> str:
    """Return a ratio as a factor."""
    return f"{value:.2f}x" if value is not None and math.isfinite(value) else UNKNOWN


def divide(one: float | None, other: float | None) -> float | None:
    """Divide; None where a side is unknown or the divisor is 0."""
    return None if one is None or not other else one / other
