"""Faults and stragglers by seed: what fails, when, and how slow a slow replica is.

Every answer is a function of (kind, object, number) and the seed alone, so two drivers that ask in
different orders hear the same, and a new kind of fault changes no other. Nothing here acts: drivers ask and
inject.
"""

from dataclasses import dataclass
from math import inf, log
from zlib import crc32

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from bidirl.models.iteration import IterationModel

__all__ = ["COLOCATED_LOSS", "Faults", "FaultsConfig", "SlowIteration"]

COLOCATED_LOSS = (
    "faults.replica_mtbf_s={}: a colocated job loses the trainer with the device: "
    "use placement = disaggregated or leave it out"
)
"""Message of the drivers: where the roles take turns, a lost replica is a lost job."""


class FaultsConfig(BaseModel):
    """The optional job section ``[faults]``; the defaults inject nothing."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    replica_mtbf_s: float | None = Field(default=None, gt=0.0)
    """Mean up-time of one rollout replica (auxiliary ones: while they are lent); None: never lost."""
    restart_s: float = Field(default=60.0, ge=0.0)
    """From the loss of a replica to its return with an empty engine and current weights."""
    side_mtbf_s: float | None = Field(default=None, gt=0.0)
    """Mean up-time of the auxiliary trainer side inside leases; None: never lost."""
    sync_failure_rate: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of weight syncs of one replica that fail at their end."""
    lease_failure_rate: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of role changes that fail at the end of C_in."""
    chunk_failure_rate: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of pulls of chunks that fail part of the way."""
    straggler_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """Chance of each rollout replica of being a straggler for the whole run."""
    straggler_factor: float = Field(default=1.0, ge=1.0)
    """Times by which a straggler's iterations take longer."""


@dataclass(frozen=True, slots=True)
class SlowIteration:
    """An iteration model whose every iteration takes ``factor`` times longer."""

    inner: IterationModel
    factor: float

    def decode(self, num_seqs: int) -> tuple[float, float]:
        base_s, context_s = self.inner.decode(num_seqs)
        return base_s * self.factor, context_s * self.factor

    def mixed(
        self, prefill_tokens: int, prefill_pairs: float, num_seqs: int, context_tokens: int, num_outputs: int
    ) -> float:
        return self.factor * self.inner.mixed(
            prefill_tokens, prefill_pairs, num_seqs, context_tokens, num_outputs
        )


class Faults:
    """Answers of one seed; times between losses are exponential (memoryless), as is usual for MTBF."""

    def __init__(self, config: FaultsConfig, entropy: int) -> None:
        """Take the rates and the seed (``entropy`` >= 0)."""
        self.config = config
        self._entropy = entropy

    def _uniform(self, kind: str, thing: int, number: int) -> float:
        """Return the number in [0, 1) of one question."""
        sequence = np.random.SeedSequence([self._entropy, crc32(kind.encode()), thing, number])
        return float(sequence.generate_state(1, np.uint64)[0] >> np.uint64(11)) * 2.0**-53

    def _lifetime_s(self, mtbf_s: float | None, kind: str, thing: int, number: int) -> float:
        if mtbf_s is None:
            return inf
        return -mtbf_s * log(1.0 - self._uniform(kind, thing, number))

    def replica_lifetime_s(self, replica: int, incarnation: int) -> float:
        """Return how long a primary replica lives after its start or its ``incarnation``-th restart."""
        return self._lifetime_s(self.config.replica_mtbf_s, "replica", replica, incarnation)

    def auxiliary_lifetime_s(self, replica: int, lease: int) -> float:
        """Return how long an auxiliary rollouter lives after it has entered a lease."""
        return self._lifetime_s(self.config.replica_mtbf_s, "auxiliary", replica, lease)

    def side_lifetime_s(self, lease: int) -> float:
        """Return how long the auxiliary trainer side lives after it has entered a lease."""
        return self._lifetime_s(self.config.side_mtbf_s, "side", 1, lease)

    def sync_fails(self, replica: int, serial: int) -> bool:
        """Return whether the sync that action ``serial`` asked for fails."""
        rate = self.config.sync_failure_rate
        return rate > 0.0 and self._uniform("sync", replica, serial) < rate

    def lease_fails(self, lease: int) -> bool:
        """Return whether the role change of a lease fails."""
        rate = self.config.lease_failure_rate
        return rate > 0.0 and self._uniform("lease", 0, lease) < rate

    def chunk_fails_at(self, side: int, serial: int) -> float | None:
        """Return the share of its time after which a pull fails; None: it does not."""
        rate = self.config.chunk_failure_rate
        if rate <= 0.0 or self._uniform("chunk", side, serial) >= rate:
            return None
        return self._uniform("chunk_at", side, serial)

    def iteration(self, model: IterationModel, replica: int) -> IterationModel:
        """Return the iteration model of a replica: slowed down if it is a straggler."""
        config = self.config
        if config.straggler_factor == 1.0 or config.straggler_share == 0.0:
            return model
        if self._uniform("straggler", replica, 0) >= config.straggler_share:
            return model
        return SlowIteration(model, config.straggler_factor)
