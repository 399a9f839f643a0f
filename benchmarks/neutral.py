"""Borrowing changes no bit of what is learned: hundreds of steps on real vLLM and torch, several s.

Needs the engine environment: ``.venv-engine/bin/python benchmarks/neutral.py [--steps N]``. Writes
docs/neutral.md; without vLLM it says so and does nothing.
"""

import argparse
import importlib.util
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bidirl.executor.backends.assemble import Kind
from bidirl.executor.backends.ray_session import shared_ray
from bidirl.executor.neutral import DIRECTIONS, Neutrality, latest_job, neutrality, pinned_job
from bidirl.executor.run import RealRun, run_real, with_steps
from bidirl.planner.job import Job, load_job
from bidirl.sim.metrics import summarise
from bidirl.traces.run_record import RunRecord

ROOT = Path(__file__).parents[1]
STALENESS = ("0", "1", "2")
LATEST_STEPS = 60
"""Steps of the runs that only show throughput."""
JOB = (
    "model.architecture.num_layers=2",
    "model.architecture.hidden_size=64",
    "model.architecture.num_attention_heads=2",
    "model.architecture.num_kv_heads=1",
    "model.architecture.intermediate_size=128",
    "model.architecture.vocab_size=32",
    "workload.prompts_per_step=8",
    "workload.samples_per_prompt=4",
    "workload.max_response_tokens=32",
    "workload.lengths={p50 = 10, p95 = 28}",
    "workload.prompt_tokens=8",
    "workload.old_logprob=off",
    "engine.kv_tokens=2048",
)


def throughput(record: RunRecord) -> float | None:
    found: float | None = summarise(record, sources={})["tokens_per_s"]
    return found


def compare(job: Job) -> tuple[Neutrality, dict[str, RealRun]]:
    runs = {}
    for name, variant in (
        ("pinned, alone", pinned_job(job, lends=False)),
        ("pinned, lending", pinned_job(job, lends=True)),
        ("latest, lending", latest_job(job)),
    ):
        start_s = time.monotonic()
        short = with_steps(variant, min(LATEST_STEPS, job.workload.num_steps))
        runs[name] = run_real(short if name.startswith("latest") else variant, 0, Kind.VLLM, digest=True)
        print(f"  {name}: {time.monotonic() - start_s:.0f} s", flush=True)
    return neutrality(runs, throughput), runs


def row(staleness: str, found: Neutrality, rewards: tuple[float, float]) -> dict[str, Any]:
    return {"staleness": staleness, "reward": rewards, **found.to_json()}


HEAD = """# Borrowing leaves the learning untouched

The paper shows reward curves of 60 steps that lie close together. In *pinned* mode with an *ordered* merge
more can be said: the version that generates a group follows from its number, chunks are cut before anyone is
chosen to run them, and gradients are added in chunk order. Placement can then decide nothing, and that is
tested to the bit: the same job is trained with and without borrowing, and every sample's tokens and the
weights of every version are compared.

{setting}

| s | steps | samples (tokens) | versions | leases (samples) + (chunks) | resumed | result | reward |
|---|---|---|---|---|---|---|---|
{rows}

*Leases*: rollouter on the training pool, with the samples that ended there, + trainer on the rollout pool,
with the chunks that it ran and that were merged, in the run with borrowing. *Resumed*: samples that went on
in another engine with the tokens that they had. *Reward*: mean of the first and of the last tenth of the
steps.

Throughput of the same runs, tokens/s, on a shared machine of two processors: not a measurement of what
borrowing gains.

| s | pinned, alone | pinned, lending | latest, lending |
|---|---|---|---|
{speeds}

Borrowing is ungated here, and chunks are pulled one by one: any idle pool lends and finds work, so that there
is something to compare; on a job this small a gate refuses most leases. At `s = 0` every step idles both
pools in turn, and most of the work moves; with staleness the pools of this job rarely wait, so little moves
there. The result holds for pinned mode. In latest mode the version that a sample sees depends on when it
runs, so there only the rules of admission are the same, not the bits.

Bits are equal because the engine samples with noise that seed and position decide, so a sample goes on
anywhere as it would have gone on; because float32 arithmetic of a sample on one thread does not depend on its
neighbours at this size; and because a chunk's gradient depends on its rows alone. On GPUs, or in bfloat16,
the second holds only for batch-invariant kernels.

Planted faults are found by the same comparison (`tests/test_neutral.py`): a merge in the wrong order, an
auxiliary trainer with old weights, an engine with another version, and noise that starts again when a sample
resumes.

Made by `benchmarks/neutral.py`; `bidirl-run neutral JOB` does the same for any job.
"""
SETTING = """Setting: vLLM 0.32 (CPU) and torch 2.13 under Ray, one rollout and one training worker; a random
Qwen3 decoder of 2 layers and width 64 in float32; copy task, 8 prompts x 4 samples a step, responses of 10
tokens (median) to 32."""


def page(rows: list[dict[str, Any]], steps: int) -> str:
    def line(data: dict[str, Any]) -> str:
        leases, lent = data["leases"], data["lent"]
        both = " + ".join(f"{leases.get(name, 0)} ({lent[name]:,})" for name in DIRECTIONS)
        result = "identical" if data["difference"] is None else data["difference"]
        if data["difference"] is None and data["proven"] is None:
            result = "identical, one direction not covered"
        first, last = data["reward"]
        sizes = f"{data['num_samples']:,} ({data['num_tokens']:,})"
        return (
            f"| {data['staleness']} | {steps} | {sizes} | {data['num_versions']} | {both} | "
            f"{data['num_resumed']:,} | {result} | {first:.2f}, {last:.2f} |"
        )

    def speed(data: dict[str, Any]) -> str:
        values = [f"{value:,.0f}" for value in data["tokens_per_s"].values()]
        return f"| {data['staleness']} | {' | '.join(values)} |"

    return HEAD.format(setting=SETTING, rows="\n".join(map(line, rows)), speeds="\n".join(map(speed, rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--from", dest="log", type=Path, help="only write the page, from a run's output")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "neutral.md")
    chosen = parser.parse_args()
    if chosen.log is not None:
        lines = chosen.log.read_text(encoding="utf-8").splitlines()
        done = [json.loads(line) for line in lines if line.startswith("{")]
        chosen.out.write_text(page(done, chosen.steps), encoding="utf-8")
        return
    if importlib.util.find_spec("vllm") is None:
        print("neutral: vLLM is not installed here; run it with .venv-engine/bin/python")
        return
    rows = []
    with shared_ray():
        for staleness in STALENESS:
            print(f"s = {staleness}", flush=True)
            job = load_job(ROOT / "examples" / "tiny.toml", [*JOB, f"policy.staleness={staleness}"])
            found, runs = compare(with_steps(replace(job), chosen.steps))
            print(f"  {found.verdict()}", flush=True)
            learning = [step.reward for step in runs["pinned, alone"].learning]
            tenth = max(1, len(learning) // 10)
            rewards = (sum(learning[:tenth]) / tenth, sum(learning[-tenth:]) / tenth)
            rows.append(row(staleness, found, rewards))
            chosen.out.write_text(page(rows, chosen.steps), encoding="utf-8")
            print(json.dumps(rows[-1]), flush=True)
    if any(data["difference"] is not None for data in rows):
        sys.exit(3)


if __name__ == "__main__":
    main()
