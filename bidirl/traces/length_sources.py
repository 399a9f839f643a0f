"""Where length laws come from: the packaged ones and files of observed lengths."""

import csv
import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from bidirl.errors import InputError
from bidirl.traces.lengths import Component, LengthLaw, empirical, mixture

__all__ = ["PackagedPrompt", "packaged_law", "packaged_names", "packaged_prompt", "read_observed"]

_COLUMN = "response_tokens"


@dataclass(frozen=True, slots=True)
class PackagedPrompt:
    """Prompt statistics that come with a packaged law."""

    mean_tokens: float
    """Mean text tokens, without images."""
    p95_tokens: float | None
    image_tokens: int
    source: str
    assumed: bool


@lru_cache(maxsize=1)
def _laws() -> dict[str, Any]:
    text = files("bidirl.traces").joinpath("data/lengths.json").read_text(encoding="utf-8")
    laws: dict[str, Any] = json.loads(text)["laws"]
    return laws


def packaged_names() -> tuple[str, ...]:
    """List the names that `packaged_law` knows, sorted."""
    return tuple(sorted(_laws()))


def packaged_law(name: str, max_tokens: int) -> LengthLaw:
    """Return the packaged law under a cap.

    Raises:
        InputError: when there is no such law.
    """
    if name not in _laws():
        raise InputError(f"lengths={name!r} is not packaged: use one of {', '.join(packaged_names())}")
    entry = _laws()[name]
    components = [Component(**part) for part in entry["components"]]
    assumed = entry["status"] != "fitted"
    law = mixture(components, max_tokens, label=entry["label"], source=entry["source"], assumed=assumed)
    return LengthLaw(
        law.z, law.log_tokens, max_tokens, law.label, law.source, assumed, notes=tuple(entry["notes"])
    )


def packaged_prompt(name: str) -> PackagedPrompt | None:
    """Return the prompt statistics of a packaged law, or None where no source prints any."""
    prompt = _laws()[name]["prompt"]
    if prompt is None:
        return None
    mean, p95, images = prompt["mean_tokens"], prompt["p95_tokens"], prompt["image_tokens"]
    return PackagedPrompt(mean, p95, images, prompt["source"], prompt["status"] != "fitted")


def read_observed(path: Path, max_tokens: int) -> LengthLaw:
    """Read observed lengths and make their law.

    Accepts a ``.json`` list of integers, a CSV file with a column ``response_tokens``, or text with one
    integer a line (blank lines and lines that start with ``#`` are skipped).

    Raises:
        InputError: when the file is missing, empty, or holds something else than integers >= 1.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InputError(f"lengths.file={path}: {reason}: give a readable file of observed lengths") from None
    except UnicodeDecodeError:
        raise InputError(f"lengths.file={path}: not UTF-8 text: give a csv, json or text file") from None
    observed = _from_json(text, path) if path.suffix == ".json" else _from_lines(text, path)
    if not observed:
        raise InputError(f"lengths.file={path}: holds no observed length: give at least one response")
    label = f"{len(observed)} observed lengths"
    return empirical(observed, max_tokens, label=label, source=path.name)


def _from_json(text: str, path: Path) -> list[int]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: not JSON ({error.msg}): give a list of integers") from None
    if not isinstance(data, list):
        raise InputError(f"{path}:1: a JSON {type(data).__name__}: give a list of integers")
    return [_checked(value, f"{path}: item {i}") for i, value in enumerate(data)]


def _from_lines(text: str, path: Path) -> list[int]:
    rows = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if _is_data(line)]
    if not rows:
        return []
    header = next(csv.reader([rows[0][1]]))
    column = 0
    if len(header) > 1 or not _is_number(header[0]):
        names = [name.strip() for name in header]
        if _COLUMN not in names:
            found = ", ".join(names[:8])
            raise InputError(f"{path}:{rows[0][0]}: columns {found}: name the column of lengths {_COLUMN}")
        column = names.index(_COLUMN)
        rows = rows[1:]
    observed = []
    for number, line in rows:
        cells = next(csv.reader([line]))
        if column >= len(cells):
            raise InputError(
                f"{path}:{number}: {len(cells)} columns, {_COLUMN} is column {column + 1}: complete it"
            )
        observed.append(_checked(_number(cells[column]), f"{path}:{number}"))
    return observed


def _is_data(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _is_number(text: str) -> bool:
    return not isinstance(_number(text), str)


def _number(text: str) -> int | float | str:
    for convert in (int, float):
        try:
            return convert(text.strip())
        except ValueError:
            continue
    return text.strip()


def _checked(value: object, where: str) -> int:
    if isinstance(value, float) and value.is_integer():  # tables written by pandas turn counts into 12.0
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{where}: {value!r} is not a whole number of tokens: give integers >= 1")
    if not 1 <= value <= 2**40:
        raise InputError(f"{where}: {value} is not a response length: give integers >= 1")
    return value
