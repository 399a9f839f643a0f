"""Tables and lines that name timers without their framework: results in a README, notes of an issue.

Such a row is often the mean of a run, not a step, and ``gen`` means waiting in an asynchronous arm (the
trap of verl's tables): rows are split by their mode, and a note says what was assumed.
"""

import itertools
import re
from collections.abc import Mapping, Sequence

import numpy as np

from bidirl.traces.logs.checks import nested_outside, plausible
from bidirl.traces.logs.table import Findings
from bidirl.traces.logs.text import NUMBER, number
from bidirl.traces.step_log import COLUMNS, Mode, StepLog

__all__ = ["bare_lines", "bare_name", "bare_tables", "bare_width"]

NAMES: dict[str, str] = {
    "step": "step_s",
    "step_time": "step_s",
    "time_per_step": "step_s",
    "total": "step_s",
    "total_step_time": "step_s",
    "gen": "generation_s",
    "generate_sequences": "generation_s",
    "generation": "generation_s",
    "rollout": "generation_s",
    "rollout_time": "generation_s",
    "wait": "wait_s",
    "wait_prev_gen": "wait_s",
    "wait_for_samples": "wait_s",
    "exposed_generation": "wait_s",
    "train_wait": "wait_s",
    "old_log_prob": "old_logprob_s",
    "logprobs": "old_logprob_s",
    "log_probs": "old_logprob_s",
    "policy_and_reference_logprobs": "old_logprob_s",
    "ref": "reference_s",
    "values": "values_s",
    "update": "update_s",
    "update_actor": "update_s",
    "update_critic": "update_critic_s",
    "adv": "advantage_s",
    "reward": "reward_s",
    "save_checkpoint": "checkpoint_s",
    "actor_train": "update_s",
    "policy_training": "update_s",
    "training": "update_s",
    "train": "update_s",
    "weight_sync": "weight_sync_s",
    "param_sync": "weight_sync_s",
    "update_weights": "weight_sync_s",
    "response_mean": "response_mean_tokens",
    "response_max": "response_max_tokens",
    "response_min": "response_min_tokens",
    "response_clip_ratio": "truncated_share",
    "clip_ratio": "truncated_share",
    "prompt_mean": "prompt_mean_tokens",
    "total_num_tokens": "total_tokens",
    "validate": "testing_s",
    "testing": "testing_s",
}
"""Bare names and their columns; those that appear as words of sentences only count beside another one."""

STAGES = frozenset({"generation_s", "wait_s", "old_logprob_s", "reference_s", "update_s", "weight_sync_s"})
IN_TURNS_REST = 0.2
"""Share of a step beside its stages up to which they must have run one after the other."""

ASYNC_WORDS = ("async", "one_step", "one-step", "overlap", "off-policy", "separate", "pipeline", "stream")
COLOCATED_WORDS = ("coloc", "sync", "hybrid")
_MODE_NAMES = ("mode", "training mode", "training_mode", "arm", "policy")
_PAIR = re.compile(
    rf"(?<![\w/])([A-Za-z][\w]*?)(?:_s|_time)?\s*(?:[=:]\s*|\s)\s*[~≈]?\s*({NUMBER})(?=\s*s\b|[\s,;|)]|$)"
)
_STEP = re.compile(r"\bstep[ =:#]+(\d+)\b(?!\.\d)", re.IGNORECASE)


def bare_name(name: str) -> str | None:
    """Return the column that a bare name stands for."""
    plain = re.sub(r"[\s\-]+", "_", re.sub(r"\(.*?\)|<.*?>|\*", "", name).strip().lower())
    if plain in COLUMNS and plain != "step":
        return plain
    return NAMES.get(plain) or NAMES.get(plain.removesuffix("_s").removesuffix("_time"))


def bare_width(names: Sequence[str]) -> int:
    """Return how many timers a header names; 0 if it is no table of timers."""
    columns = [column for name in names if (column := bare_name(name))]
    return len(columns) if len(STAGES.intersection(columns)) and len(set(columns)) > 1 else 0


def _mode(cells: Mapping[str, str]) -> Mode:
    told = " ".join(value for name, value in cells.items() if name.strip().lower() in _MODE_NAMES).lower()
    if any(word in told for word in ASYNC_WORDS):
        return Mode.ASYNC
    return Mode.COLOCATED if any(word in told for word in COLOCATED_WORDS) else Mode.UNKNOWN


def bare_tables(names: Sequence[str], rows: Sequence[Mapping[str, str]], source: str) -> list[StepLog]:
    """Return one table per mode of the rows of a table of timers."""
    column_of = {name: column for name in names if (column := bare_name(name))}
    has_step_s = sum(column == "step_s" for column in column_of.values()) > 1 or "step_s" in names
    if has_step_s:
        column_of.pop("step", None)
    elif "step" in column_of and _counts([row["step"] for row in rows]):
        column_of["step"] = "step"
    counter = "step" if has_step_s and "step" in names else None
    parts: dict[tuple[str, Mode], list[dict[str, float]]] = {}
    for row in rows:
        values = {column: number(row[name]) for name, column in reversed(column_of.items()) if row[name]}
        if counter and row[counter]:
            values["step"] = number(row[counter])
        kept = {name: value for name, value in values.items() if value is not None and np.isfinite(value)}
        if len(kept) > 1:
            parts.setdefault((row.get("run", ""), _mode(row)), []).append(kept)
    found = []
    is_told = any(name.strip().lower() in _MODE_NAMES for name in names)
    for (run, mode), steps in parts.items():
        log = _table(steps, mode, f"{source} ({run})" if run else source, may_infer=not is_told)
        if log is not None:
            found.append(log)
    return found


def _counts(texts: Sequence[str]) -> bool:
    """Say whether a column counts steps: whole numbers that rise by one at least once."""
    values = [number(text) for text in texts]
    if any(value is None or value != int(value) for value in values if value is None or np.isfinite(value)):
        return False
    return any(b is not None and a is not None and b - a == 1 for a, b in itertools.pairwise(values))


def _table(
    rows: Sequence[Mapping[str, float]], mode: Mode, source: str, *, may_infer: bool = True
) -> StepLog | None:
    names = [name for name in COLUMNS if any(name in row for row in rows)]
    names += [name for name in dict.fromkeys(key for row in rows for key in row) if name not in COLUMNS]
    columns = {name: np.array([row.get(name, np.nan) for row in rows]) for name in names}
    if not STAGES.intersection(columns) and "step_s" not in columns:
        return None
    if mode is Mode.UNKNOWN and "wait_s" in columns and "generation_s" not in columns:
        mode = Mode.ASYNC
    notes = [
        "detected as a table of timers: what names them is not told, so the names were taken as they are"
    ]
    if mode is Mode.ASYNC and "wait_s" not in columns and "generation_s" in columns:
        columns["wait_s"] = columns.pop("generation_s")
        columns = {name: columns[name] for name in sorted(columns, key=_order)}
        notes.append("gen of an asynchronous arm is the trainer's wait for samples: it is in wait_s")
    findings = Findings(raw={}, columns=columns, mode=mode, notes=notes)
    _repair(findings)
    if may_infer:
        _infer_turns(findings)
    elif mode is Mode.UNKNOWN:
        notes.append(
            "the mode of these rows is not known: gen may be generation or the trainer's wait for it"
        )
    names = sorted(findings.columns, key=_order)
    return StepLog(
        framework="table",
        mode=findings.mode,
        step_unit="one row of a table: a step, or the mean of a run, as its source says",
        columns={name: findings.columns[name] for name in names},
        facts=findings.facts,
        notes=tuple(findings.notes),
        source=source,
    )


def _repair(findings: Findings) -> None:
    """Add the critic to the update, take validation out of the step, tell stages in turns by their sum."""
    columns = findings.columns
    if "update_s" in columns and "update_critic_s" in columns:
        columns["update_s"] = columns["update_s"] + np.nan_to_num(columns["update_critic_s"])
    if "step_s" in columns:
        inside = [np.nan_to_num(columns[name]) for name in ("testing_s", "checkpoint_s") if name in columns]
        columns["step_s"] = columns["step_s"] - np.sum(inside, axis=0) if inside else columns["step_s"]
        nested_outside(findings)
    plausible(findings)


def _infer_turns(findings: Findings) -> None:
    """Call a run colocated whose generation and training add up to its step."""
    columns = findings.columns
    rest = findings.facts.get("unexplained_share")
    is_in_turns = rest is not None and abs(rest) < IN_TURNS_REST
    if (
        findings.mode is Mode.UNKNOWN
        and "wait_s" not in columns
        and "generation_s" in columns
        and is_in_turns
    ):
        findings.mode = Mode.COLOCATED
        findings.notes.append("generation and training add up to the step: they take turns (colocated)")


def _order(name: str) -> int:
    return COLUMNS.index(name) if name in COLUMNS else len(COLUMNS)


def bare_lines(text: str, source: str) -> list[StepLog]:
    """Return the lines of a note that name a step and at least two timers, as one table per mode.

    Lines without a step are left alone: they may be totals of a run, or shares.
    """
    parts: dict[Mode, list[dict[str, float]]] = {}
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            continue
        values: dict[str, float] = {}
        for name, printed in _PAIR.findall(line):
            column = bare_name(name)
            found = number(printed)
            if column and found is not None and np.isfinite(found):
                values.setdefault(column, found)
        step = _STEP.search(line)
        if step:
            if values.get("step_s") == float(step[1]):
                del values["step_s"]
                later = [number(v) for n, v in _PAIR.findall(line[step.end() :]) if bare_name(n) == "step_s"]
                values |= {"step_s": later[0]} if later and later[0] is not None else {}
            values["step"] = float(step[1])
        if step and len(values.keys() - {"step"}) > 1 and STAGES & values.keys():
            parts.setdefault(_mode({"mode": line}), []).append(values)
    return [log for mode, rows in parts.items() if (log := _table(rows, mode, source)) is not None]
