"""What the parts of the scheduler share: the plan, the clock of the current event, and the outbox."""

from dataclasses import dataclass, field

from bidirl.planner.events import Action
from bidirl.planner.plan import Plan

__all__ = ["Core", "Group", "Place"]

Place = tuple[tuple[int, ...], int]
"""Samples of a group on a replica: their indices and the serial of the hand-over."""


@dataclass(slots=True)
class Group:
    """One group between its start and its training."""

    id: int
    version: int
    """Oldest version of any of its tokens: the confirmed version of the replica that started it."""
    unfinished: int
    """Samples that have not ended."""
    places: dict[int, Place] = field(default_factory=dict)
    """Replica -> samples that it holds."""
    tokens: dict[int, int] = field(default_factory=dict)
    """Sample index -> response tokens, of ended samples."""
    prompt_tokens: int = 0
    attempt: int = 0
    filtered: bool = False
    expired: bool = False
    """Cancelled: dropped as soon as its samples have left their replicas."""


@dataclass(slots=True)
class Core:
    """Context of one ``handle`` call."""

    plan: Plan
    now: float = 0.0
    serial: int = 0
    actions: list[Action] = field(default_factory=list)
    gate_due: bool = False
    """Set by whatever may make borrowing worth a thought: an idle pool, new credit, a phase's end."""

    def next_serial(self) -> int:
        """Return the serial of the next action."""
        self.serial += 1
        return self.serial
