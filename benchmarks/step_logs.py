"""Judge fits of step logs: public runs, windows of them, synthetic runs with known truth; prints Markdown.

``python -m benchmarks.step_logs [runs] [windows] [synthetic] [online]`` (default: all). The public runs are
read from ``$BIDIRL_DATA`` (default: ``../shared/data`` beside the repository) and skipped where that is not.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bidirl.models.fit.holdout import Holdout, hold_out
from bidirl.models.online import Calibration, Observation, Side, observe
from bidirl.traces.logs import read_logs
from bidirl.traces.step_log import Mode, StepLog

DATA = Path(os.environ.get("BIDIRL_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
Column = NDArray[np.float64]
NUM_FIRST = 30
ORIGINS = (0, 15, 40, 80, 150, 300, 500, 800)
"""First rows of the windows that are fitted."""
NUM_SEEDS = 12


def public_runs() -> list[StepLog]:
    path = DATA / "published" / "verl_step_logs.csv"
    if not path.exists():
        print(f"no {path}: set BIDIRL_DATA", file=sys.stderr)
        return []
    return read_logs([path])


def row(name: str, stage: str, held: Holdout) -> str:
    figures = held.to_json()
    fitted = held.fitted[0]
    values = [
        f"{100 * figures[key]:.2f}"
        for key in ("median_error", "p90_error", "coverage", "baseline_mean", "baseline_last")
    ]
    values[2] = f"{100 * figures['coverage']:.1f}"
    form = fitted.form
    cells = (name, stage, str(held.num_steps), *values, form.name, str(form.num_parameters))
    return f"| {' | '.join(cells)} |"


def print_runs(logs: list[StepLog]) -> None:
    print("| run | stage | n | median % | p90 % | coverage % | mean % | last % | form | parameters |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---|---:|")
    for log in logs:
        for stage, held in hold_out(log, NUM_FIRST).items():
            print(row(log.source.rpartition("(")[2].rstrip(")"), stage, held))


def print_windows(logs: list[StepLog]) -> None:
    found: dict[str, list[dict[str, float]]] = {}
    for log in logs:
        for origin in ORIGINS:
            if len(log) >= origin + 2 * NUM_FIRST:
                for stage, held in hold_out(log.rows(slice(origin, None)), NUM_FIRST).items():
                    found.setdefault(stage, []).append(held.to_json())
    print("| stage | windows | median % | p90 % | coverage % | in 85-95 % | better baseline % |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for stage, each in found.items():
        covered = np.array([figures["coverage"] for figures in each])
        base = [min(figures["baseline_mean"], figures["baseline_last"]) for figures in each]
        print(
            f"| {stage} | {len(each)} | {100 * np.mean([f['median_error'] for f in each]):.2f} "
            f"| {100 * np.mean([f['p90_error'] for f in each]):.2f} | {100 * covered.mean():.1f} "
            f"| {100 * np.mean((covered >= 0.85) & (covered <= 0.95)):.0f} | {100 * np.mean(base):.2f} |"
        )


def synthetic(
    rng: np.random.Generator,
    *,
    batching: str = "packed",
    at_cap: float = 0.6,
    tail: float = 0.5,
    wander: float = 0.0,
    dof: float = np.inf,
    num: int = 230,
) -> StepLog:
    """Return a run whose lengths fall from 300 to 200 tokens; the first step is 40 % slow."""
    steps = np.arange(num)
    mean = 200.0 + 100.0 * np.exp(-steps / 12.0) + rng.normal(0.0, 4.0, num)
    longest = np.where(rng.random(num) < at_cap, 1024.0, rng.uniform(400.0, 1024.0, num))
    prompt = rng.normal(90.0, 1.0, num)

    def noise(size: float) -> Column:
        drawn = rng.normal(size=num) if np.isinf(dof) else rng.standard_t(dof, num)
        walk = wander * np.cumsum(rng.normal(size=num)) / np.sqrt(num)
        return np.asarray(np.exp(size * drawn + walk))

    work = {
        "packed": 1.0 + 0.02 * (mean + prompt),
        "constant": np.full(num, 8.0),
        "longest": 0.5 + 0.008 * (longest + prompt),
    }[batching]
    generation = 1.0 + 30.0 * (tail * longest / 1024.0 + (1.0 - tail) * mean / 230.0)
    update = work * noise(0.015)
    update[0] *= 1.4
    columns = {
        "step": steps.astype(float),
        "response_mean_tokens": mean,
        "response_max_tokens": longest,
        "prompt_mean_tokens": prompt,
        "generation_s": generation * noise(0.03),
        "reference_s": 0.3 * work * noise(0.015),
        "update_s": update,
    }
    return StepLog("synthetic", Mode.COLOCATED, "a step", columns, source=batching)


CASES: dict[str, dict[str, object]] = {
    "packed": {},
    "padded to a fixed length": {"batching": "constant"},
    "padded to the longest": {"batching": "longest"},
    "every step at the cap": {"at_cap": 1.0},
    "no step at the cap": {"at_cap": 0.0},
    "tail 20 % of generation": {"tail": 0.2},
    "tail 90 % of generation": {"tail": 0.9},
    "Student-t (3) noise": {"dof": 3.0},
    "machine wanders by 1.5 %": {"wander": 0.015},
    "machine wanders by 3 %": {"wander": 0.03},
}


def print_synthetic() -> None:
    print("| truth | stage | median % | p90 % | coverage % | better baseline % | form found |")
    print("|---|---|---:|---:|---:|---:|---|")
    for name, options in CASES.items():
        found: dict[str, list[Holdout]] = {}
        for seed in range(NUM_SEEDS):
            log = synthetic(np.random.default_rng(seed), **options)  # type: ignore[arg-type]
            for stage, held in hold_out(log, NUM_FIRST).items():
                found.setdefault(stage, []).append(held)
        for stage, each in found.items():
            figures = [held.to_json() for held in each]
            base = [min(f["baseline_mean"], f["baseline_last"]) for f in figures]
            forms = [held.fitted[0].form.name for held in each]
            best = max(set(forms), key=forms.count)
            print(
                f"| {name} | {stage} | {100 * np.mean([f['median_error'] for f in figures]):.2f} "
                f"| {100 * np.mean([f['p90_error'] for f in figures]):.2f} "
                f"| {100 * np.mean([f['coverage'] for f in figures]):.1f} | {100 * np.mean(base):.2f} "
                f"| {best} {forms.count(best)}/{len(forms)} |"
            )


def alarms(ratios: Iterator[float]) -> Iterator[bool]:
    state = Calibration()
    for ratio in ratios:
        before = state.train.num_drifts
        state, _ = observe(state, Observation(Side.TRAIN, 1.0, float(np.exp(ratio))))
        yield state.train.num_drifts > before


def print_online(num_runs: int = 60, num: int = 500) -> None:
    print("| noise | false alarms per 1,000 | after a jump of 1 scale | 2 scales | 4 scales |")
    print("|---|---:|---:|---:|---:|")
    rng = np.random.default_rng(1)
    laws = {
        "normal, 0.5 %": (0.005, np.inf),
        "normal, 2 %": (0.02, np.inf),
        "normal, 10 %": (0.1, np.inf),
        "Student-t (4), 2 %": (0.02, 4.0),
    }
    for name, (scale, dof) in laws.items():

        def draw(size: int, scale: float = scale, dof: float = dof) -> Column:
            drawn = rng.normal(size=size) if np.isinf(dof) else rng.standard_t(dof, size)
            return np.asarray(scale * drawn)

        false = sum(sum(alarms(iter(draw(num)))) for _ in range(num_runs))
        cells = []
        for jump in (1.0, 2.0, 4.0):
            delays = []
            for _ in range(num_runs):
                before = draw(100)
                after = draw(100) + jump * float(np.std(before))
                found = [
                    i for i, is_alarm in enumerate(alarms(iter([*before, *after]))) if is_alarm and i >= 100
                ]
                delays.append(found[0] - 99 if found else np.inf)
            cells.append(f"{np.median(delays):.0f}" if np.isfinite(np.median(delays)) else "> 100")
        print(f"| {name} | {1000 * false / (num_runs * num):.2f} | {' | '.join(cells)} |")


def main() -> None:
    wanted = sys.argv[1:] or ["runs", "windows", "synthetic", "online"]
    logs = public_runs() if {"runs", "windows"} & set(wanted) else []
    if "runs" in wanted and logs:
        print_runs(logs)
    if "windows" in wanted and logs:
        print()
        print_windows(logs)
    if "synthetic" in wanted:
        print()
        print_synthetic()
    if "online" in wanted:
        print()
        print_online()


if __name__ == "__main__":
    main()
