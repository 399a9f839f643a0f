"""The samples of a run: prompts, what was generated so far, rewards; by (group, index), each in one place."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bidirl.executor.backends import Ended, Taken
from bidirl.executor.backends.torch.advantages import group_advantages
from bidirl.executor.roles import Draft, Row
from bidirl.planner.learn import AdvantageScale
from bidirl.traces.records import GroupBlock
from bidirl.traces.workload import Workload

__all__ = ["Prompts", "SampleStore"]

Key = tuple[int, int]

KEPT = (
    "_waiting",
    "_done",
    "_rewards",
    "_filtered",
    "_old",
    "_reference",
    "digests",
    "decode_tokens",
    "recomputed_tokens",
    "num_ended",
)
"""Fields of the store that outlive its workers."""
SEED_BITS = 63
"""Keys of the samplers are positive and fit a signed 64-bit integer."""


class Prompts:
    """What a sample is before anything is generated: prompt, key of its noise, length limit."""

    def __init__(
        self,
        workload: Workload,
        seed: int,
        prompt_of: Callable[[int, int], NDArray[np.int32]],
        *,
        max_tokens: int | None,
    ) -> None:
        """Take ``prompt_of(group, prompt tokens)``; without ``max_tokens`` the workload draws the lengths."""
        self._workload = workload
        self._seed = seed
        self._prompt_of = prompt_of
        self._max_tokens = max_tokens
        self._per_block = workload.config.prompts_per_step
        self._blocks: dict[int, GroupBlock] = {}

    def _block(self, group: int) -> tuple[GroupBlock, int]:
        number, row = divmod(group, self._per_block)
        block = self._blocks.get(number)
        if block is None:
            block = self._blocks[number] = self._workload.block(number)
        return block, row

    def draft(self, group: int, index: int) -> Draft:
        """Return a sample of which nothing is generated; (seed, group, index) decide everything about it."""
        block, row = self._block(group)
        limit = self._max_tokens or int(block.response_tokens[row, index])
        words = np.random.SeedSequence([self._seed, group, index]).generate_state(2, np.uint32)
        key = (int(words[0]) << 32 | int(words[1])) & ((1 << SEED_BITS) - 1)
        return Draft(group, index, self.prompt(group), key, limit)

    def prompt(self, group: int) -> NDArray[np.int32]:
        """Return the prompt of a group."""
        block, row = self._block(group)
        return self._prompt_of(group, int(block.prompt_tokens[row]))

    def forget_before(self, group: int) -> None:
        """Drop what was drawn for the blocks before a group's."""
        first = group // self._per_block
        self._blocks = {number: block for number, block in self._blocks.items() if number >= first}


@dataclass(slots=True)
class _Part:
    """The samples of one group on one replica."""

    running: dict[int, int] = field(default_factory=dict)
    """Index -> tokens that the sample had when it came."""
    ended: list[Draft] = field(default_factory=list)


class SampleStore:
    """Knows of every started, untrained sample where it is and what it has."""

    def __init__(
        self, prompts: Prompts, reward: Callable[[NDArray[np.int32], NDArray[np.int32]], float]
    ) -> None:
        self.prompts = prompts
        self._reward = reward
        self._waiting: dict[Key, Draft] = {}
        """Samples on no replica, with the tokens that they have."""
        self._on: dict[int, dict[int, _Part]] = {}
        """Replica -> group -> its samples there, in the order of their completion."""
        self._done: dict[int, dict[int, Draft]] = {}
        """Group -> index -> ended and collected samples."""
        self._rewards: dict[int, list[float]] = {}
        self._filtered: set[int] = set()
        self._old: dict[Key, NDArray[np.float32]] = {}
        self._reference: dict[Key, NDArray[np.float32]] = {}
        self.digests: dict[Key, tuple[str, tuple[tuple[int, int], ...]]] = {}
        """(group, index) -> SHA-256 of the tokens of a collected sample, and its segments of versions."""
        self.keep_digests = False
        self.decode_tokens = 0
        self.recomputed_tokens = 0
        self.num_ended: Counter[int] = Counter()
        """Replica -> samples that ended on it."""

    # ------------------------------------------------------------------ rollout

    def start(
        self, replica: int, group: int, indices: Sequence[int], prefixes: Sequence[int]
    ) -> tuple[Draft, ...]:
        """Return the samples to be handed to a replica, with the prefixes that it must continue."""
        part = self._on.setdefault(replica, {}).setdefault(group, _Part())
        drafts = []
        for index, prefix in zip(indices, prefixes, strict=True):
            held = self._waiting.pop((group, index), None)
            if held is None or not prefix:
                held = self.prompts.draft(group, index)
            assert len(held.tokens) == prefix, f"sample {(group, index)} has {len(held.tokens)} != {prefix}"
            if prefix:
                self.recomputed_tokens += len(held.prompt) + prefix
            part.running[index] = prefix
            drafts.append(held)
        return tuple(drafts)

    def take_ended(self, replica: int, drafts: Sequence[Draft]) -> None:
        """Note samples that ended on a replica."""
        parts = self._on.get(replica, {})
        for draft in drafts:
            part = parts.get(draft.group)
            if part is not None and draft.index in part.running:
                self.decode_tokens += len(draft.tokens) - part.running.pop(draft.index)
                self.num_ended[replica] += 1
                part.ended.append(draft)
                if not part.running:  # whole groups are announced in the order in which they became whole
                    parts[draft.group] = parts.pop(draft.group)

    def next_whole(self, replica: int, leaving: set[int]) -> int | None:
        """Return the group that has been whole on a replica for longest, those that leave it apart."""
        for group, part in self._on.get(replica, {}).items():
            if not part.running and group not in leaving:
                return group
        return None

    def collect(self, replica: int, group: int) -> tuple[Ended, ...] | None:
        """Hand over the samples of a group, by index, if all of them on the replica have ended."""
        part = self._on.get(replica, {}).get(group)
        if part is None or part.running:
            return None
        del self._on[replica][group]
        return tuple(self._keep(draft) for draft in sorted(part.ended, key=lambda draft: draft.index))

    def _keep(self, draft: Draft) -> Ended:
        self._done.setdefault(draft.group, {})[draft.index] = draft
        if self.keep_digests:
            found = sha256(draft.tokens.astype(np.int32).tobytes()).hexdigest()
            self.digests[draft.group, draft.index] = found, draft.segments
        last_version = draft.segments[-1][1] if draft.segments else 0
        return Ended(
            draft.group, draft.index, len(draft.tokens), len(draft.prompt), draft.finish_s, last_version
        )

    def take_back(self, replica: int, groups: Sequence[int], drafts: Sequence[Draft], version: int) -> Taken:
        """Note what a preemption took off a replica: running samples, and those that had ended there."""
        parts = self._on.get(replica, {})
        ended: list[Ended] = []
        had: dict[Key, int] = {}
        for group in groups:
            part = parts.pop(group, None)
            if part is not None:
                had.update(((group, index), prefix) for index, prefix in part.running.items())
                ended += [self._keep(draft) for draft in sorted(part.ended, key=lambda draft: draft.index)]
        unfinished = []
        for draft in sorted(drafts, key=lambda draft: (draft.group, draft.index)):
            self._waiting[draft.group, draft.index] = draft
            self.decode_tokens += len(draft.tokens) - had.get((draft.group, draft.index), len(draft.tokens))
            unfinished.append((draft.group, draft.index, len(draft.tokens)))
        return Taken(tuple(unfinished), tuple(ended), version)

    def lose(self, replica: int) -> None:
        """Forget what a lost replica held."""
        self._on.pop(replica, None)

    # ------------------------------------------------------------------ training

    def score(self, group: int) -> list[float]:
        """Return the rewards of a complete group, by index."""
        rewards = self._rewards.get(group)
        if rewards is None:
            drafts = self._done[group]
            rewards = [self._reward(drafts[index].prompt, drafts[index].tokens) for index in sorted(drafts)]
            self._rewards[group] = rewards
        return rewards

    def filter(self, group: int) -> None:
        """Give a group no weight."""
        self._filtered.add(group)

    def rows(self, group: int, scale: AdvantageScale) -> list[Row]:
        """Return the samples of a complete group as the trainer sees them, by index."""
        rewards = self.score(group)
        advantages = group_advantages(rewards, scale)
        weight = 0.0 if group in self._filtered else 1.0
        drafts = self._done[group]
        return [
            Row(
                drafts[index],
                rewards[place],
                float(advantages[place]),
                weight,
                self._old.get((group, index)),
                self._reference.get((group, index)),
            )
            for place, index in enumerate(sorted(drafts))
        ]

    def note(self, keys: Sequence[Key], logprobs: Sequence[NDArray[np.float32]], *, reference: bool) -> None:
        """Keep the log-probabilities that a forward-only segment gave for some samples."""
        store = self._reference if reference else self._old
        store.update(zip(keys, logprobs, strict=True))

    def first_versions(self, group: int) -> list[int]:
        """Return, for each sample of a complete group, the oldest version of any of its tokens."""
        return [min(version for _, version in draft.segments) for draft in self._done[group].values()]

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs: all samples that are on no replica, and what they were worth."""
        return {name: copy(getattr(self, name)) for name in KEPT}  # rewards come from another thread

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state`` returned."""
        for name in KEPT:
            setattr(self, name, state[name])

    def forget(self, groups: Sequence[int]) -> None:
        """Drop groups that were trained, or never will be."""
        for group in groups:
            for index in self._done.pop(group, {}):
                self._old.pop((group, index), None)
                self._reference.pop((group, index), None)
            self._rewards.pop(group, None)
            self._filtered.discard(group)
            for key in [key for key in self._waiting if key[0] == group]:
                del self._waiting[key]
