"""How a sequence of an engine ends its turn: it leaves, or goes to its tool and comes back."""

from heapq import heappop, heappush

from bidirl.models.engine_state import SERIAL_BITS, SERIAL_MASK, EngineState

__all__ = ["complete", "finish", "return_turns", "start_tool"]


def complete(state: EngineState, context: int) -> int:
    """Finish the turns that end at this boundary; return the remaining context of ``context``."""
    iteration = state.iteration
    ends = state.ends
    decoding = state.decoding
    phases = state.pool.phases
    size = state.pool.block_size
    turns = state.turns
    while ends and ends[0] >> SERIAL_BITS == iteration:
        record = decoding.pop(heappop(ends) & SERIAL_MASK, None)
        if record is None:
            continue
        seq, group, shared, end_context, _, generated = record
        phases[(iteration - end_context) % size] -= 1
        context -= end_context
        if turns and seq in turns and generated in turns[seq]:
            start_tool(state, seq, group, shared, end_context, generated)
        else:
            finish(state, seq, group, shared, end_context)
    return context


def start_tool(state: EngineState, seq: int, group: int, shared: int, computed: int, generated: int) -> None:
    """Send a sequence away to its tool: its KV blocks are freed, cached as long as nobody takes them."""
    tool_tokens, tool_s, left = state.turns[seq][generated]
    if state.limits.prefix_caching:
        state.pool.suspend(seq, group, shared, computed)
    else:
        state.pool.release(group, shared, computed)
    back = (seq, group, shared, computed + 1 + tool_tokens, left, computed, generated)
    state.serial += 1
    heappush(state.timed, (state.time_s + tool_s, state.serial, back))


def finish(state: EngineState, seq: int, group: int, shared: int, computed: int) -> None:
    """Let a finished sample leave, and note its group if it was the last one here."""
    state.pool.release(group, shared, computed)
    state.num_unfinished -= 1
    state.finished.append((seq, state.time_s))
    unfinished, finished = state.groups[group]
    if unfinished > 1:
        state.groups[group] = (unfinished - 1, (*finished, seq))
    else:
        del state.groups[group]
        state.pool.cached_groups.pop(group, None)
        state.ready.append((state.time_s, group, (*finished, seq)))


def return_turns(state: EngineState) -> None:
    """Queue the sequences whose tools have answered by now."""
    timed = state.timed
    while timed and timed[0][0] <= state.time_s:
        state.queue.append(heappop(timed)[2])
