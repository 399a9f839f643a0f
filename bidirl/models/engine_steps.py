"""How an engine moves from event to event."""

from heapq import heappop
from math import inf, sqrt

from bidirl.errors import InvariantBroken
from bidirl.models.engine_ends import complete, return_turns
from bidirl.models.engine_prefill import iterate
from bidirl.models.engine_state import SERIAL_BITS, SERIAL_MASK, EngineState

__all__ = ["advance", "at_floor"]


def advance(state: EngineState, limit_s: float, *, every: bool = False) -> None:
    """Move to the first boundary at or after ``limit_s``, or to the first completed group.

    ``every``: do not stop at completed groups. An idle engine's clock stays where it became idle.
    """
    while state.time_s < limit_s and (every or not state.ready):
        if not _move(state, limit_s):
            return


def at_floor(state: EngineState, now: float) -> EngineState:
    """Return a copy moved to the last boundary at or before ``now``."""
    state = state.copy()
    while state.time_s < now:
        return_turns(state)
        before = state.copy()
        moved = _move(state, now)
        if state.time_s > now:
            last = state.iteration - 1
            while before.iteration < last:
                if not _decode(before, inf, most=last - before.iteration):
                    iterate(before, admit=False)
            return before
        if not moved:
            break
    return state


def _move(state: EngineState, limit_s: float) -> bool:
    """Move by one event; return False where nothing is left to do before ``limit_s``."""
    timed = state.timed
    if timed:
        return_turns(state)
    waiting = state.front or state.head < len(state.queue)
    if not state.decoding and state.part is None and not waiting:
        state.close_busy()
        if not timed or timed[0][0] >= limit_s:
            return False
        state.time_s = timed[0][0]
        state.anchor(0)
        return True
    if state.busy_from_s < 0:
        state.busy_from_s = state.time_s
    if state.part is None and (not waiting or len(state.decoding) == state.limits.max_num_seqs):
        if _decode(state, limit_s, quiet=not waiting):
            return True
        iterate(state, admit=False)
    elif iterate(state, admit=True):
        return True
    if not _decode(state, limit_s):
        raise InvariantBroken(f"engine stalled at {state.time_s} s: nothing runs and nothing can be admitted")
    return True


def _decode(state: EngineState, limit_s: float, *, quiet: bool = False, most: int = 1 << 60) -> bool:
    """Run pure decode iterations up to the next completion, full KV memory, arrival or ``limit_s``.

    Return False, having run none, where the next one finds no KV block for some sequence.
    ``quiet``: nobody waits, so go on from completion to completion until a group is complete.
    ``most``: run at most so many iterations.
    """
    decoding = state.decoding
    ends = state.ends
    if not decoding:
        return False
    size = state.pool.block_size
    costs_of = state.decode_costs
    iteration = state.iteration
    timed = state.timed
    moved = False
    while True:
        while ends[0] & SERIAL_MASK not in decoding:
            heappop(ends)
        num = len(decoding)
        until = ends[0] >> SERIAL_BITS
        if until - iteration > most:
            until = iteration + most
        if state.room_num * ((until - state.room_iteration) // size + 1) > state.room:
            state.settle()
            until = min(until, iteration + state.pool.num_iterations_that_fit(iteration, num))
            if until == iteration:
                return moved
        costs = costs_of.get(num)
        if costs is None:
            costs = costs_of[num] = state.model.decode(num)
        base_s, token_s = costs
        context = state.anchor_context
        n = until - state.anchor_iteration
        time_s = state.anchor_s + (n * base_s + token_s * (n * context + num * (n * (n - 1) // 2)))
        stop_s = timed[0][0] if timed and timed[0][0] < limit_s else limit_s
        if time_s > stop_s:
            n = _last_until(state, stop_s, n, base_s, token_s)
            time_s = state.anchor_s + (n * base_s + token_s * (n * context + num * (n * (n - 1) // 2)))
            until = state.anchor_iteration + n
        state.decode_tokens += num * (until - iteration)
        state.iteration = iteration = until
        state.time_s = time_s
        moved = True
        if ends[0] >> SERIAL_BITS == iteration:
            state.anchor_context = complete(state, context + num * n)
            state.anchor_iteration = iteration
            state.anchor_s = time_s
            if quiet and decoding and not state.ready and not timed and time_s < limit_s:
                continue
        return True


def _last_until(state: EngineState, stop_s: float, n: int, base_s: float, token_s: float) -> int:
    """Return the iterations from the anchor, of at most ``n``, to the first boundary at or after ``stop_s``.

    The quadratic gives a guess, comparison with the very expression of the clock settles it.
    """
    num = len(state.decoding)
    start_s = state.anchor_s
    context = state.anchor_context
    first = state.iteration - state.anchor_iteration

    def at(m: int) -> float:
        return start_s + (m * base_s + token_s * (m * context + num * (m * (m - 1) // 2)))

    half = 0.5 * token_s * num
    linear = base_s + token_s * context - half
    root = linear * linear + 4.0 * half * (stop_s - start_s)
    guess = (sqrt(root) - linear) / (2.0 * half) if half > 0 else (stop_s - start_s) / linear
    n = min(max(int(guess) + 1, first + 1), n)
    while n > first + 1 and at(n - 1) >= stop_s:
        n -= 1
    while at(n) < stop_s:
        n += 1
    return n
