"""The steps of a journal: times between a step's own events, without a scheduler."""

import json
import math
from typing import Any

import numpy as np

from bidirl.traces.step_log import Mode, StepLog

__all__ = ["JournalSteps", "is_journal"]

STAGE_OF = {"old_logprob": "old_logprob_s", "reference": "reference_s", "update": "update_s"}


def is_journal(head: bytes) -> bool:
    """Say whether bytes begin a journal."""
    return head.lstrip().startswith(b'{"schema":"bidirl-journal"')


class JournalSteps:
    """Collects per step: when its chunks ran, when its updates ended, when its weights were applied.

    A step lasts from the end of the one before (its weights applied everywhere, or its last update where the
    next step did not wait for that) to its own end. ``wait_s`` is the part before its first chunk.
    """

    def __init__(self) -> None:
        self._tail = b""
        self._plan: dict[str, Any] = {}
        self._kind_of: dict[int, tuple[int, str]] = {}
        self._started: dict[int, float] = {}
        self._ended: dict[int, float] = {}
        self._stage_s: dict[tuple[int, str], float] = {}
        self._sync: dict[int, list[float]] = {}
        self._stage_end: dict[int, float] = {}
        self._tokens: dict[int, float] = {}
        self._prompts: dict[int, int] = {}

    def feed(self, data: bytes) -> None:
        """Take the next bytes, cut anywhere; lines that are not whole are left for later."""
        lines = (self._tail + data).split(b"\n")
        self._tail = lines.pop()
        for line in lines:
            self._line(line)

    def close(self) -> None:
        """Take a last line without an end."""
        tail, self._tail = self._tail, b""
        self._line(tail)

    def _line(self, line: bytes) -> None:
        try:
            data = json.loads(line)
        except ValueError:
            return
        if not isinstance(data, dict):
            return
        if isinstance(data.get("plan"), dict):
            self._plan = data["plan"]
        time_s = data.get("t")
        if isinstance(time_s, int | float) and isinstance(data.get("event"), dict):
            self._event(float(time_s), data["event"])
            for action in data.get("actions") or ():
                if isinstance(action, dict):
                    self._action(float(time_s), action)

    def _event(self, time_s: float, event: dict[str, Any]) -> None:
        kind, step = event.get("kind_of"), event.get("step")
        if kind == "ChunkFinished" and isinstance(step, int):
            found = self._kind_of.get(event.get("cause", -1))
            since = self._stage_end.get(step, self._started.get(step, time_s))
            if found is not None:
                self._grow(step, found[1], since, time_s)
        elif kind == "Updated" and isinstance(step, int):
            self._grow(step, "update_s", self._stage_end.get(step, time_s), time_s)
            self._ended[step] = time_s
        elif kind == "SyncApplied" and isinstance(event.get("version"), int):
            self._sync.setdefault(event["version"] - 1, [time_s, time_s])[1] = time_s

    def _grow(self, step: int, stage: str, since: float, time_s: float) -> None:
        self._stage_s[step, stage] = self._stage_s.get((step, stage), 0.0) + max(time_s - since, 0.0)
        self._stage_end[step] = time_s

    def _action(self, time_s: float, action: dict[str, Any]) -> None:
        kind, step = action.get("kind_of"), action.get("step")
        if kind == "StartChunks" and isinstance(step, int):
            stage = STAGE_OF.get(str(action.get("kind")), "update_s")
            self._kind_of[action.get("serial", -1)] = (step, stage)
            self._started.setdefault(step, time_s)
        elif kind == "SyncReplica" and isinstance(action.get("version"), int):
            self._sync.setdefault(action["version"] - 1, [time_s, time_s])

    def table(self, source: str) -> list[StepLog]:
        """Return the steps that have ended; empty if none has."""
        steps = sorted(self._ended)
        if not steps:
            return []
        columns: dict[str, list[float]] = {"step": [float(step) for step in steps]}
        names = ("step_s", "wait_s", *dict.fromkeys(STAGE_OF.values()), "weight_sync_s")
        columns |= {name: [] for name in names}
        before = 0.0
        for step in steps:
            end, sync = self._ended[step], math.nan
            if step in self._sync:
                began, applied = self._sync[step]
                sync = applied - began
                if applied <= self._started.get(step + 1, math.inf):
                    end = max(end, applied)
            columns["step_s"].append(end - before)
            columns["wait_s"].append(max(self._started.get(step, before) - before, 0.0))
            columns["weight_sync_s"].append(sync)
            for stage in dict.fromkeys(STAGE_OF.values()):
                columns[stage].append(self._stage_s.get((step, stage), math.nan))
            before = end
        policy = self._plan.get("policy")
        is_colocated = isinstance(policy, dict) and policy.get("placement") == "colocated"
        facts = {
            name: float(self._plan[key])
            for key, name in (("rollout_gpus", "rollout_gpus"), ("train_gpus", "train_gpus"))
            if isinstance(self._plan.get(key), int)
        }
        arrays = {name: np.array(values) for name, values in columns.items()}
        return [
            StepLog(
                framework="bidirl",
                mode=Mode.COLOCATED if is_colocated else Mode.ASYNC,
                step_unit="one step (one published version)",
                columns={name: value for name, value in arrays.items() if np.isfinite(value).any()},
                facts=facts,
                notes=("detected as bidirl: a journal; stage times are gaps between its events",),
                source=source,
            )
        ]
