"""The file of fitted stages: one entry a run; plain JSON with hashes, ranges and residuals."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bidirl.errors import InputError
from bidirl.models.fit.fitted import FittedStage

__all__ = ["FittedRun", "load_fits", "save_fits"]

SCHEMA = "bidirl-fits"
VERSION = 1


@dataclass(frozen=True)
class FittedRun:
    """The fitted stages of one run, and what the run was."""

    source: str
    framework: str
    mode: str
    num_steps: int
    stages: Mapping[str, FittedStage]
    facts: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "source": self.source,
            "framework": self.framework,
            "mode": self.mode,
            "num_steps": self.num_steps,
            "facts": dict(self.facts),
            "notes": list(self.notes),
            "stages": {name: stage.to_json() for name, stage in self.stages.items()},
        }

    @classmethod
    def from_json(cls, data: object) -> FittedRun:
        """Read what ``to_json`` wrote; raise ``InputError`` for anything else."""
        try:
            assert isinstance(data, dict)
            return cls(
                source=str(data["source"]),
                framework=str(data["framework"]),
                mode=str(data["mode"]),
                num_steps=int(data["num_steps"]),
                stages={str(name): FittedStage.from_json(each) for name, each in data["stages"].items()},
                facts={str(name): float(value) for name, value in data["facts"].items()},
                notes=tuple(str(note) for note in data["notes"]),
            )
        except (AssertionError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"a run of the fits is malformed ({error!r}): calibrate again") from None


def save_fits(runs: Sequence[FittedRun], path: Path) -> None:
    """Write the runs; raise ``InputError`` if the file cannot be written."""
    data = {"schema": SCHEMA, "version": VERSION, "runs": [run.to_json() for run in runs]}
    try:
        path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}): choose another path") from None


def load_fits(path: Path) -> list[FittedRun]:
    """Read what ``save_fits`` wrote; raise one-line ``InputError`` for a missing or malformed file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}): give a file of calibrate") from None
    except ValueError as error:
        raise InputError(f"{path}: is not JSON ({error}): give a file of calibrate") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or data.get("version") != VERSION:
        raise InputError(f"{path}: is no {SCHEMA} file of version {VERSION}: calibrate again")
    try:
        return [FittedRun.from_json(run) for run in data.get("runs", [])]
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
