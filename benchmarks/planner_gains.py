"""What the split gains, what borrowing gains, and what they share: a 2 x 2 per packaged workload.

Writes the table of docs/planning.md between its markers, and docs/planning.png.
Run: python benchmarks/planner_gains.py
"""

from dataclasses import replace
from pathlib import Path

from bidirl.planner.cli import simulated
from bidirl.planner.job import Job, load_job
from bidirl.planner.search.candidates import Objective
from bidirl.planner.search.figure import landscape
from bidirl.planner.search.run import Found, search_job

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- gains -->", "<!-- /gains -->"
TOP = 3
"""Splits simulated per workload; neighbours, layouts and lending join."""

WORKLOADS = {
    "Geo3K, VL-4B, 16 A6000": ("paper_a6000.toml", ()),
    "Geo3K, VL-4B, 16 H100": ("paper_h100.toml", ()),
    "Geo3K, VL-2B, 16 A6000": ("paper_a6000.toml", ('model.name="Qwen3-VL-2B"',)),
    "GSM8K, 8B, 16 A6000": (
        "paper_a6000.toml",
        (
            'model.name="Qwen3-8B"',
            'workload.lengths="gsm8k"',
            "workload.max_response_tokens=1024",
            "workload.prompts_per_step=128",
        ),
    ),
    "DAPO-Math, 4B, 8K, 16 H100": (
        "paper_h100.toml",
        (
            'model.name="Qwen3-4B"',
            'workload.lengths="dapo_math_17k"',
            "workload.max_response_tokens=8192",
            "workload.prompts_per_step=64",
        ),
    ),
}


def evenly(job: Job) -> Job:
    """Return the job without a partition: the base of the table is then the most even split."""
    return replace(job, partition=None)


def row(name: str, found: Found) -> str:
    """Return one line of the table."""
    table, best = found.factorial, found.best
    assert best is not None
    if table is None:
        return f"| {name} | | {best.label}, {best.lending} | | | | |"
    numbers = (table.partition_gain, table.borrowing_gain, table.both_gain, table.interaction)
    cells = [
        name,
        found.factorial_base,
        f"{best.label}, {best.lending}",
        *(f"{each:.2f}" for each in numbers),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    lines = [
        "| workload | base: most even split, no lending | plan | split | lending | both | interaction |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (example, settings) in WORKLOADS.items():
        job = evenly(load_job(ROOT / "examples" / example, settings))
        found = search_job(job, Objective.TIME, TOP, simulated)
        lines.append(row(name, found))
        print(lines[-1], flush=True)
        if len(lines) == 3:
            landscape(found, ROOT / "docs" / "planning.png")
    page = ROOT / "docs" / "planning.md"
    text = page.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    table = "\n".join(lines)
    page.write_text(f"{head}{BEGIN}\n{table}\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
