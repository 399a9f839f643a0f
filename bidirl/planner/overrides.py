"""Values given on the command line: ``--set section.key=value`` and ``--vary section.key=V1,V2``."""

import tomllib
from collections.abc import Iterable, Sequence
from typing import Any

from bidirl.errors import InputError
from bidirl.planner.config_file import ConfigFile, dotted, exact, show

__all__ = ["apply_overrides", "parse_override", "split_vary"]

PAIRS = {"[": "]", "{": "}", "(": ")"}


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """Split ``section.key=value`` into key path and value: TOML if it is, else a string."""
    key, equals, written = text.partition("=")
    parts = _key_parts(key)
    if not equals or parts is None:
        raise InputError(f"--set {text}: not of the form section.key=value: write the key, =, and the value")
    return parts, _toml_or_string(written.strip())


def _key_parts(key: str) -> tuple[str, ...] | None:
    if "\n" in key:
        return None
    try:
        node: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        return None
    parts = []
    while isinstance(node, dict):
        if len(node) != 1:
            return None
        [(part, node)] = node.items()
        parts.append(part)
    return tuple(parts)


def _toml_or_string(written: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {written}", parse_float=exact)
    except (ValueError, RecursionError):
        return written
    return parsed["value"] if list(parsed) == ["value"] else written


def apply_overrides(config: ConfigFile, overrides: Sequence[str]) -> ConfigFile:
    """Return the job with each ``section.key=value`` laid over it, in order; the last one wins."""
    data = _copy(config.data)
    origins = dict(config.origins)
    for text in overrides:
        parts, value = parse_override(text)
        table = data
        for depth, part in enumerate(parts[:-1], start=1):
            below = table.setdefault(part, {})
            if not isinstance(below, dict):
                whole = dotted(parts[:depth])
                raise InputError(
                    f"--set {text}: {whole} = {show(below)} is not a table: set {whole} as a whole, "
                    f"{whole}={{{dotted(parts[depth:])} = ...}}"
                )
            table = below
        table[parts[-1]] = value
        for path in [path for path in origins if path[: len(parts)] == parts]:
            del origins[path]
        origins[parts] = text
    return ConfigFile(config.path, data, config.lines, origins)


def _copy(table: dict[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, dict) else value for key, value in table.items()}


def split_vary(text: str) -> tuple[str, list[str]]:
    """Split ``key=V1,V2,...`` at top-level commas; brackets, braces and quotes keep a value together.

    Returns the key and the values as written, without blanks around them.
    """
    key, equals, written = text.partition("=")
    parts = _key_parts(key)
    if not equals or parts is None:
        raise InputError(f"--vary {text}: not of the form section.key=V1,V2: write key, = and values")
    values = [value.strip() for value in _top_level(text, written)]
    if "" in values:
        raise InputError(f"--vary {text}: an empty value: give one value between two commas")
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise InputError(f"--vary {text}: {value} is given twice: each value makes a cell, keep one")
        seen.add(value)
    return dotted(parts), values


def _top_level(whole: str, written: str) -> Iterable[str]:
    closing: list[str] = []
    quote = ""
    start = 0
    escaped = False
    for at, char in enumerate(written):
        if quote:
            if escaped:
                escaped = False
            elif char == "\\" and quote == '"':
                escaped = True
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in PAIRS:
            closing.append(PAIRS[char])
        elif closing and char == closing[-1]:
            closing.pop()
        elif char in "]})":
            raise InputError(f"--vary {whole}: {char!r} closes nothing: balance the brackets")
        elif char == "," and not closing:
            yield written[start:at]
            start = at + 1
    if quote or closing:
        missing = quote or closing[-1]
        raise InputError(f"--vary {whole}: {missing!r} is missing at the end: close the quote or bracket")
    yield written[start:]
