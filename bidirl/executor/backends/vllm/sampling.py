"""vLLM's hook for position-keyed sampling; vLLM imports this module by its name in the worker's process.

Works with the first model runner (vLLM's CPU build, no Triton). The second one, vLLM's default on CUDA, keys
its own noise by (seed, position) and takes no processor of this kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.interface import MoveDirectionality

from bidirl.executor.backends.vllm.noise import Noise
from bidirl.executor.backends.vllm.requests import KEY

__all__ = ["GumbelProcessor"]


@dataclass(slots=True)
class _Row:
    """What decides the noise of one request."""

    seed: int
    offset: int
    temperature: float
    generated: list[int]
    """The engine's own list of this request's output tokens: its length is the position."""


class GumbelProcessor(LogitsProcessor):  # type: ignore[misc,unused-ignore]
    """Replace the logits of keyed requests by ``logits / T + gumbel``; greedy decoding then samples.

    Requests ask for temperature 0. The log-probabilities that vLLM returns are taken before this.
    """

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}
        self._noise = Noise()

    def is_argmax_invariant(self) -> bool:
        """Say that greedy decoding must run it."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows of the persistent batch: removed, then added, then moved."""
        if batch_update is None:
            return
        rows = self._rows
        for index in batch_update.removed:
            rows.pop(index, None)
        for index, params, _, generated in batch_update.added:
            key = (params.extra_args or {}).get(KEY)
            if key is None:
                rows.pop(index, None)
            else:
                rows[index] = _Row(key[0], key[1], key[2], generated)
        for source, target, direction in batch_update.moved:
            row, other = rows.pop(source, None), rows.pop(target, None)
            if row is not None:
                rows[target] = row
            if direction == MoveDirectionality.SWAP and other is not None:
                rows[source] = other

    def apply(self, logits: Any) -> Any:
        """Add the noise; shape [requests, vocabulary], float32, changed in place."""
        if not self._rows:
            return logits
        rows = self._rows
        keys = [(row.seed, row.offset + len(row.generated)) for row in rows.values()]
        noise = torch.from_numpy(self._noise.gumbel(keys, logits.shape[1])).to(logits.device)
        scale = torch.tensor([[row.temperature] for row in rows.values()], device=logits.device)
        where = torch.tensor(list(rows), device=logits.device)
        logits[where] = logits[where] / scale + noise
        return logits
