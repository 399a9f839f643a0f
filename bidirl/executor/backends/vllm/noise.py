"""Position-keyed noise: the token at a position depends on seed, position and logits, on nothing else.

A sample that was taken off one engine and goes on in another therefore gives the tokens of an uninterrupted
run: ``argmax(logits / T + gumbel)`` is a draw from ``softmax(logits / T)``.
Source: the Gumbel-max identity (Gumbel 1954; Maddison et al. 2014); Philox is that of Salmon et al. 2011 as
shipped by NumPy, whose raw words are stable over NumPy's releases (its distributions are not).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Noise", "sample_seed"]

WORD = (1 << 64) - 1
SCALE = np.float32(2.0**-32)
HALF = np.float32(0.5)
SMALL = np.float32(2.0**-8)
"""Below this a series to the third power gives -log(1 - c) to float32's precision, without its rounding of
1 - c: the smallest exponentials are the ones that win."""
THIRD = np.float32(1.0 / 3.0)
MIX_ADD = 0x9E3779B97F4A7C15
MIX_A = 0xBF58476D1CE4E5B9
MIX_B = 0x94D049BB133111EB
"""Constants of the SplitMix64 mixer (Steele et al. 2014)."""


class Noise:
    """A source of Gumbel noise; one per thread (it reuses one generator, which is what makes it cheap)."""

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._counter = np.zeros(4, np.uint64)
        self._key = np.zeros(2, np.uint64)
        self._state: Any = {
            "bit_generator": "Philox",
            "state": {"counter": self._counter, "key": self._key},
            "buffer": np.zeros(4, np.uint64),
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }

    def gumbel(self, keys: Sequence[tuple[int, int]], size: int) -> NDArray[np.float32]:
        """Return standard Gumbel variates, shape [keys, size]: one row per (seed, response position).

        A row is a function of its key alone. Seeds are in [0, 2**64), positions count response tokens from 0.
        Rows of different keys never overlap: the position stands in a counter word that ``size`` draws do not
        reach. Float32 with 2**-32 steps in the uniform.
        """
        words = np.empty((len(keys), -(-size // 2)), np.uint64)
        for row, (seed, position) in enumerate(keys):
            self._key[0] = seed
            self._counter[3] = position
            self._bits.state = self._state
            words[row] = self._bits.random_raw(words.shape[1])
        small = (words.view(np.uint32)[:, :size].astype(np.float32) + HALF) * SCALE
        with np.errstate(divide="ignore"):
            series = small * (1 + small * (HALF + small * THIRD))
            exponential = np.where(small < SMALL, series, -np.log(1 - small))
            noise: NDArray[np.float32] = -np.log(exponential)
        return noise


def sample_seed(entropy: int, group: int, index: int) -> int:
    """Return the 64-bit seed of one sample of a run: a function of the run's seed and the sample's place."""
    return _mixed(_mixed(entropy & WORD) ^ ((group & 0xFFFFFFFF) << 32 | (index & 0xFFFFFFFF)))


def _mixed(word: int) -> int:
    """Return the SplitMix64 hash of a 64-bit word."""
    word = (word + MIX_ADD) & WORD
    word = ((word ^ (word >> 30)) * MIX_A) & WORD
    word = ((word ^ (word >> 27)) * MIX_B) & WORD
    return word ^ (word >> 31)
