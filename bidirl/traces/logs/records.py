"""Records that a terminal may have broken over lines: when a line belongs to the one before it."""

import re
from dataclasses import dataclass, field

from bidirl.traces.logs.shapes import pipe_field
from bidirl.traces.logs.text import NUMBER, clean

__all__ = ["STEP_LINE", "OpenRecord", "starts_anew"]

MAX_LINES, MAX_BYTES = 600, 1 << 20
"""Beyond this a record that does not end is given up: no metrics line is that long."""

MIN_WIDTH, MAX_WIDTH = 40, 500
"""Columns of terminals: only lines of such a length are broken in the middle of a word."""

STEP_LINE = re.compile(rb"(?<![\w/.])step:\s*(\d+)\s*(?= -|-|$|\r)")

_ANEW = re.compile(
    r"^\s*(?:#|\[?\d{4}-\d\d-\d\d|\[?\d\d:\d\d:\d\d|INFO\b|WARN|ERROR|DEBUG|SUCCESS|Traceback|===|"
    r"(?:perf|rollout|step|eval) \d+:|(?:[\w.\[\]: -]*\s)?step:\s*\d+\s+-|"
    r"[^{]*[\[(:]\s*\{['\"]|[^{'\"]*\{['\"][\w/]+['\"]:)"
)
_TOKEN = re.compile(rf"^[\w./@()+-]+:(?:(?:np\.\w+|tensor)\((?:{NUMBER})\)|(?:{NUMBER}))$")
_KEY_PART = re.compile(r"^[A-Za-z_][\w./@()+-]*:?$")
_BORDERS = ("│", "┃")
_FRAGMENT = re.compile(r"^[\w./@()+-]*:?[\w.()+-]*$")


def starts_anew(text: str) -> bool:
    """Say whether a line begins something of its own, so that it continues nothing."""
    return not text.strip() or bool(_ANEW.match(text))


@dataclass
class OpenRecord:
    """A record whose last line may still come: ``kind`` is ``step``, ``dict``, ``box`` or ``pipe``."""

    kind: str
    first: bytes
    """The first line as it is in the log, from where the record begins."""
    width: int = 0
    """Bytes of the first line with what stands before the record: the width of a terminal that broke it."""
    last_width: int = 0
    lines: list[str] = field(default_factory=list)
    """All lines, cleaned, once a second one was looked at."""
    num_bytes: int = 0

    @property
    def text(self) -> str:
        """All lines as one."""
        return "".join(self.lines) if self.lines else clean(self.first)

    def take(self, line: bytes) -> bool:
        """Add a line if it continues the record; say whether it does."""
        if len(self.lines) >= MAX_LINES or self.num_bytes > MAX_BYTES or STEP_LINE.search(line, 0, 200):
            return False
        if len(line) > MAX_WIDTH and not (self.kind == "step" and b" - " in line):
            return False
        if not self.lines:
            self.lines.append(clean(self.first))
            self.last_width = self.width
        text = clean(line)
        if not self._continues(text):
            return False
        self.lines.append(text)
        self.last_width = len(line)
        self.num_bytes += len(text)
        return True

    def _continues(self, text: str) -> bool:
        if starts_anew(text):
            return False
        match self.kind:
            case "step":
                return self._continues_step(text)
            case "dict":
                return self._continues_dict(text)
            case "box":
                return self._continues_box(text)
            case _:
                return self._continues_pipe(text)

    def _continues_step(self, text: str) -> bool:
        is_inside = self.lines[-1][-1:].isalnum() and text[:1].isalnum()
        if is_inside and abs(self.last_width - self.width) > 1:
            return False  # a terminal breaks words at its own width only
        parts = [part.strip() for part in re.split(r"(?:^|\s)-(?=\s|$)", text)]
        tail = re.split(r"\s-(?=\s|$)", self.text)[-1].strip()
        joined = tail + parts[0]
        whole = not parts[0] or bool(_TOKEN.match(parts[0])) or bool(_TOKEN.match(joined))
        whole = whole or bool(_KEY_PART.match(joined) and len(parts) == 1)
        if len(parts) > 1:
            last = parts[-1]
            inner = all(_TOKEN.match(part) for part in parts[1:-1])
            before = self.text
            if any(f"{part.rpartition(':')[0]}:" in before for part in parts[1:] if ":" in part):
                return False  # a key that the record has: the rest of another one
            return whole and inner and (not last or bool(_FRAGMENT.match(last)))
        width = len(self.lines[-1])
        return whole and bool(_FRAGMENT.match(text.strip())) and MIN_WIDTH <= width <= MAX_WIDTH

    def _continues_dict(self, text: str) -> bool:
        whole = self.text
        if whole.count("{") <= whole.count("}"):
            return False
        if "':" in text or '":' in text or "}" in text:
            return True
        return len(text.split()) <= 4 and MIN_WIDTH <= len(self.lines[-1]) <= MAX_WIDTH

    def _continues_box(self, text: str) -> bool:
        is_open = not self.lines[-1].rstrip().endswith(_BORDERS)
        is_row = text.lstrip().startswith((*_BORDERS, "├", "╞", "╘", "╰", "└")) and len(text.strip()) > 1
        return is_open and not is_row and MIN_WIDTH <= len(self.lines[-1]) <= MAX_WIDTH

    def _continues_pipe(self, text: str) -> bool:
        if " │ " in text or not MIN_WIDTH <= len(self.lines[-1]) <= MAX_WIDTH:
            return False
        if "|" in text and "%|" not in text:
            return True
        tail = self.text.rpartition("|")[2]
        is_short = len(text) < MIN_WIDTH
        return is_short and pipe_field(tail) is None and pipe_field(tail + text) is not None
