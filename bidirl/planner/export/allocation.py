"""Check an AReaL allocation string against the GPUs that are there, before a run finds out.

A string that asks for more than the cluster has ended in an out-of-memory or custom-allreduce error instead
of a message (AReaL#409). Grammar: AReaL 1.0.4 ``areal/api/alloc_mode.py``, and the older form with a dot.
"""

import re
from math import prod

from bidirl.errors import InputError

__all__ = ["allocation_gpus", "check_allocation"]

DIMENSION = re.compile(r"([dtpce])([1-9][0-9]*)")
COMPONENT = re.compile(
    r"(?:(?P<backend>sglang|vllm|fsdp|megatron|archon)(?:\[\w+\])?[:.]|\[\w+\]:)?(?P<dims>(?:[dtpce][1-9][0-9]*)+)"
)
HYBRID = re.compile(
    r"(?:megatron[:.])?\(?attn:(?P<dims>(?:[dtpc][1-9][0-9]*)+)\|ffn:(?:[detp][1-9][0-9]*)+\)?"
)
"""Attention and expert layers with layouts of their own; the attention one counts the GPUs."""
EXPERTS = "e"
"""Expert parallelism lives inside the other dimensions."""


def allocation_gpus(allocation: str) -> tuple[int, ...]:
    """Return the GPUs of each part of an allocation string that is joined by ``+``.

    Parts joined by ``|`` share GPUs and count once.

    Raises:
        InputError: the string is none, or parts that share GPUs need different numbers.
    """
    return tuple(_group(part.strip(), allocation) for part in allocation.split("+"))


def check_allocation(allocation: str, num_gpus: int) -> int:
    """Return the GPUs that an allocation string needs.

    Raises:
        InputError: it needs more than ``num_gpus``, or is none.
    """
    parts = allocation_gpus(allocation)
    needed = sum(parts)
    if needed > num_gpus:
        raise InputError(
            f"allocation {allocation!r} needs {needed} GPUs ({' + '.join(map(str, parts))}), there are "
            f"{num_gpus}: the parts take GPUs of their own, so lower a dimension or add GPUs"
        )
    return needed


def _group(text: str, allocation: str) -> int:
    if found := HYBRID.fullmatch(text):
        return _gpus(found["dims"])
    sizes = []
    for part in text.split("|"):
        component = COMPONENT.fullmatch(part.strip())
        if component is None:
            raise InputError(
                f"allocation {allocation!r}: {part.strip()!r} is no part of one; write it like vllm:d4t2 "
                "or fsdp:d8"
            )
        sizes.append(_gpus(component["dims"]))
    if len(set(sizes)) > 1:
        raise InputError(
            f"allocation {allocation!r}: parts that share GPUs need {sizes}: give them equal sizes"
        )
    return sizes[0]


def _gpus(dims: str) -> int:
    return prod(int(size) for kind, size in DIMENSION.findall(dims) if kind != EXPERTS)
