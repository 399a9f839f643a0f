"""A sweep: the full grid of varied keys and seeds, as cells to run, and their rows in ``sweep.csv``.

A cell's identity is the hash of what decides its result: the resolved job, the contents of the files that it
names, the seed, and this release's code. So a sweep goes on where it stopped, a changed job computes only the
cells that changed, and two cells that resolve to the same job are computed once.
"""

import csv
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bidirl import __version__
from bidirl.errors import InputError
from bidirl.models.estimate import Source, worst
from bidirl.planner.build import build_workload
from bidirl.planner.config_file import dotted
from bidirl.planner.job import FILES, Job, load_job, resolved_json
from bidirl.planner.overrides import parse_override, split_vary
from bidirl.sim.sweep_store import Result
from bidirl.traces.tables import flatten

__all__ = ["Cell", "Sweep", "plan_sweep", "rows_of", "write_rows"]

CODE = ("traces", "models", "planner", "sim")
"""What a simulated result depends on, in the package's folder."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of values under one seed."""

    values: tuple[str, ...]
    """Values of the varied keys, as written."""
    seed: int
    job: Job | None
    """None: this combination is no valid job."""
    resolved: Mapping[str, Any]
    """The job as JSON data, contents of files as hashes."""
    key: str
    problem: str | None
    """Why it is no valid job."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """A checked grid: the first key varies slowest, seeds fastest."""

    varied: tuple[str, ...]
    cells: tuple[Cell, ...]
    notices: tuple[str, ...]


def plan_sweep(path: Path, sets: Sequence[str], vary: Sequence[str], num_seeds: int) -> Sweep:
    """Load the job of every cell before the first one runs.

    A value that is refused in every cell is bad input. One that is refused only beside certain values of
    other keys leaves those combinations out, each with its reason: a grid over layouts has such holes.

    Raises:
        InputError: with one line per problem; they name the ``--vary``.
    """
    axes = _axes(vary, sets)
    varied = tuple(axes)
    jobs: dict[tuple[str, ...], Job | str] = {}
    notices: dict[str, None] = {}
    for values in itertools.product(*axes.values()):
        overrides = [f"{key}={value}" for key, value in zip(varied, values, strict=True)]
        try:
            job = load_job(path, [*sets, *overrides])
            notices |= dict.fromkeys((*job.notices, *build_workload(job, 0).notes))
            jobs[values] = job
        except InputError as error:
            jobs[values] = _as_vary(str(error), overrides)
    _refuse_bad_values(jobs, len(varied))
    contents = cache(_content)
    code = _code_digest()
    cells = [
        _cell(values, seed, job, contents, code) for values, job in jobs.items() for seed in range(num_seeds)
    ]
    return Sweep(varied, tuple(cells), tuple(notices))


def _axes(vary: Sequence[str], sets: Sequence[str]) -> dict[str, list[str]]:
    fixed = {dotted(parse_override(text)[0]): text for text in sets}
    axes: dict[str, list[str]] = {}
    for text in vary:
        key, values = split_vary(text)
        if key in axes:
            raise InputError(f"--vary {text}: {key} is varied twice: give all its values in one --vary")
        if key in fixed:
            raise InputError(f"--vary {text}: --set {fixed[key]} fixes {key}: leave one of them out")
        axes[key] = values
    if not axes:
        raise InputError("--vary is missing: a sweep needs at least one --vary KEY=V1,V2")
    return axes


def _as_vary(message: str, overrides: Sequence[str]) -> str:
    """Name the ``--vary`` where a loaded override broke a rule."""
    lines = []
    for line in message.splitlines():
        found = [text for text in overrides if line.startswith(f"--set {text}: ")]
        lines.append(f"--vary{line.removeprefix('--set')}" if found else line)
    return "\n".join(lines)


def _refuse_bad_values(jobs: Mapping[tuple[str, ...], Job | str], num_keys: int) -> None:
    bad: dict[str, None] = {}
    for index in range(num_keys):
        for value in dict.fromkeys(values[index] for values in jobs):
            found = [job for values, job in jobs.items() if values[index] == value]
            if not any(isinstance(job, Job) for job in found):
                # The problem that all these cells share is the one of this value; others come and go.
                texts = [job.splitlines() for job in found if isinstance(job, str)]
                shared = [line for line in texts[0] if all(line in text for text in texts)]
                bad |= dict.fromkeys(shared or texts[0])
    if bad:
        raise InputError("\n".join(_joined(bad)))


def _joined(lines: Iterable[str]) -> Iterator[str]:
    """Join the lines ``--vary key=value: rule`` that differ in the value alone."""
    values: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        option, _, rule = line.partition(": ")
        key, _, value = option.partition("=")
        values.setdefault((key if line.startswith("--vary ") else option, rule), []).append(value)
    for (key, rule), found in values.items():
        yield f"{key}={','.join(found)}: {rule}" if key.startswith("--vary ") else f"{key}: {rule}"


def _cell(values: tuple[str, ...], seed: int, job: Job | str, contents: Any, code: str) -> Cell:
    if isinstance(job, str):
        return Cell(values, seed, None, {}, "", job.splitlines()[0])
    resolved = resolved_json(job)
    for *tables, last in FILES:
        node: Any = resolved
        for key in tables:
            node = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, dict) and isinstance(node.get(last), str) and Path(node[last]).is_absolute():
            node[last] = contents(node[last])
    identity = {"job": resolved, "seed": seed, "bidirl": __version__, "code": code}
    text = json.dumps(identity, sort_keys=True)
    return Cell(values, seed, job, resolved, hashlib.sha256(text.encode()).hexdigest()[:32], None)


def _content(path: str) -> str:
    try:
        return f"sha256:{hashlib.sha256(Path(path).read_bytes()).hexdigest()}"
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({(error.strerror or '').lower()}): give a file") from None


def _code_digest() -> str:
    """Hash the code and data that results come from, so that an edited working copy reuses nothing stale."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for name in CODE:
        for path in sorted((root / name).rglob("*")) or [root / name]:
            if path.suffix in {".py", ".json", ".csv"}:
                digest.update(path.relative_to(root).as_posix().encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


# ------------------------------------------------------------------------ rows


def rows_of(sweep: Sweep, results: Mapping[str, Result]) -> list[dict[str, Any]]:
    """Return one row per cell and seed, in the order of the grid.

    Columns: the varied keys as written, ``seed``, the summary flattened with dots, and ``error`` (empty for a
    cell with a result). Of ``sources`` only the most doubtful kind stays, under ``sources``.
    """
    return [_row(sweep.varied, cell, results.get(cell.key)) for cell in sweep.cells]


def _row(varied: Sequence[str], cell: Cell, result: Result | None) -> dict[str, Any]:
    row: dict[str, Any] = {**dict(zip(varied, cell.values, strict=True)), "seed": cell.seed}
    if result is not None and result.summary is not None:
        summary = dict(result.summary)
        summary["sources"] = str(worst(Source(kind) for kind in summary["sources"].values()))
        row |= flatten(summary)
    row["error"] = cell.problem or (result.error if result is not None else None)
    return row


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], varied: Sequence[str]) -> None:
    """Write ``sweep.csv``: varied keys, ``seed``, the summary block by block, ``error``.

    A row without some column (a cause that did not occur there) leaves it empty.

    Raises:
        OSError: the file cannot be written.
    """
    first = (*varied, "seed")
    names = [name for name in dict.fromkeys(itertools.chain(*rows)) if name not in (*first, "error")]
    blocks = list(dict.fromkeys(map(_block, names)))
    columns = [*first, *sorted(names, key=lambda name: blocks.index(_block(name))), "error"]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _block(name: str) -> str:
    return name.partition(".")[0]
