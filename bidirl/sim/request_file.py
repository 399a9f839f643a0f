"""Request files of one engine: arrivals and lengths, and a real engine's timestamps where it has them.

Columns ``arrival_s, input_toks, output_toks`` are required; ``request_id`` names the rows; a measured run
adds ``first_token_ts, last_token_ts``, in seconds on the clock of ``arrival_s``. Other columns are ignored.
"""

import csv
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from bidirl.errors import InputError

__all__ = ["MeasuredTimes", "Requests", "read_requests"]

REQUIRED = ("arrival_s", "input_toks", "output_toks")
MEASURED = ("first_token_ts", "last_token_ts")


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """When a real engine emitted the first and the last token of each request, in seconds."""

    first_token_s: tuple[float, ...]
    last_token_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Requests:
    """Columns of a request file, in its order."""

    names: tuple[str, ...]
    arrival_s: tuple[float, ...]
    input_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    measured: MeasuredTimes | None = None

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.names)


def read_requests(path: Path) -> Requests:
    """Read a request file; raise InputError with file, line and remedy for anything malformed."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.reader(file, strict=True))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}): give a request file") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise InputError(f"{path}: is not a CSV file ({error}): give comma-separated UTF-8 text") from None
    if not rows:
        raise InputError(f"{path}: is empty: it needs a header with {', '.join(REQUIRED)}")
    header = [name.strip() for name in rows[0]]
    for name in REQUIRED:
        if name not in header:
            raise InputError(f"{path}:1: column {name} is missing: the header needs {', '.join(REQUIRED)}")
    for name in header:
        if header.count(name) > 1:
            raise InputError(
                f"{path}:1: column {name!r} appears {header.count(name)} times: name each column once"
            )
    lines = [(number, row) for number, row in enumerate(rows[1:], start=2) if row]
    if not lines:
        raise InputError(f"{path}: has a header but no request: add one line per request")
    places = {name: header.index(name) for name in header}
    given = [name for name in MEASURED if name in places]
    if len(given) == 1:
        raise InputError(
            f"{path}:1: column {given[0]} alone does not describe a run: give {' and '.join(MEASURED)}"
        )
    names: list[str] = []
    columns: dict[str, list[float]] = {name: [] for name in (*REQUIRED, *given)}
    for number, row in lines:
        where = f"{path}:{number}"
        if len(row) != len(header):
            raise InputError(f"{where}: has {len(row)} fields, the header {len(header)}: correct the line")
        columns["arrival_s"].append(_seconds(row[places["arrival_s"]], "arrival_s", where))
        for name in ("input_toks", "output_toks"):
            columns[name].append(_tokens(row[places[name]], name, where))
        for name in given:
            columns[name].append(_seconds(row[places[name]], name, where))
        if (
            given
            and not columns["arrival_s"][-1] <= columns["first_token_ts"][-1] <= columns["last_token_ts"][-1]
        ):
            raise InputError(
                f"{where}: arrival_s, first_token_ts, last_token_ts must not decrease: use one clock for all"
            )
        names.append(row[places["request_id"]] if "request_id" in places else str(len(names)))
    return Requests(
        names=tuple(names),
        arrival_s=tuple(columns["arrival_s"]),
        input_tokens=tuple(int(v) for v in columns["input_toks"]),
        output_tokens=tuple(int(v) for v in columns["output_toks"]),
        measured=MeasuredTimes(tuple(columns[MEASURED[0]]), tuple(columns[MEASURED[1]])) if given else None,
    )


def _seconds(text: str, name: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"{where}: {name}={text!r} is not a number: give seconds") from None
    if not isfinite(value) or value < 0:
        raise InputError(
            f"{where}: {name}={text!r} must be finite and >= 0: give seconds from the start of the run"
        )
    return value


def _tokens(text: str, name: str, where: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise InputError(f"{where}: {name}={text!r} is not an integer: give a number of tokens") from None
    if value < 1:
        raise InputError(f"{where}: {name}={value} must be at least 1: drop the request or correct it")
    return value
