"""Engines and trainers that take at least a stated time: devices of known speed on a small machine.

All work is done; what is left of the stated time is waited for. A job asks for it by ``learn.pace``.
"""

from collections.abc import Sequence
from time import monotonic, sleep
from typing import Any

from bidirl.executor.roles import Draft, Engine, Piece, Row, Trainer
from bidirl.planner.events import SegmentKind
from bidirl.planner.learn import PaceConfig

__all__ = ["PacedEngine", "PacedTrainer"]


def _wait_until(end_s: float) -> None:
    left_s = end_s - monotonic()
    if left_s > 0.0:
        sleep(left_s)


class PacedEngine:
    """An engine whose iterations take ``iteration_s`` and ``sequence_s`` for each sequence, or longer."""

    def __init__(self, engine: Engine, pace: PaceConfig) -> None:
        """Take the engine that does the work."""
        self._engine = engine
        self._pace = pace

    def __getattr__(self, name: str) -> Any:
        """Return whatever the engine has."""
        return getattr(self._engine, name)

    def step(self) -> list[Draft]:
        """Run one iteration, not faster than the pace."""
        held = min(self._engine.num_unfinished, self._max_num_seqs())
        end_s = monotonic() + self._pace.iteration_s + self._pace.sequence_s * held
        ended = self._engine.step()
        _wait_until(end_s)
        return ended

    def _max_num_seqs(self) -> int:
        settings: Any = getattr(self._engine, "settings", None) or getattr(self._engine, "config", None)
        return int(settings.max_num_seqs)


class PacedTrainer:
    """A trainer whose chunks take ``token_s`` for each prompt and response token, or longer."""

    def __init__(self, trainer: Trainer, pace: PaceConfig) -> None:
        """Take the trainer that does the work."""
        self._trainer = trainer
        self._pace = pace

    def __getattr__(self, name: str) -> Any:
        """Return whatever the trainer has."""
        return getattr(self._trainer, name)

    def run(
        self, kind: SegmentKind, chunk: int, rows: Sequence[Row], *, num_tokens: int, num_sequences: int
    ) -> Piece:
        """Run one chunk, not faster than the pace."""
        tokens = sum(len(row.draft.prompt) + len(row.draft.tokens) for row in rows)
        end_s = monotonic() + self._pace.token_s * tokens
        piece = self._trainer.run(kind, chunk, rows, num_tokens=num_tokens, num_sequences=num_sequences)
        _wait_until(end_s)
        return piece
