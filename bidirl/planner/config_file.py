"""Read a job file and say where each of its values was written.

TOML floats are read as ``Decimal``, so that a fraction keeps the digits that were written.
"""

import datetime
import json
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from bidirl.errors import InputError
from bidirl.planner.toml_lines import KeyPath, key_lines

__all__ = ["ConfigFile", "dotted", "exact", "nearest", "read_config", "show"]

MAX_SHOWN = 60
"""Characters of a value that an error line shows; longer ones would hide the rule."""
OF_ONE_KEY = re.compile(r"(\w+) ?= ?(?:'[^']*'|\S+): (.*)", re.DOTALL)
"""A rule of a whole table that begins like ours: ``key = value: rule``."""
PLACE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A parsed job with the places of its values."""

    path: Path
    data: dict[str, Any]
    lines: dict[KeyPath, int]
    """Empty for JSON, which a machine wrote."""
    origins: dict[KeyPath, str] = field(default_factory=dict)
    """Paths that an override wrote -> the override as given."""

    def origin(self, path: KeyPath) -> str | None:
        """Return the override that wrote the value at ``path``, or None if the file did."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return None

    def where(self, path: KeyPath) -> str:
        """Return ``file:line`` of the value at ``path``, of the nearest table around it, or ``file``."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return f"{self.path}:{self.lines[path[:length]]}"
        return str(self.path)

    def problem(self, path: KeyPath, value: Any, rule: str, because: Iterable[KeyPath] = ()) -> str:
        """Return the line ``place: key = value: rule`` for a value at ``path``.

        ``because`` are other values that the rule compares with: if one of them was set on the command
        line and this one was not, the line names that one.
        """
        fact = f"{dotted(path)} = {show(value)}: "
        for candidate in (path, *because):
            origin = self.origin(candidate)
            if origin is not None:
                key, _, _ = origin.partition("=")
                return f"--set {origin}: {'' if dotted(path) == key.strip() else fact}{rule}"
        return f"{self.where(path)}: {fact}{rule}"

    def table_problem(self, path: KeyPath, rule: str) -> str:
        """Return the line for a rule between keys of one table; the rule's text names the keys."""
        table: Any = self.data
        for key in path:
            table = table[key]
        of_one = OF_ONE_KEY.match(rule)
        if of_one and of_one.group(1) in table:
            return self.problem((*path, of_one.group(1)), table[of_one.group(1)], of_one.group(2))
        for key, value in table.items():
            if isinstance(value, str) and value and f"'{value}'" in rule:
                return self.problem((*path, key), value, rule)
        keys = {key: re.search(rf"\b{re.escape(key)}\b", rule) for key in table}
        places = sorted((found.start(), key) for key, found in keys.items() if found)
        named = [(*path, key) for _, key in places]
        for key_path in named:
            if origin := self.origin(key_path):
                return f"--set {origin}: {rule}"
        place = next((self.where(key_path) for key_path in named if key_path in self.lines), self.where(path))
        return f"{place}: {dotted(path)}: {rule}"


def read_config(path: Path) -> ConfigFile:
    """Read a TOML job, or a resolved job in JSON; raise ``InputError`` with file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{path}: is not UTF-8 text: save it as UTF-8 TOML") from None
    except OSError as error:
        reason = (error.strerror or "no reason given").lower()
        raise InputError(f"{path}: cannot be read ({reason}): give the path of a job file") from None
    is_json = path.suffix == ".json"
    try:
        if is_json:
            data = json.loads(text, parse_float=exact, parse_constant=exact)
        else:
            data = tomllib.loads(text, parse_float=exact)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: not valid JSON: {_lower(error.msg)}; correct it") from None
    except tomllib.TOMLDecodeError as error:
        line, reason = _toml_place(error, text)
        raise InputError(f"{path}:{line}: not valid TOML: {reason}; correct this line") from None
    except (ValueError, RecursionError):  # an integer of thousands of digits, brackets thousands deep
        raise InputError(f"{path}: a value is too large to be read: shorten it") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: holds no table of sections: give a job file or a resolved.json")
    return ConfigFile(path, data, {} if is_json else key_lines(text))


def exact(text: str) -> Decimal:
    """Read a number with the digits that were written; beyond any float it is infinite."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return Decimal("Infinity")


def _toml_place(error: tomllib.TOMLDecodeError, text: str) -> tuple[int, str]:
    message = str(error)
    found = PLACE.search(message)
    last = len(text.rstrip().splitlines()) or 1
    line = int(found.group(1)) if found and found.group(1) else last
    return line, _lower(PLACE.sub("", message))


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that ``word`` was probably meant to be."""
    by_lower = {name.lower(): name for name in known}
    close = get_close_matches(word.lower(), by_lower, n=1)
    return by_lower[close[0]] if close else None


def dotted(path: Iterable[str | int]) -> str:
    """Write a key path as TOML would: dots between keys, brackets around indices."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            quoted = part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else json.dumps(part, ensure_ascii=False)
            text += f".{quoted}" if text else quoted
    return text


def show(value: Any) -> str:
    """Write a value on one line, as TOML would, cut where it is long."""
    match value:
        case bool():
            text = str(value).lower()
        case str():
            text = json.dumps(value, ensure_ascii=False)
        case list():
            text = f"[{', '.join(show(item) for item in value)}]"
        case dict():
            pairs = ", ".join(f"{dotted([key])} = {show(item)}" for key, item in value.items())
            text = f"{{{pairs}}}"
        case datetime.date() | datetime.time():
            text = value.isoformat()
        case Decimal() if not value.is_finite():
            text = str(float(value))
        case _:
            text = str(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
