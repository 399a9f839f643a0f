"""Activities of devices while they last: opened at their start, written when they end or are cut short."""

from dataclasses import dataclass

from bidirl.planner.recorder import Recorder
from bidirl.traces.run_record import Activity, Owner

__all__ = ["OpenSpans", "Unit"]

Unit = tuple[Owner, int, int]
"""Owner, first device of the pool, number of devices."""


@dataclass(slots=True)
class _Open:
    units: list[Unit]
    activity: Activity
    start_s: float
    step: int
    owner: int | None
    is_known: bool
    """Whether ``start_s`` is when the activity began, not just when it was asked for."""


class OpenSpans:
    """The spans that have begun, by a key of the driver's (serials of actions)."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.open_spans: dict[int, _Open] = {}

    def open(
        self,
        key: int,
        units: list[Unit],
        activity: Activity,
        start_s: float,
        *,
        owner: int | None = None,
        waits: bool = False,
    ) -> None:
        """Note that devices begin something, for an ``owner`` whose loss ends it.

        ``waits``: it was only asked for, and ``began`` will say when it began.
        """
        step = self._recorder.scheduler.train.step
        self.open_spans[key] = _Open(list(units), activity, start_s, step, owner, not waits)

    def began(self, key: int, start_s: float | None) -> None:
        """Note when a sync began: when its replica had paused; None: that is not known."""
        span = self.open_spans.get(key)
        if span is not None and start_s is not None:
            span.start_s, span.is_known = start_s, True

    def shut(self, key: int, end_s: float) -> float:
        """Write a span that ends now, if its begin is known; return its seconds."""
        span = self.open_spans.pop(key)
        if span.is_known:
            for unit in span.units:
                self._write(span, unit, end_s)
        return end_s - span.start_s

    def cut(self, unit: Unit, end_s: float) -> None:
        """End whatever some devices are doing, because they are lost; a sync if its begin is known."""
        for span in self.open_spans.values():
            for whole in list(span.units):
                part, rest = _split(whole, unit)
                if part is not None:
                    span.units.remove(whole)
                    span.units.extend(rest)
                    if span.is_known:
                        self._write(span, part, end_s)

    def cut_owner(self, owner: int, end_s: float) -> None:
        """End whatever an owner does, because it is lost."""
        for key in [key for key, span in self.open_spans.items() if span.owner == owner]:
            self.shut(key, end_s)

    def close(self, end_s: float) -> None:
        """End everything."""
        for span in self.open_spans.values():
            if span.is_known:
                for unit in span.units:
                    self._write(span, unit, end_s)
        self.open_spans.clear()

    def _write(self, span: _Open, unit: Unit, end_s: float) -> None:
        steps = self._recorder.record.spans.step
        before = len(steps)
        self._recorder.span(*unit, span.activity, span.start_s, end_s)
        if len(steps) > before:
            steps[-1] = span.step


def _split(whole: Unit, lost: Unit) -> tuple[Unit | None, list[Unit]]:
    """Return the part of some devices that is among the lost ones, and what is left of them."""
    owner, first, num = whole
    low, high = max(first, lost[1]), min(first + num, lost[1] + lost[2])
    if owner != lost[0] or low >= high:
        return None, [whole]
    rest = [(owner, first, low - first), (owner, high, first + num - high)]
    return (owner, low, high - low), [unit for unit in rest if unit[2]]
