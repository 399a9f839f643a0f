"""The state of one engine between two iterations.

``iteration`` counts the iterations so far. A decoding sequence is an immutable tuple that says at which
iteration its turn ends and how many tokens are computed by then, so that nothing about it changes while it
decodes: its context at iteration K is ``end_context - (end - K)``. While the set of decoding sequences
stays the same, time is a closed form of the iterations since an anchor (time, iteration, context), never a
running sum, so stopping in between does not change a bit.
"""

from bidirl.models.engine_limits import EngineLimits
from bidirl.models.engine_records import Decoding, Mark, Partial, Waiting
from bidirl.models.iteration import IterationModel
from bidirl.models.kv import BlockPool

__all__ = ["SERIAL_BITS", "SERIAL_MASK", "EngineState"]

SERIAL_BITS = 32
"""Heap codes are ``end iteration << 32 | serial``; serials number admissions: they are the running order."""
SERIAL_MASK = (1 << SERIAL_BITS) - 1


class EngineState:
    """Everything that one engine knows; ``copy`` is cheap, so that a caller can look ahead."""

    __slots__ = (
        "anchor_context", "anchor_iteration", "anchor_s", "busy", "busy_from_s", "closed_busy_s",
        "decode_costs", "decode_tokens", "decoding", "ends", "finished", "front", "groups", "head",
        "iteration", "limits", "marks", "model", "num_preemptions", "num_unfinished", "part", "pool",
        "prefill_tokens", "queue", "ready", "recompute_s", "recomputed_tokens", "room", "room_iteration",
        "room_num", "serial", "time_s", "timed", "turns",
    )  # fmt: skip

    def __init__(self, model: IterationModel, limits: EngineLimits, *, trace: bool) -> None:
        self.model = model
        self.limits = limits
        self.decode_costs: dict[int, tuple[float, float]] = {}
        """What ``model.decode`` has answered so far, by number of sequences."""
        self.pool = BlockPool(limits.num_blocks, limits.block_size)
        self.time_s = 0.0
        self.iteration = 0
        self.anchor_s = 0.0
        self.anchor_iteration = 0
        self.anchor_context = 0
        self.serial = 0
        self.decoding: dict[int, Decoding] = {}
        """By serial, hence in running order; all of them run before ``part``."""
        self.ends: list[int] = []
        """Heap of the decoding sequences' ends; codes of preempted ones stay until they surface."""
        self.room = 0
        """Free blocks at ``room_iteration``, with ``room_num`` decoding sequences then."""
        self.room_iteration = 0
        self.room_num = 0
        self.part: Partial | None = None
        """The one sequence whose prefill is not complete: the budget leaves no second one."""
        self.front: list[Waiting] = []
        """Sequences before the queue, the next one last."""
        self.queue: list[Waiting] = []
        self.head = 0
        self.timed: list[tuple[float, int, Waiting]] = []
        """Heap of the sequences whose tools are working: (return time, serial, sequence)."""
        self.turns: dict[int, dict[int, tuple[int, float, int]]] = {}
        """By sequence: ``following_turns`` of the unfinished several-turn samples."""
        self.groups: dict[int, tuple[int, tuple[int, ...]]] = {}
        """By group: (unfinished samples here, finished ones in order)."""
        self.ready: list[tuple[float, int, tuple[int, ...]]] = []
        self.finished: list[tuple[int, float]] = []
        self.busy: list[tuple[float, float]] = []
        self.busy_from_s = -1.0
        self.closed_busy_s = 0.0
        self.marks: list[tuple[float, Mark, int]] | None = [] if trace else None
        self.num_unfinished = 0
        self.decode_tokens = 0
        self.prefill_tokens = 0
        self.recomputed_tokens = 0
        self.recompute_s = 0.0
        self.num_preemptions = 0

    def copy(self) -> "EngineState":
        """Return an independent copy with nothing left to drain."""
        new = EngineState.__new__(EngineState)
        new.model = self.model
        new.decode_costs = self.decode_costs
        new.limits = self.limits
        new.pool = self.pool.copy()
        new.time_s = self.time_s
        new.iteration = self.iteration
        new.anchor_s = self.anchor_s
        new.anchor_iteration = self.anchor_iteration
        new.anchor_context = self.anchor_context
        new.serial = self.serial
        new.decoding = self.decoding.copy()
        new.ends = self.ends[:]
        new.room = self.room
        new.room_iteration = self.room_iteration
        new.room_num = self.room_num
        new.part = self.part
        new.front = self.front[:]
        # Only returning turns append to the queue while it moves: without them the list can be shared.
        new.queue = self.queue[:] if self.turns else self.queue
        new.head = self.head
        new.timed = self.timed[:]
        new.turns = self.turns
        new.groups = self.groups.copy()
        new.ready = self.ready[:]
        new.finished = []
        new.busy = []
        new.busy_from_s = self.busy_from_s
        new.closed_busy_s = self.closed_busy_s
        new.marks = None if self.marks is None else []
        new.num_unfinished = self.num_unfinished
        new.decode_tokens = self.decode_tokens
        new.prefill_tokens = self.prefill_tokens
        new.recomputed_tokens = self.recomputed_tokens
        new.recompute_s = self.recompute_s
        new.num_preemptions = self.num_preemptions
        return new

    # -- figures ------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Return the sequences that hold KV blocks."""
        return len(self.decoding) + (self.part is not None)

    @property
    def total_busy_s(self) -> float:
        """Return the seconds with an iteration running."""
        open_s = self.time_s - self.busy_from_s if self.busy_from_s >= 0 else 0.0
        return self.closed_busy_s + open_s

    @property
    def context(self) -> int:
        """Return the cached tokens of the decoding sequences."""
        return self.anchor_context + len(self.decoding) * (self.iteration - self.anchor_iteration)

    @property
    def num_free_blocks(self) -> int:
        """Return the KV blocks that nobody holds."""
        part_tokens = 0 if self.part is None else self.part[1]
        return self.pool.settle(self.iteration, self.context, part_tokens)

    # -- bookkeeping

    def anchor(self, context: int) -> None:
        """Start a new closed form here, with ``context`` cached tokens of decoding sequences."""
        self.anchor_s = self.time_s
        self.anchor_iteration = self.iteration
        self.anchor_context = context

    def settle(self) -> None:
        """Count the free KV blocks; until the next count, a bound is enough."""
        part_tokens = 0 if self.part is None else self.part[1]
        self.room = self.pool.settle(self.iteration, self.context, part_tokens)
        self.room_iteration = self.iteration
        self.room_num = len(self.decoding)

    def close_busy(self) -> None:
        """End the busy interval at this boundary."""
        if self.busy_from_s >= 0:
            self.busy.append((self.busy_from_s, self.time_s))
            self.closed_busy_s += self.time_s - self.busy_from_s
            self.busy_from_s = -1.0

    def idle_until(self, now: float) -> None:
        """Move an idle engine's clock to ``now``."""
        if self.time_s < now:
            self.close_busy()
            self.time_s = now
            self.anchor(0)
