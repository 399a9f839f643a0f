"""What both vLLM engines do alike: hold samples, sleep and wake, refuse to step when they must not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from bidirl.errors import InvariantBroken, RunFault
from bidirl.executor.backends.vllm.args import EngineSettings
from bidirl.executor.backends.vllm.flights import Flight, Flights, check_fits, is_complete, is_truncated
from bidirl.executor.backends.vllm.meter import Meter
from bidirl.executor.roles import Capabilities, Draft

__all__ = ["CACHE", "WEIGHTS", "HoldingEngine"]

WEIGHTS, CACHE = "weights", "kv_cache"
"""vLLM's names of what can be woken by itself."""


class HoldingEngine(ABC):
    """The part of the ``Engine`` protocol that does not depend on where vLLM runs.

    ``clock`` gives the ``finish_s`` of samples.
    """

    def __init__(self, settings: EngineSettings, version: int, clock: Callable[[], float]) -> None:
        self.settings = settings
        self.meter = Meter()
        self._clock = clock
        self._version = version
        self._flights = Flights()
        self._ended: list[Draft] = []
        self._asleep = 0
        self._cache_dropped = False
        self._broken = ""
        """Why it cannot go on until a load succeeds."""
        self._capabilities = Capabilities(False, False, False, settings.device)

    @property
    def capabilities(self) -> Capabilities:
        """What it does on this device."""
        return self._capabilities

    @property
    def version(self) -> int:
        """Version of the weights that it runs."""
        return self._version

    @property
    def num_unfinished(self) -> int:
        """Samples that it holds, ended ones that no ``step`` has returned yet included."""
        return len(self._flights) + len(self._ended)

    def submit(self, drafts: Sequence[Draft]) -> None:
        """Queue samples, fresh or with a prefix; a prefix that is already complete ends at the next step."""
        for draft in drafts:
            check_fits(draft, self.settings.max_model_tokens)
        fresh: list[tuple[str, Draft]] = []
        for draft in drafts:
            if is_complete(draft, self.settings.eos_id):
                self._ended.append(self._finished(Flight(draft)))
            else:
                fresh.append((self._flights.add(draft), draft))
        self._launch(fresh)

    def sleep(self, level: int) -> None:
        """Give device memory up (1: weights to the host, 2: drop them); on CPU it frees nothing.

        Raises:
            InvariantBroken: samples are still held; they would be lost with the cache.
        """
        if self._flights:
            raise InvariantBroken(f"asked to sleep with {len(self._flights)} samples: take them off first")
        self._asleep = level
        if self.capabilities.sleep_frees_memory:
            self._sleep(level)

    def wake(self) -> None:
        """Take memory back; after level 2 the weights must be loaded before the next step.

        The cache of a level-2 sleep comes back only with the weights, so that at no time old weights, new
        weights and cache lie in memory together.
        """
        level, self._asleep = self._asleep, 0
        if level == 0 or not self.capabilities.sleep_frees_memory:
            return
        self._wake(WEIGHTS)
        if level == 1:
            self._wake(CACHE)
        else:
            self._cache_dropped = True
            self._broken = "its weights were dropped in its sleep"

    # ------------------------------------------------------------------ inside

    @abstractmethod
    def _launch(self, fresh: Sequence[tuple[str, Draft]]) -> None:
        """Give requests to vLLM."""

    @abstractmethod
    def _sleep(self, level: int) -> None:
        """Have vLLM free memory."""

    @abstractmethod
    def _wake(self, what: str) -> None:
        """Have vLLM take back ``WEIGHTS`` or ``CACHE``."""

    def _rebuild_cache(self) -> None:
        if self._cache_dropped:
            self._wake(CACHE)
            self._cache_dropped = False

    def _check_ready(self) -> None:
        if self._asleep:
            raise InvariantBroken("asked to step while asleep: wake it first")
        if self._broken:
            raise RunFault(f"the engine cannot go on, {self._broken}: load weights or restart the replica")

    def _finished(self, flight: Flight) -> Draft:
        return flight.landed(finish_s=self._clock(), truncated=is_truncated(flight, self.settings.eos_id))
