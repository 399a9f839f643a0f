"""The samples that an engine holds: token by token, with log-probabilities and versions. Needs no engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bidirl.errors import InvariantBroken, RunFault
from bidirl.executor.roles import Draft

__all__ = ["Flight", "Flights", "check_fits", "is_complete", "is_truncated"]


@dataclass(slots=True)
class Flight:
    """A draft as it was submitted, and what the engine has added since."""

    draft: Draft
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    starts: list[tuple[int, int]] = field(default_factory=list)
    """(first new response token, version), where the version changed."""

    @property
    def prefix_tokens(self) -> int:
        """Response tokens that it was submitted with."""
        return len(self.draft.tokens)

    @property
    def response_tokens(self) -> int:
        """Response tokens by now."""
        return len(self.draft.tokens) + len(self.tokens)

    @property
    def context_tokens(self) -> int:
        """Prompt and response by now."""
        return len(self.draft.prompt) + self.response_tokens

    def extend(self, tokens: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Add what one iteration gave."""
        if len(tokens) != len(logprobs):
            raise InvariantBroken(
                f"group {self.draft.group} sample {self.draft.index}: {len(tokens)} tokens with "
                f"{len(logprobs)} log-probabilities: the engine's output is incomplete"
            )
        if not tokens:
            return
        last = self.starts[-1] if self.starts else (self.draft.segments or ((0, -1),))[-1]
        if last[1] != version:
            self.starts.append((self.response_tokens, version))
        self.tokens += tokens
        self.logprobs += logprobs

    def landed(self, *, finish_s: float = 0.0, truncated: bool = False) -> Draft:
        """Return the draft with everything that was added; arrays are new, nothing is shared."""
        return replace(
            self.draft,
            tokens=np.concatenate((self.draft.tokens, np.asarray(self.tokens, np.int32)), dtype=np.int32),
            logprobs=np.concatenate(
                (self.draft.logprobs, np.asarray(self.logprobs, np.float32)), dtype=np.float32
            ),
            segments=(*self.draft.segments, *self.starts),
            finish_s=finish_s,
            truncated=truncated,
        )


class Flights:
    """All flights of one engine by request id, in order of submission."""

    def __init__(self) -> None:
        self._by_id: dict[str, Flight] = {}
        self._places: dict[tuple[int, int], str] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._by_id.values())

    def items(self) -> list[tuple[str, Flight]]:
        """Return (request id, flight)."""
        return list(self._by_id.items())

    def get(self, request: str) -> Flight | None:
        """Return a flight, None if it has left."""
        return self._by_id.get(request)

    def add(self, draft: Draft) -> str:
        """Take a draft in and return its request id; a place (group, index) is held once."""
        place = draft.group, draft.index
        if place in self._places:
            raise InvariantBroken(
                f"group {draft.group} sample {draft.index} was submitted twice: an engine holds a sample once"
            )
        if len(draft.tokens) != len(draft.logprobs):
            raise InvariantBroken(
                f"group {draft.group} sample {draft.index}: {len(draft.tokens)} prefix tokens with "
                f"{len(draft.logprobs)} log-probabilities: both must have one length"
            )
        return self._enter(Flight(draft))

    def requeue(self, request: str) -> str:
        """Give a flight a new request id, last in order."""
        return self._enter(self._by_id.pop(request))

    def take(self, request: str) -> Flight:
        """Remove a flight."""
        flight = self._by_id.pop(request)
        del self._places[flight.draft.group, flight.draft.index]
        return flight

    def of(self, groups: Sequence[int]) -> list[str]:
        """Return the request ids of some groups."""
        wanted = set(groups)
        return [request for request, flight in self._by_id.items() if flight.draft.group in wanted]

    def progress(self) -> list[tuple[int, int, int]]:
        """Return (group, index, response tokens)."""
        return [(flight.draft.group, flight.draft.index, flight.response_tokens) for flight in self]

    def _enter(self, flight: Flight) -> str:
        self._serial += 1
        request = f"{flight.draft.group}-{flight.draft.index}-{self._serial}"
        self._by_id[request] = flight
        self._places[flight.draft.group, flight.draft.index] = request
        return request


def check_fits(draft: Draft, max_model_tokens: int) -> None:
    """Raise ``RunFault`` for a sample that may grow beyond what the engine takes."""
    longest = len(draft.prompt) + draft.max_tokens
    if longest > max_model_tokens:
        raise RunFault(
            f"group {draft.group} sample {draft.index} may reach {longest} tokens, the engine takes "
            f"{max_model_tokens}: raise max_model_tokens or lower max_response_tokens"
        )


def is_complete(draft: Draft, eos_id: int | None) -> bool:
    """Say whether nothing is left to generate: the length is reached, or the last token ends it."""
    ended = eos_id is not None and len(draft.tokens) > 0 and int(draft.tokens[-1]) == eos_id
    return ended or len(draft.tokens) >= draft.max_tokens


def is_truncated(flight: Flight, eos_id: int | None) -> bool:
    """Say whether a finished flight was cut: the task has an end token and it did not come."""
    if eos_id is None:
        return False
    last = (
        flight.tokens[-1] if flight.tokens else (int(flight.draft.tokens[-1]) if flight.prefix_tokens else -1)
    )
    return last != eos_id
