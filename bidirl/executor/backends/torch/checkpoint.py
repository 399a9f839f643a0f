"""Checkpoints of a trainer: a folder that is there whole or not at all, with a hash of every file."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bidirl.errors import RunFault
from bidirl.executor.backends.torch.sharded import ShardedStates
from bidirl.executor.backends.torch.states import FlatStates
from bidirl.executor.disk import flush

__all__ = ["restore_states", "save_states"]

WEIGHTS, OPTIMIZER, STATE, CONFIG = "model.safetensors", "optimizer.safetensors", "state.json", "config.json"
SCHEMA = "bidirl-trainer"
VERSION = 1


def save_states(folder: Path, states: FlatStates | ShardedStates) -> None:
    """Write weights, optimizer and random state to ``folder``, which is also a Hugging Face model folder.

    All files are written to a folder beside it and flushed to disk before that takes its name, so a crash
    leaves either the old folder or the new one. Of several ranks all must call, the first one writes.
    Raises ``RunFault`` if it cannot be written.
    """
    weights = {name: tensor.cpu().contiguous() for name, tensor in states.tensors()}
    moments = {name: vector.cpu() for name, vector in states.moments().items()}
    if states.rank == 0:
        _write(folder, states, weights, moments)
    states.share(None)  # nobody goes on before it is there


def _write(
    folder: Path, states: FlatStates | ShardedStates, weights: dict[str, Any], moments: dict[str, Any]
) -> None:
    fresh = folder.with_name(folder.name + ".new")
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        save_file(weights, str(fresh / WEIGHTS), metadata={"format": "pt"})
        save_file({**moments, "rng": torch.get_rng_state()}, str(fresh / OPTIMIZER))
        (fresh / CONFIG).write_text(states.model.config.to_json_string(), encoding="utf-8")
        state = {
            "schema": SCHEMA,
            "version": VERSION,
            "num_steps": states.num_steps,
            "sha256": {name: _file_hash(fresh / name) for name in (WEIGHTS, OPTIMIZER, CONFIG)},
        }
        (fresh / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        for name in (WEIGHTS, OPTIMIZER, CONFIG, STATE):
            flush(fresh / name)
        flush(fresh)
        _take_name(fresh, folder)
    except OSError as error:
        raise RunFault(
            f"{folder}: checkpoint cannot be written ({error.strerror}); choose another place"
        ) from None


def restore_states(folder: Path, states: FlatStates | ShardedStates) -> None:
    """Read what ``save_states`` wrote; raise ``RunFault`` for a missing, damaged or foreign checkpoint."""
    old = _aside(folder)
    if not folder.is_dir() and old.is_dir():
        folder = old  # the crash came between the two renames
    try:
        state: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if state.get("schema") != SCHEMA or state.get("version") != VERSION:
            raise RunFault(f"{folder}: is no checkpoint of this release: give one that it wrote")
        for name, digest in state["sha256"].items():
            if _file_hash(folder / name) != digest:
                raise RunFault(f"{folder / name}: differs from its hash: take an earlier checkpoint")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise RunFault(f"{folder}: cannot be read as a checkpoint ({error}): give another one") from None
    states.load(iter(load_file(str(folder / WEIGHTS)).items()))
    extra = load_file(str(folder / OPTIMIZER))
    torch.set_rng_state(extra.pop("rng"))
    states.set_moments(int(state["num_steps"]), extra)


def _aside(folder: Path) -> Path:
    return folder.with_name(folder.name + ".old")


def _take_name(fresh: Path, folder: Path) -> None:
    """Give ``fresh`` the name ``folder``; a folder of that name moves aside first, then goes."""
    old = _aside(folder)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    fresh.rename(folder)
    flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
