"""The line formats that frameworks share: each function turns one (joined) line into key-value pairs."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from bidirl.traces.logs.text import NUMBER, number

__all__ = [
    "box_equations",
    "box_pairs",
    "bullet",
    "dict_pairs",
    "engine",
    "loose_pairs",
    "pair",
    "pipe_field",
    "pipe_fields",
    "timers_ms",
    "wanted_values",
]

_LOOSE = re.compile(rf"([A-Za-z_][\w./@()\-]*?):\s*((?:np\.\w+\(|tensor\()?(?:{NUMBER}))\)?(?=$|[\s,;)\[-])")
_DICT = re.compile(
    rf"['\"](?P<key>[^'\"{{}}]{{1,200}})['\"]\s*:\s*"
    rf"(?:(?:np|numpy)\.\w+\(|tensor\()?(?P<quote>['\"]?)(?P<value>{NUMBER})(?P=quote)\)?\s*(?P<end>[,}}\]]|,|$)"
)
_PAIR = re.compile(
    r"^\s*(?:wandb:\s+)?['\"]?([A-Za-z_][\w.@\-]*(?:/[\w.@()\- ]+?)+)['\"]?\s*(?:[=:]|\s)\s*"
    rf"({NUMBER})\s*,?\s*$"
)
_ENTRY = re.compile(
    rf"^\s*\{{?\s*(?P<mark>['\"])(?P<key>[A-Za-z_][\w.@\-]*(?:/[\w.@()\- ]+?)+)(?P=mark):\s*"
    rf"(?P<quote>['\"]?)(?P<value>{NUMBER})(?P=quote)[,}}]\s*$"
)
_BULLET = re.compile(
    rf"^\s*(?:[•\-*]\s+)?(?P<key>[A-Za-z][\w/ .()+-]*?)\s*:\s*[~≈]?(?P<value>{NUMBER})\s*"
    r"(?P<unit>s|%|ms|steps?|tokens|TFLOPS)?\b\s*(?:\([^)]*\))?\s*$"
)
_PIPE = re.compile(
    rf"^(?:(?P<name>[A-Za-z][\w. %\-]*?)\s*:?\s+)?(?P<value>{NUMBER})\s*"
    r"(?P<unit>[A-Za-z%/]+)?(?:\s*/.*)?(?:\s*\([^)]*\))?$"
)
_PIPE_UNITS = {
    "time": "s",
    "throughput": "tokens/s",
    "seq. length": "tokens/sample",
    "truncation": "%",
    "error": "%",
    "cancelled": "%",
    "mfu": "%",
}
"""Units that these fields (by the beginning of their name) always have."""
_ENGINE = re.compile(
    rf"Avg prompt throughput: ({NUMBER}) tokens/s, Avg generation throughput: ({NUMBER}) tokens/s"
    rf"(?:.*?Running: (\d+) reqs)?(?:.*?Waiting: (\d+) reqs)?(?:.*?GPU KV cache usage: ({NUMBER})%)?"
    rf"(?:.*?Prefix cache hit rate: (?:GPU: )?({NUMBER})%)?"
)
_ENGINE_KEYS = (
    "engine/prompt_tokens_per_s",
    "engine/generation_tokens_per_s",
    "engine/num_running",
    "engine/num_waiting",
    "engine/kv_percent",
    "engine/prefix_hit_percent",
)


def wanted_values(
    tokens: Sequence[bytes], wanted: Mapping[bytes, str]
) -> tuple[dict[str, float], str | None]:
    """Return the numbers of those ``key:value`` tokens whose key is wanted, and the key of the last token.

    The hot loop of dense logs: one look-up a token, one number a wanted key.
    """
    values: dict[str, float] = {}
    find = wanted.get
    for token in tokens:
        key, _, printed = token.rpartition(b":")
        name = find(key)
        if name is not None:
            try:
                value = float(printed)
            except ValueError:
                parsed = number(printed.decode("utf-8", "replace"))
                if parsed is None:
                    continue
                value = parsed
            if math.isfinite(value):
                values[name] = value
    return values, tokens[-1].rpartition(b":")[0].decode("utf-8", "replace") if tokens else None


def loose_pairs(text: str) -> Iterator[tuple[str, float]]:
    """Yield ``key:value`` pairs from a line whose separators were damaged by wrapping."""
    for key, value in _LOOSE.findall(text):
        found = number(value)
        if found is not None:
            yield key, found


def dict_pairs(text: str) -> tuple[dict[str, float], bool]:
    """Return the numbers of a printed dict or JSON object, and whether its end was reached.

    Numbers may be quoted or wrapped (``np.float64(1.5)``); nested values keep their own key. The last value
    of a dict that was cut is left out: it may lack digits.
    """
    found: dict[str, float] = {}
    for match in _DICT.finditer(text):
        if not match["end"]:
            continue
        value = number(match["value"])
        if value is not None:
            found[match["key"]] = value
    closed = text.count("}") >= text.count("{")
    return found, closed


def pair(text: str) -> tuple[str, float] | None:
    """Return the pair of a line ``area/key = value`` (or ``:``, or blanks); None if it is no such line.

    A line may be one entry of a dict that is printed over many lines: ``'area/key': '1.5',``.
    """
    entry = _ENTRY.match(text)
    if entry is not None:
        return entry["key"], float(entry["value"].replace(",", ""))
    match = _PAIR.match(text)
    return (match[1], float(match[2].replace(",", ""))) if match else None


def bullet(text: str) -> tuple[str, str, str] | None:
    """Return key, value (as printed) and unit of a line ``• key: 1.23s (45.6%)``; None for other lines."""
    match = _BULLET.match(text)
    if match is None:
        return None
    return match["key"], match["value"], match["unit"] or ""


def pipe_field(text: str) -> tuple[str, float, str] | None:
    """Return name (lower case), value and unit of one field; None if it is none, or was cut before its unit.

    A bare ``12.3s`` is named ``time``.
    """
    match = _PIPE.match(text.strip())
    if match is None:
        return None
    unit = match["unit"] or ""
    name = (match["name"] or ("time" if unit == "s" else "")).strip().lower()
    needed = next((each for start, each in _PIPE_UNITS.items() if name.startswith(start)), unit)
    return (name, float(match["value"].replace(",", "")), unit) if name and unit == needed else None


def pipe_fields(text: str) -> Iterator[tuple[str, float, str]]:
    """Yield the fields of ``Name: value unit | Name value%``."""
    for part in text.split("|"):
        found = pipe_field(part)
        if found is not None:
            yield found


def box_pairs(text: str) -> dict[str, float]:
    """Return the pairs of a table row ``│ key │ value │ key │ value │``.

    What stands behind the last border may be cut: it is no cell.
    """
    cells = [cell.strip() for cell in re.split(r"[│┃|]", text)][:-1]
    found: dict[str, float] = {}
    for key, value in itertools.pairwise(cells):
        if "/" in key or "_" in key:
            parsed = number(value) if value else None
            if parsed is not None and number(key) is None:
                found[key] = parsed
    return found


def box_equations(text: str, area: str) -> dict[str, float]:
    """Return the cells ``│key=value│`` of a table row, their area put before each key; cut cells are none."""
    found: dict[str, float] = {}
    for cell in re.split("[│┃]", text)[:-1]:
        key, _, printed = cell.strip().partition("=")
        value = number(printed) if printed else None
        if key and value is not None:
            found[area + key] = value
    return found


def timers_ms(text: str) -> Iterator[tuple[str, float]]:
    """Yield the timers of DeepSpeed's ``time (ms) | name: 1.23 | name: 4.56``; they have two decimals."""
    return ((name, float(value)) for name, value in re.findall(r"\| (\w+): (\d+\.\d{2})(?= \||\s*$)", text))


def engine(text: str) -> dict[str, float]:
    """Return the numbers of vLLM's periodic line."""
    match = _ENGINE.search(text)
    if match is None:
        return {}
    values = {key: number(value) for key, value in zip(_ENGINE_KEYS, match.groups(), strict=True) if value}
    return {key: value for key, value in values.items() if value is not None and not math.isnan(value)}
