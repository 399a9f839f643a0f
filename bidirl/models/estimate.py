"""Numbers that know where they come from and how sure they are."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import isfinite

from bidirl.errors import InputError

__all__ = ["Estimate", "Source", "from_mapping", "total", "worst"]


class Source(StrEnum):
    """Where a number comes from, best first; of a sum the worst survives."""

    MEASURED = "measured"
    """Timed on the user's hardware, or read on a data sheet."""
    FITTED = "fitted"
    """Estimated from the user's log or profile."""
    TRANSFERRED = "transferred"
    """Carried over from a published measurement of something similar."""
    ROOFLINE = "roofline"
    """Computed from catalogue facts and an efficiency prior."""
    ASSUMED = "assumed"
    """Nobody measured it; the note says why this value."""

    @property
    def rank(self) -> int:
        """Return 0 for the best source, growing with doubt."""
        return _RANKS[self]


_RANKS = {source: rank for rank, source in enumerate(Source)}


def worst(sources: Iterable[Source]) -> Source:
    """Return the most doubtful of ``sources``; ``MEASURED`` if there are none."""
    return max(sources, key=lambda source: source.rank, default=Source.MEASURED)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with a nominal 90 % interval and its source.

    Half-widths add linearly, not in quadrature: priors of one class err together, so the sum of two
    roofline numbers is as uncertain as each of them. Raises ``InputError`` unless
    ``low <= value <= high`` and all are finite.
    """

    value: float
    low: float
    high: float
    source: Source
    note: str = ""
    extrapolated: bool = False

    def __post_init__(self) -> None:
        """Refuse a value outside its own interval."""
        if not (isfinite(self.low) and isfinite(self.high) and self.low <= self.value <= self.high):
            raise InputError(
                f"estimate {self.value} [{self.low}, {self.high}]: needs finite low <= value <= high; "
                "give the interval around the value"
            )

    @classmethod
    def exact(cls, value: float, source: Source = Source.MEASURED, note: str = "") -> "Estimate":
        """Return an estimate without spread."""
        return cls(value, value, value, source, note)

    @classmethod
    def within(cls, value: float, factor: float, source: Source, note: str = "") -> "Estimate":
        """Return ``value`` known up to a factor: the interval is ``[value / factor, value * factor]``."""
        low, high = sorted((value / factor, value * factor))
        return cls(value, low, high, source, note)

    def __add__(self, other: "Estimate") -> "Estimate":
        """Add two estimates; the interval ends add, the worst source and its note survive."""
        doubtful = self if self.source.rank >= other.source.rank else other
        return Estimate(
            self.value + other.value,
            self.low + other.low,
            self.high + other.high,
            doubtful.source,
            doubtful.note,
            self.extrapolated or other.extrapolated,
        )

    def __mul__(self, factor: float) -> "Estimate":
        """Scale by an exact number."""
        low, high = sorted((self.low * factor, self.high * factor))
        return replace(self, value=self.value * factor, low=low, high=high)

    __rmul__ = __mul__

    def flagged(self, note: str) -> "Estimate":
        """Return the same number marked as extrapolated, with the reason appended to its note."""
        return replace(self, extrapolated=True, note=f"{self.note}; {note}" if self.note else note)

    def to_mapping(self) -> dict[str, object]:
        """Return plain JSON data."""
        return {
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "source": self.source.value,
            "note": self.note,
            "extrapolated": self.extrapolated,
        }


def from_mapping(data: Mapping[str, object]) -> Estimate:
    """Read what ``Estimate.to_mapping`` wrote; raise ``InputError`` for anything else."""
    known = {"value", "low", "high", "source", "note", "extrapolated"}
    unknown = sorted(set(data) - known)
    if unknown:
        raise InputError(f"estimate has the unknown key {unknown[0]!r}: use {', '.join(sorted(known))}")
    numbers = []
    for key in ("value", "low", "high"):
        number = data.get(key)
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise InputError(f"estimate {key} = {number!r}: must be a number; write value, low and high")
        numbers.append(float(number))
    try:
        source = Source(str(data.get("source")))
    except ValueError:
        choices = ", ".join(Source)
        raise InputError(f"estimate source = {data.get('source')!r}: must be one of {choices}") from None
    note, extrapolated = data.get("note", ""), data.get("extrapolated", False)
    if not isinstance(note, str) or not isinstance(extrapolated, bool):
        raise InputError(
            f"estimate note = {note!r}, extrapolated = {extrapolated!r}: must be a text and a bool"
        )
    return Estimate(numbers[0], numbers[1], numbers[2], source, note, extrapolated)


def total(estimates: Iterable[Estimate]) -> Estimate:
    """Add any number of estimates; an empty sum is an exact zero."""
    result = Estimate.exact(0.0)
    for estimate in estimates:
        result += estimate
    return result
