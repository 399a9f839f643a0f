"""Borrowing changes no bit of what is learned: hundreds of steps on real vLLM and torch, several s.

Needs the engine environment: ``.venv-engine/bin/python benchmarks/neutral.py [--steps N]``. Writes
docs/neutral.md; without vLLM it says so and does nothing.
"""

import argparse
import importlib.util
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from bidirl.executor.backends.assemble import Kind
from bidirl.executor.backends.ray_session import shared_ray
from bidirl.executor.neutral import DIRECTIONS, Neutrality, latest_job, neutrality, pinned_job
from bidirl.executor.run import RealRun, run_real
from bidirl.planner.job import Job, load_job
from bidirl.sim.metrics import summarise
from bidirl.traces.run_record import RunRecord

ROOT = Path(__file__).parents[1]
STALENESS = ("0", "1", "2")
LATEST_STEPS = 60
"""Steps of the runs that only show throughput."""
BURST = (12.0, 1.0, 1.0, 1.0)
"""Factors on response lengths, step after step: one step in four is long.

Its rollout outlasts the training of the short steps before it, so the trainer waits; its training outlasts
the rollout of the short steps after it, so rollout runs up to the bound and waits. Both pools idle in turn at
every ``s`` up to the number of short steps, whatever the balance of the pools on average.
"""
PACE = "{iteration_s = 0.010, token_s = 0.0008}"
"""About what a loaded machine of two processors takes anyway, so that its load decides little about who
waits."""
JOB = (
    "model.architecture.num_layers=2",
    "model.architecture.hidden_size=64",
    "model.architecture.num_attention_heads=2",
    "model.architecture.num_kv_heads=1",
    "model.architecture.intermediate_size=128",
    "model.architecture.vocab_size=32",
    "workload.prompts_per_step=4",
    "workload.samples_per_prompt=4",
    "workload.max_response_tokens=36",
    "workload.lengths={p50 = 3, p95 = 5}",
    "workload.prompt_tokens=3",
    "workload.old_logprob=off",
    "engine.kv_tokens=2048",
    f"learn.pace={PACE}",
)


def job_of(staleness: str, num_steps: int) -> Job:
    factors = islice(cycle(BURST), num_steps)
    steps = (f"workload.num_steps={num_steps}", f"workload.drift=[{','.join(map(str, factors))}]")
    return load_job(ROOT / "examples" / "tiny.toml", [*JOB, *steps, f"policy.staleness={staleness}"])


def throughput(record: RunRecord) -> float | None:
    found: float | None = summarise(record, sources={})["tokens_per_s"]
    return found


def worked(record: RunRecord) -> dict[str, int]:
    """Return direction -> leases in which lent devices generated or trained something."""
    leases = record.leases
    pairs = zip(leases.direction, leases.useful_device_s, strict=True)
    return dict(Counter(direction for direction, useful_s in pairs if useful_s > 0.0))


def compare(staleness: str, num_steps: int) -> tuple[Neutrality, dict[str, RealRun]]:
    job = job_of(staleness, num_steps)
    variants = {
        "pinned, alone": pinned_job(job, lends=False),
        "pinned, lending": pinned_job(job, lends=True),
        "latest, lending": latest_job(job_of(staleness, min(LATEST_STEPS, num_steps))),
    }
    runs = {}
    for name, variant in variants.items():
        start_s = time.monotonic()
        runs[name] = run_real(variant, 0, Kind.VLLM, digest=True)
        print(f"  {name}: {time.monotonic() - start_s:.0f} s", flush=True)
    return neutrality(runs, throughput), runs


def row(staleness: str, found: Neutrality, runs: dict[str, RealRun]) -> dict[str, Any]:
    learning = [step.reward for step in runs["pinned, alone"].learning]
    tenth = max(1, len(learning) // 10)
    return {
        "staleness": staleness,
        "num_steps": len(learning),
        "reward": (sum(learning[:tenth]) / tenth, sum(learning[-tenth:]) / tenth),
        "worked": worked(runs["pinned, lending"].record),
        **found.to_json(),
    }


HEAD = """# Borrowing leaves the learning untouched

The paper shows reward curves of 60 steps that lie close together. In *pinned* mode with an *ordered* merge
more can be said: the version that generates a group follows from its number, chunks are cut before anyone is
chosen to run them, and gradients are added in chunk order. Placement can then decide nothing, and that is
tested to the bit: the same job is trained with and without borrowing, and every sample's tokens and the
weights of every version are compared.

{setting}

| s | steps | samples (tokens) | versions | lent to rollout | lent to training | resumed | result | reward |
|---|---|---|---|---|---|---|---|---|
{rows}

*Lent*: leases of the run with borrowing in which the lent devices worked, of those taken. To rollout: with
the samples that ended on the training pool. To training: with the chunks that ran on the rollout pool and
were merged. *Resumed*: samples that went on in another engine with the tokens that they had. *Reward*: mean
of the first and of the last tenth of the steps.

Throughput of the same runs, tokens/s, on a shared machine of two processors: not a measurement of what
borrowing gains.

| s | pinned, alone | pinned, lending | latest, lending |
|---|---|---|---|
{speeds}

One step in four has long responses. Their rollout outlasts the training of the short steps before, so the
trainer waits; their training outlasts the rollout of the short steps after, so rollout runs up to the bound
and waits. So both pools idle in turn at every `s` shown. Borrowing is ungated, and chunks are pulled one by
one: any idle pool lends and finds work, so that there is something to compare; on a job this small a gate
refuses most leases. A lease does not work if its owner has work again before it is entered.

The result holds for pinned mode. In latest mode the version that a sample sees depends on when it
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
Qwen3 decoder of 2 layers and width 64 in float32; copy task, 4 prompts x 4 samples a step, responses of 3
tokens (median), in every fourth step twelve times as long, at most 36. *Paced*: an engine iteration takes at
least 10 ms, a chunk 0.8 ms a token ([what that means](predicted_vs_measured.md))."""


def leases(data: dict[str, Any]) -> Iterator[str]:
    for name in DIRECTIONS:
        yield f"{data['worked'].get(name, 0)} of {data['leases'].get(name, 0)} ({data['lent'][name]:,})"


def line(data: dict[str, Any]) -> str:
    result = "identical" if data["difference"] is None else data["difference"]
    if data["difference"] is None and data["proven"] is None:
        result = "identical, one direction not covered"
    first, last = data["reward"]
    cells = (
        data["staleness"],
        data["num_steps"],
        f"{data['num_samples']:,} ({data['num_tokens']:,})",
        data["num_versions"],
        *leases(data),
        f"{data['num_resumed']:,}",
        result,
        f"{first:.2f}, {last:.2f}",
    )
    return f"| {' | '.join(map(str, cells))} |"


def speed(data: dict[str, Any]) -> str:
    values = ["-" if value is None else f"{value:,.0f}" for value in data["tokens_per_s"].values()]
    return f"| {data['staleness']} | {' | '.join(values)} |"


def page(rows: list[dict[str, Any]]) -> str:
    return HEAD.format(setting=SETTING, rows="\n".join(map(line, rows)), speeds="\n".join(map(speed, rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--staleness", default=",".join(STALENESS))
    parser.add_argument("--from", dest="log", type=Path, help="only write the page, from a run's output")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "neutral.md")
    chosen = parser.parse_args()
    if chosen.log is not None:
        lines = chosen.log.read_text(encoding="utf-8").splitlines()
        done = [json.loads(line) for line in lines if line.startswith("{")]
        chosen.out.write_text(page(done), encoding="utf-8")
        return
    if importlib.util.find_spec("vllm") is None:
        print("neutral: vLLM is not installed here; run it with .venv-engine/bin/python")
        return
    rows = []
    with shared_ray():
        for staleness in chosen.staleness.split(","):
            print(f"s = {staleness}", flush=True)
            found, runs = compare(staleness, chosen.steps)
            print(f"  {found.verdict()}", flush=True)
            rows.append(row(staleness, found, runs))
            chosen.out.write_text(page(rows), encoding="utf-8")
            print(json.dumps(rows[-1]), flush=True)
    if any(data["difference"] is not None for data in rows):
        sys.exit(3)


if __name__ == "__main__":
    main()
