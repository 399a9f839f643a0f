"""A search as data: plan.json, the ranked table, and the sentences a person reads first."""

import csv
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bidirl.errors import InputError
from bidirl.planner.job import resolved_json
from bidirl.planner.plan_json import plan_to_json
from bidirl.planner.policy import Lending, Placement
from bidirl.planner.search import answers
from bidirl.planner.search.candidates import Candidate, Objective
from bidirl.planner.search.frameworks import FRAMEWORKS
from bidirl.planner.search.goodput import goodput
from bidirl.planner.search.legality import lending_reason
from bidirl.planner.search.measured import layouts_note
from bidirl.planner.search.plans import job_of
from bidirl.planner.search.ranking import Ranked
from bidirl.planner.search.run import Found, no_plan

__all__ = ["plan_json", "rows", "verdict", "write_report"]

SCHEMA = "bidirl-plan"
VERSION = 1
NUM_PRICED = 50
"""Candidates of plan.json that were priced but not simulated; the table of the landscape has every split."""


def _layouts(candidate: Candidate) -> dict[str, Any]:
    rollout, train = candidate.rollout, candidate.train
    return {
        "placement": str(candidate.placement),
        "rollout_gpus": candidate.rollout_gpus,
        "train_gpus": candidate.train_gpus,
        "rollout": {
            "tp": rollout.tp,
            "pp": rollout.pp,
            "dp": candidate.rollout_gpus // (rollout.tp * rollout.pp),
            "ep": rollout.ep,
        },
        "train": {
            "style": str(train.style),
            "tp": train.tp,
            "pp": train.pp,
            "cp": train.cp,
            "dp": candidate.train_replicas,
            "ep": train.ep,
        },
        "lending": str(candidate.lending),
    }


def _priced(candidate: Candidate) -> dict[str, Any]:
    return {
        "label": candidate.label,
        **_layouts(candidate),
        "rollout_s": candidate.rollout_s,
        "train_s": candidate.train_s,
        "step_s": candidate.step_s,
        "gpu_seconds": candidate.step_s * candidate.num_gpus,
        "binds": "rollout" if candidate.rollout_s > candidate.train_s else "train",
    }


def _simulated(ranked: Ranked, price: float | None) -> dict[str, Any]:
    row = _priced(ranked.candidate)
    if ranked.error is not None:
        return row | {"error": ranked.error}
    over = ranked.over_best
    first = next(iter(ranked.evaluations.values()))
    row["simulated"] = {
        "step_s": ranked.step_s,
        "tokens_per_s": ranked.tokens_per_s,
        "gpu_seconds": ranked.cost(Objective.GPU_HOURS),
        "num_seeds": len(ranked.evaluations),
        "over_best": None if over is None else over.ratio,
        "over_best_low": None if over is None else over.low,
        "over_best_high": None if over is None else over.high,
        "is_sure": None if over is None else over.is_sure,
        "limit": first.limit,
    }
    if price is not None:
        row["simulated"]["price_per_step"] = ranked.cost(Objective.GPU_HOURS) / 3600 * price
    return row


def plan_json(found: Found) -> dict[str, Any]:
    """Return plan.json: the plan, why it wins, why the others lose."""
    search, question = found.search, found.search.question
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "version": VERSION,
        "objective": str(found.objective),
        "framework": None if search.framework is None else search.framework.name,
        "verdict": verdict(found),
        "job": resolved_json(found.job),
    }
    best = found.best
    if best is not None and found.plan is not None:
        data["job"] = resolved_json(job_of(found.job, search, best))
        policy = found.plan.policy
        data["plan"] = {
            **_layouts(best),
            "policy": policy.model_dump(mode="json"),
            "staleness": str(policy.staleness),
            "num_nodes": question.cluster.num_nodes,
            "gpus_per_node": question.cluster.gpus_per_node,
            "engine": question.engine.model_dump(mode="json"),
        }
        data["answers"] = _answers(found, best)
        data["frameworks"] = dict(_frameworks(found, best))
        data["envelope"] = plan_to_json(found.plan)
    else:
        data["error"] = str(no_plan(found))
    price = question.cluster.price_per_gpu_hour
    data["candidates"] = [_simulated(ranked, price) for ranked in found.ranked]
    data["priced"] = [_priced(candidate) for candidate in found.priced[:NUM_PRICED]]
    data["paper_algorithm_1"] = None if found.paper is None else asdict(found.paper)
    data["searched"] = {
        "num_layouts": {"rollout": len(search.rollouts), "train": len(search.trains)},
        "num_priced": search.num_evaluated,
        "num_legal_pairs": search.num_candidates,
        "layouts": layouts_note(question),
        "tie_rule": "least cost, then fewer GPUs, smaller rollout pool, smaller replicas",
    }
    data["rejected"] = [asdict(each) for each in found.rejected]
    data["no_lending"] = found.no_lending
    data["errors"] = found.errors
    return data


def _answers(found: Found, best: Candidate) -> dict[str, Any]:
    search, plan = found.search, found.plan
    assert plan is not None
    models = plan.models
    weight = search.question.model.weight_bytes() / best.rollout.gpus
    reward = found.job.workload.reward_s
    reward_s = reward if isinstance(reward, float | int) else reward.mean
    other = found.other_best
    named = {
        Objective.TIME: "time_optimal",
        Objective.GPU_HOURS: "gpu_hour_optimal",
    }
    mine, theirs = (
        (named[Objective.TIME], named[Objective.GPU_HOURS])
        if found.objective is Objective.TIME
        else (named[Objective.GPU_HOURS], named[Objective.TIME])
    )
    alone_s, idle = answers.overlap_bound(best.rollout_s, best.train_s)
    data: dict[str, Any] = {
        mine: best.label,
        theirs: None if other is None else _priced(other),
        "bottleneck": asdict(answers.bottleneck(search, best, models, reward_s)),
        "ceilings": asdict(answers.ceilings(search, best, plan.policy)),
        "bounds": asdict(answers.bounds(search, best, models)),
        "overlap": {"speedup_at_most": alone_s, "idle_share_of_faster_side": idle},
        "break_even": [asdict(each) for each in answers.break_even(models, weight)],
        "why_no_lending": lending_reason(search, best),
        "samples_to_generate": search.question.produced_samples,
        "goodput": _goodput(found, best, models.sync.seconds(best.rollout_replicas)),
    }
    if found.knee_curve:
        data["staleness"] = {
            "knee": answers.staleness_knee(found.knee_curve),
            "curve": [{"bound": bound, "step_s": seconds} for bound, seconds in found.knee_curve],
            "source": "simulated, one seed" if found.ranked else "stage models",
        }
    if found.factorial is not None:
        data["partition_and_borrowing"] = {"base": found.factorial_base, **asdict(found.factorial)}
    return data


def _goodput(found: Found, best: Candidate, sync_s: float) -> dict[str, Any]:
    answer = goodput(found.search, best, found.job.faults, sync_s)
    if answer is None:
        return {
            "cannot_tell": "no failure rate: give faults.replica_mtbf_s, the up-time of a rollout replica"
        }
    return asdict(answer)


def _frameworks(found: Found, best: Candidate) -> Iterator[tuple[str, list[str]]]:
    """Yield each framework with the rules that the plan breaks there."""
    question = found.search.question
    for name, rules in sorted(FRAMEWORKS.items()):
        train = rules.train_reason(question, best.train, best.train_gpus or best.rollout_gpus)
        reasons = [
            rules.rollout_reason(question, best.rollout, best.rollout_gpus),
            train,
            None if best.placement is Placement.COLOCATED else rules.staleness_reason(question.staleness),
            None if best.lending in rules.lending else f"{name}: does not lend {best.lending}",
        ]
        yield name, [reason for reason in reasons if reason is not None]


def verdict(found: Found) -> str:
    """Return the answer in one sentence, with how sure it is."""
    best = found.best
    if best is None:
        return str(no_plan(found))
    lends = "" if best.lending is Lending.NONE else f", lending {best.lending}"
    if not found.ranked:
        return f"{best.label}{lends}: {best.step_s:.1f} s a step by the stage models (not simulated)"
    alive = [each for each in found.ranked if each.error is None]
    text = f"{best.label}{lends}: {alive[0].step_s:.1f} s a step, {alive[0].tokens_per_s:,.0f} tokens/s"
    rivals = [
        each
        for each in alive[1:]
        if each.over_best is not None and not each.over_best.is_sure and not each.over_best.is_equal
    ]
    names = [each.candidate for each in rivals]
    if not names:
        return f"{text}; no other simulated candidate is faster" if len(alive) > 1 else text
    shown = "; ".join(f"{each.label} ({each.lending})" for each in names[:2])
    return f"{text}; too close to call against {shown}"


def rows(found: Found) -> list[dict[str, Any]]:
    """Return the ranked table: simulated candidates first, then the best of every other split."""
    table = []
    seen = set()
    for place, ranked in enumerate(found.ranked, start=1):
        over = ranked.over_best
        seen.add((ranked.candidate.rollout_gpus, ranked.candidate.train_gpus))
        table.append(
            _row(ranked.candidate)
            | {
                "rank": place,
                "simulated_step_s": None if ranked.error else ranked.step_s,
                "tokens_per_s": None if ranked.error else ranked.tokens_per_s,
                "over_best": 1.0 if place == 1 and not ranked.error else None if over is None else over.ratio,
                "over_best_low": None if over is None else over.low,
                "over_best_high": None if over is None else over.high,
                "why": ranked.error or next(iter(ranked.evaluations.values())).limit,
            }
        )
    for candidate in found.priced:
        if (candidate.rollout_gpus, candidate.train_gpus) not in seen:
            side = "generation" if candidate.rollout_s > candidate.train_s else "training"
            table.append(_row(candidate) | {"why": f"{side} takes longer, by the stage models"})
    return table


def _row(candidate: Candidate) -> dict[str, Any]:
    return {
        "rank": None,
        "rollout_gpus": candidate.rollout_gpus,
        "train_gpus": candidate.train_gpus,
        "rollout": candidate.rollout.label,
        "train": candidate.train.label,
        "lending": str(candidate.lending),
        "rollout_s": candidate.rollout_s,
        "train_s": candidate.train_s,
        "step_s": candidate.step_s,
        "simulated_step_s": None,
        "tokens_per_s": None,
        "over_best": None,
        "over_best_low": None,
        "over_best_high": None,
        "why": "",
    }


def write_report(found: Found, folder: Path) -> list[str]:
    """Write plan.json, candidates.csv, rejected.csv and landscape.png; return their names.

    Raises:
        InputError: the folder cannot be written.
    """
    from bidirl.planner.search.figure import landscape

    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(plan_json(found), indent=1, ensure_ascii=False, default=str)
        (folder / "plan.json").write_text(text + "\n", encoding="utf-8")
        _write_csv(folder / "candidates.csv", rows(found))
        _write_csv(folder / "rejected.csv", [asdict(each) for each in found.rejected])
        landscape(found, folder / "landscape.png")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InputError(f"--out {folder}: {reason}: choose a folder that can be written") from None
    return ["plan.json", "candidates.csv", "rejected.csv", "landscape.png"]


def _write_csv(path: Path, table: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        if table:
            writer = csv.DictWriter(file, list(table[0]))
            writer.writeheader()
            writer.writerows(table)
