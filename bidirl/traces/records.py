"""Columns that describe groups of samples: what a run is fed with and what it writes.

A *sample* is one response to one prompt; the ``n`` samples of one prompt form a *group*.
Sample ``i`` of group ``g`` has the id ``g * n + i`` everywhere.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["GroupBlock", "Turns"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Turns:
    """Ragged columns of several-turn samples; turn ``t`` of sample row ``r`` is at ``offsets[r] + t``."""

    offsets: Ints
    """Shape ``[G * n + 1]``: row ``r`` of the flattened block owns ``offsets[r]:offsets[r + 1]``."""
    response_tokens: Ints
    """Tokens generated in the turn (>= 1)."""
    tool_tokens: Ints
    """Tokens of the tool's answer that are prefilled before the next turn; 0 after the last turn."""
    tool_s: Floats
    """Seconds the tool takes after the turn, outside the engine; 0 after the last turn."""


@dataclass(frozen=True, slots=True)
class GroupBlock:
    """Columns of ``G`` consecutive groups with ``n`` samples each (first axis group, second sample)."""

    first_group: int
    prompt_tokens: Ints
    """Shape ``[G]``: text and image tokens prefilled before generation (>= 1)."""
    image_tokens: Ints
    """Shape ``[G]``: the part of ``prompt_tokens`` that comes from images."""
    response_tokens: Ints
    """Shape ``[G, n]``: generated tokens over all turns (>= 1), the length trained on."""
    truncated: Bools
    """Shape ``[G, n]``: whether the sample was cut at ``max_response_tokens``."""
    reward_s: Floats
    """Shape ``[G]``: seconds from the group's last sample to its rewards."""
    filtered: Bools
    """Shape ``[G]``: whether the group is thrown away after its reward (zero-variance filter)."""
    turns: Turns | None = None
    """None where every sample has one turn."""
