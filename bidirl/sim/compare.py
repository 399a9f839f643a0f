"""Compare policies on one job: same seeds for all, so that what differs is the policy and not the luck.

Lengths, prompts, filters and rewards of a seed are the same under every policy (common random numbers). So
speed-ups are paired: one ratio per seed, and the interval is over these ratios.
"""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bidirl.errors import InputError, RunFault
from bidirl.planner.build import build_workload
from bidirl.planner.config_file import dotted, nearest
from bidirl.planner.job import Job, load_job, resolved_json
from bidirl.planner.overrides import parse_override
from bidirl.planner.policy import PRESETS, PolicyConfig
from bidirl.sim.run import build, make_folder, write_json
from bidirl.sim.sweep import Cell, Sweep, rows_of, write_rows
from bidirl.sim.sweep_store import Result, Scatter, Task, compute

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "CONFIDENCE",
    "Comparison",
    "Gain",
    "Planned",
    "comparison_of",
    "comparison_rows",
    "gain_of",
    "plan_comparison",
    "run_comparison",
    "write_comparison",
]

CONFIDENCE = 0.95
"""Coverage of the intervals; a winner is claimed where the interval leaves out 1."""

POLICY_KEY: tuple[str, ...] = ("policy", "name")

Summary = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Gain:
    """Throughput of one policy over another, paired by seed."""

    ratio: float
    """Geometric mean of the seeds' ratios, so that swapping the two policies gives its inverse."""
    low: float | None
    """Lower end of the interval of ``CONFIDENCE``; None with one seed, which has no interval."""
    high: float | None
    by_seed: dict[int, float]

    @property
    def is_identical(self) -> bool:
        """Return whether the two were equally fast under every seed, to the last bit."""
        return all(each == 1.0 for each in self.by_seed.values())

    @property
    def is_sure(self) -> bool:
        """Return whether the interval leaves out 1."""
        return self.low is not None and self.high is not None and (self.low > 1.0 or self.high < 1.0)


def gain_of(one: Mapping[int, float], other: Mapping[int, float]) -> Gain | None:
    """Compare two throughputs by seed; None without a common seed on which both are positive.

    The interval is Student's t on the logarithms of the paired ratios, ``exp(mean +- t * s / sqrt(n))`` with
    ``n - 1`` degrees of freedom. Source: Student 1908; logarithms because a ratio's error is a factor.
    """
    common = [seed for seed in one if one[seed] > 0.0 and other.get(seed, 0.0) > 0.0]
    if not common:
        return None
    by_seed = {seed: one[seed] / other[seed] for seed in common}
    logs = [math.log(each) for each in by_seed.values()]
    middle = statistics.fmean(logs)
    if len(logs) == 1:
        return Gain(by_seed[common[0]], None, None, by_seed)
    from scipy.special import stdtrit

    reach = (
        float(stdtrit(len(logs) - 1, 0.5 + CONFIDENCE / 2)) * statistics.stdev(logs) / math.sqrt(len(logs))
    )
    return Gain(math.exp(middle), math.exp(middle - reach), math.exp(middle + reach), by_seed)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Results of policies on one job; speed-ups are over the first policy."""

    policies: tuple[str, ...]
    seeds: tuple[int, ...]
    summaries: Mapping[str, Mapping[int, Summary]]
    """Policy -> seed -> summary; a run without a result is not there."""
    errors: Mapping[str, str] = field(default_factory=dict)
    """Policy -> why its first run without a result has none."""

    @property
    def base(self) -> str:
        """Return the policy that speed-ups are over."""
        return self.policies[0]

    def values(self, policy: str, *path: str) -> dict[int, float]:
        """Return one number of a policy's summaries by seed; seeds where it is unknown are left out."""
        found: dict[int, float] = {}
        for seed, summary in self.summaries[policy].items():
            value: Any = summary
            for key in path:
                value = value[key]
            if value is not None:
                found[seed] = float(value)
        return found

    def mean(self, policy: str, *path: str) -> float | None:
        """Return the mean over seeds of one number of the summaries; None where no seed has it."""
        values = self.values(policy, *path).values()
        return statistics.fmean(values) if values else None

    def gain(self, one: str, other: str, *, per_gpu: bool = False) -> Gain | None:
        """Return the speed-up of one policy over another, of the whole job or per GPU."""
        key = "tokens_per_s_per_gpu" if per_gpu else "tokens_per_s"
        return gain_of(self.values(one, key), self.values(other, key))

    def ranked(self) -> list[str]:
        """Return the policies that have a throughput, the fastest first."""
        means = {name: self.mean(name, "tokens_per_s") for name in self.policies}
        known = {name: mean for name, mean in means.items() if mean}
        return sorted(known, key=lambda name: -known[name])

    def winner(self) -> str | None:
        """Return the policy that is surely faster than each other one, if there is any.

        All its intervals must lie above 1, so no correction for several comparisons is needed: the chance of
        a false winner is not above that of its least sure comparison.
        """
        ranked = self.ranked()
        if len(ranked) < 2:
            return None
        gains = [self.gain(ranked[0], other) for other in ranked[1:]]
        sure = all(gain is not None and gain.is_sure and gain.ratio > 1.0 for gain in gains)
        return ranked[0] if sure else None

    def pools(self, policy: str) -> str | None:
        """Return the GPUs of both pools as text; None without a result."""
        for summary in self.summaries[policy].values():
            gpus = summary["gpus"]
            return f"{gpus['rollout']} + {gpus['train']}" if gpus["train"] else f"{gpus['rollout']} in turns"
        return None

    def to_json(self) -> dict[str, Any]:
        """Return the comparison without the summaries."""
        return {
            "baseline": self.base,
            "winner": self.winner(),
            "confidence": CONFIDENCE,
            "seeds": list(self.seeds),
            "policies": [self._policy_json(name) for name in self.policies],
        }

    def _policy_json(self, name: str) -> dict[str, Any]:
        runs = self.summaries[name].values()
        return {
            "policy": name,
            "num_runs": len(runs),
            "tokens_per_s": self.mean(name, "tokens_per_s"),
            "tokens_per_s_per_gpu": self.mean(name, "tokens_per_s_per_gpu"),
            "step_time_s": self.mean(name, "step_time_s", "mean"),
            "idle": {pool: self.mean(name, "idle", pool) for pool in ("rollout", "train")},
            "leases": {
                direction: self.mean(name, "borrow", direction, "count")
                for direction in ("rollout_on_train", "train_on_rollout")
            },
            "speed_up": _gain_json(self.gain(name, self.base)),
            "speed_up_per_gpu": _gain_json(self.gain(name, self.base, per_gpu=True)),
            "error": self.errors.get(name),
        }


def _gain_json(gain: Gain | None) -> dict[str, Any] | None:
    if gain is None:
        return None
    each = {str(seed): ratio for seed, ratio in gain.by_seed.items()}
    return {"ratio": gain.ratio, "low": gain.low, "high": gain.high, "by_seed": each}


# ------------------------------------------------------------------------ plan


@dataclass(frozen=True, slots=True)
class Planned:
    """A checked comparison: one job per policy, and what the folder's ``resolved.json`` will hold."""

    jobs: Mapping[str, Job]
    seeds: tuple[int, ...]
    resolved: Mapping[str, Any]
    notices: tuple[str, ...]


def plan_comparison(
    path: Path, policies: str, sets: Sequence[str], first_seed: int, num_seeds: int
) -> Planned:
    """Load the job under every policy of a comma-separated list, before anything runs.

    Raises:
        InputError: fewer than two policies, one twice, unknown names, or a job that a policy cannot run.
    """
    names = _policy_names(policies)
    for text in sets:
        if dotted(parse_override(text)[0]) == dotted(POLICY_KEY):
            raise InputError(f"--set {text}: --policies names the presets to run: leave the --set out")
    jobs: dict[str, Job] = {}
    problems: list[str] = []
    for name in names:
        override = f"{dotted(POLICY_KEY)}={json.dumps(name)}"
        try:
            jobs[name] = load_job(path, [*sets, override])
        except InputError as error:
            problems += str(error).replace(f"--set {override}: ", f"--policies {name}: ").splitlines()
    if problems:
        raise InputError("\n".join(dict.fromkeys(problems)))
    try:
        own = load_job(path, sets)
    except InputError:  # the job's own policy does not matter here
        own = jobs[names[0]]
    notices = dict.fromkeys(
        notice for job in jobs.values() for notice in (*job.notices, *build_workload(job, first_seed).notes)
    )
    seeds = tuple(range(first_seed, first_seed + num_seeds))
    return Planned(jobs, seeds, _as_job(own), tuple(notices))


def _policy_names(policies: str) -> list[str]:
    names = [name.strip() for name in policies.split(",")]
    wrong = [name for name in names if name not in PRESETS]
    if wrong:
        lines = []
        for name in wrong:
            meant = nearest(name, PRESETS)
            hint = f"did you mean {meant}?" if meant else f"choose from {', '.join(sorted(PRESETS))}"
            lines.append(f"--policies {name or repr(name)}: no preset has this name; {hint}")
        raise InputError("\n".join(dict.fromkeys(lines)))
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"--policies {policies}: {twice} is given twice: name each preset once")
    if len(names) < 2:
        raise InputError(f"--policies {policies}: one policy has nothing to compare with: give two or more")
    return names


def _as_job(job: Job) -> dict[str, Any]:
    """Return the resolved job with only those policy choices that its preset does not make.

    So the file serves another comparison: with all choices in it, they would override every preset's.
    """
    data = resolved_json(job)
    policy = data["policy"]
    default = PolicyConfig(name=policy["name"]).model_dump(mode="json", exclude_none=True)
    preset = {**default, **PRESETS[policy["name"]]}
    kept = {key: value for key, value in policy.items() if str(preset.get(key)) != str(value)}
    data["policy"] = {"name": policy["name"], "staleness": policy["staleness"], **kept}
    return data


# ------------------------------------------------------------------------- run


def run_comparison(planned: Planned, scatter: Scatter, progress: "Console") -> Comparison:
    """Run every policy under every seed; ``progress`` shows a bar if it is a terminal.

    Raises:
        RunFault: a run failed by a fault, not by a property of its job.
    """
    from rich.progress import track

    tasks: list[Task] = [
        (_key(name, seed), job, seed) for name, job in planned.jobs.items() for seed in planned.seeds
    ]
    results: dict[str, Result] = {}
    for result in track(
        scatter(compute, tasks),
        description="runs",
        total=len(tasks),
        console=progress,
        transient=True,
        disable=not progress.is_terminal,
    ):
        if result.is_fault:
            raise RunFault(f"policy and seed {result.key}: {result.error}")
        results[result.key] = result
    return comparison_of(tuple(planned.jobs), planned.seeds, results.values())


def _key(policy: str, seed: int) -> str:
    return f"{policy} {seed}"


def comparison_of(policies: tuple[str, ...], seeds: tuple[int, ...], results: Iterable[Result]) -> Comparison:
    """Collect results whose keys are ``policy seed``, in any order."""
    by_key = {result.key: result for result in results}
    summaries: dict[str, dict[int, Summary]] = {name: {} for name in policies}
    errors: dict[str, str] = {}
    for name in policies:
        for seed in seeds:
            result = by_key.get(_key(name, seed))
            if result is not None and result.summary is not None:
                summaries[name][seed] = result.summary
            elif result is not None and result.error is not None:
                errors.setdefault(name, result.error)
    return Comparison(policies, seeds, summaries, errors)


# ----------------------------------------------------------------------- files


def comparison_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """Return a row per policy and seed: both, the flattened summary, ``speed_up`` and ``error``."""
    cells = tuple(
        Cell((name,), seed, None, {}, _key(name, seed), None)
        for name in comparison.policies
        for seed in comparison.seeds
    )
    results = {
        cell.key: Result(
            cell.key,
            dict(comparison.summaries[cell.values[0]].get(cell.seed) or {}) or None,
            comparison.errors.get(cell.values[0]),
        )
        for cell in cells
    }
    rows = rows_of(Sweep(("policy",), cells, ()), results)
    gains = {name: comparison.gain(name, comparison.base) for name in comparison.policies}
    for row in rows:
        gain, error = gains[row["policy"]], row.pop("error")
        row["speed_up"] = None if gain is None else gain.by_seed.get(row["seed"])
        row["error"] = error if "tokens_per_s" not in row else None
    return rows


def write_comparison(planned: Planned, comparison: Comparison, folder: Path) -> None:
    """Write ``compare.csv``, ``compare.png`` and ``resolved.json`` (a job, with the policies and seeds).

    Raises:
        InputError: the folder cannot be made.
        RunFault: writing failed.
    """
    from bidirl.sim.compare_plot import compare_figure
    from bidirl.sim.plots import save_figure

    make_folder(folder)
    chosen = {name: resolved_json(job)["policy"] for name, job in planned.jobs.items()}
    about = {**build(), "seeds": list(planned.seeds), "policies": chosen}
    try:
        write_json(folder / "resolved.json", {**planned.resolved, "provenance": about})
        write_rows(folder / "compare.csv", comparison_rows(comparison), ("policy",))
        figure = compare_figure(comparison)
        if figure is None:
            (folder / "compare.png").unlink(missing_ok=True)  # an earlier one would pass for this one's
        else:
            save_figure(figure, folder / "compare.png")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise RunFault(f"{folder}: {reason} while writing: free space or choose another --out") from None
