"""The lending budget: a direction that keeps losing is not lent any more.

Source: design.md section 5. What a lease gave is measured, not predicted: the work of the lent devices, in
seconds that the borrowing pool alone would have needed for it. Its cost is the time for which the owner
waited for its devices to come back.
"""

from dataclasses import dataclass, field

from bidirl.planner.events import Direction

__all__ = ["Budget"]

LOSSES_BEFORE_STOP = 4
"""Leases in a row that cost more than they gave before a direction stops: one or two may be bad luck with
a long sample, four are a model that is wrong for this job."""


@dataclass(slots=True)
class Budget:
    """Counts losing leases per direction."""

    losses: dict[Direction, int] = field(default_factory=dict)
    stopped: set[Direction] = field(default_factory=set)

    def account(self, direction: Direction, gave_s: float, cost_s: float) -> bool:
        """Book a closed lease; return whether lending in its direction stops with it."""
        if gave_s >= cost_s:
            self.losses[direction] = 0
            return False
        self.losses[direction] = self.losses.get(direction, 0) + 1
        if self.losses[direction] < LOSSES_BEFORE_STOP or direction in self.stopped:
            return False
        self.stopped.add(direction)
        return True
