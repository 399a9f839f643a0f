"""What a driver does to an engine: take sequences out, go on after a pause, ask how far each one is."""

from collections.abc import Collection

from bidirl.models.engine_prefill import back_to_waiting
from bidirl.models.engine_state import EngineState

__all__ = ["progress", "restart", "take_out"]


def restart(state: EngineState, now: float, *, recompute: bool) -> None:
    """Go on at ``now`` after a pause, with the KV of the running sequences dropped if ``recompute``."""
    context = state.context
    state.time_s = max(state.time_s, now)
    if recompute:
        context = 0
        if state.part is not None:
            waiting, computed = state.part
            state.pool.release(waiting[1], waiting[2], computed)
            state.front.append((*waiting[:5], max(waiting[5], computed), waiting[6]))
            state.part = None
        for record in reversed(state.decoding.values()):
            waiting, computed = back_to_waiting(state, record)
            state.pool.release(waiting[1], waiting[2], computed)
            state.front.append(waiting)
        state.decoding.clear()
        state.ends.clear()
        state.pool.forget()
    state.anchor(context)


def progress(state: EngineState) -> list[tuple[int, int]]:
    """Return (seq, generated tokens) of the unfinished sequences in running, then waiting order."""
    iteration = state.iteration
    found = [(record[0], record[5] - (record[4] - iteration)) for record in state.decoding.values()]
    if state.part is not None:
        found.append((state.part[0][0], state.part[0][6]))
    found += [(waiting[0], waiting[6]) for waiting in reversed(state.front)]
    found += [(waiting[0], waiting[6]) for waiting in state.queue[state.head :]]
    found += [(waiting[0], waiting[6]) for _, _, waiting in sorted(state.timed)]
    return found


def take_out(
    state: EngineState, groups: Collection[int] | None, seqs: Collection[int] | None
) -> list[tuple[int, int, int]]:
    """Remove sequences (of ``groups``, else ``seqs``, else all); return (seq, group, generated)."""

    def wanted(seq: int, group: int) -> bool:
        if groups is not None:
            return group in groups
        return seqs is None or seq in seqs

    pool = state.pool
    context = state.context
    num_decoding = len(state.decoding)
    taken: list[tuple[int, int, int]] = []
    for serial, record in [(s, r) for s, r in state.decoding.items() if wanted(r[0], r[1])]:
        del state.decoding[serial]
        waiting, computed = back_to_waiting(state, record)
        context -= computed
        pool.release(waiting[1], waiting[2], computed)
        taken.append((waiting[0], waiting[1], waiting[6]))
    if state.part is not None and wanted(state.part[0][0], state.part[0][1]):
        waiting, computed = state.part
        pool.release(waiting[1], waiting[2], computed)
        taken.append((waiting[0], waiting[1], waiting[6]))
        state.part = None
    out = [w for w in reversed(state.front) if wanted(w[0], w[1])]
    state.front = [w for w in state.front if not wanted(w[0], w[1])]
    out += [w for w in state.queue[state.head :] if wanted(w[0], w[1])]
    state.queue = [w for w in state.queue[state.head :] if not wanted(w[0], w[1])]
    state.head = 0
    out += [w for _, _, w in sorted(state.timed) if wanted(w[0], w[1])]
    state.timed = sorted(t for t in state.timed if not wanted(t[2][0], t[2][1]))
    taken += [(w[0], w[1], w[6]) for w in out]
    for seq, group, _ in taken:
        pool.cached_seqs.pop(seq, None)
        state.turns.pop(seq, None)
        unfinished, finished = state.groups[group]
        state.groups[group] = (unfinished - 1, finished)
    state.num_unfinished -= len(taken)
    if len(state.decoding) != num_decoding:
        state.anchor(context)
    return taken
