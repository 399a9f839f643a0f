"""Both roles without vLLM and torch: a bigram policy in numpy that really samples and really learns.

With it the control plane is tested where neither is installed. Tokens, log-probabilities and gradients are
exact functions of (weights, prompt, seed, position) and of the rows of a chunk, as those of the real roles
are on a CPU; times mean nothing.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bidirl.executor.backends.vllm.meter import Iteration, Meter
from bidirl.executor.roles import Capabilities, Draft, NamedTensors, Piece, Row
from bidirl.planner.events import SegmentKind

__all__ = ["StubConfig", "StubEngine", "StubTrainer"]

NAME = "bigram.weight"
Weights = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StubConfig:
    """Sizes of the stand-ins; seconds make lending worth a thought where everything else is instant."""

    vocab_size: int = 32
    seed: int = 0
    temperature: float = 1.0
    learning_rate: float = 0.5
    clip: float = 0.2
    max_num_seqs: int = 64
    step_s: float = 0.0
    """Seconds that an iteration takes at least."""
    token_s: float = 0.0
    """Seconds that the trainer needs for a token."""


def _initial(config: StubConfig) -> Weights:
    rng = np.random.default_rng(config.seed)
    shape = config.vocab_size, config.vocab_size
    return (0.02 * rng.standard_normal(shape)).astype(np.float32)


def _log_softmax(logits: Weights) -> Weights:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: Weights = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def _noise(seed: int, position: int, size: int) -> Weights:
    """Return the Gumbel noise of one position: seed and position decide it."""
    uniform = np.random.Generator(np.random.Philox(key=seed, counter=position)).random(size)
    return (-np.log(-np.log(uniform + 1e-20) + 1e-20)).astype(np.float32)


class StubEngine:
    """Samples one token of every running sample an iteration."""

    def __init__(self, config: StubConfig) -> None:
        self.config = config
        self._weights = _initial(config)
        self._version = 0
        self._queue: list[Draft] = []
        self.meter = Meter()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(False, True, True, "numpy")

    @property
    def version(self) -> int:
        return self._version

    @property
    def num_unfinished(self) -> int:
        return len(self._queue)

    def submit(self, drafts: Sequence[Draft]) -> None:
        for draft in drafts:
            draft.segments += ((len(draft.tokens), self._version),)
        self._queue += drafts

    def step(self) -> list[Draft]:
        if self.config.step_s:
            sleep(self.config.step_s)
        ended = []
        running = self._queue[: self.config.max_num_seqs]
        context = sum(len(draft.prompt) + len(draft.tokens) for draft in running)
        self.meter.add(Iteration(len(running), 0, len(running), context, 0, 0.0), len(running))
        for draft in running:
            last = int(draft.tokens[-1] if len(draft.tokens) else draft.prompt[-1])
            logits = self._weights[last]
            noise = _noise(draft.seed, len(draft.tokens), len(logits))
            token = int(np.argmax(logits / np.float32(self.config.temperature) + noise))
            logprob = _log_softmax(logits)[token]
            draft.tokens = np.append(draft.tokens, np.int32(token)).astype(np.int32)
            draft.logprobs = np.append(draft.logprobs, logprob).astype(np.float32)
            if len(draft.tokens) >= draft.max_tokens:
                draft.truncated = True
                ended.append(draft)
        self._queue = [draft for draft in self._queue if len(draft.tokens) < draft.max_tokens]
        return ended

    def preempt(self, groups: Sequence[int]) -> list[Draft]:
        taken = [draft for draft in self._queue if draft.group in set(groups)]
        self._queue = [draft for draft in self._queue if draft.group not in set(groups)]
        for draft in taken:
            if draft.segments and draft.segments[-1][0] == len(draft.tokens):
                draft.segments = draft.segments[:-1]
        return taken

    def progress(self) -> list[tuple[int, int, int]]:
        return [(draft.group, draft.index, len(draft.tokens)) for draft in self._queue]

    def load(self, version: int, tensors: NamedTensors) -> float:
        self._weights = np.array(dict(tensors)[NAME], np.float32)
        self._version = version
        for draft in self._queue:
            draft.segments += ((len(draft.tokens), version),)
        return 0.0

    def sleep(self, level: int) -> None:
        if level == 2:
            self._weights = np.full_like(self._weights, np.nan)

    def wake(self) -> None:
        """Do nothing: there is no device."""

    def close(self) -> None:
        """Do nothing: there is no device."""


class StubTrainer:
    """Policy gradient with a clipped ratio on the bigram's weights, plain gradient descent."""

    def __init__(self, config: StubConfig) -> None:
        self.config = config
        self._weights = _initial(config)
        self._initial = self._weights.copy()

    def _run_row(self, row: Row, weights: Weights) -> tuple[Weights, NDArray[np.int64], NDArray[np.int64]]:
        tokens = row.draft.tokens.astype(np.int64)
        before = np.concatenate([row.draft.prompt[-1:].astype(np.int64), tokens[:-1]])
        return _log_softmax(weights[before]), before, tokens

    def logprobs(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        return [self._logprobs(row, self._weights) for row in rows]

    def _logprobs(self, row: Row, weights: Weights) -> NDArray[np.float32]:
        table, _, tokens = self._run_row(row, weights)
        found: NDArray[np.float32] = table[np.arange(len(tokens)), tokens]
        return found

    def run(
        self, kind: SegmentKind, chunk: int, rows: Sequence[Row], *, num_tokens: int, num_sequences: int
    ) -> Piece:
        if self.config.token_s:
            sleep(self.config.token_s * sum(len(row.draft.tokens) for row in rows))
        if kind is not SegmentKind.UPDATE:
            weights = self._weights if kind is SegmentKind.OLD_LOGPROB else self._initial
            return Piece(chunk, [self._logprobs(row, weights) for row in rows])
        gradient = np.zeros_like(self._weights)
        stats = {"mismatch": 0.0, "mismatch_max": 0.0, "tokens": 0.0}
        for row in rows:
            table, before, tokens = self._run_row(row, self._weights)
            at = np.arange(len(tokens))
            ratio = np.exp(table[at, tokens] - row.draft.logprobs)
            advantage = np.float32(row.advantage)
            low, high = 1 - self.config.clip, 1 + self.config.clip
            active = np.where(advantage >= 0, ratio <= high, ratio >= low)
            scale = np.where(active, ratio * advantage * np.float32(row.weight), 0) / max(1, num_tokens)
            share = np.exp(table)
            share[at, tokens] -= 1.0
            np.add.at(gradient, before, (share * scale[:, None]).astype(np.float32))
            gap = np.abs(table[at, tokens] - row.draft.logprobs)
            stats["mismatch"] += float(gap.sum())
            stats["mismatch_max"] = max(stats["mismatch_max"], float(gap.max(initial=0.0)))
            stats["tokens"] += len(tokens)
        return Piece(chunk, gradient=gradient.ravel(), stats=stats)

    def apply(self, gradients: Sequence[Any]) -> dict[str, float]:
        total = np.zeros(self._weights.size, np.float32)
        for gradient in gradients:
            total += gradient
        self._weights = self._weights - np.float32(self.config.learning_rate) * total.reshape(
            self._weights.shape
        ) * np.float32(self.config.vocab_size)
        return {"gradient_norm": float(np.linalg.norm(total))}

    def digest(self) -> str:
        return sha256(self._weights.tobytes()).hexdigest()

    def tensors(self) -> NamedTensors:
        yield NAME, self._weights

    def load(self, tensors: NamedTensors) -> None:
        self._weights = np.array(dict(tensors)[NAME], np.float32)

    def save(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        np.save(Path(folder, "stub.npy"), self._weights)
        Path(folder, "stub.json").write_text(json.dumps({"digest": self.digest()}), encoding="utf-8")

    def restore(self, folder: str) -> None:
        self._weights = np.load(Path(folder, "stub.npy"))

    def sleep(self) -> None:
        """Do nothing: there is no device."""

    def wake(self) -> None:
        """Do nothing: there is no device."""

    def close(self) -> None:
        """Do nothing: there is no device."""
