"""The tables of all frameworks, in the order in which a tie between them is decided."""

from bidirl.traces.logs.dialects import (
    areal,
    engines,
    nemo_rl,
    openrlhf,
    prime_rl,
    rlinf,
    roll,
    skyrl,
    slime,
    tinker,
    trl,
    verl,
)
from bidirl.traces.logs.table import Dialect, keys_of

__all__ = ["DIALECTS", "FRAMEWORKS", "WANTED", "dialects_of"]

DIALECTS: tuple[Dialect, ...] = (
    *verl.DIALECTS,
    *slime.DIALECTS,
    *nemo_rl.DIALECTS,
    *prime_rl.DIALECTS,
    *areal.DIALECTS,
    *roll.DIALECTS,
    *skyrl.DIALECTS,
    *openrlhf.DIALECTS,
    *trl.DIALECTS,
    *rlinf.DIALECTS,
    *tinker.DIALECTS,
    *engines.DIALECTS,
)
"""Within a framework the first dialect whose evidence is met holds; the last one needs the least."""

FRAMEWORKS: tuple[str, ...] = tuple(dict.fromkeys(dialect.framework for dialect in DIALECTS))


def dialects_of(framework: str) -> tuple[Dialect, ...]:
    """Return a framework's dialects in order."""
    return tuple(dialect for dialect in DIALECTS if dialect.framework == framework)


def _wanted() -> frozenset[str]:
    found: set[str] = set()
    for dialect in DIALECTS:
        for term in dialect.columns.values():
            found.update(keys_of(term))
        found.update(key for key in dialect.evidence if not key.endswith(("/", "*")))
        found.update(dialect.step_keys)
        found.update(dialect.reads)
    return frozenset(found)


WANTED: frozenset[str] = _wanted()
"""Raw keys that some table reads: only these are kept of each line."""
