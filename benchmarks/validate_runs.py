"""Predict real runs from their first part, and measure what borrowing gives: docs/predicted_vs_measured.md.

    python benchmarks/validate_runs.py run [--repeats 5] [--backend vllm|fake] [--cases ...] --data FILE.json
    python benchmarks/validate_runs.py page --data FILE.json

``run`` adds runs to the file (one entry each, so that it can be stopped and continued); ``page`` writes the
tables and the figure from it. Without an argument it is ``page`` on the committed data. Seconds are this
machine's; the file says how loaded it was.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from bidirl.errors import BidirlError
from bidirl.executor.backends.assemble import Kind
from bidirl.executor.backends.ray_session import shared_ray
from bidirl.executor.run import real_plan
from bidirl.executor.validate import STAND_IN, Simulated, validate, with_models
from bidirl.models.fit.regression import t_quantile
from bidirl.models.iteration import AffineIteration
from bidirl.models.trainer import SegmentCost
from bidirl.models.transfer import SwitchCosts
from bidirl.planner.job import Job, load_job
from bidirl.sim.metrics import summarise
from bidirl.sim.reality.table import markdown_table
from bidirl.sim.run import simulate

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "predicted_vs_measured.json"
JOB = ROOT / "examples" / "copy.toml"
STEPS, CALIBRATE = 12, 4
SIZES = (
    f"workload.num_steps={STEPS}",
    "workload.prompts_per_step=16",
    "workload.samples_per_prompt=8",
    "workload.max_response_tokens=96",
    "workload.lengths={p50 = 32, p95 = 84}",
    "engine.max_num_seqs=64",
    "engine.kv_tokens=16384",
    "cluster.gpus_per_node=3",
)
PACED = ("learn.pace={iteration_s = 0.025, sequence_s = 2.5e-4, token_s = 3.5e-4}",)
"""Slower than engine and trainer ever were on this machine with all three workers busy, so that a paced
worker behaves as a device of its own; the work itself is still done."""
LENDS, ALONE = ("policy.name=opportunistic",), ("policy.name=no_borrow",)
TWO_ONE, ONE_TWO = ("partition.rollout_gpus=2",), ("partition.rollout_gpus=1",)
ONE_ONE = ("partition.rollout_gpus=1", "cluster.gpus_per_node=2")
"""As many workers as the machine has cores: what plain workers need to keep their speed."""
CASES: dict[str, tuple[str, ...]] = {
    "paced 2+1 lending": (*PACED, *TWO_ONE, *LENDS),
    "paced 2+1 alone": (*PACED, *TWO_ONE, *ALONE),
    "paced 1+2 lending": (*PACED, *ONE_TWO, *LENDS),
    "paced 1+2 alone": (*PACED, *ONE_TWO, *ALONE),
    "plain 1+1 lending": (*ONE_ONE, *LENDS),
    "plain 1+1 alone": (*ONE_ONE, *ALONE),
    "plain 2+1 lending": (*TWO_ONE, *LENDS),
    "plain 2+1 alone": (*TWO_ONE, *ALONE),
    "plain 1+2 lending": (*ONE_TWO, *LENDS),
    "plain 1+2 alone": (*ONE_TWO, *ALONE),
}
"""Pools as rollout + training workers."""
PAIRS = {case: case.replace("lending", "alone") for case in CASES if case.endswith("lending")}


def one(case: str, seed: int, kind: Kind) -> dict[str, Any]:
    """Run a case once: what was measured, what was predicted."""

    def foretell(job: Job, seed: int) -> Simulated:
        outcome = simulate(job, seed)
        return Simulated(outcome.record, outcome.summary)

    job = load_job(JOB, [*SIZES, *CASES[case]])
    began = time.time()
    with tempfile.TemporaryDirectory() as folder:
        found = validate(
            job,
            seed,
            kind,
            Path(folder),
            simulate=foretell,
            summarise=lambda record: summarise(record, sources={}),
            calibration_steps=CALIBRATE,
            stub=STAND_IN,
        )
    data = found.to_json()
    rows = data.pop("rows")
    sums: dict[str, list[float]] = {}
    for row in rows:
        entry = sums.setdefault(row["stage"], [0.0, 0.0])
        entry[0] += row["measured_s"]
        entry[1] += row["predicted_s"]
    data["fits"] = {
        name: {key: value for key, value in fit.items() if key != "ranges"}
        for name, fit in data["fits"].items()
    }
    entry = {
        "case": case,
        "seed": seed,
        "load": os.getloadavg()[0],
        "took_s": time.time() - began,
        "sums": sums,
        "stage_rows": [
            [row["stage"], row["step"], row["measured_s"], row["predicted_s"]]
            for row in rows
            if row["stage"] in ("generation", "update")
        ],
        **data,
    }
    return {**entry, "foretold_with_lending_s": foretold_with_lending_s(entry)}


def foretold_with_lending_s(entry: dict[str, Any]) -> float | None:
    """Simulate lending with the models of a run without it; None for other runs.

    The models are built from what the file holds of the run: a sync stands for the switches that it never
    saw, and half an iteration of a full engine for the wait for its end.
    """
    lent = next((lent for lent, alone in PAIRS.items() if alone == entry["case"]), None)
    if lent is None:
        return None
    job = load_job(JOB, [*SIZES, *CASES[lent]])
    values = {
        group: {name: found["value"] for name, found in fit["coefficients"].items()}
        for group, fit in entry["fits"].items()
    }
    iteration = AffineIteration(**values["iteration"], beta_hist_pre_s=0.0)
    full_s = iteration.decode(job.engine.max_num_seqs)[0]
    means = {
        stage: entry["sums"][stage][1] / entry["errors"][stage]["num_rows"] for stage in ("optimizer", "sync")
    }
    sync_s = max(0.0, means["sync"] - full_s / 2.0)
    models = real_plan(job, entry["seed"]).models
    zero = {"s_per_byte": 0.0, "per_tensor_s": 0.0, "per_hop_s": 0.0, "fixed_s": 0.0}
    models = replace(
        models,
        iteration=iteration,
        trainer=replace(
            models.trainer,
            update=SegmentCost(**values["trainer.update"]),
            optimizer_s=means["optimizer"],
            alpha_comm_s=0.0,
            beta_comm_s_per_byte=0.0,
            beta_inter_s_per_byte=0.0,
        ),
        sync=replace(models.sync, apply_s=sync_s, **zero),
        switch=SwitchCosts(**{spec.name: means["sync"] for spec in fields(SwitchCosts)}),
    )
    with tempfile.TemporaryDirectory() as folder:
        models.save(Path(folder) / "models.json")
        lends = with_models(job, Path(folder) / "models.json")
        published = simulate(lends, entry["seed"]).record.steps.published_s
    return published[-1] - published[CALIBRATE - 1]


def run(arguments: argparse.Namespace) -> None:
    """Run the cases that the file does not have yet, round after round."""
    path: Path = arguments.data
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []
    kind = Kind.VLLM if arguments.backend == "vllm" else Kind.STUB
    with shared_ray():
        _add(runs, kind, arguments)


def _add(runs: list[dict[str, Any]], kind: Kind, arguments: argparse.Namespace) -> None:
    path: Path = arguments.data
    for repeat in range(arguments.repeats):
        for case in arguments.cases:
            if any(entry["case"] == case and entry["seed"] == repeat for entry in runs):
                continue
            try:
                runs.append(one(case, repeat, kind))
            except BidirlError as error:
                print(f"{case}, seed {repeat}: {error}", file=sys.stderr, flush=True)
                continue
            path.write_text(json.dumps({"backend": arguments.backend, "runs": runs}) + "\n", encoding="utf-8")
            last = runs[-1]
            stages = last["errors"]["stages"]
            print(
                f"{case:18s} seed {repeat}: makespan {last['makespan']['measured_s']:.2f} s, predicted "
                f"{last['makespan']['predicted_s']:.2f}; stages {100 * stages['median']:.1f} % median, "
                f"{100 * stages['p90']:.1f} p90; took {last['took_s']:.0f} s, load {last['load']:.1f}",
                flush=True,
            )


def _span(values: list[float], *, unit: float = 100.0) -> str:
    """Return mean and range."""
    return f"{unit * statistics.mean(values):.1f} ({unit * min(values):.1f} to {unit * max(values):.1f})"


def accuracy_rows(runs: list[dict[str, Any]]) -> list[list[str]]:
    """Return a table row per case: errors in percent, mean and range over the repeats."""
    rows = []
    for case in CASES:
        mine = [entry for entry in runs if entry["case"] == case]
        if not mine:
            continue
        errors = [entry["errors"] for entry in mine]
        counts = [
            [sum(int(found["count"]) for found in entry["leases"][side].values()) for entry in mine]
            for side in ("measured", "predicted")
        ]
        rows.append(
            [
                case,
                str(len(mine)),
                _span([error["stages"]["median"] for error in errors]),
                _span([error["stages"]["p90"] for error in errors]),
                _span([error["step"]["median"] for error in errors]),
                _span([entry["makespan"]["error"] for entry in mine]),
                _span([entry["makespan"]["measured_s"] for entry in mine], unit=1.0),
                "; ".join(f"{a}, {b}" for a, b in zip(*counts, strict=True)) if any(counts[0]) else "",
            ]
        )
    return rows


def run_rows(runs: list[dict[str, Any]]) -> list[list[str]]:
    """Return a table row per run, as it was."""
    order = list(CASES)
    rows = []
    for entry in sorted(runs, key=lambda entry: (order.index(entry["case"]), entry["seed"])):
        stages, step, makespan = entry["errors"]["stages"], entry["errors"]["step"], entry["makespan"]
        idle = [
            f"{100 * entry['idle'][side]['rollout']:.0f}/{100 * entry['idle'][side]['train']:.0f}"
            for side in ("measured", "predicted")
        ]
        rows.append(
            [
                entry["case"],
                str(entry["seed"]),
                f"{entry['load']:.0f}",
                f"{100 * stages['median']:.1f}",
                f"{100 * stages['p90']:.1f}",
                f"{100 * step['median']:.1f}",
                f"{makespan['measured_s']:.2f}",
                f"{makespan['predicted_s']:.2f}",
                f"{100 * makespan['error']:.1f}",
                ", ".join(idle),
            ]
        )
    return rows


def cost_rows(runs: list[dict[str, Any]]) -> list[list[str]]:
    """Return a table row per case and stage: seconds in all, and how far their prediction is off."""
    rows = []
    for case in CASES:
        mine = [entry for entry in runs if entry["case"] == case]
        for stage in dict.fromkeys(stage for entry in mine for stage in entry["sums"]):
            sums = [entry["sums"][stage] for entry in mine if stage in entry["sums"]]
            off = [predicted / measured - 1.0 for measured, predicted in sums]
            found = [entry["errors"][stage] for entry in mine if stage in entry["errors"]]
            rows.append(
                [
                    case,
                    stage,
                    f"{statistics.mean(measured for measured, _ in sums):.3f}",
                    _span(off),
                    _span([error["median"] for error in found]),
                ]
            )
    return rows


def effects(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what lending does to the time of the predicted steps, by case.

    ``measured``: mean and 90 % interval (paired by seed, Student's t of the logarithms) of time alone over
    time with lending, less one. ``predicted``: the same from the models of the run alone, lending simulated.
    """
    found = {}
    for lent, alone in PAIRS.items():
        pairs = [
            (with_, without)
            for with_ in runs
            for without in runs
            if with_["case"] == lent and without["case"] == alone and with_["seed"] == without["seed"]
        ]
        if len(pairs) < 2:
            continue
        measured = [
            math.log(without["makespan"]["measured_s"] / with_["makespan"]["measured_s"])
            for with_, without in pairs
        ]
        predicted = [
            math.log(without["makespan"]["predicted_s"] / without["foretold_with_lending_s"])
            for _, without in pairs
        ]
        name = lent.removesuffix(" lending")
        found[name] = {"num_pairs": len(pairs), "pairs": list(map(math.expm1, measured))}
        for key, logs in (("measured", measured), ("predicted", predicted)):
            mean = statistics.mean(logs)
            half = t_quantile(0.95, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
            found[name][key] = [math.expm1(value) for value in (mean, mean - half, mean + half)]
    return found


def _effect_rows(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    rows = []
    for name, effect in found.items():
        texts = [
            f"{100 * mean:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
            for mean, low, high in (effect["measured"], effect["predicted"])
        ]
        _, low, high = effect["measured"]
        claim = "faster" if low > 0 else "slower" if high < 0 else "no claim: the interval holds zero"
        pairs = ", ".join(f"{100 * value:+.1f}" for value in effect["pairs"])
        rows.append([name, str(effect["num_pairs"]), *texts, pairs, claim])
    return rows


def figure(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw every predicted stage time against the measured one, and the effect of lending."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    drawn, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for stage, color in (("generation", "#3b6ea5"), ("update", "#c44e2b")):
        for pace, marker in (("paced", "o"), ("plain", "x")):
            rows = [
                row
                for entry in runs
                if entry["case"].startswith(pace)
                for row in entry["stage_rows"]
                if row[0] == stage
            ]
            if rows:
                left.loglog(
                    [row[2] for row in rows],
                    [row[3] for row in rows],
                    marker,
                    color=color,
                    ms=4,
                    alpha=0.6,
                    label=f"{stage}, {pace} devices",
                )
    ends = [min(left.get_xlim()[0], left.get_ylim()[0]), max(left.get_xlim()[1], left.get_ylim()[1])]
    left.plot(ends, ends, "k-", lw=0.8)
    left.set(xlabel="measured seconds of a step's stage", ylabel="predicted")
    left.legend(fontsize=7)
    found = effects(runs)
    for at, (key, color) in enumerate((("measured", "#3b6ea5"), ("predicted", "#c44e2b"))):
        for place, effect in enumerate(found.values()):
            mean, low, high = (100 * value for value in effect[key])
            right.errorbar(
                place + 0.15 * at,
                mean,
                [[mean - low], [high - mean]],
                fmt="o",
                color=color,
                capsize=3,
                label=key if not place else None,
            )
    right.axhline(0, color="k", lw=0.8)
    right.set_xticks(range(len(found)), list(found), fontsize=8)
    right.set(ylabel="faster by lending, % (90 % intervals)")
    right.legend()
    drawn.savefig(path, dpi=130)
    plt.close(drawn)


def page(arguments: argparse.Namespace) -> None:
    """Put the tables into the page, between its marks, and draw the figure."""
    data = json.loads(arguments.data.read_text(encoding="utf-8"))
    runs = data["runs"]
    head = ["workers", "runs", "stages, median %", "stages, p90 %", "step, median %", "makespan %"]
    parts = {
        "accuracy": markdown_table(
            [*head, "makespan, s", "leases (measured, predicted)"], accuracy_rows(runs)
        ),
        "runs": markdown_table(
            [
                "workers",
                "seed",
                "load",
                *head[2:5],
                "makespan, s",
                "simulated, s",
                "off by %",
                "idle rollout/train %: measured, simulated",
            ],
            run_rows(runs),
        ),
        "effect": markdown_table(
            ["workers", "pairs", "measured %", "predicted %", "each pair %", "claim"],
            _effect_rows(effects(runs)),
        ),
        "costs": markdown_table(
            ["workers", "stage", "measured, s a run", "sum off by %", "single times off by, median %"],
            cost_rows(runs),
        ),
    }
    if arguments.data != DATA:
        print("\n\n".join(parts.values()))
        return
    path = DATA.with_suffix(".md")
    text = path.read_text(encoding="utf-8")
    for name, table in parts.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{table}\n\n{end}{rest.partition(end)[2]}"
    path.write_text(text, encoding="utf-8")
    figure(runs, DATA.with_suffix(".png"))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "page"), nargs="?", default="page")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--backend", choices=("vllm", "fake"), default="vllm")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--data", type=Path, default=DATA)
    arguments = parser.parse_args()
    {"run": run, "page": page}[arguments.what](arguments)


if __name__ == "__main__":
    main()
