"""Hold the lending gates against each other on a fixed grid; write docs/lending_grid.md and its figure.

    python benchmarks/lending_grid.py [--quick] [--jobs N]

Every cell runs the same job under each policy with the same seed. A cell's figure of merit is the time at
which its last version is published. ``--quick`` takes a part of the grid and writes nothing.
"""

import argparse
import itertools
import sys
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median

from joblib import Parallel, delayed

from bidirl.planner.build import build_plan, build_workload
from bidirl.planner.job import load_job
from bidirl.sim.driver import Driver
from bidirl.sim.oracle import attach_oracle

ROOT = Path(__file__).resolve().parent.parent
POLICIES = (
    "no_borrow",
    "rollout_on_train",
    "train_on_rollout",
    "bidirl",
    "bidirl_length_aware",
    "oracle",
)
OURS, BASE = "bidirl_length_aware", "no_borrow"
SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4)
"""Rollout GPUs over all GPUs: from a starved to a swollen rollout pool."""
STALENESS = ("0", "0.5", "1", "2", "4")
SIGMAS = (0.3, 1.0)
"""Spread of the log length: short and long tail around a mean of 700 tokens, cut at 4,096."""
SWITCH_FACTORS = (0.2, 1.0, 3.0)
"""Times the measured switch costs of Qwen3-VL-4B (paper, Table 5)."""
SIZES = (8, 32, 256)
"""GPUs; 4 prompts a GPU. All combinations at 8 GPUs, a part of them above (see ``cells``)."""
STEPS, SEED = 8, 20261129
HARM, GAIN = 0.01, 0.05


@dataclass(frozen=True, slots=True)
class Cell:
    """One job of the grid."""

    gpus: int
    share: float
    staleness: str
    sigma: float
    switch: float

    @property
    def name(self) -> str:
        """Return the cell in one line."""
        rollout = round(self.gpus * self.share)
        return (
            f"{rollout}R:{self.gpus - rollout}T, s={self.staleness}, sigma={self.sigma}, "
            f"switch x{self.switch:g}"
        )


def cells(*, quick: bool) -> list[Cell]:
    """Return the grid, or a part of it."""
    found = []
    for gpus, share, staleness, sigma, switch in itertools.product(
        SIZES, SHARES, STALENESS, SIGMAS, SWITCH_FACTORS
    ):
        if gpus == SIZES[1] and (switch < 1.0 or staleness not in ("0", "1", "4")):
            continue
        if gpus == SIZES[2] and (switch != 1.0 or staleness not in ("0", "1")):
            continue
        if quick and (gpus != SIZES[0] or staleness not in ("0", "1")):
            continue
        found.append(Cell(gpus, share, staleness, sigma, switch))
    return found


def run(cell: Cell, policy: str) -> tuple[float, int]:
    """Return (seconds until the last publication, leases) of a cell under a policy."""
    job = load_job(
        ROOT / "examples" / "paper_a6000.toml",
        [
            f"cluster.num_nodes={max(1, cell.gpus // 8)}",
            f"workload.prompts_per_step={4 * cell.gpus}",
            f"workload.num_steps={STEPS}",
            f"workload.lengths={{mean=700, sigma={cell.sigma}, max=4096}}",
            "workload.max_response_tokens=4096",
            f"partition.rollout_gpus={round(cell.gpus * cell.share)}",
            f"policy.name={policy}",
            f"policy.staleness={cell.staleness}",
        ],
    )
    workload = build_workload(job, SEED)
    plan = build_plan(job, workload)
    switch = plan.models.switch
    scaled = replace(switch, **{f.name: getattr(switch, f.name) * cell.switch for f in fields(switch)})
    driver = Driver(replace(plan, models=replace(plan.models, switch=scaled)), workload)
    attach_oracle(driver)
    record = driver.run()
    return record.steps.published_s[-1], len(record.leases.direction)


def row(cell: Cell) -> dict[str, tuple[float, int]]:
    """Return a cell's result per policy; the oracle copies whole runs and is asked at 8 GPUs only."""
    names = [policy for policy in POLICIES if policy != "oracle" or cell.gpus == SIZES[0]]
    return {policy: run(cell, policy) for policy in names}


def report(grid: list[Cell], rows: list[dict[str, tuple[float, int]]], wall_s: float) -> str:
    """Return the page."""
    gains = [result[BASE][0] / result[OURS][0] - 1.0 for result in rows]
    best = [min(time_s for time_s, _ in result.values()) for result in rows]
    regrets = {
        policy: sorted(
            result[policy][0] / least - 1.0
            for result, least in zip(rows, best, strict=True)
            if policy in result
        )
        for policy in POLICIES
    }
    worst = min(range(len(grid)), key=gains.__getitem__)
    setting = (
        f"{STEPS} steps, 4 prompts a GPU, 8 samples a prompt, seed {SEED}; {len(grid)} cells:\n"
        "8, 32 and 256 GPUs, rollout share 1/8 to 3/4, s from 0 to 4, log-length spread 0.3 and 1.0,\n"
        f"switch costs x0.2, x1 and x3. `{OURS}` is preset `bidirl` with `split = length_aware`;\n"
        "`oracle` (at 8 GPUs only) simulates both branches of each decision with the true lengths."
    )
    lines = [
        "# Lending on a fixed grid",
        "",
        "Made by `python benchmarks/lending_grid.py`. Simulated times with prior models (RTX A6000,",
        "Qwen3-VL-4B),",
        setting,
        "",
        "| policy | mean gain over no_borrow | worst | best | regret to the best: median | p90 | max |",
        "|---|---|---|---|---|---|---|",
    ]
    for policy in POLICIES:
        own = [result[BASE][0] / result[policy][0] - 1.0 for result in rows if policy in result]
        regret = regrets[policy]
        lines.append(
            f"| {policy} | {sum(own) / len(own):+.1%} | {min(own):+.1%} | {max(own):+.1%} | "
            f"{median(regret):.1%} | {regret[int(0.9 * (len(regret) - 1))]:.1%} | {regret[-1]:.1%} |"
        )
    losing = sum(gain < -HARM for gain in gains)
    lines += [
        "",
        f"- Cells with `{OURS}` worse than `no_borrow` by over {HARM:.0%}: **{losing}** of {len(grid)}.",
        f"- Cells with a gain above {GAIN:.0%}: {sum(gain > GAIN for gain in gains) / len(gains):.0%}.",
        f"- Worst cell (seed {SEED}): {grid[worst].name}: {gains[worst]:+.2%}.",
        "- Why a cell loses: a lease is taken whose gain, small beside dear switches, was over-predicted;",
        "  the lookahead's few representatives smooth the longest samples of a small batch. One lease is",
        "  then lost.",
        "",
        "## Cells in which it loses most",
        "",
        "| cell | gain | leases | best policy there | its gain |",
        "|---|---|---|---|---|",
    ]
    for index in sorted(range(len(grid)), key=gains.__getitem__)[:8]:
        result = rows[index]
        winner = min(result, key=lambda policy: result[policy][0])
        lines.append(
            f"| {grid[index].name} | {gains[index]:+.2%} | {result[OURS][1]} | {winner} | "
            f"{result[BASE][0] / result[winner][0] - 1.0:+.2%} |"
        )
    lines += ["", "![gain over no_borrow](lending_grid.png)", ""]
    print(f"{wall_s:.0f} s for {len(grid)} cells", file=sys.stderr)
    return "\n".join(lines)


def figure(grid: list[Cell], rows: list[dict[str, tuple[float, int]]], path: Path) -> None:
    """Draw the gain of the length-aware gate and of the paper's over the rollout share."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    shown = ("bidirl", OURS, "oracle")
    figure_, axes = plt.subplots(1, len(STALENESS), figsize=(15, 3.6), sharey=True, layout="constrained")
    for axis, staleness in zip(axes, STALENESS, strict=True):
        for offset, policy in enumerate(shown):
            xs, ys = [], []
            for cell, result in zip(grid, rows, strict=True):
                if cell.staleness == staleness and policy in result:
                    xs.append(SHARES.index(cell.share) + 0.22 * (offset - 1))
                    ys.append(100 * (result[BASE][0] / result[policy][0] - 1.0))
            axis.scatter(xs, ys, s=12, alpha=0.6, label=policy)
        axis.axhline(0.0, color="black", linewidth=0.8)
        axis.set_title(f"s = {staleness}")
        axis.set_xticks(range(len(SHARES)), ["1/8", "1/4", "1/2", "3/4"])
        axis.set_xlabel("rollout GPUs / all GPUs")
    axes[0].set_ylabel("gain over no_borrow (%)")
    axes[-1].legend(loc="upper right", fontsize=8)
    figure_.savefig(path, dpi=110)


def main() -> None:
    """Run the grid."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--jobs", type=int, default=-1)
    options = parser.parse_args()
    grid = cells(quick=options.quick)
    start = time.perf_counter()
    rows = list(Parallel(n_jobs=options.jobs)(delayed(row)(cell) for cell in grid))
    page = report(grid, rows, time.perf_counter() - start)
    if options.quick:
        print(page)
        return
    (ROOT / "docs" / "lending_grid.md").write_text(page, encoding="utf-8")
    figure(grid, rows, ROOT / "docs" / "lending_grid.png")


if __name__ == "__main__":
    main()
