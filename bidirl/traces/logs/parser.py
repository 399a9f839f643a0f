"""Feed a log in pieces, ask for its steps at any time; or read whole files at once."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from bidirl.errors import InputError
from bidirl.traces.logs.assemble import assemble, with_facts
from bidirl.traces.logs.dialects import FRAMEWORKS, dialects_of
from bidirl.traces.logs.documents import Document, Reader, notes_of, reader_of
from bidirl.traces.logs.reader import TextReader
from bidirl.traces.logs.rows import Store
from bidirl.traces.logs.stream import blocks
from bidirl.traces.step_log import StepLog

__all__ = ["FORMATS", "LogParser", "read_logs"]

HEAD_BYTES = 1 << 16
"""Bytes after which the kind of a file is decided; also what is searched for notes in the end."""


def _tells(head: bytes) -> bool:
    """Say whether a beginning holds a whole line that is no comment, or is no text: enough to choose."""
    lines = head.split(b"\n")[:-1]
    return b"\0" in head or any(line.strip() and not line.lstrip().startswith(b"#") for line in lines)


FORMATS: tuple[str, ...] = ("auto", *FRAMEWORKS, "bidirl")
"""What ``format`` may be."""


class LogParser:
    """Reads one log incrementally.

    ``feed`` takes bytes cut anywhere (decompressed); ``steps`` gives the tables of what is complete so far;
    ``close`` says that nothing follows, so that a last line without an end counts too.

    Raises:
        InputError: the format is unknown.
    """

    def __init__(self, format: str = "auto", source: str = "") -> None:  # noqa: A002
        if format not in FORMATS:
            raise InputError(f"format {format!r} is unknown: take one of {', '.join(FORMATS)}")
        self.format = format
        self.source = source
        self._framework = "auto" if format == "bidirl" else format
        self._store = Store()
        self._lines = TextReader(self._store)
        self._reader: Reader | None = None
        self._document: Reader | None = None
        self._head = b""

    @property
    def num_rows(self) -> int:
        """Rows completed so far, over all runs."""
        return self._store.num_rows + getattr(self._reader, "num_rows", 0)

    @property
    def is_model_file(self) -> bool:
        """Whether the file is a models.json."""
        return b'"bidirl-models"' in self._head[:4096]

    @property
    def is_empty(self) -> bool:
        """Whether nothing was fed."""
        return not self._head

    @property
    def line_kinds(self) -> Mapping[str, int]:
        """How many lines of each known kind were met."""
        return self._lines.kinds

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        if self._reader is None:
            self._head += data
            if len(self._head) < HEAD_BYTES and not _tells(self._head):
                return
            self._begin()
        else:
            self._reader.feed(data)

    def close(self) -> None:
        """Say that the log has ended."""
        if self._reader is None:
            self._begin()
        if self._reader is not None:
            self._reader.close()

    def steps(self) -> list[StepLog]:
        """Return one table per run found so far; empty if there is no step yet."""
        found = [assemble(rows, self.source, self._framework) for rows in self._store.runs]
        logs = [log for log in found if log is not None]
        if len(logs) > 1:
            logs = [
                replace(log, source=f"{log.source} (run {index} of {len(logs)})".strip())
                for index, log in enumerate(logs, start=1)
            ]
        if isinstance(self._document, Document):
            logs += self._document.tables(self.source, self._framework)
        for rows in (self._lines.deepspeed_rows, self._lines.engine_rows):
            if not logs and len(rows):
                log = assemble(rows, self.source)
                logs = [] if log is None else [log]
        if not logs and self._framework == "auto":
            logs = notes_of(self._head, self.source)
        facts = self._facts()
        return [with_facts(log, facts) for log in logs]

    def _begin(self) -> None:
        """Choose a reader by how the log begins, and give it what was held back."""
        self._document = reader_of(self._head, self._store)
        self._reader = self._document or self._lines
        head, self._head = self._head, self._head[:HEAD_BYTES]
        self._reader.feed(head)

    def _facts(self) -> dict[str, float]:
        facts: dict[str, float] = {}
        for what, name in (("fall asleep", "sleep"), ("wake up", "wake_up")):
            seconds = self._lines.sleep_s[what]
            if seconds:
                facts[f"engine_{name}_median_s"] = float(np.median(seconds))
                facts[f"num_engine_{name}s"] = float(len(seconds))
        if self._lines.bar_s is not None:
            facts["progress_bar_s_per_step"] = self._lines.bar_s
        engine, deepspeed = self._lines.engine_rows, self._lines.deepspeed_rows
        if len(deepspeed):
            columns = deepspeed.columns()
            for key in ("deepspeed/fwd", "deepspeed/bwd", "deepspeed/step"):
                if key in columns:
                    name = key.replace("/", "_") + "_median_s"
                    facts[name] = float(np.nanmedian(columns[key])) / 1e3
        if len(engine):
            columns = engine.columns()
            for key, name in (
                ("engine/generation_tokens_per_s", "engine_generation_tokens_per_s_median"),
                ("engine/num_running", "engine_num_running_max"),
                ("engine/kv_percent", "engine_kv_used_percent_max"),
            ):
                if key in columns:
                    value = np.nanmedian if name.endswith("median") else np.nanmax
                    facts[name] = float(value(columns[key]))
        return facts


def read_logs(paths: Sequence[Path], format: str = "auto") -> list[StepLog]:  # noqa: A002
    """Read logs of any size, compressed or not, into one table per run.

    A file with nothing usable does not lose the others' results. Files of one run whose framework writes
    several (prime-rl's orchestrator and trainer) become one table.

    Raises:
        InputError: no file holds a step, a file cannot be read, or the format is unknown.
    """
    logs: list[StepLog] = []
    complaints: list[str] = []
    for path in _files(paths):
        parser = LogParser(format, str(path))
        try:
            for block in blocks(path):
                parser.feed(block)
        except InputError as error:
            complaints.append(str(error))
            continue
        parser.close()
        found = parser.steps()
        logs += found
        if not found:
            complaints.append(_nothing(path, parser))
    if not logs:
        raise InputError("; ".join(complaints) if complaints else "no log was given: name at least one file")
    merged = _merged(logs)
    if complaints:
        merged[0] = replace(merged[0], notes=(*merged[0].notes, *complaints))
    return merged


def _files(paths: Sequence[Path]) -> list[Path]:
    """Replace a folder by the event files in it: TensorBoard's logs are folders."""
    found: list[Path] = []
    for path in paths:
        events = sorted(path.rglob("events.out.tfevents.*")) if path.is_dir() else []
        found += events or [path]
    return found


def _nothing(path: Path, parser: LogParser) -> str:
    if parser.is_model_file:
        return f"{path}: holds fitted models, no steps: give it to a job as models.file"
    if parser.is_empty:
        return f"{path}: no step found (the file is empty): give a log with steps"
    seen = ", ".join(f"{count} x {kind}" for kind, count in parser.line_kinds.items())
    what = f"seen: {seen}, without times of steps" if seen else "no line has a known form"
    return f"{path}: no step found ({what}): give a log of {', '.join(FRAMEWORKS)}, or name --format"


def _merged(logs: Iterable[StepLog]) -> list[StepLog]:
    """Merge tables of one run that came from several files, where the framework writes several."""
    result: list[StepLog] = []
    for log in logs:
        for index, other in enumerate(result):
            if _complete_each_other(other, log):
                result[index] = _joined(other, log)
                break
        else:
            result.append(log)
    return result


def _complete_each_other(a: StepLog, b: StepLog) -> bool:
    if a.framework != b.framework or a.source == b.source or a.framework not in FRAMEWORKS:
        return False
    if not any(dialect.split_files for dialect in dialects_of(a.framework)):
        return False
    if not (a.has("step") and b.has("step")):
        return False
    shared = (set(a.columns) & set(b.columns)) - {"step", "step_s"}
    steps = set(a.columns["step"]) & set(b.columns["step"])
    return not shared and 2 * len(steps) >= min(len(a), len(b))


def _joined(a: StepLog, b: StepLog) -> StepLog:
    steps = np.union1d(a.columns["step"], b.columns["step"])
    columns = {"step": steps}
    # The trainer's step time wins: it is the one that holds the wait.
    first, second = (a, b) if a.has("trainer_s") or a.has("wait_s") else (b, a)
    for log in (second, first):
        index = np.searchsorted(steps, log.columns["step"])
        for name, column in log.columns.items():
            if name != "step":
                values = columns.get(name, np.full(len(steps), np.nan))
                values[index] = np.where(np.isnan(column), values[index], column)
                columns[name] = values
    return replace(
        first,
        columns=columns,
        facts={**second.facts, **first.facts},
        unknown_keys=tuple(sorted({*a.unknown_keys, *b.unknown_keys})),
        notes=tuple(dict.fromkeys((*first.notes, *second.notes))),
        source=f"{a.source} + {b.source}",
    )
