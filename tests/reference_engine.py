"""A naive engine for tests: one loop pass per iteration, one object per sequence and per KV block.

It shares no code with ``bidirl.models.replica`` and keeps real block lists, a real free queue and a real
prefix-cache map, as vLLM does, where the replica keeps counts.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from bidirl.models.iteration import IterationModel
from bidirl.models.replica import EngineLimits, Request

Key = tuple[str, int, int]


@dataclass(eq=False)
class Sample:
    """One sample and the state of its computation."""

    seq: int
    group: int
    prompt: int
    generated: int
    target: int
    context: int
    stops: list[tuple[int, int, float]]
    computed: int = 0
    old: int = 0
    blocks: list[int] = field(default_factory=list)
    started: bool = False

    @property
    def tokens(self) -> int:
        return self.context


class ReferenceEngine:
    """Step a vLLM-like engine iteration by iteration."""

    def __init__(self, iteration: IterationModel, limits: EngineLimits) -> None:
        self.model = iteration
        self.limits = limits
        self.time = 0.0
        num_blocks = limits.kv_tokens // limits.block_size - 1
        self.free: OrderedDict[int, None] = OrderedDict((i, None) for i in range(num_blocks))
        self.refs: dict[int, int] = dict.fromkeys(self.free, 0)
        self.key_of: dict[int, Key] = {}
        self.cache: dict[Key, int] = {}
        self.running: list[Sample] = []
        self.waiting: list[Sample] = []
        self.away: list[tuple[float, int, Sample]] = []
        self.num_away = 0
        self.left: dict[int, int] = {}
        self.done: dict[int, list[int]] = {}
        self.finished: list[tuple[int, float]] = []
        self.groups_done: list[tuple[float, int, list[int]]] = []
        self.num_preemptions = 0
        self.num_iterations = 0
        self.decode_tokens = 0
        self.prefill_tokens = 0
        self.recomputed_tokens = 0
        self.busy = 0.0
        self.paused = False

    # -- blocks
    def keys(self, s: Sample) -> list[Key]:
        size = self.limits.block_size
        shared = (s.prompt - 1) // size
        return [("g", s.group, j) if j < shared else ("s", s.seq, j) for j in range(s.tokens // size + 1)]

    def hits(self, s: Sample) -> list[int]:
        if not self.limits.prefix_caching:
            return []
        found: list[int] = []
        for key in self.keys(s)[: (s.tokens - 1) // self.limits.block_size]:
            if key not in self.cache:
                break
            found.append(self.cache[key])
        return found

    def grow(self, s: Sample, tokens: int) -> bool:
        size = self.limits.block_size
        need = -(-tokens // size) - len(s.blocks)
        if need > len(self.free):
            return False
        for _ in range(need):
            block, _ = self.free.popitem(last=False)
            key = self.key_of.pop(block, None)
            if key is not None and self.cache.get(key) == block:
                del self.cache[key]
            self.refs[block] = 1
            s.blocks.append(block)
        if self.limits.prefix_caching:
            for j, key in enumerate(self.keys(s)[: tokens // size]):
                if key not in self.cache:
                    self.cache[key] = s.blocks[j]
                    self.key_of[s.blocks[j]] = key
        return True

    def drop(self, s: Sample) -> None:
        for block in reversed(s.blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.free[block] = None
        s.blocks = []
        s.computed = 0
        s.started = False

    def forget_all(self) -> None:
        self.cache.clear()
        self.key_of.clear()

    # -- the loop
    def step(self) -> bool:
        """Run one iteration at the present time; False if there is nothing to run."""
        for entry in sorted(self.away):
            if entry[0] <= self.time:
                self.away.remove(entry)
                self.waiting.append(entry[2])
        if not self.running and not self.waiting:
            return False
        budget = self.limits.max_num_batched_tokens
        planned: list[tuple[Sample, int]] = []
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            s = self.running[index]
            num = min(s.tokens - s.computed, budget)
            ok = True
            while not self.grow(s, s.computed + num):
                victim = self.running.pop()
                victim.old = max(victim.old, victim.computed)
                self.drop(victim)
                self.waiting.insert(0, victim)
                self.num_preemptions += 1
                preempted = True
                if victim is s:
                    ok = False
                    break
            if not ok:
                break
            planned.append((s, num))
            budget -= num
            index += 1
        while not preempted and self.waiting and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            s = self.waiting[0]
            hits = self.hits(s)
            required = -(-s.tokens // self.limits.block_size) - sum(self.refs[b] > 0 for b in hits)
            if required > len(self.free):
                break
            for block in hits:
                if self.refs[block] == 0:
                    del self.free[block]
                self.refs[block] += 1
            s.blocks = list(hits)
            s.computed = len(hits) * self.limits.block_size
            num = min(s.tokens - s.computed, budget)
            assert self.grow(s, s.computed + num)
            self.waiting.pop(0)
            self.running.append(s)
            planned.append((s, num))
            budget -= num
        assert planned
        decodes = [(s, n) for s, n in planned if s.started]
        prefills = [(s, n) for s, n in planned if not s.started]
        context = sum(s.computed for s, _ in decodes)
        outputs = sum(s.computed + n == s.tokens for s, n in planned)
        if prefills:
            tokens = sum(n for _, n in prefills)
            pairs = sum(n * s.computed + n * (n + 1) / 2 for s, n in prefills)
            seconds = self.model.mixed(tokens, pairs, len(decodes), context, outputs)
            self.prefill_tokens += tokens
            self.recomputed_tokens += sum(max(0, min(n, s.old - s.computed)) for s, n in prefills)
        else:
            base, per = self.model.decode(len(decodes))
            seconds = base + per * context
        self.time += seconds
        self.busy += seconds
        self.num_iterations += 1
        for s, n in planned:
            s.computed += n
            if s.computed < s.tokens:
                continue
            s.generated += 1
            s.context += 1
            s.started = True
            self.decode_tokens += 1
            if s.stops and s.stops[0][0] == s.generated:
                _, tool_tokens, tool_s = s.stops.pop(0)
                self.running.remove(s)
                s.old = s.computed
                self.drop(s)
                s.context += tool_tokens
                s.started = False
                self.num_away += 1
                self.away.append((self.time + tool_s, self.num_away, s))
            elif s.generated == s.target:
                self.running.remove(s)
                self.drop(s)
                self.finished.append((s.seq, self.time))
                self.done.setdefault(s.group, []).append(s.seq)
                self.left[s.group] -= 1
                if self.left[s.group] == 0:
                    self.groups_done.append((self.time, s.group, self.done.pop(s.group)))
        return True

    def advance(self, now: float) -> None:
        """Step to the first boundary at or after ``now``."""
        while not self.paused and self.time < now:
            if self.step():
                continue
            arrivals = [a for a, _, _ in self.away if a < now]
            self.time = min(arrivals) if arrivals else now
        if self.paused:
            self.time = max(self.time, now)

    def run_out(self) -> None:
        """Step until everything is finished."""
        while self.step() or self.away:
            if not self.running and not self.waiting and self.away:
                self.time = max(self.time, min(a for a, _, _ in self.away))

    # -- the calls of the replica
    def submit(self, now: float, requests: list[Request], *, front: bool = False) -> None:
        self.advance(now)
        new = []
        for r in requests:
            context = r.prompt_tokens + r.generated_tokens
            stops = []
            total = 0
            for tokens, tool_tokens, tool_s in (r.turns or ())[:-1]:
                total += tokens
                if total <= r.generated_tokens:
                    context += tool_tokens
                else:
                    stops.append((total, tool_tokens, tool_s))
            done = r.generated_tokens
            s = Sample(r.seq, r.group, r.prompt_tokens, done, r.target_tokens, context, stops)
            s.old = context - 1 if done else 0
            new.append(s)
            self.left[r.group] = self.left.get(r.group, 0) + 1
        self.waiting = new + self.waiting if front else self.waiting + new

    def everything(self) -> list[Sample]:
        return self.running + self.waiting + [s for _, _, s in sorted(self.away, key=lambda e: e[:2])]

    def preempt(
        self, now: float, groups: set[int] | None = None, *, seqs: set[int] | None = None
    ) -> tuple[float, list[tuple[int, int]], list[int]]:
        self.advance(now)
        out = [
            s
            for s in self.everything()
            if (groups is None or s.group in groups) and (seqs is None or s.seq in seqs)
        ]
        for s in out:
            if s.blocks:
                self.drop(s)
        for key in [k for k in self.cache if k[0] == "s" and k[1] in {s.seq for s in out}]:
            self.key_of.pop(self.cache.pop(key))
        self.running = [s for s in self.running if s not in out]
        self.waiting = [s for s in self.waiting if s not in out]
        self.away = [e for e in self.away if e[2] not in out]
        handed = []
        for s in out:
            self.left[s.group] -= 1
            if self.left[s.group] == 0:
                handed += self.done.pop(s.group, [])
        return self.time, [(s.seq, s.generated) for s in out], sorted(handed)

    def pause(self, now: float) -> float:
        self.advance(now)
        self.paused = True
        return self.time

    def resume(self, now: float, *, recompute: bool) -> None:
        self.advance(now)
        self.paused = False
        if recompute:
            for s in self.running:
                s.old = max(s.old, s.computed)
                s.started = False
                self.drop(s)
            self.waiting = self.running + self.waiting
            self.running = []
            self.forget_all()

    def progress(self) -> list[tuple[int, int]]:
        return [(s.seq, s.generated) for s in self.everything()]
