"""The training role of one replica: chunks in, log-probabilities and gradients out, optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bidirl.errors import InputError, RunFault
from bidirl.executor.backends.torch.advantages import coefficient, global_counts
from bidirl.executor.backends.torch.batching import micro_batches
from bidirl.executor.backends.torch.checkpoint import restore_states, save_states
from bidirl.executor.backends.torch.loss import Tokens, policy_loss
from bidirl.executor.backends.torch.merge import merge_stats
from bidirl.executor.backends.torch.scoring import Scorer, load_model
from bidirl.executor.backends.torch.settings import PlantedFault, Summation, TrainerConfig
from bidirl.executor.backends.torch.sharded import ShardedStates
from bidirl.executor.backends.torch.states import FlatStates
from bidirl.executor.roles import NamedTensors, Piece, Row
from bidirl.planner.events import SegmentKind

__all__ = ["TorchTrainer"]

PADDING = 0
"""Token behind the end of a shorter row; attention is causal, so no token of a row ever sees it."""


@contextmanager
def _deterministic(device: Any) -> Iterator[None]:
    """Have torch choose kernels that repeat to the last bit; on a GPU it warns where there are none."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=device.type != "cpu")
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


class TorchTrainer:
    """A replica on one device, or one rank of a replica on several; implements ``roles.Trainer``.

    Chunks are cut into micro-batches by a rule that depends on their rows alone, and no result depends on
    an earlier chunk, so with one thread a chunk gives the same bits on every worker. ``folder`` is the
    model of version 0, which is also the reference; it is read again at the first reference segment.
    With a ``mesh`` (one dimension) the model is cut over its ranks by FSDP2, micro-batches go round the
    ranks, and every rank makes the same calls: results are those of all ranks, a gradient the rank's own.
    """

    def __init__(
        self,
        folder: Path,
        config: TrainerConfig,
        *,
        mesh: Any = None,
        fault: PlantedFault = PlantedFault.NONE,
    ) -> None:
        self.folder = folder
        self.config = config
        self.fault = fault
        device = torch.device(config.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise InputError(f"device = {config.device!r}: no CUDA device is there; use 'cpu'")
        self.scorer = Scorer(load_model(folder), config)
        self.states: FlatStates | ShardedStates
        if mesh is None:
            self.states = FlatStates(self.scorer.model, config)
        else:
            self.states = ShardedStates(self.scorer, config, mesh)
        self.reference: Any = None

    @property
    def num_params(self) -> int:
        """Return the length of a gradient: the parameters of this rank, tied ones once."""
        return self.states.num_params

    # ----------------------------------------------------------------- segments

    def run(
        self, kind: SegmentKind, chunk: int, rows: Sequence[Row], *, num_tokens: int, num_sequences: int
    ) -> Piece:
        """Run one chunk of a segment.

        Raises:
            RunFault: an update lacks the results of a segment that its loss needs.
        """
        if kind is SegmentKind.OLD_LOGPROB:
            return Piece(chunk, self.logprobs(rows))
        if kind is SegmentKind.REFERENCE:
            if self.reference is None:
                self.reference = self.states.reference_of(load_model(self.folder))
            with self.states.replaced(self.reference):
                return Piece(chunk, self.logprobs(rows))
        return self._update(chunk, rows, num_tokens, num_sequences)

    def logprobs(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """Return the float32 log-probabilities of each row's response tokens under the present weights."""
        own: dict[int, NDArray[np.float32]] = {}
        with torch.no_grad(), _deterministic(self.states.device):
            for batch, _ in self._cut(rows, self.config.micro_tokens):
                part = self._forward([rows[at] for at in batch]).cpu().numpy()
                ends = np.cumsum([len(rows[at].draft.tokens) for at in batch])
                own.update(zip(batch, np.split(part, ends[:-1]), strict=True))
        self.states.forget_gathered()
        found = {at: values for part in self.states.share(own) for at, values in part.items()}
        return [found.get(at, np.empty(0, np.float32)) for at in range(len(rows))]

    def _update(self, chunk: int, rows: Sequence[Row], num_tokens: int, num_sequences: int) -> Piece:
        self._check(chunk, rows)
        rows = [row for row in rows if row.weight]
        if self.fault is PlantedFault.CHUNK_NORMALISED:
            num_tokens, num_sequences = global_counts(rows)
        exact = self.config.summation is Summation.EXACT
        self.states.zero()
        own: list[dict[str, float]] = []
        with _deterministic(self.states.device):
            for batch, share in self._cut(rows, 1 if exact else self.config.micro_tokens):
                chosen = [rows[at] for at in batch]
                tokens = self._tokens(chosen, share, num_tokens, num_sequences)
                loss, sums = policy_loss(self.config.loss, self._forward(chosen), tokens)
                loss.backward()
                if exact:
                    self.states.bank()
                own.append({name: float(value) for name, value in sums.items()})
        stats = merge_stats(part for parts in self.states.share(own) for part in parts)
        return Piece(chunk, gradient=self.states.take(), stats=stats)

    def _check(self, chunk: int, rows: Sequence[Row]) -> None:
        loss = self.config.loss
        for needed, values, segment in (
            (loss.needs_old, [row.old for row in rows], "old-logprob"),
            (loss.needs_reference, [row.reference for row in rows], "reference"),
        ):
            if needed and any(value is None for value in values):
                raise RunFault(
                    f"chunk {chunk}: its loss needs a {segment} segment, the step has none: add it"
                )

    def _cut(self, rows: Sequence[Row], micro_tokens: int) -> list[tuple[list[int], float]]:
        """Return this rank's micro-batches: row numbers, and the weight of the whole.

        A rank that has one less than another runs the first once more, with weight 0: ranks meet in every
        layer. Rows without a response token are in none.
        """
        some = [at for at, row in enumerate(rows) if len(row.draft.tokens)]
        lengths = [len(rows[at].draft.prompt) + len(rows[at].draft.tokens) for at in some]
        every = [[some[at] for at in batch] for batch in micro_batches(lengths, micro_tokens)]
        rank, num_ranks = self.states.rank, self.states.num_ranks
        own = [(batch, 1.0) for batch in every[rank::num_ranks]]
        return own + [(batch, 0.0) for batch in every[:1]] * (-(-len(every) // num_ranks) - len(own))

    def _tokens(self, rows: Sequence[Row], share: float, num_tokens: int, num_sequences: int) -> Tokens:
        config, device = self.config.loss, self.states.device

        def vector(parts: Sequence[NDArray[np.float32]]) -> Any:
            return torch.from_numpy(np.concatenate(parts).astype(np.float32)).to(device)

        def spread(values: Sequence[float]) -> Any:
            lengths = [len(row.draft.tokens) for row in rows]
            return torch.from_numpy(np.repeat(np.asarray(values, np.float32), lengths)).to(device)

        factors = [
            coefficient(
                config.normalisation,
                share * row.weight,
                len(row.draft.tokens),
                num_tokens=num_tokens,
                num_sequences=num_sequences,
            )
            for row in rows
        ]
        return Tokens(
            behaviour=vector([row.draft.logprobs for row in rows]),
            advantage=spread([row.advantage for row in rows]),
            coefficient=spread(factors),
            old=vector([row.old for row in rows if row.old is not None]) if config.needs_old else None,
            reference=vector([row.reference for row in rows if row.reference is not None])
            if config.needs_reference
            else None,
        )

    def _forward(self, rows: Sequence[Row]) -> Any:
        """Return the log-probabilities of the rows' response tokens, row after row: [tokens]."""
        lengths = [len(row.draft.prompt) + len(row.draft.tokens) for row in rows]
        ids = np.full((len(rows), max(lengths)), PADDING, np.int64)
        places = []
        for at, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            ids[at, :length] = np.concatenate([row.draft.prompt, row.draft.tokens])
            places.append(at * ids.shape[1] + np.arange(len(row.draft.prompt), length))
        device = self.states.device
        return self.scorer(
            torch.from_numpy(ids).to(device), torch.from_numpy(np.concatenate(places)).to(device)
        )

    # ------------------------------------------------------------------ weights

    def apply(self, gradients: Sequence[Any]) -> dict[str, float]:
        """Add gradients from the first to the last and take one optimizer step."""
        with _deterministic(self.states.device):
            return self.states.step(gradients)

    def tensors(self) -> NamedTensors:
        """Return the weights under their checkpoint names; views, not copies."""
        return self.states.tensors()

    def load(self, tensors: NamedTensors) -> None:
        """Replace the weights, not the optimizer's state."""
        self.states.load(tensors)

    def digest(self) -> str:
        """Return the SHA-256 of the weights."""
        return self.states.digest()

    def save(self, folder: str) -> None:
        """Write weights, optimizer and random state, atomically."""
        save_states(Path(folder), self.states)

    def restore(self, folder: str) -> None:
        """Read what ``save`` wrote."""
        restore_states(Path(folder), self.states)

    # --------------------------------------------------------------------- role

    def sleep(self) -> None:
        """Move all states to host memory; on a CPU there is nothing to free."""
        if self.states.device.type != "cpu":
            self.reference = None
            self.states.move(torch.device("cpu"))
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Move all states back to the device."""
        if self.states.device.type != "cpu":
            self.states.move(self.states.device)

    def close(self) -> None:
        """Free what it holds; it cannot be used afterwards."""
        self.reference = None
        del self.states, self.scorer
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
