"""An iteration model made of profile tables, and the JSON form of every iteration model.

A layerwise profile times the operators of one layer alone. Summed over the layers they fall into four
tables: dense operators by the tokens of the iteration, the head and sampler by the sequences that emit a
token, attention of decoding sequences by their number and context, attention of prefill by its tokens and
(query, visible token) pairs. Between table points everything is linear.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from math import isfinite
from typing import Any

from bidirl.errors import InputError
from bidirl.models.iteration import AffineIteration, IterationModel

__all__ = [
    "ProfiledIteration",
    "iteration_from_json",
    "iteration_to_json",
    "vllm_graph_sizes",
]

Table = tuple[float, ...]


def vllm_graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the batch sizes for which vLLM captures CUDA graphs: smaller batches are padded up to them.

    Source: vLLM 0.19 ``vllm/config/vllm.py``: sizes 1, 2, 4, then steps of 8 below 256 and of 16 up to
    min(2 * max_num_seqs, 512).
    """
    top = min(2 * max_num_seqs, 512)
    return tuple(n for n in (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)) if n <= top)


def _interpolate(points: Sequence[int], values: Table, at: float) -> float:
    """Return the value at ``at`` of a table, linear between points and beyond them."""
    last = len(points) - 1
    if last == 0:
        return values[0]
    i = min(max(bisect_right(points, at), 1), last)
    low = points[i - 1]
    share = (at - low) / (points[i] - low)
    return values[i - 1] + share * (values[i] - values[i - 1])


@dataclass(frozen=True, slots=True)
class ProfiledIteration:
    """Iteration times from the tables of a profile, in seconds over all layers of the model."""

    dense_tokens: tuple[int, ...]
    dense_s: Table
    """Embedding, norms and linear operators of an iteration of so many tokens."""
    output_seqs: tuple[int, ...]
    output_s: Table
    """Language-model head and sampler for so many sequences that emit a token."""
    decode_seqs: tuple[int, ...]
    decode_base_s: Table
    decode_context_token_s: Table
    """Decode attention of ``n`` sequences of total context ``C``: base + per_token * C, by ``n``."""
    mixed_base_s: Table
    mixed_context_token_s: Table
    """The same sequences in an iteration with prefill, where the kernel serves them worse (by ``n``, too)."""
    prefill_tokens: tuple[int, ...]
    prefill_base_s: Table
    prefill_visible_token_s: Table
    """Prefill attention of ``N`` tokens: base + per_token * (pairs / N), by ``N``."""
    graph_sizes: tuple[int, ...] = ()
    """Token counts to which the engine pads small iterations (CUDA graphs), ascending."""
    overhead_s: float = 0.0
    """Seconds of every iteration outside the profiled operators."""

    def __post_init__(self) -> None:
        """Refuse tables that are empty, of unequal length, unordered or not finite and non-negative."""
        for axis, *tables in (
            ("dense_tokens", "dense_s"),
            ("output_seqs", "output_s"),
            (
                "decode_seqs",
                "decode_base_s",
                "decode_context_token_s",
                "mixed_base_s",
                "mixed_context_token_s",
            ),
            ("prefill_tokens", "prefill_base_s", "prefill_visible_token_s"),
        ):
            points = getattr(self, axis)
            if not points or any(b <= a for a, b in pairwise(points)):
                raise InputError(f"iteration.{axis}={list(points)[:4]}...: must be ascending and not empty")
            for name in tables:
                values = getattr(self, name)
                if len(values) != len(points):
                    raise InputError(
                        f"iteration.{name} has {len(values)} values for {len(points)} {axis}: give one each"
                    )
                if not all(isfinite(v) and v >= 0 for v in values):
                    raise InputError(f"iteration.{name}: every value must be finite and >= 0 seconds")
        if not (isfinite(self.overhead_s) and self.overhead_s >= 0):
            raise InputError(f"iteration.overhead_s={self.overhead_s}: must be finite and >= 0 seconds")

    def _padded(self, num_tokens: int) -> int:
        sizes = self.graph_sizes
        if not sizes or num_tokens > sizes[-1]:
            return num_tokens
        return sizes[bisect_right(sizes, num_tokens - 1)]

    def _common_s(self, num_tokens: int, num_outputs: int) -> float:
        return (
            self.overhead_s
            + _interpolate(self.dense_tokens, self.dense_s, self._padded(num_tokens))
            + _interpolate(self.output_seqs, self.output_s, num_outputs)
        )

    def decode(self, num_seqs: int) -> tuple[float, float]:
        """Return ``(base_s, per_context_token_s)`` of a pure decode iteration of ``num_seqs`` sequences."""
        return (
            self._common_s(num_seqs, num_seqs) + _interpolate(self.decode_seqs, self.decode_base_s, num_seqs),
            _interpolate(self.decode_seqs, self.decode_context_token_s, num_seqs),
        )

    def mixed(
        self, prefill_tokens: int, prefill_pairs: float, num_seqs: int, context_tokens: int, num_outputs: int
    ) -> float:
        """Return the seconds of an iteration that holds prefill work; see ``IterationModel``."""
        seconds = self._common_s(prefill_tokens + num_seqs, num_outputs)
        seconds += _interpolate(self.prefill_tokens, self.prefill_base_s, prefill_tokens)
        per_visible_s = _interpolate(self.prefill_tokens, self.prefill_visible_token_s, prefill_tokens)
        seconds += per_visible_s * (prefill_pairs / prefill_tokens)
        if num_seqs:
            seconds += _interpolate(self.decode_seqs, self.mixed_base_s, num_seqs)
            seconds += _interpolate(self.decode_seqs, self.mixed_context_token_s, num_seqs) * context_tokens
        return seconds


def iteration_to_json(iteration: IterationModel) -> dict[str, Any]:
    """Return plain data for an iteration model, ``kind`` first."""
    match iteration:
        case AffineIteration():
            return {"kind": "affine", **asdict(iteration)}
        case ProfiledIteration():
            tables = asdict(iteration)
            return {
                "kind": "profiled",
                **{k: list(v) if isinstance(v, tuple) else v for k, v in tables.items()},
            }
        case _:
            raise InputError(
                f"iteration model {type(iteration).__name__} has no JSON form: use affine or profiled"
            )


def iteration_from_json(data: object, where: str = "iteration") -> AffineIteration | ProfiledIteration:
    """Read what ``iteration_to_json`` wrote; every InputError names ``where``."""
    if not isinstance(data, Mapping):
        raise InputError(f"{where}: must be an object with a `kind`, not {type(data).__name__}")
    kind = data.get("kind")
    if kind not in ("affine", "profiled"):
        raise InputError(f"{where}.kind={kind!r}: must be 'affine' or 'profiled'")
    values = {k: v for k, v in data.items() if k != "kind"}
    if kind == "affine":
        names = {f.name for f in fields(AffineIteration)}
        _check_names(values, names, names, where)
        return AffineIteration(**{k: _number(v, f"{where}.{k}") for k, v in values.items()})
    names = {f.name for f in fields(ProfiledIteration)}
    _check_names(values, names, names - {"graph_sizes", "overhead_s"}, where)
    counts = {"dense_tokens", "output_seqs", "decode_seqs", "prefill_tokens", "graph_sizes"}
    tables: dict[str, Any] = {}
    for name, value in values.items():
        at = f"{where}.{name}"
        if name == "overhead_s":
            tables[name] = _number(value, at)
            continue
        if not isinstance(value, list):
            raise InputError(f"{at}: must be a list of numbers, not {type(value).__name__}")
        if name in counts:
            if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 1 for v in value):
                raise InputError(f"{at}: every entry must be an integer of at least 1")
            tables[name] = tuple(value)
        else:
            tables[name] = tuple(_number(v, at) for v in value)
    return ProfiledIteration(**tables)


def _check_names(values: Mapping[str, object], known: set[str], needed: set[str], where: str) -> None:
    for name in values:
        if name not in known:
            raise InputError(f"{where}.{name}: unknown key, the keys are {', '.join(sorted(known))}")
    missing = sorted(needed - set(values))
    if missing:
        raise InputError(f"{where}: {', '.join(missing)} missing, give every coefficient")


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{where}={value!r}: must be a number of seconds")
    if not isfinite(value) or value < 0:
        raise InputError(f"{where}={value!r}: must be finite and >= 0 seconds")
    return float(value)
