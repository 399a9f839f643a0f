"""Two panels: predicted over measured per stage, and the way from the measured step to the best reachable."""

from collections.abc import Mapping
from pathlib import Path

from bidirl.models.stages import StageModels
from bidirl.planner.advise.advice import Advice, Advised
from bidirl.planner.advise.evidence import Evidence
from bidirl.planner.advise.tryout import steps_of
from bidirl.planner.advise.worlds import Simulator
from bidirl.planner.build import build_plan, build_workload
from bidirl.planner.job import Job
from bidirl.planner.search.plans import with_steps
from bidirl.traces.step_log import Mode

__all__ = ["StageRatio", "draw_advice", "stage_ratios", "waterfall"]

StageRatio = tuple[str, float, float, float]
"""Stage, predicted over measured, and the ends of the prediction's interval over measured."""

GROUPS: Mapping[str, tuple[str, ...]] = {
    "waiting or generation": ("wait", "drain"),
    "training": ("old_logprob", "reference", "update", "optimizer", "merge", "broadcast"),
    "weight sync": ("sync",),
    "role switches": ("switch", "switch_in", "switch_out"),
    "unexplained": ("unexplained",),
}
"""Parts of a simulated step under the names of the log's parts."""


def stage_ratios(evidence: Evidence, job: Job, simulate: Simulator) -> list[StageRatio]:
    """Return what the job's own models, not fitted to the log, predict over what was measured."""
    job = with_steps(job, steps_of(job))
    plan = build_plan(job, build_workload(job, 0))
    parts = simulate(job, plan, 0).details["parts_s"]
    seconds, known = evidence.seconds, evidence.known()
    pairs = [
        (
            "generation" if evidence.mode is Mode.COLOCATED else "wait",
            "wait",
            known.generation_s or known.wait_s,
        ),
        ("old_logprob", "old_logprob", known.old_logprob_s),
        ("reference", "reference", known.reference_s),
        ("update", "update", known.update_s),
        ("weight sync", "sync", seconds.get("weight_sync_s")),
    ]
    found = []
    for name, part, measured in pairs:
        predicted = float(parts.get(part, 0.0))
        if measured and predicted > 0.0:
            low, high = _spread(plan.models, part)
            ratio = predicted / measured
            found.append((name, ratio, ratio * low, ratio * high))
    return found


RATIO_TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 0.7, 1.0, 1.5, 2.0, 5.0, 10.0, 20.0, 50.0)
COEFFICIENTS = {"wait": "iteration.tau_dec_s", "sync": "sync.s_per_byte"}
"""The coefficient whose interval stands for a stage; a trainer segment's is its ``alpha_s``."""


def _spread(models: StageModels, part: str) -> tuple[float, float]:
    source = models.sources.get(COEFFICIENTS.get(part, f"trainer.{part}.alpha_s"))
    if source is None or source.value <= 0.0:
        return 1.0, 1.0
    return source.low / source.value, source.high / source.value


def waterfall(evidence: Evidence, best: Advised) -> list[tuple[str, float]]:
    """Return the differences, seconds, between the measured step and the best change's predicted one."""
    step_s = evidence.step_s or 0.0
    measured = {
        "waiting or generation": max(evidence.share("wait"), evidence.share("generation"))
        if evidence.mode is Mode.COLOCATED
        else evidence.share("wait"),
        "training": evidence.share("training"),
        "weight sync": evidence.share("weight sync"),
        "role switches": evidence.share("role switches"),
    }
    before = {name: share * step_s for name, share in measured.items()}
    before["unexplained"] = step_s - sum(before.values())
    after = {name: sum(best.parts_s.get(part, 0.0) for part in group) for name, group in GROUPS.items()}
    after["unexplained"] += sum(best.parts_s.values()) - sum(after.values())
    return [(name, after[name] - before[name]) for name in GROUPS if abs(after[name] - before[name]) > 0.0]


def draw_advice(advice: Advice, job: Job | None, simulate: Simulator, path: Path) -> bool:
    """Draw what there is to draw; return whether there was anything."""
    best = next((each for each in advice.changes if each.parts_s), None)
    ratios = (
        [] if job is None or advice.evidence.step_s is None else stage_ratios(advice.evidence, job, simulate)
    )
    if not ratios and best is None:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.5))
    _draw_ratios(left, ratios)
    _draw_waterfall(right, advice, best)
    figure.savefig(path, dpi=120)
    return True


def _draw_ratios(axes: object, ratios: list[StageRatio]) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    places = range(len(ratios))
    values = [ratio for _, ratio, _, _ in ratios]
    below = [ratio - low for _, ratio, low, _ in ratios]
    above = [high - ratio for _, ratio, _, high in ratios]
    axes.errorbar(values, list(places), xerr=[below, above], fmt="o", capsize=4, color="#1f4e79")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    ends = [1.0, *(end for _, _, low, high in ratios for end in (low, high))]
    shown = [tick for tick in RATIO_TICKS if min(ends) <= tick <= max(ends)]
    axes.set_xticks(shown, [f"{tick:g}" for tick in shown])
    axes.set_xticks([], minor=True)
    axes.set_yticks(list(places), [name for name, *_ in ratios])
    axes.invert_yaxis()
    axes.margins(y=0.3)
    axes.set_xlabel("predicted by the job's models, over measured")
    axes.set_title("Stages before any fit")


def _draw_waterfall(axes: object, advice: Advice, best: Advised | None) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    step_s = advice.evidence.step_s or 0.0
    if best is None or best.step_s is None or best.gain is None or best.low is None:
        axes.text(0.5, 0.5, "no change gains", ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    names, level = ["measured"], step_s
    axes.bar(0, step_s, color="#7f7f7f")
    for place, (name, delta) in enumerate(waterfall(advice.evidence, best), start=1):
        axes.bar(
            place, abs(delta), bottom=min(level, level + delta), color="#c0504d" if delta > 0 else "#4f9a55"
        )
        axes.text(place, max(level, level + delta), f"{delta:+.0f}", ha="center", va="bottom", fontsize=8)
        level += delta
        names.append(name)
    ends = [step_s / best.high, step_s / best.low]
    low, high = [abs(level - ends[0])], [abs(ends[1] - level)]
    axes.bar(len(names), level, yerr=[low, high], capsize=5, color="#1f4e79")
    names.append("best reachable")
    axes.set_xticks(range(len(names)), [name.replace(" ", "\n") for name in names], fontsize=8)
    axes.set_ylabel("seconds of a step")
    axes.set_title(f"To the best change: {best.change}", fontsize=10)
