"""Find the line of every key of a TOML text that has already been parsed without an error."""

import re
import tomllib

__all__ = ["KeyPath", "key_lines"]

KeyPath = tuple[str | int, ...]
"""Keys from the root to a value; an integer is an index into an array."""

BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
BARE = re.compile(r"[A-Za-z0-9_-]+")
SCALAR = re.compile(r"[^,\]}\n#]+")
STRINGS = (
    re.compile(r'"""(?:[^\\]|\\.)*?"{3,5}', re.DOTALL),
    re.compile(r"'''.*?'{3,5}", re.DOTALL),
    re.compile(r'"(?:[^"\\]|\\.)*"'),
    re.compile(r"'[^']*'"),
)
"""Multi-line forms first: their opening quotes would also match the short forms."""


def key_lines(text: str) -> dict[KeyPath, int]:
    """Return the line (from 1) of the first mention of each table, key and array element of valid TOML."""
    return _Scanner(text).scan()


class _Scanner:
    """A reader of places only: values are stepped over, not understood."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[KeyPath, int] = {}
        self.num_tables: dict[KeyPath, int] = {}
        """Arrays of tables: path -> elements so far."""

    def scan(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        self._blank()
        while self.at < len(self.text):
            if self.text[self.at] == "[":
                table = self._header()
            else:
                self._pair(table)
            self._blank()
        return self.lines

    def _header(self) -> KeyPath:
        start = self.at
        is_array = self.text.startswith("[[", self.at)
        self.at += 2 if is_array else 1
        path: KeyPath = ()
        parts = self._key()
        for part in parts[:-1]:
            path = self._step(path, part, start)
        if not is_array:
            path = self._step(path, parts[-1], start)
        else:
            path = (*path, parts[-1])
            self._mark(path, start)
            index = self.num_tables.get(path, 0)
            self.num_tables[path] = index + 1
            path = (*path, index)
            self._mark(path, start)
        self.at = self.text.index("]", self.at) + (2 if is_array else 1)
        return path

    def _step(self, path: KeyPath, part: str, start: int) -> KeyPath:
        """Go down by one key; inside an array of tables that means its newest element."""
        path = (*path, part)
        self._mark(path, start)
        return (*path, self.num_tables[path] - 1) if path in self.num_tables else path

    def _pair(self, table: KeyPath) -> None:
        start = self.at
        path = table
        for part in self._key():
            path = (*path, part)
            self._mark(path, start)
        self.at = self.text.index("=", self.at) + 1
        self._blank()
        self._value(path)

    def _key(self) -> list[str]:
        parts = []
        while True:
            self._blank()
            if bare := BARE.match(self.text, self.at):
                parts.append(bare.group())
                self.at = bare.end()
            else:
                start = self.at
                self._string()
                [part] = tomllib.loads(f"{self.text[start : self.at]} = 0")
                parts.append(part)
            self._blank()
            if not self.text.startswith(".", self.at):
                return parts
            self.at += 1

    def _value(self, path: KeyPath) -> None:
        match self.text[self.at]:
            case '"' | "'":
                self._string()
            case "[":
                self._sequence("]", path)
            case "{":
                self._sequence("}", path)
            case _:
                self.at = SCALAR.match(self.text, self.at).end()  # type: ignore[union-attr]

    def _sequence(self, closing: str, path: KeyPath) -> None:
        self.at += 1
        index = 0
        self._blank()
        while self.text[self.at] != closing:
            if closing == "}":
                self._pair(path)
            else:
                self._mark((*path, index), self.at)
                self._value((*path, index))
                index += 1
            self._blank()
            if self.text[self.at] == ",":
                self.at += 1
                self._blank()
        self.at += 1

    def _string(self) -> None:
        for pattern in STRINGS:
            if found := pattern.match(self.text, self.at):
                self.at = found.end()
                return
        raise ValueError(f"no string at {self.at}")

    def _blank(self) -> None:
        self.at = BLANK.match(self.text, self.at).end()  # type: ignore[union-attr]

    def _mark(self, path: KeyPath, start: int) -> None:
        if path not in self.lines:
            self.lines[path] = self.text.count("\n", 0, start) + 1
