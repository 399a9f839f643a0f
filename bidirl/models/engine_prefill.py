"""One iteration of an engine that holds prefill: admission, chunks, preemption for lack of KV blocks.

Order as in vLLM V1: the running sequences get their tokens and blocks first, the last one is preempted when
blocks run out, and waiting ones are admitted in order only if nobody was preempted in this iteration.
Source: vLLM V1 ``Scheduler.schedule`` (semantics; code ours).
"""

from heapq import heappush

from bidirl.models.engine_ends import complete, finish, start_tool
from bidirl.models.engine_records import Chunk, Decoding, Mark, Partial, Waiting
from bidirl.models.engine_state import SERIAL_BITS, EngineState

__all__ = ["back_to_waiting", "iterate"]


def iterate(state: EngineState, *, admit: bool) -> bool:
    """Run one iteration that holds prefill; return False if it turns out a plain decode, and run nothing.

    Sequences that find no block are preempted either way. ``admit``: waiting ones may enter. (After a
    preemption none could: the blocks that it freed are fewer than its victim needs.)
    """
    pool = state.pool
    size = pool.block_size
    place = state.iteration % size
    context = state.context
    preempted = False
    state.settle()
    while pool.phases[place] > pool.queued - pool.taken:
        context -= _preempt_last(state)
        preempted = True
    need = pool.phases[place]
    pool.taken += need
    num = len(state.decoding)
    budget = state.limits.max_num_batched_tokens - num
    chunks: list[Chunk] = []
    if state.part is not None:
        waiting, done = state.part
        chunk = min(waiting[3] - done, budget)
        blocks = -(-(done + chunk) // size) - -(-done // size)
        if blocks > pool.queued - pool.taken:
            _preempt_last(state)
            preempted = True
        else:
            pool.taken += blocks
            budget -= chunk
            chunks.append((waiting, done, chunk))
    if admit and not preempted:
        _admit_waiting(state, budget, state.limits.max_num_seqs - num - len(chunks), chunks)
    if not chunks:
        pool.taken -= need
        if preempted:
            state.anchor(context)
        return False
    _run_mixed(state, num, context, chunks)
    return True


def _admit_waiting(state: EngineState, budget: int, slots: int, chunks: list[Chunk]) -> None:
    """Admit waiting sequences in order, as far as tokens, slots and KV blocks go."""
    pool = state.pool
    size = pool.block_size
    front = state.front
    queue = state.queue
    admit = pool.admit
    while budget > 0 and slots > 0:
        if front:
            waiting = front[-1]
        elif state.head < len(queue):
            waiting = queue[state.head]
        else:
            return
        tokens = waiting[3]
        done = admit(waiting[0], waiting[1], waiting[2], tokens)
        if done < 0:
            return
        if front:
            front.pop()
        else:
            state.head += 1
        if state.marks is not None:
            state.marks.append((state.time_s, Mark.SCHEDULED, waiting[0]))
        chunk = tokens - done
        chunk = min(chunk, budget)
        pool.taken += -(-(done + chunk) // size) - done // size
        budget -= chunk
        slots -= 1
        chunks.append((waiting, done, chunk))


def _run_mixed(state: EngineState, num: int, context: int, chunks: list[Chunk]) -> None:
    """Run the iteration of ``num`` decoding sequences of ``context`` cached tokens and the prefill chunks.

    A finished prefill emits its first token and decodes from the next iteration on.
    """
    pool = state.pool
    phases = pool.phases
    size = pool.block_size
    decoding = state.decoding
    ends = state.ends
    serial = state.serial
    begin = state.iteration + 1
    tokens = pairs = joining = 0
    again = False
    leaving: list[Waiting] = []
    part: Partial | None = None
    for waiting, done, chunk in chunks:
        seq, group, shared, total, left, old, generated = waiting
        tokens += chunk
        pairs += chunk * done + chunk * (chunk + 1) // 2
        if old > done:
            again = True
        if done + chunk < total:
            part = (waiting, done + chunk)
        elif left == 1:
            leaving.append(waiting)
        else:
            serial += 1
            end = begin + left - 1
            end_context = total + left - 1
            decoding[serial] = (seq, group, shared, end_context, end, generated + left)
            heappush(ends, end << SERIAL_BITS | serial)
            phases[(begin - total) % size] += 1
            joining += total
    state.serial = serial
    num_outputs = num + len(chunks) - (part is not None)
    duration_s = state.model.mixed(tokens, float(pairs), num, context, num_outputs)
    if again:
        _note_recomputed(state, chunks, tokens, pairs, num, context, num_outputs, duration_s)
    state.prefill_tokens += tokens
    state.time_s += duration_s
    state.iteration = begin
    state.decode_tokens += num_outputs
    state.part = part
    if state.marks is not None:
        for waiting, done, chunk in chunks:
            if done + chunk == waiting[3]:
                state.marks.append((state.time_s, Mark.FIRST_TOKEN, waiting[0]))
    context = complete(state, context + num)
    for seq, group, shared, total, _, _, generated in leaving:
        if seq in state.turns and generated + 1 in state.turns[seq]:
            start_tool(state, seq, group, shared, total, generated + 1)
        else:
            finish(state, seq, group, shared, total)
    state.anchor(context + joining)
    state.room = pool.queued - pool.taken
    state.room_iteration = begin
    state.room_num = len(decoding)


def _note_recomputed(
    state: EngineState,
    chunks: list[Chunk],
    tokens: int,
    pairs: int,
    num: int,
    context: int,
    num_outputs: int,
    duration_s: float,
) -> None:
    """Count the recomputed tokens of a mixed iteration and the seconds it would take less without them."""
    redone = redone_pairs = 0
    for waiting, done, chunk in chunks:
        again = min(waiting[5] - done, chunk)
        if again > 0:
            redone += again
            redone_pairs += again * done + again * (again + 1) // 2
    state.recomputed_tokens += redone
    if tokens > redone:
        without_s = state.model.mixed(tokens - redone, float(pairs - redone_pairs), num, context, num_outputs)
    elif num:
        base_s, token_s = state.model.decode(num)
        without_s = base_s + token_s * context
    else:
        without_s = 0.0
    state.recompute_s += duration_s - without_s


def _preempt_last(state: EngineState) -> int:
    """Send the last running sequence back to the head of the queue; return its decoding context."""
    state.num_preemptions += 1
    context = 0
    if state.part is not None:
        waiting, computed = state.part
        state.part = None
        waiting = (*waiting[:5], max(waiting[5], computed), waiting[6])
    else:
        _, record = state.decoding.popitem()
        waiting, computed = back_to_waiting(state, record)
        context = computed
    if state.limits.prefix_caching:
        state.pool.suspend(waiting[0], waiting[1], waiting[2], computed)
    else:
        state.pool.release(waiting[1], waiting[2], computed)
    state.front.append(waiting)
    if state.marks is not None:
        state.marks.append((state.time_s, Mark.PREEMPTED, waiting[0]))
    return context


def back_to_waiting(state: EngineState, record: Decoding) -> tuple[Waiting, int]:
    """Return what a decoding sequence waits for after losing its KV, and its computed tokens."""
    seq, group, shared, end_context, end, generated = record
    left = end - state.iteration
    computed = end_context - left
    state.pool.phases[(end - end_context) % state.pool.block_size] -= 1
    return (seq, group, shared, computed + 1, left, computed, generated - left), computed
