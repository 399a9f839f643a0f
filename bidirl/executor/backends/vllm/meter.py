"""What an engine did, iteration by iteration: the raw material of calibration."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from bidirl.executor.backends.vllm.flights import Flights

__all__ = ["Iteration", "Meter"]

KEPT_ITERATIONS = 65_536
"""Bound of the record: a few megabytes, minutes of steps."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """One engine iteration."""

    num_seqs: int
    """Sequences that it worked on."""
    prefill_tokens: int
    """Tokens of sequences that got more than one; cached prefixes are not in it."""
    decode_tokens: int
    """Sequences that got one token."""
    context_tokens: int
    """Prompt and response tokens of these sequences before the iteration, summed."""
    recomputed_tokens: int
    """Response tokens whose keys and values existed before, on another engine or under other weights."""
    seconds: float


class Meter:
    """Sums over all iterations, and the latest iterations one by one."""

    def __init__(self) -> None:
        self.num_iterations = 0
        self.decode_tokens = 0
        """Response tokens generated."""
        self.prefill_tokens = 0
        self.recomputed_tokens = 0
        self.recompute_s = 0.0
        """Seconds by the share of recomputed tokens in their iterations."""
        self.busy_s = 0.0
        self._recent: deque[Iteration] = deque(maxlen=KEPT_ITERATIONS)

    def record(self, scheduled: Mapping[str, int], flights: Flights, generated: int, seconds: float) -> None:
        """Add an iteration: tokens scheduled by request, flights as they were before it."""
        prefill = decode = context = recomputed = 0
        for request, tokens in scheduled.items():
            flight = flights.get(request)
            if flight is None:
                continue
            context += flight.context_tokens
            if tokens > 1:
                prefill += tokens
                recomputed += max(0, min(tokens, flight.response_tokens) - 1)
            else:
                decode += tokens
        self.add(Iteration(len(scheduled), prefill, decode, context, recomputed, seconds), generated)

    def add(self, iteration: Iteration, generated: int) -> None:
        """Add an iteration that generated so many response tokens."""
        self.num_iterations += 1
        self.decode_tokens += generated
        self.prefill_tokens += iteration.prefill_tokens
        self.recomputed_tokens += iteration.recomputed_tokens
        self.busy_s += iteration.seconds
        if iteration.recomputed_tokens:
            worked_on = iteration.prefill_tokens + iteration.decode_tokens
            self.recompute_s += iteration.seconds * iteration.recomputed_tokens / worked_on
        self._recent.append(iteration)

    def take(self) -> list[Iteration]:
        """Return and forget the iterations since the last call (the latest ``KEPT_ITERATIONS``)."""
        taken = list(self._recent)
        self._recent.clear()
        return taken
