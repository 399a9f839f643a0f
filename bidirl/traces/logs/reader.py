"""Find the lines that matter in blocks of bytes and bring what they say to the rows of a store.

Blocks are searched for a few byte strings (``bytes.find``, memory speed); only lines with one of them, and
lines that continue such a line, are looked at. Nothing else of a log is decoded.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping

from bidirl.traces.logs import shapes
from bidirl.traces.logs.dialects import WANTED
from bidirl.traces.logs.records import STEP_LINE, OpenRecord
from bidirl.traces.logs.rows import Rows, Store
from bidirl.traces.logs.text import clean, number
from bidirl.traces.logs.timers import DeepSpeedTimers, Spans

__all__ = ["NEEDLES", "TextReader"]

NEEDLES: tuple[bytes, ...] = (
    b"step:",
    b"Step ",
    b"timing",
    b"perf/",
    b"_time",
    b"time/",
    b"rollout/",
    b"async/",
    b"global_step",
    "•".encode(),
    "│".encode(),
    "┃".encode(),
    b"Training Results",
    b"step time:",
    b"/sec/gpu)",
    b"(Tokens/sec)",
    b" throughput: ",
    b"seconds to ",
    b"Orchestrator ",
    b" rollouts (",
    b"ed: '",
    b"train_runtime",
    b"time (ms) |",
    b"Stats (",
    b"Global step ",
    b"{'loss'",
    b"{'reward'",
    b"generate/",
    "├".encode(),
)
"""Every line format has one of these in each line that starts it."""

WANTED_BYTES = {key.encode(): key for key in WANTED}

SAMPLE_FIRST, SAMPLE_EVERY = 16, 256
"""All keys are looked at in the first records and then in every so many: new keys rarely appear late."""

_SYNC_PRINT = re.compile(r"param_sync: ([\d.]+) seconds self\.current_param_version: (\d+)")
_DICT_HEAD = re.compile(
    r"(?:\b(?P<kind>perf|rollout|step|eval|[Gg]lobal step|Step|iteration)\s*:?\s*(?P<step>\d+)\s*[:|-]?\s*)?$"
)
_PIPE_STEP = re.compile(r"\bStep (\d+) \|")
_HEADER = re.compile(r"=+ ?Step (\d+)/\d+ ?=+")
_AREAL = re.compile(r"\bTrain step (\d+)/\d+ done")
_AREAL_PART = re.compile(r"\bStats \((\d+)/\d+\):")
_TITLE = re.compile(r"(?:^|[ -])Step (\d+)(?P<colon>:)?\s*$")
_BAR = re.compile(rb"^\s*\d+%\|[^|]*\| *\d+/\d+ \[[\d:]+<[\d:?]+, +([\d.]+)s/it\]")
_SECTION = re.compile(r"^\s*├─+ ([A-Z][\w/ ]*) ─+┤")
_BOX_STEP = re.compile(r"│ Global Step:\s*(\d+)/\d+")
_SLEEP = re.compile(r"It took ([\d.]+) seconds to (fall asleep|wake up)")
_RESUMED = re.compile(r"Orchestrator resumed\b.*\(after ([\d.]+)s\)")
_FILTERED = re.compile(r"Detected \d+/(\d+) rollouts \(.*\), enforced (\d+)")
_ENGINE_INDEX = re.compile(r"Engine (\d+):")
_STEP_NAMES = (
    "trainer/global_step",
    "global_step",
    "rollout/step",
    "training/global_step",
    "train/global_step",
    "system/global_step",
    "trainer/step",
    "step",
    "_step",
)
"""Keys that hold a record's step, best first: trackers count their own calls in ``_step``."""

_AREAS = {"Time": "time/", "Rollout": "rollout/"}
"""Sections of RLinf's box whose metrics say something, and the area that it leaves out of their names."""
_TIMER_UNIT_FREE = (
    "Mean",
    "Avg",
    "Buffer",
    "Loss",
    "E2E",
    "Policy Training (",
    "Generation Worker",
    "Training W",
)


class TextReader:
    """Reads the lines of one log into a store; state lives between blocks."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.sleep_s: dict[str, list[float]] = {"fall asleep": [], "wake up": []}
        self.kinds: Counter[str] = Counter()
        """How many lines of each kind were met: what an error message tells."""
        self._tail = b""
        self._open: OpenRecord | None = None
        self._num_records = 0
        self._block: dict[str, float] | None = None
        self._block_step: int | None = None
        self._is_validation = False
        self._pending: dict[str, float] = {}
        self._last_resumed = ""
        self._box_title: int | None = None
        self._dict_title: int | None = None
        self._area: str | None = None
        self._part = 1
        self._last_dict: dict[str, float] = {}
        self._spans = Spans()
        self._deepspeed = DeepSpeedTimers()
        self.engine_rows = Rows()
        """Rows of the inference engine's own lines, beside those of training."""
        self.deepspeed_rows = self._deepspeed.rows
        """Rows of DeepSpeed's timers, beside those of training."""
        self.bar_s: float | None = None
        """Seconds a step by the last progress bar without a name, as the Hugging Face trainer draws it."""

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the log, cut anywhere."""
        buffer = self._tail + data if self._tail else data
        end = buffer.rfind(b"\n") + 1
        self._tail = buffer[end:]
        if end:
            self._scan(buffer, end)
            self._bar(buffer, end)

    def close(self) -> None:
        """Take what is left as the last line; nothing can follow."""
        if self._tail:
            tail, self._tail = self._tail + b"\n", b""
            self._scan(tail, len(tail))
        self._commit()
        self._flush_block()
        self._span_row(self._spans.take())

    def _bar(self, buffer: bytes, end: int) -> None:
        """Look at the last progress bar of a block: there may be millions of them."""
        hit = buffer.rfind(b"s/it]", 0, end)
        if hit >= 0:
            start = max(buffer.rfind(b"\n", 0, hit), buffer.rfind(b"\r", 0, hit)) + 1
            found = _BAR.match(buffer[start : hit + 5])
            if found is not None:
                self.bar_s = float(found[1])

    # ------------------------------------------------------------ finding lines

    def _scan(self, buffer: bytes, end: int) -> None:
        position = 0
        hits = [buffer.find(needle, 0, end) for needle in NEEDLES]
        while position < end:
            if self._open is not None:
                stop = buffer.find(b"\n", position, end)
                if self._open.take(buffer[position:stop]):
                    position = stop + 1
                    continue
                self._commit()
            for index, hit in enumerate(hits):
                if 0 <= hit < position:
                    hits[index] = buffer.find(NEEDLES[index], position, end)
            hit = min((each for each in hits if each >= 0), default=-1)
            if hit < 0:
                break
            start = max(buffer.rfind(b"\n", position, hit) + 1, position)
            stop = buffer.find(b"\n", hit, end)
            self._line(buffer[start:stop])
            position = stop + 1

    def _line(self, line: bytes) -> None:
        if line.lstrip()[:1] == b"#":
            return
        if b"step:" in line:
            if b"\x1b" in line or b"\r" in line or b"m(" in line:
                line = clean(line).encode()
            found = STEP_LINE.search(line)
            if found is not None:
                self._flush_block()
                self._open = OpenRecord("step", line[found.start() :], len(line))
                self.kinds["step:N - key:value"] += 1
                return
        text_line = clean(line)
        if text_line.lstrip().startswith("#"):
            return
        self._other(text_line, len(line))

    def _other(self, text: str, width: int) -> None:
        if "{'" in text or '{"' in text:
            self._open = OpenRecord("dict", text.encode(), width)
            self.kinds["dict"] += 1
        elif "Step " in text and _PIPE_STEP.search(text):
            self._open = OpenRecord("pipe", text.encode(), width)
            self.kinds["Step N | ..."] += 1
        elif "throughput: " in text and "Avg prompt" in text:
            self._engine(text)
        elif "seconds to " in text and (slept := _SLEEP.search(text)):
            self.sleep_s[slept[2]].append(float(slept[1]))
            self.kinds["sleep and wake"] += 1
        elif "param_sync" in text and (sync := _SYNC_PRINT.search(text)):
            self.store.add(int(sync[2]), {"print/param_sync_s": float(sync[1])})
            self.kinds["param_sync"] += 1
        elif header := _HEADER.search(text):
            self._flush_block()
            self._block_step, self._block, self._is_validation = int(header[1]), None, False
            self.kinds["=== Step N/M ==="] += 1
        elif areal := _AREAL.search(text):
            self.store.close_row()  # its table follows: what came before is another step's
            self.store.begin(int(areal[1]))
            self._part = 1
            self.kinds["Train step N/M"] += 1
        elif "Stats (" in text and (part := _AREAL_PART.search(text)):
            self._part = int(part[1])
        elif section := _SECTION.match(text):
            self._area = _AREAS.get(section[1])
        elif "│" in text or "┃" in text:
            if text.rstrip().endswith(("│", "┃")):
                self._box(text)
            else:
                self._open = OpenRecord("box", text.encode(), width)
        elif "time cost: " in text and (span := self._spans.end(text)):
            self.kinds["timer"] += 1
            self._span_row(span[0])
            self.store.attach(span[1])
        elif "Started: 'step'" in text:
            self._span_row(self._spans.begin())
        elif "time (ms) |" in text:
            self.kinds["DeepSpeed timers"] += 1
            self._deepspeed.line(text)
        elif "Orchestrator" in text and (resumed := _RESUMED.search(text)):
            if text != self._last_resumed:  # a doubled line is one pause
                waited = self._pending.get("orchestrator:paused", 0.0) + float(resumed[1])
                self._pending["orchestrator:paused"] = waited
            self._last_resumed = text
        elif "rollouts (" in text and (filtered := _FILTERED.search(text)):
            self._pending["orchestrator:filtered"] = int(filtered[2]) / max(int(filtered[1]), 1)
        elif " - " in text and "timing" in text and ("timing_s/" in text or "timing/" in text):
            self._open = OpenRecord("step", ("step:? - " + text.lstrip(" -")).encode(), width)
            self.kinds["key:value without a step"] += 1
        elif title := _TITLE.search(text):
            if title["colon"]:
                self._dict_title = int(title[1])
            else:
                self._box_title = int(title[1])
        else:
            self._block_or_pair(text)

    # ------------------------------------------------------------ single lines

    def _box(self, text: str) -> None:
        self.kinds["table row"] += 1
        if step := _BOX_STEP.search(text):
            self.store.close_row()
            self.store.begin(int(step[1]))
            self._area = None
            return
        values = shapes.box_pairs(text)
        if self._area is not None:
            values |= shapes.box_equations(text, self._area)
        if self._box_title is not None and not values.keys().isdisjoint(WANTED):
            self.store.close_row()
            self.store.begin(self._box_title)
            self._box_title = None
        if self._part == 1:
            self._add(None, values)
        else:  # further mini-batches of the step: what the first block has is not theirs to change
            self.store.attach({key: value for key, value in values.items() if key in WANTED})

    def _span_row(self, values: dict[str, float]) -> None:
        if values:
            held_back = self._spans.ended
            self.store.close_row()
            self._add(None, values)
            self.store.close_row()
            self._spans.ended = held_back

    def _engine(self, text: str) -> None:
        values = shapes.engine(text)
        if values:
            index = _ENGINE_INDEX.search(text)
            values["engine/index"] = float(index[1]) if index else 0.0
            row = self.engine_rows.append(None)
            for key, value in values.items():
                self.engine_rows.put(row, key, value)
            self.kinds["vLLM engine"] += 1

    def _block_or_pair(self, text: str) -> None:
        if "Training Results" in text:
            self._flush_block()
            self._block, self._is_validation = {}, False
            self.kinds["Training Results"] += 1
            return
        if "Validation Results" in text or "Validation Timing" in text or "validation time" in text:
            self._is_validation = True
            return
        found = shapes.bullet(text)
        if found is not None and ("•" in text or self._block is not None):
            self._bullet(*found)
            return
        pair = shapes.pair(text)
        if pair is not None:
            key, value = pair
            self.kinds["key = value"] += 1
            if key in _STEP_NAMES and value >= 0 and value == int(value):
                self.store.begin(int(value))
            else:
                self._add(None, {key: value})

    def _bullet(self, key: str, value: str, unit: str) -> None:
        if self._is_validation:
            return
        is_free = key.startswith(_TIMER_UNIT_FREE)
        if (unit != "s" and not is_free) or (is_free and "." in value and len(value.rpartition(".")[2]) < 2):
            return  # timers end in "s" and rates have two decimals: what does not was cut
        parsed = number(value)
        if parsed is None or math.isnan(parsed):
            return
        name = f"• {key}"
        if self._block is None:
            self._block = {}
        if name in self._block and self._block[name] != parsed:
            self._flush_block()
            self._block = {}
        self._block[name] = parsed
        self.kinds["bullet"] += 1

    def _flush_block(self) -> None:
        block, self._block = self._block, None
        if block:
            step, self._block_step = self._block_step, None
            if step is None:
                self.store.close_row()
            self._add(step, block)
            if step is None:
                self.store.close_row()

    # ------------------------------------------------------------ records

    def _commit(self) -> None:
        record, self._open = self._open, None
        if record is None:
            return
        match record.kind:
            case "step":
                self._step_record(record)
            case "dict":
                self._dict_record(record.text)
            case "box":
                self._box(record.text)
            case _:
                self._pipe_record(record.text)

    def _step_record(self, record: OpenRecord) -> None:
        is_sampled = self._sampled()
        if len(record.lines) > 1:
            head, _, rest = record.text.partition(" - ")
            pairs = list(shapes.loose_pairs(rest))
            values = {key: value for key, value in pairs if key in WANTED and math.isfinite(value)}
            seen = [key for key, _ in pairs] if is_sampled else []
            last = pairs[-1][0] if pairs else None
        else:
            tokens = record.first.split(b" - ")
            head = tokens[0].decode("utf-8", "replace")
            values, last = shapes.wanted_values(tokens, WANTED_BYTES)
            seen = (
                [token.rpartition(b":")[0].decode("utf-8", "replace") for token in tokens[1:]]
                if is_sampled
                else []
            )
        label = head.removeprefix("step:").strip().rstrip("-").strip()
        if values:
            rows = self.store.add(int(label) if label.isdigit() else None, values, last)
            if is_sampled:
                rows.see([key for key in seen if key])

    def _dict_record(self, text: str) -> None:
        brace = text.find("{")
        head = _DICT_HEAD.search(text[:brace].rstrip())
        kind, step = (head["kind"], head["step"]) if head else (None, None)
        if kind == "eval":
            return
        values, _ = shapes.dict_pairs(text[brace:])
        if kind == "step" and all(key.startswith("train/") for key in values):
            return  # slime's optimizer steps: another counter than its rollouts
        title, self._dict_title = self._dict_title, None
        if "train_runtime" in values:  # the Hugging Face trainer's last word
            self.store.new_run()
            return
        number_of = int(step) if step is not None else _step_of(values)
        kept = {key: value for key, value in values.items() if key in WANTED and math.isfinite(value)}
        if title is not None and any("/" in key for key in values):
            self.store.close_row()
            self.store.begin(title)  # what follows line by line belongs to it too
            number_of = None
        elif number_of is None and kept and not self._last_dict.items() <= kept.items():
            self.store.close_row()  # no repetition of the last one: the next row
        self._last_dict = kept or self._last_dict
        self._add(number_of, values)

    def _pipe_record(self, text: str) -> None:
        found = _PIPE_STEP.search(text)
        if found is None:
            return
        fields = list(shapes.pipe_fields(text[found.end() :]))
        is_trainer = any(name in ("loss", "mismatch kl", "entropy", "kl loss", "lr") for name, _, _ in fields)
        who = "trainer" if is_trainer else "orchestrator"
        values: dict[str, float] = {}
        for name, value, _ in fields:
            values[f"{who}:{name}"] = value / 100 if name.startswith("truncation") else value
        if who == "orchestrator":
            values |= self._pending
            self._pending = {}
        self._add(int(found[1]), values)

    def _add(self, step: int | None, values: dict[str, float]) -> None:
        kept = {key: value for key, value in values.items() if key in WANTED and math.isfinite(value)}
        kept = {key: value for key, value in kept.items() if key not in _STEP_NAMES}
        if "timing/step" in kept:
            self._spans.ended = {}
        if kept:
            rows = self.store.add(step, kept)
            if self._sampled():
                rows.see([key for key in values if key not in _STEP_NAMES])

    def _sampled(self) -> bool:
        self._num_records += 1
        return self._num_records <= SAMPLE_FIRST or self._num_records % SAMPLE_EVERY == 0


def _step_of(values: Mapping[str, float]) -> int | None:
    """Return the step that a record names, None if it names none."""
    for name in _STEP_NAMES:
        value = values.get(name, math.nan)
        if value >= 0 and value == int(value):
            return int(value)
    return None
