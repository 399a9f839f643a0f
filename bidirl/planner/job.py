"""Load a job: TOML sections, ``--set`` values over them, all rules checked, every error on one line."""

import datetime
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from bidirl.errors import InputError
from bidirl.models.architecture import ModelConfig
from bidirl.models.cluster import ClusterConfig
from bidirl.models.faults import FaultsConfig
from bidirl.planner.config_errors import section_problems
from bidirl.planner.config_file import ConfigFile, dotted, nearest, read_config
from bidirl.planner.job_rules import JobParts, cross_problems, resolve_placement
from bidirl.planner.learn import LearnConfig
from bidirl.planner.overrides import apply_overrides
from bidirl.planner.policy import PRESETS, PolicyConfig, with_preset
from bidirl.planner.sections import EngineConfig, ModelsConfig, Partition, PartitionConfig
from bidirl.planner.toml_lines import KeyPath
from bidirl.traces.workload import WorkloadConfig

__all__ = ["Job", "load_job", "resolved_json"]

SECTIONS: dict[str, type[BaseModel]] = {
    "cluster": ClusterConfig,
    "model": ModelConfig,
    "workload": WorkloadConfig,
    "partition": PartitionConfig,
    "policy": PolicyConfig,
    "engine": EngineConfig,
    "models": ModelsConfig,
    "faults": FaultsConfig,
    "learn": LearnConfig,
}
REQUIRED = ("cluster", "model", "workload")
OPTIONAL = frozenset({"learn"})
"""Sections that a job without them does not have; of all others the defaults hold."""
EXACT: frozenset[KeyPath] = frozenset({("policy", "staleness")})
"""Numbers that stay decimal; all others become floats."""
LENGTHS: KeyPath = ("workload", "lengths")
FILES: tuple[KeyPath, ...] = (("model", "config"), LENGTHS, (*LENGTHS, "file"), ("models", "file"))
"""Paths of other files: relative to the job's folder, or to the current one if given by ``--set``."""
LENGTH_FILES = (".csv", ".json", ".txt")
"""A text with one of these endings as ``workload.lengths`` is a file, not a packaged name."""
PROVENANCE = "provenance"
"""Section of a resolved.json that tells where it came from; reading a job skips it."""


@dataclass(frozen=True, slots=True)
class Job:
    """A resolved job: every section validated, presets merged, counts derived, file paths absolute."""

    cluster: ClusterConfig
    model: ModelConfig
    workload: WorkloadConfig
    partition: Partition | None
    """None: the planner chooses."""
    policy: PolicyConfig
    engine: EngineConfig
    models: ModelsConfig
    faults: FaultsConfig
    learn: LearnConfig | None = None
    """None: the job says nothing about real runs."""
    base_dir: Path = field(default=Path(), compare=False)
    """Folder of the job file."""
    notices: tuple[str, ...] = field(default=(), compare=False)
    """What was set aside or left unused, one line each; not an error."""


def load_job(path: Path | str, overrides: Sequence[str] = ()) -> Job:
    """Read a job file (TOML, or a resolved.json) and lay ``section.key=value`` overrides over it.

    Raises:
        InputError: with one line per problem: ``file:line: section.key = value: rule; remedy``.
    """
    file = apply_overrides(read_config(Path(path)), overrides)
    problems = list(_unknown_sections(file))
    problems += _resolve_files(file)
    notices = resolve_placement(file.data)
    sections: dict[str, Any] = {}
    for section, model in SECTIONS.items():
        if section not in file.data and section in REQUIRED:
            problems.append(f"{file.path}: [{section}] is missing: it is required; add the section")
            continue
        if section not in file.data and section in OPTIONAL:
            continue
        found = _validate(file, section, model)
        if isinstance(found, list):
            problems += found
        else:
            sections[section] = found
    if problems:
        raise InputError("\n".join(problems))
    parts = JobParts(**sections)
    problems = cross_problems(file, parts)
    if problems:
        raise InputError("\n".join(problems))
    partition, more = parts.resolve_partition(is_written="partition" in file.data)
    sections["partition"] = partition
    return Job(**sections, base_dir=file.path.parent, notices=(*notices, *more, *parts.notices()))


def resolved_json(job: Job) -> dict[str, Any]:
    """Return the job as plain JSON data; written to a ``.json`` file, ``load_job`` reads an equal job back.

    Decimals are strings. Absent optional values are left out.
    """
    data: dict[str, Any] = {}
    for section in SECTIONS:
        value = getattr(job, section)
        match value:
            case BaseModel():
                data[section] = value.model_dump(mode="json", exclude_none=True)
            case Partition():
                data[section] = value.as_written()
            case _:
                pass
    return data


def _unknown_sections(file: ConfigFile) -> Iterator[str]:
    for name, value in file.data.items():
        if name in SECTIONS or (name == PROVENANCE and file.path.suffix == ".json"):
            continue
        meant = nearest(name, SECTIONS)
        remedy = f"did you mean [{meant}]?" if meant else f"the sections are {', '.join(SECTIONS)}"
        origin = file.origin((name,))
        if origin is None and isinstance(value, dict):
            inner = next((file.origin((name, key)) for key in value if file.origin((name, key))), None)
            written_by = f"--set {inner}" if inner else file.where((name,))
            yield f"{written_by}: [{dotted([name])}]: unknown section; {remedy}"
        else:
            yield file.problem((name,), value, f"unknown key outside the sections; {remedy}")


def _resolve_files(file: ConfigFile) -> Iterator[str]:
    """Make the paths of other files absolute, in place; yield a line for each that is not there."""
    for path in FILES:
        node: Any = file.data
        for key in path[:-1]:
            node = node.get(key) if isinstance(node, dict) else None
        written = node.get(path[-1]) if isinstance(node, dict) else None
        if not isinstance(written, str) or (path == LENGTHS and not written.endswith(LENGTH_FILES)):
            continue
        base = Path() if file.origin(path) else file.path.parent
        target = (base / written).absolute()
        if not target.is_file():
            folder = "the current folder" if file.origin(path) else "the job's folder"
            yield file.problem(path, written, f"no such file; give a path from {folder}")
        node[path[-1]] = str(target)


def _validate(file: ConfigFile, section: str, model: type[BaseModel]) -> BaseModel | list[str]:
    """Return the validated section, or its problems."""
    written = file.data.get(section, {})
    if not isinstance(written, dict):
        return [file.problem((section,), written, f"must be a table; write [{section}] and its keys below")]
    problems: dict[KeyPath, str] = {}
    if section == "policy":
        if rule := _preset_rule(written.get("name")):
            problems["policy", "name"] = file.problem(("policy", "name"), written["name"], rule)
        written = with_preset(written)
    plain = _plain(file, (section,), written, problems)
    found = list(problems.values())
    try:
        # JSON mode: enums by value and tuples from arrays, with everything else as strict as in Python.
        valid = model.model_validate_json(json.dumps(plain))
    except ValidationError as error:
        return found + section_problems(file, section, model, error, problems)
    except InputError as error:
        return [*found, file.table_problem((section,), str(error))]
    return found or valid


def _preset_rule(name: Any) -> str | None:
    if not isinstance(name, str) or name in PRESETS:
        return None
    meant = nearest(name, PRESETS)
    remedy = f"did you mean {meant}?" if meant else "choose one of them"
    return f"no preset has this name, they are {', '.join(sorted(PRESETS))}; {remedy}"


def _plain(file: ConfigFile, path: KeyPath, value: Any, problems: dict[KeyPath, str]) -> Any:
    """Return a parsed value as JSON data; values that JSON cannot hold go to ``problems``."""
    match value:
        case dict():
            return {key: _plain(file, (*path, key), item, problems) for key, item in value.items()}
        case list():
            return [_plain(file, (*path, index), item, problems) for index, item in enumerate(value)]
        case Decimal():
            return str(value) if path in EXACT else float(value)
        case datetime.date() | datetime.time():
            problems[path] = file.problem(path, value, "is a date or time, which no key takes; give a number")
            return None
        case str() if path in EXACT and (file.path.suffix != ".json" or file.origin(path)):
            problems[path] = file.problem(path, value, "must be a number; write it without quotes")
            return "0"
        case _:
            return value
