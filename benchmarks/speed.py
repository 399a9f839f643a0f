"""Measure how fast a simulation runs and what it needs; write benchmarks/speed.md.

    python benchmarks/speed.py [--quick]

Every figure is a ratio, a slope, or stands beside a reference of the same process and minute. Each size runs
in a process of its own, so that its peak memory is its own.
"""

import argparse
import gc
import json
import math
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

import simpy

ROOT = Path(__file__).resolve().parent.parent
SIZES = (32, 128, 512, 2048, 8192, 16384)
MEAN_TOKENS = 2000
REPEATS = 2


def overrides(gpus: int, steps: int, policy: str) -> list[str]:
    """Return the job of a size: 4 prompts a GPU, half of the GPUs roll out, mean response 2K."""
    return [
        f"cluster.num_nodes={gpus // 8}",
        f"workload.prompts_per_step={4 * gpus}",
        f"workload.num_steps={steps}",
        f"workload.lengths={{mean={MEAN_TOKENS}, sigma=0.6, max=8192}}",
        "workload.max_response_tokens=8192",
        f"partition.rollout_gpus={gpus // 2}",
        f"policy.name={policy}",
    ]


def raw_simpy(pending: int, events: int = 200_000) -> float:
    """Return callback timeouts per second of bare SimPy with ``pending`` of them in the queue."""
    env = simpy.Environment()

    def again(_: object) -> None:
        env.timeout(1.0).callbacks.append(again)

    for index in range(pending):
        env.timeout(index / pending).callbacks.append(again)
    start = time.process_time()
    for _ in range(events):
        env.step()
    return events / (time.process_time() - start)


def measure(gpus: int, steps: int, policy: str) -> dict[str, float]:
    """Run one job in this process and return its figures."""
    from bidirl.planner.build import build_plan, build_workload
    from bidirl.planner.job import load_job
    from bidirl.sim.driver import Driver

    job = load_job(ROOT / "examples" / "paper_a6000.toml", overrides(gpus, steps, policy))
    workload = build_workload(job, 0)
    plan = build_plan(job, workload)
    driver = Driver(plan, workload)
    gc.freeze()
    gc.disable()
    start = time.process_time()
    record = driver.run()
    seconds = time.process_time() - start
    return {
        "gpus": gpus,
        "samples": len(record.samples.group),
        "seconds": seconds,
        "tokens_per_s": record.decode_tokens / seconds,
        "events_per_s": driver.num_events / seconds,
        "samples_per_s": len(record.samples.group) / seconds,
        "leases": len(record.leases.direction),
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "raw_simpy": raw_simpy(plan.rollout_replicas),
    }


def apart(gpus: int, steps: int, policy: str) -> dict[str, float]:
    """Return the best of some runs, each in a process of its own."""
    best: dict[str, float] = {}
    for _ in range(REPEATS if gpus <= 512 else 1):
        text = subprocess.run(
            [sys.executable, __file__, "--one", str(gpus), str(steps), policy],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        found = json.loads(text)
        if not best or found["seconds"] < best["seconds"]:
            best = found
    return best


def slope(points: list[tuple[float, float]]) -> float:
    """Return the least-squares slope of log y over log x."""
    xs = [math.log(x) for x, _ in points]
    ys = [math.log(y) for _, y in points]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum(
        (x - mean_x) ** 2 for x in xs
    )


def sweep_seconds(cells: int) -> float:
    """Return the wall seconds of a sweep of the default job over seeds and staleness."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        subprocess.run(
            [
                sys.executable, "-c", "from bidirl.sim.cli import main; main()", "sweep",
                str(ROOT / "examples" / "paper_a6000.toml"), "--vary", "policy.staleness=0,0.5,1,2",
                "--seeds", str(cells // 4), "--jobs", "2", "--out", folder,
            ],
            check=True, capture_output=True,
        )  # fmt: skip
        return time.perf_counter() - start


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sweep-s", type=float, help="seconds of the 1,000-cell sweep, if just measured")
    parser.add_argument("--one", nargs=3)
    options = parser.parse_args()
    if options.one:
        gpus, steps, policy = options.one
        print(json.dumps(measure(int(gpus), int(steps), policy)))
        return
    policies = ("no_borrow", "bidirl", "bidirl_length_aware")
    made = (
        f"Made by `python benchmarks/speed.py` on {platform.machine()}, Python {platform.python_version()}."
    )
    setting = (
        f"Mean response {MEAN_TOKENS} tokens, 8 samples a prompt, every decision taken, one process unless\n"
        f"said, best of {REPEATS} (one from 2,048 GPUs on)."
    )
    head = (
        "| policy (16 GPUs, 40 steps) | decode tokens per s | samples per s | scheduler events per s "
        "| samples per s over raw SimPy timeouts | leases |"
    )
    lines = ["# Speed and memory of the simulator", "", made, setting, "", head, "|---|---|---|---|---|---|"]
    for policy in policies:
        found = apart(16, 40, policy)
        lines.append(
            f"| {policy} | {found['tokens_per_s']:.2g} | {found['samples_per_s']:,.0f} | "
            f"{found['events_per_s']:,.0f} | 1/{found['raw_simpy'] / found['samples_per_s']:.0f} | "
            f"{found['leases']:.0f} |"
        )
    lines += [
        "",
        "| GPUs | samples | microseconds per sample: " + " | ".join(policies) + " | peak MB (bidirl) |",
        "|---|---|---|---|---|---|",
    ]
    points: dict[str, list[tuple[float, float]]] = {policy: [] for policy in policies}
    for gpus in SIZES[:3] if options.quick else SIZES:
        steps = max(2, 4096 // gpus)
        row = {policy: apart(gpus, steps, policy) for policy in policies}
        for policy in policies:
            points[policy].append((gpus, row[policy]["seconds"] / row[policy]["samples"] * gpus))
        each = " | ".join(f"{1e6 * row[p]['seconds'] / row[p]['samples']:.1f}" for p in policies)
        lines.append(
            f"| {gpus:,} | {row['bidirl']['samples']:,.0f} | {each} | {row['bidirl']['rss_mb']:.0f} |"
        )
    slopes = ", ".join(f"{policy} {slope(points[policy]):.2f}" for policy in policies)
    lines += [
        "",
        f"Log-log slope of the cost of a step over GPUs (1 = the cost of a sample is flat): {slopes}.",
    ]
    million = apart(128, 61 if options.quick else 244, "bidirl")
    lines += [
        "",
        f"{million['samples']:,.0f} samples in one process: peak {million['rss_mb']:.0f} MB.",
    ]
    if not options.quick:
        seconds = options.sweep_s or sweep_seconds(1000)
        what = "1,000 cells of the default 16-GPU, 40-step job, 2 processes"
        lines += ["", f"`bidirl-sim sweep` of {what}: {seconds:.0f} s."]
    page = "\n".join(lines) + "\n"
    if options.quick:
        print(page)
    else:
        (ROOT / "benchmarks" / "speed.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
