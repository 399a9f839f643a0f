"""Cut the rows of a chunk into micro-batches by a rule that looks at nothing but the rows."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["micro_batches"]


def micro_batches(lengths: Sequence[int], micro_tokens: int) -> list[list[int]]:
    """Return row numbers by micro-batch: by falling length, filled while the padded tokens fit.

    A micro-batch of ``k`` rows holds ``k`` times its longest row's tokens; a row above ``micro_tokens``
    runs alone. Equal lengths keep their order, so equal rows give equal micro-batches on any worker.
    """
    batches: list[list[int]] = []
    room = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if not batches or len(batches[-1]) >= room:
            batches.append([])
            room = max(1, micro_tokens // max(1, lengths[row]))
        batches[-1].append(row)
    return batches
