"""Clean log lines and read numbers out of them: colours, prefixes, wrappers; reject rather than guess."""

import math
import re

__all__ = ["MAX_NUMBER", "NUMBER", "clean", "number", "strip_ansi"]

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")
_LOST_ESCAPE = re.compile(r"\[(?:\d{1,3}(?:;\d{1,3})*)?m(?=[\s(]|$)")
"""A colour whose escape byte was lost when the log was copied, as in ``[36m(TaskRunner pid=1)[0m``."""
_RAY = re.compile(r"^\s*\((?:[^()]|\([^()]*\))*?\bpid=\d+[^()]*\)\s?")
_REPEATED = re.compile(r"\s*\[repeated \d+x across [^\]]*\](?:\s*\(Ray deduplicates.*)?\s*$")

NUMBER = (
    r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|NaN|inf|Infinity)\b"
)
"""A number as logs print it; thousands may be set off by commas."""

MAX_NUMBER = 1e30
"""What is larger is damage: sums and products of such numbers overflow."""

_WRAPPED = re.compile(
    rf"^[~≈]?(?:(?:np|numpy|torch)\.\w+\(|tensor\(|array\()?['\"]?\s*(?P<value>{NUMBER})\s*['\"]?"
    r"(?P<rest>.*)$",
    re.DOTALL,
)
_UNIT = re.compile(
    r"^(?:\)|,? ?dtype=[\w.]+\)|,? ?device='[\w:]+'\)|\s|%|ms\b|s\b|sec(?:onds)?\b|x\b"
    r"|(?:tokens|samples|steps?|reqs)(?:/(?:s|sec|sample|gpu)){0,2}\b|[GM]i?B\b|\(\s*[\d.,]+\s*%\)|,$|;$"
    r"|\[repeated.*)*$"
)


def strip_ansi(text: str) -> str:
    """Return text without terminal colours and other escape sequences."""
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    return _LOST_ESCAPE.sub("", text) if "[" in text and "m" in text else text


def clean(line: bytes) -> str:
    """Return a line as text without colours, Ray's prefix and suffix, or what a progress bar overwrote."""
    text = strip_ansi(line.decode("utf-8", "replace").rstrip("\r\n"))
    if "\r" in text:
        text = text.rpartition("\r")[2]
    if "pid=" in text:
        text = _RAY.sub("", text, count=1)
    return _REPEATED.sub("", text) if "[repeated" in text else text


def number(text: str) -> float | None:
    """Return the number that a value is; None if it is not one, NaN if it says so.

    Takes ``np.float64(1.5)``, quotes, ``1,234``, ``~3``, a unit (``12.5s``, ``1.2 tokens/s``) and a share in
    brackets behind it. ``1.5abc`` is no number. Infinite values are read as NaN, and so are those beyond
    ``MAX_NUMBER``: no quantity is.
    """
    try:
        value = float(text) if "_" not in text else None
    except ValueError:
        value = None
    if value is None:
        found = _WRAPPED.match(text.strip())
        if found is None or not _UNIT.match(found["rest"]):
            return None
        value = float(found["value"].replace(",", ""))
    return value if abs(value) <= MAX_NUMBER else math.nan
