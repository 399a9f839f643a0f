"""A rollout replica: one continuous-batching engine, moved from event to event.

The semantics are those of vLLM's V1 scheduler (chunked prefill under a token budget, FIFO admission, KV
blocks on demand, preemption of the last running sequence with recomputation, prefix caching); the time of
an iteration comes from an ``IterationModel``. Iterations without prefill are summed in closed form up to
the next completion, full KV memory or timed arrival, so the cost per event is O(log b) and nothing is done
per token.

A replica *runs ahead*: ``peek`` computes the next group completion on a copy of the state; ``pop`` adopts
the copy; any interruption throws it away and moves the committed state to the first iteration boundary at
or after the interruption. The committed state is a function of the mutating calls alone, so results do not
depend on whether or how often ``peek`` ran, bit for bit.

Source: vLLM V1 ``vllm/v1/core/sched/scheduler.py`` (semantics; code ours), design.md section 6.
"""

from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass
from math import inf

from bidirl.errors import InputError
from bidirl.models.engine_control import progress, restart, take_out
from bidirl.models.engine_limits import EngineLimits
from bidirl.models.engine_records import Mark, Turn, Waiting, following_turns, place_in_turns
from bidirl.models.engine_state import EngineState
from bidirl.models.engine_steps import advance, at_floor
from bidirl.models.iteration import IterationModel

__all__ = ["EngineLimits", "Mark", "Replica", "Request", "Turn"]

QUEUE_SLACK = 1024
"""Admitted requests kept at the head of the queue before it is cut: a look-ahead shares the list."""


@dataclass(slots=True)
class Request:
    """One sample for an engine: ``generated_tokens > 0`` resumes a prefix (its KV is computed again)."""

    seq: int
    group: int
    prompt_tokens: int
    generated_tokens: int
    target_tokens: int
    turns: tuple[Turn, ...] | None = None
    """Turns whose generated tokens sum to ``target_tokens``; None = one turn."""


class Replica:
    """One engine on the simulated clock; all times are absolute seconds.

    ``submit``, ``pop``, ``preempt``, ``pause`` and ``resume`` change the state; ``peek``, ``boundary`` and
    ``progress`` do not. Calls must come in non-decreasing time. An interruption acts at an iteration
    boundary, so the state may stand up to one iteration after the caller's clock.
    """

    def __init__(self, iteration: IterationModel, limits: EngineLimits, *, trace: bool = False) -> None:
        """Build an idle replica; ``trace`` keeps a mark per scheduling, first token and preemption."""
        self.limits = limits
        self._state = EngineState(iteration, limits, trace=trace)
        self._ahead: EngineState | None = None
        self._paused = False
        self._finished: list[tuple[int, float]] = []
        self._busy: list[tuple[float, float]] = []
        self._busy_reported_s = -inf
        self._marks: list[tuple[float, Mark, int]] = []

    def twin(self) -> "Replica":
        """Return an independent engine in the same state, with the same left to be drained."""
        self._drain(self._state)
        twin = copy(self)
        twin._state = self._state.copy()
        # a look-ahead may share these two, a twin that lives on may not
        twin._state.queue = list(self._state.queue)
        twin._state.turns = dict(self._state.turns)
        twin._ahead = None
        twin._finished, twin._busy, twin._marks = list(self._finished), list(self._busy), list(self._marks)
        return twin

    # -- events -------------------------------------------------------------------------------------

    def submit(self, now: float, requests: Sequence[Request], *, front: bool = False) -> None:
        """Queue requests at ``now``; ``front`` puts them before everything that waits, in their order.

        Raise InputError for a request that can never fit into the KV memory, ValueError for a malformed one.
        """
        state = self._interrupt(now)
        size = self.limits.block_size
        capacity = state.pool.num_blocks * size
        caching = self.limits.prefix_caching
        queued: list[Waiting] = []
        for request in requests:
            seq = request.seq
            prompt = request.prompt_tokens
            done = request.generated_tokens
            target = request.target_tokens
            if not 0 <= done < target or prompt < 1:
                raise ValueError(
                    f"sequence {seq}: prompt {prompt} >= 1 and 0 <= generated {done} < target {target}"
                )
            context = prompt + done
            left = target - done
            needed = prompt + target - 1
            if request.turns is not None:
                context, left, needed = place_in_turns(prompt, done, request.turns)
            if needed > capacity:
                raise InputError(
                    f"sequence {seq} needs {needed} KV tokens, more than the engine's {capacity}: "
                    "shorten it or give the engine more KV memory"
                )
            shared = (prompt - 1) // size if caching else 0
            queued.append((seq, request.group, shared, context, left, context - 1 if done else 0, done))
        groups = state.groups
        for waiting in queued:
            unfinished, finished = groups.get(waiting[1], (0, ()))
            groups[waiting[1]] = (unfinished + 1, finished)
        for request in requests:
            if request.turns is not None:
                state.turns[request.seq] = following_turns(request.turns)
        state.num_unfinished += len(queued)
        if front:
            queued.reverse()
            state.front.extend(queued)
        else:
            state.queue.extend(queued)

    def peek(self) -> float:
        """Return the time at which the next group is complete here, inf if none will be."""
        state = self._state
        if state.ready:
            return state.ready[0][0]
        if self._paused:
            return inf
        ahead = self._ahead
        if ahead is None:
            ahead = self._ahead = state.copy()
            advance(ahead, inf)
        return ahead.ready[0][0] if ahead.ready else inf

    def peek_group(self) -> int:
        """Return the group whose completion ``peek`` announces; ValueError if there is none."""
        if self.peek() == inf:
            raise ValueError("no group will complete on this replica: check peek() first")
        ready = self._state.ready or (self._ahead.ready if self._ahead is not None else [])
        return ready[0][1]

    def pop(self) -> tuple[float, int, list[int]]:
        """Commit to the next group completion: (time, group, its samples finished on this replica)."""
        if self.peek() == inf:
            raise ValueError("no group will complete on this replica: check peek() first")
        if not self._state.ready and self._ahead is not None:
            self._commit(self._ahead)
        time_s, group, finished = self._state.ready.pop(0)
        return time_s, group, list(finished)

    def boundary(self, now: float) -> float:
        """Return the first iteration boundary at or after ``now`` (``now`` itself if nothing runs)."""
        state = self._state
        if self._paused or state.time_s >= now:
            return max(now, state.time_s)
        ahead = state.copy()
        advance(ahead, now, every=True)
        return max(now, ahead.time_s)

    def preempt(
        self, now: float, groups: Collection[int] | None = None, *, seqs: Collection[int] | None = None
    ) -> tuple[float, list[tuple[int, int]], list[int]]:
        """Take sequences out of the engine at the next boundary: of ``groups``, or ``seqs``, or all.

        Return (boundary time, [(seq, generated tokens)] of the unfinished ones taken out, in running then
        waiting order, [finished seqs whose group was not reported yet]). The finished samples of a group
        are handed over with its last unfinished one; until then they stay and are reported by ``pop``.
        """
        state = self._interrupt(now)
        taken = take_out(state, groups, seqs)
        touched = {group for _, group, _ in taken}
        handed: list[int] = []
        for group in [g for g, (left, _) in state.groups.items() if left == 0 and g in touched]:
            handed.extend(state.groups.pop(group)[1])
            state.pool.cached_groups.pop(group, None)
        kept = []
        for entry in state.ready:
            if seqs is None and (groups is None or entry[1] in groups):
                handed.extend(entry[2])
            else:
                kept.append(entry)
        state.ready = kept
        return state.time_s, [(seq, generated) for seq, _, generated in taken], handed

    def pause(self, now: float) -> float:
        """Stop at the next boundary and return it; nothing runs until ``resume``."""
        state = self._interrupt(now)
        state.close_busy()
        self._paused = True
        return state.time_s

    def resume(self, now: float, *, recompute: bool) -> None:
        """Run on from ``now``.

        ``recompute``: the weights have changed, so every resident sequence computes its whole context again
        and the prefix cache is dropped. As vLLM's ``reset_prefix_cache(reset_running_requests=True)`` does,
        the running sequences go to the front of the waiting queue in running order.
        """
        if not self._paused:
            self._interrupt(now)
        self._paused = False
        self._ahead = None
        restart(self._state, now, recompute=recompute)

    def progress(self, now: float) -> list[tuple[int, int]]:
        """Return (seq, generated tokens) of the unfinished sequences at the last boundary <= ``now``.

        Where an earlier interruption has already moved the state beyond ``now`` (less than one iteration),
        the figures are those of that boundary.
        """
        state = self._state
        if state.time_s < now and not self._paused:
            state = at_floor(state, now)
        return progress(state)

    # -- internals ----------------------------------------------------------------------------------

    def _interrupt(self, now: float) -> EngineState:
        """Move the committed state to the first boundary at or after ``now`` and return it."""
        state = self._state
        self._ahead = None
        if self._paused:
            state.time_s = max(state.time_s, now)
        elif state.time_s < now:
            advance(state, now, every=True)
            self._drain(state)
            state.idle_until(now)
            if state.head > QUEUE_SLACK and 2 * state.head > len(state.queue):
                state.queue = state.queue[state.head :]
                state.head = 0
        return state

    def _commit(self, ahead: EngineState) -> None:
        self._drain(self._state)
        self._drain(ahead)
        self._state = ahead
        self._ahead = None

    def _drain(self, state: EngineState) -> None:
        if state.turns:
            for seq, _ in state.finished:
                state.turns.pop(seq, None)
        self._finished.extend(state.finished)
        state.finished.clear()
        self._busy.extend(state.busy)
        state.busy.clear()
        if state.marks:
            self._marks.extend(state.marks)
            state.marks.clear()

    # -- figures, all as of the last committed event -------------------------------------------------

    def take_finished(self) -> list[tuple[int, float]]:
        """Return and forget the (seq, finish time) of the samples finished since the last call."""
        self._drain(self._state)
        taken, self._finished = self._finished, []
        return taken

    def take_busy(self) -> list[tuple[float, float]]:
        """Return and forget the intervals with an iteration running; a call cuts the running one in two."""
        state = self._state
        self._drain(state)
        if state.busy_from_s >= 0:
            self._busy.append((state.busy_from_s, state.time_s))
        reported_s = self._busy_reported_s
        taken = [(max(start, reported_s), end) for start, end in self._busy if end > max(start, reported_s)]
        self._busy = []
        if taken:
            self._busy_reported_s = taken[-1][1]
        return taken

    def take_marks(self) -> list[tuple[float, Mark, int]]:
        """Return and forget the (time, mark, seq) of the trace."""
        self._drain(self._state)
        taken, self._marks = self._marks, []
        return taken

    @property
    def time_s(self) -> float:
        """Return the boundary at which the committed state stands."""
        return self._state.time_s

    @property
    def num_running(self) -> int:
        """Return the sequences that hold KV blocks."""
        return self._state.num_running

    @property
    def num_waiting(self) -> int:
        """Return the queued sequences, those whose tool is working included."""
        return self._state.num_unfinished - self._state.num_running

    @property
    def num_unfinished(self) -> int:
        """Return all sequences that have not emitted their last token."""
        return self._state.num_unfinished

    @property
    def kv_used_tokens(self) -> int:
        """Return the tokens of the KV blocks in use."""
        state = self._state
        return (state.pool.num_blocks - state.num_free_blocks) * self.limits.block_size

    @property
    def busy_s(self) -> float:
        """Return the seconds with an iteration running."""
        return self._state.total_busy_s

    @property
    def decode_tokens(self) -> int:
        """Return the tokens emitted so far, first tokens included."""
        return self._state.decode_tokens

    @property
    def prefill_tokens(self) -> int:
        """Return the context tokens computed so far (cache hits are not)."""
        return self._state.prefill_tokens

    @property
    def recomputed_tokens(self) -> int:
        """Return the part of ``prefill_tokens`` that had been computed before, here or elsewhere."""
        return self._state.recomputed_tokens

    @property
    def recompute_s(self) -> float:
        """Return the seconds that recomputation added, each iteration against itself without it."""
        return self._state.recompute_s

    @property
    def num_preemptions(self) -> int:
        """Return how often the engine preempted a sequence for lack of KV blocks."""
        return self._state.num_preemptions

    @property
    def num_iterations(self) -> int:
        """Return the engine iterations so far."""
        return self._state.iteration
