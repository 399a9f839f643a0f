"""KV blocks of one engine: who holds how many, and what the prefix cache still remembers.

Only counts are kept, never block numbers. vLLM's free blocks form a queue: allocation takes its head (and
forgets what the block cached), a freed sequence appends its blocks last block first. So a block's fate
depends on its *place in the queue* alone, and two running totals say everything: block ``i`` of the queue
has been overwritten as soon as ``taken > i``. A sequence that leaves with its blocks cached is one pair
``(start, count)`` of queue places, and the part of its prefix that survives is a subtraction.

Source: vLLM V1 ``vllm/v1/core/kv_cache_manager.py`` and ``block_pool.py`` (semantics; code ours).
"""

from operator import mul

__all__ = ["BlockPool"]


class BlockPool:
    """Count the KV blocks of one engine, with vLLM's prefix cache and its eviction order.

    The prompt's full blocks of a group are shared by its resident sequences and counted once. Decoding
    sequences are known by the iteration number (modulo the block size) at which they need a block.
    """

    __slots__ = (
        "block_size", "cached_groups", "cached_seqs", "doubled", "num_blocks", "phases", "queued", "shared",
        "taken",
    )  # fmt: skip

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.taken = 0
        """Blocks taken from the head of the free queue since the start, as of the last ``settle``."""
        self.queued = num_blocks
        """Blocks ever appended to the free queue, less those that left it by a cache hit."""
        self.phases = [0] * block_size
        """``phases[r]``: decoding sequences that need a new block at iterations = r modulo block_size."""
        self.shared: dict[int, int] = {}
        """Resident sequences of a group, by group."""
        self.doubled = 0
        """Shared blocks counted once per resident sequence, less once per group."""
        self.cached_groups: dict[int, tuple[int, int]] = {}
        self.cached_seqs: dict[int, tuple[int, int]] = {}

    def copy(self) -> "BlockPool":
        """Return an independent copy."""
        new = BlockPool.__new__(BlockPool)
        new.num_blocks = self.num_blocks
        new.block_size = self.block_size
        new.taken = self.taken
        new.queued = self.queued
        new.phases = self.phases[:]
        new.shared = self.shared.copy()
        new.doubled = self.doubled
        new.cached_groups = self.cached_groups.copy()
        new.cached_seqs = self.cached_seqs.copy()
        return new

    @property
    def num_free(self) -> int:
        """Return the blocks that nobody held (cached ones included) at the last ``settle``."""
        return self.queued - self.taken

    def admit(self, seq: int, group: int, shared_blocks: int, total_tokens: int) -> int:
        """Return the tokens that the cache already holds for a sequence, or -1 if it does not fit.

        The whole context of ``total_tokens`` must fit into the free blocks (vLLM: the full input sequence
        is checked at admission, ``scheduler_reserve_full_isl``), but only the hits are taken here: the
        caller takes the rest chunk by chunk. ``shared_blocks`` = full blocks of the group's prompt.
        """
        size = self.block_size
        residents = self.shared.get(group, 0)
        required = -(-total_tokens // size)
        if residents:
            required -= shared_blocks
        if required > self.queued - self.taken:
            return -1
        if shared_blocks:
            self.shared[group] = residents + 1
            if residents:
                hits = shared_blocks
                self.doubled += shared_blocks
            else:
                hits = self._revive(self.cached_groups, group)
        else:
            hits = 0
        if self.cached_seqs:
            if hits == shared_blocks:
                hits += self._revive(self.cached_seqs, seq)
            else:
                self.cached_seqs.pop(seq, None)
        return hits * size

    def _revive(self, cached: dict[int, tuple[int, int]], key: int) -> int:
        """Take the surviving prefix of an entry out of the free queue and return its blocks."""
        entry = cached.pop(key, None)
        if entry is None:
            return 0
        start, count = entry
        hits = min(count, start + count - self.taken)
        if hits <= 0:
            return 0
        for entries in (self.cached_groups, self.cached_seqs):
            for other, (place, num) in entries.items():
                if place > start:
                    entries[other] = (place - hits, num)
        self.queued -= hits
        return hits

    def suspend(self, seq: int, group: int, shared_blocks: int, computed_tokens: int) -> None:
        """Free a sequence as ``release`` does, and remember its own full blocks for its return."""
        size = self.block_size
        full = computed_tokens // size - shared_blocks
        if full > 0:
            self.cached_seqs[seq] = (self.queued + -(-computed_tokens // size) - shared_blocks - full, full)
        self.release(group, shared_blocks, computed_tokens)

    def release(self, group: int, shared_blocks: int, computed_tokens: int) -> None:
        """Free a sequence that holds blocks for ``computed_tokens``.

        The blocks enter the free queue last first, the shared ones after the last resident of the group;
        those stay cached until they are overwritten.
        """
        size = self.block_size
        held = -(-computed_tokens // size)
        if held > shared_blocks:
            self.queued += held - shared_blocks
        if not shared_blocks:
            return
        residents = self.shared[group] - 1
        if residents:
            self.shared[group] = residents
            self.doubled -= shared_blocks
            return
        del self.shared[group]
        prompt = min(held, shared_blocks)
        full = min(computed_tokens // size, shared_blocks)
        self.cached_groups[group] = (self.queued + prompt - full, full)
        self.queued += prompt

    def forget(self) -> None:
        """Drop everything that is cached but not held (the weights have changed)."""
        self.cached_groups.clear()
        self.cached_seqs.clear()

    def settle(self, iteration: int, context_tokens: int, part_tokens: int) -> int:
        """Bring ``taken`` up to date at an iteration and return the free blocks.

        Blocks that decoding sequences take are not counted one by one: what is held follows from their
        summed context and its phases, since ``sum(ceil(c / size)) = (sum(c) + sum(-c mod size)) / size``.
        ``part_tokens`` are held by the sequence in prefill.
        """
        size = self.block_size
        place = iteration % size
        phases = self.phases
        padding: int = sum(map(mul, phases[place:] + phases[:place], range(size)))
        held = (context_tokens + padding) // size - self.doubled - (-part_tokens // size)
        free = self.num_blocks - held
        self.taken = self.queued - free
        return free

    def num_iterations_that_fit(self, iteration: int, num_seqs: int) -> int:
        """Return how many decode iterations the free blocks allow, exactly; ``taken`` must be up to date."""
        size = self.block_size
        cycles, rest = divmod(self.queued - self.taken, num_seqs)
        phases = self.phases
        place = iteration % size
        num = 0
        while num < size and phases[place] <= rest:
            rest -= phases[place]
            num += 1
            place = place + 1 if place + 1 < size else 0
        return cycles * size + num
