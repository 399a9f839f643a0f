"""Fit the public measured points, judge each fit by what it leaves out; write docs/fit_points.md.

    python benchmarks/fit_points.py                     write docs/fit_points.md (about a minute)
    python benchmarks/fit_points.py predict TABLE.csv   fit on the public rows, predict the rows of TABLE.csv

TABLE.csv has the columns of the public table of the same kind; the errors are printed.
Public tables are read from the folder in BIDIRL_DATA (default ../shared/data).
"""

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bidirl.models.estimate import Estimate
from bidirl.models.fit import microbatch, switch, sync
from bidirl.models.fit.microbatch import MicroBatch
from bidirl.models.fit.serving import fit_serving
from bidirl.models.roofline import Links, trainer_prior

if __package__:
    from benchmarks import fit_tables
else:
    import fit_tables


def loo_frame(groups: Iterable[tuple[str, pd.DataFrame]], mode: Any) -> pd.DataFrame:
    """Return predicted and measured TPOT of every left-out point, and what the coefficients alone say."""
    rows = []
    for name, group in groups:
        points, prior = fit_tables.points_of(group), fit_tables.prior_of(group)
        for condition in sorted({p.condition for p in points}):
            fitted = fit_serving([p for p in points if p.condition != condition], prior, mode)
            for point in (p for p in points if p.condition == condition):
                estimate = fitted.tpot_s(*condition, campaign=point.campaign)
                inside = estimate.low <= point.tpot_s <= estimate.high
                rows.append((name, point.tpot_s, estimate.value, inside, fitted.physical_s(*condition)))
    return pd.DataFrame(rows, columns=["group", "measured", "predicted", "inside", "physical"])


def half_frame(groups: Iterable[tuple[str, pd.DataFrame]]) -> pd.DataFrame:
    """Return predictions for a seeded random half of each group's conditions from the other half."""
    rng, rows = np.random.default_rng(0), []
    for name, group in groups:
        points, prior = fit_tables.points_of(group), fit_tables.prior_of(group)
        conditions = sorted({p.condition for p in points})
        hidden = {conditions[i] for i in rng.permutation(len(conditions))[: len(conditions) // 2]}
        fitted = fit_serving([p for p in points if p.condition not in hidden], prior)
        for point in (p for p in points if p.condition in hidden):
            estimate = fitted.tpot_s(*point.condition, campaign=point.campaign)
            inside = estimate.low <= point.tpot_s <= estimate.high
            rows.append((name, point.tpot_s, estimate.value, inside))
    return pd.DataFrame(rows, columns=["group", "measured", "predicted", "inside"])


def errors(frame: pd.DataFrame) -> pd.Series:
    """Return absolute relative errors."""
    return (frame.predicted / frame.measured - 1.0).abs()


def transfer_of(fits: list[tuple[str, bool, Any]], model: str, experts: bool) -> list[float]:
    """Return the median multiplier of each coefficient over the fits of other models of the class."""
    table = [f for name, kind, f in fits if name != model and kind == experts]
    ratios = []
    for column in range(6):
        found = [f.values[column] / f.prior.vector()[column] for f in table if f.prior.vector()[column] > 0.0]
        ratios.append(float(np.median(found)) if found else 1.0)
    return ratios


def two_point_frame(groups: list[tuple[str, pd.DataFrame]], how: str) -> pd.DataFrame:
    """Predict each group from two of its points and what other models' groups teach.

    ``how``: ``none`` (no point), ``ends`` (fewest and most requests), ``random`` (8 seeded pairs). No
    group of the same model counts for the transfer.
    """
    fits = []
    for _, group in groups:
        prior = fit_tables.prior_of(group)
        fits.append((group.iloc[0].model, prior.share > 0.0, fit_serving(fit_tables.points_of(group), prior)))
    rng, rows = np.random.default_rng(0), []
    for name, group in groups:
        points, prior, model = fit_tables.points_of(group), fit_tables.prior_of(group), group.iloc[0].model
        transfer = transfer_of(fits, model, prior.share > 0.0)
        order = sorted(range(len(points)), key=lambda i: points[i].condition)
        pairs = [(order[0], order[-1])]
        if how == "random":
            pairs = [tuple(rng.choice(len(points), 2, replace=False)) for _ in range(8)]
        for pair in pairs:
            shown = [points[i] for i in pair]
            fitted = fit_serving(shown, prior, transfer=transfer)
            seen = {p.condition for p in shown}
            for point in points:
                if point.condition not in seen or how == "none":
                    estimate = fitted.tpot_s(*point.condition, campaign=point.campaign)
                    value = fitted.physical_s(*point.condition) if how == "none" else estimate.value
                    inside = estimate.low <= point.tpot_s <= estimate.high
                    rows.append((name, point.tpot_s, value, inside))
    return pd.DataFrame(rows, columns=["group", "measured", "predicted", "inside"])


def roofline_s(run: MicroBatch) -> float:
    """Return the prior's seconds of a micro-batch, without the constant of a pull."""
    links = Links(run.device.peer_bytes_per_s(8), 1e12, 8)
    trainer, _ = trainer_prior(run.device, run.model, 1, run.num_gpus, links)
    work = trainer.sample_work(float(run.seq_tokens))
    return trainer.pull_s("update", work * run.num_gpus, work, run.num_gpus) - trainer.update.tau_s


GENERIC_SYNC, GENERIC_WIDEN = (1.0, 0.3, 0.4, 1.0, 1.0), 3.0
GENERIC_LINES = dict.fromkeys(switch.OPERATIONS, (1.0, 0.4e-9))
"""Priors of the leave-one-out: round numbers, since the package's own were read off these rows."""


def table(headers: str, rows: Iterable[Iterable[object]]) -> str:
    """Return a markdown table."""
    names = headers.split(" | ")
    lines = [f"| {headers} |", "|" + "---|" * len(names)]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def percent(value: float) -> str:
    """Return a share as percent with one digit."""
    return f"{100.0 * value:.1f} %"


def summary(frame: pd.DataFrame) -> tuple[object, ...]:
    """Return the number of points, median, mean and p90 error, and the coverage of the 90 % intervals."""
    error = errors(frame)
    parts = (error.median(), error.mean(), error.quantile(0.9), frame.inside.mean())
    return (len(frame), *map(percent, parts))


HEAD = "points | median | mean | p90 | in 90 % interval"


def serving_page() -> str:
    """Return the section on serving points."""
    raw = fit_tables.serving_rows(fit_tables.DATA / "profiles" / "aic_silicon_serving_points.csv")
    rows = fit_tables.distinct(raw)
    groups = fit_tables.groups_of(rows, "agg", fit_tables.MIN_CONDITIONS)
    loo = loo_frame(groups, "agg")
    split = fit_tables.groups_of(rows, "disagg", fit_tables.MIN_CONDITIONS)
    known = [(name, group) for name, group in split if group.decode_num_workers.notna().all()]
    unknown = [(name, group) for name, group in split if group.decode_num_workers.isna().all()]
    facts = pd.DataFrame(
        [(name, g.iloc[0].gpu, g.iloc[0].model, g.iloc[0].backend) for name, g in groups],
        columns=["group", "gpu", "model", "backend"],
    )
    loo = loo.merge(facts, on="group")
    by = [(*key, *summary(part)) for key, part in loo.groupby(["gpu", "model"])]
    engines = [(key, *summary(part)) for key, part in loo.groupby("backend")]
    worst = loo.assign(error=errors(loo)).groupby("group").error.agg(["size", "median", "mean"])
    worst = worst.sort_values("mean", ascending=False).head(10)
    every = loo.assign(error=errors(loo)).groupby("group").error.agg(["median", "mean"])
    two = {how: two_point_frame(groups, how) for how in ("none", "ends", "random")}
    fits = [
        (
            g.iloc[0].model,
            fit_tables.prior_of(g).share > 0.0,
            fit_serving(fit_tables.points_of(g), fit_tables.prior_of(g)),
        )
        for _, g in groups
    ]
    transfer = [
        (name, *(f"{r:.2f}" for r in transfer_of(fits, "", kind)))
        for name, kind in (("dense", False), ("experts", True))
    ]
    lines = [
        (
            f"{len(raw)} rows; {len(raw) - len(rows)} repeat a "
            "measurement that another file of the source lists "
            f"too, {len(rows)} remain ({(rows['mode'] == 'agg').sum()} aggregated, "
            f"{(rows['mode'] == 'disagg').sum()} disaggregated). No row is refused."
        ),
        (
            f"A group is one {', '.join(fit_tables.KEY)}; {len(groups)} "
            f"groups have {fit_tables.MIN_CONDITIONS} or more different "
            "conditions (concurrency, prompt, response). Each "
            "point is predicted from the group without any point "
            "of its condition."
        ),
        table(
            "leave-one-out | " + HEAD,
            [
                ("aggregated", *summary(loo)),
                ("the coefficients alone", *summary(loo.assign(predicted=loo.physical))[:-1], "-"),
                ("a random half of the conditions left out", *summary(half_frame(groups))),
            ],
        ),
        (
            "Targets: median at most 3 %, mean at most 6 %. "
            f"{(every['median'] <= 0.03).sum()} of {len(groups)} "
            f"groups have a median of 3 % or less, {(every['mean'] <= 0.06).sum()} a mean of 6 % or less."
        ),
        table("engine | " + HEAD, engines),
        table("board | model | " + HEAD, by),
        "The ten groups with the largest mean error:",
        table(
            "group | points | median | mean",
            [
                (name, int(r["size"]), percent(r["median"]), percent(r["mean"]))
                for name, r in worst.iterrows()
            ],
        ),
        "### Across groups: the roofline and two points",
        (
            "Coefficients: the roofline's times the medians "
            "below, taken over the groups of all other models; "
            "then the correction follows two points of the group. Target: median at most 10 %."
        ),
        table(
            "what the group gives | " + HEAD,
            [
                ("nothing", *summary(two["none"])[:-1], "-"),
                ("fewest and most requests", *summary(two["ends"])),
                ("two random points, 8 pairs", *summary(two["random"])),
            ],
        ),
        table("median over the roofline | tau | experts | token | context | prefill | root", transfer),
        "### Disaggregated rows",
        table(
            "decode workers | groups | " + HEAD,
            [
                (name, len(found), *summary(loo_frame(found, "disagg")))
                for name, found in (("recorded", known), ("not recorded", unknown))
                if found
            ],
        ),
    ]
    return "\n\n".join(lines)


def estimate_frame(pairs: list[tuple[str, float, Estimate]]) -> pd.DataFrame:
    """Return name, measured, predicted and whether the interval holds."""
    rows = [(name, m, e.value, e.low <= m <= e.high) for name, m, e in pairs]
    return pd.DataFrame(rows, columns=["name", "measured", "predicted", "inside"])


def trainer_page() -> str:
    """Return the section on micro-batches."""
    rows = fit_tables.trainer_rows(fit_tables.DATA / "published" / "prime_rl_trainer_bench.csv")
    sizes = pd.Series([row.run.group for row in rows]).value_counts()
    lines, units = (
        [],
        {
            "the row": id,
            "all rows of its weights and length": lambda r: (r.run.group, r.run.weights, r.run.seq_tokens),
            "its whole group": lambda r: r.run.group,
        },
    )
    by_group = []
    for name, unit in units.items():
        predicted = [
            (str(r.run.group), r.seconds, e)
            for r, e in microbatch.leave_out(rows, unit)
            if sizes[r.run.group] > 1 or name == "its whole group"
        ]
        frame = estimate_frame(predicted)
        lines.append((name, *summary(frame)))
        if name == "the row":
            by_group = [
                (" ".join(eval_name), *summary(part))
                for eval_name, part in (
                    (re.findall(r"'([^']+)'", key), part) for key, part in frame.groupby("name")
                )
            ]
    zero = pd.DataFrame(
        [(r.run.device.name, r.seconds, roofline_s(r.run)) for r in rows],
        columns=["gpu", "measured", "predicted"],
    )
    ratios = [
        (
            gpu,
            len(p),
            f"{(p.predicted / p.measured).median():.2f}",
            percent(errors(p).median()),
            percent(errors(p).mean()),
        )
        for gpu, p in zero.groupby("gpu")
    ]
    fitted = microbatch.fit_microbatch(rows)
    used = [
        (*group, f"{fitted.utilisation(group)[0]:.2f}", f"{fitted.utilisation(group)[1]:.2f}", sizes[group])
        for group in fitted.groups
    ]
    shared = fitted.shared
    return "\n\n".join(
        [
            (
                f"{len(rows)} rows, {len(sizes)} groups (board, model), "
                f"{(sizes > 1).sum()} of them with two or more. "
                "Target: leave-one-out median 6 %."
            ),
            table("left out | " + HEAD, lines),
            table("group, row left out | " + HEAD, by_group),
            "Zero-shot roofline (`trainer_prior`, no row used):",
            table("board | rows | median predicted / measured | median error | mean error", ratios),
            "Fitted shares of the BF16 peak (recomputed work counted):",
            table("board | model | linear layers | attention | rows", used),
            (
                f"Shared: {shared['host_s_per_param'] * 1e9:.2f} ns "
                "a parameter for optimizer states on the host, "
                f"activation offload {percent(shared['offload_factor'] - 1)}, "
                f"{shared['fixed_s']:.3f} s fixed."
            ),
        ]
    )


def sync_page() -> str:
    """Return the section on weight syncs."""
    rows, refused, pairs = [], [], []
    for name, found in fit_tables.sync_rows(fit_tables.DATA / "published" / "weight_sync.csv").items():
        kept, out = sync.screen_sync(found)
        refused += out
        if len(kept) < 3:
            continue
        loo = sync.leave_one_out(kept, GENERIC_SYNC, GENERIC_WIDEN)
        own = [(row.name, row.seconds, estimate) for row, estimate in loo]
        pairs += own
        fitted = sync.fit_sync(kept)
        terms = " / ".join(f"{m:.2f}" for m in fitted.multipliers)
        rows.append((name, *summary(estimate_frame(own)), terms))
    rows.append(("all", *summary(estimate_frame(pairs)), ""))
    return "\n\n".join(
        [
            (
                "By system and method, three or more usable rows. The "
                "prior of these fits is round numbers (1 s, 30 % of "
                "a link, 0.3 ms a tensor, three times as wide), since "
                "the package's prior was read off some of these rows."
            ),
            table(
                "system, method | " + HEAD + " | fitted over prior: fixed / bytes / tensors / hops / apply",
                rows,
            ),
            "Refused:",
            "\n".join(f"- {r.reason}" for r in refused),
        ]
    )


def switch_page() -> str:
    """Return the section on switches and sleeps."""
    rows = fit_tables.switch_rows()
    frame = estimate_frame(
        [(r.operation, r.seconds, e) for r, e in switch.leave_one_out(rows, GENERIC_LINES)]
    )
    fitted = switch.fit_switch(rows)
    levels = []
    for name, num_bytes in (("Qwen3-0.6B", 1.192e9), ("Qwen3-8B", 16.381e9)):
        for free in (float("inf"), 8e9):
            choice = switch.choose_sleep_level(fitted, num_bytes, free)
            levels.append((name, "any" if free > 1e12 else "8 GB", choice.level, choice.reason))
    lines = [(name, *summary(part)) for name, part in frame.groupby("name")]
    return "\n\n".join(
        [
            (
                f"{len(rows)} rows of known size, two models an operation, "
                "so leave-one-out predicts one model from the "
                "other and a generic line (1 s and 0.4 s a GB): the least evidence of this page."
            ),
            table("operation | " + HEAD, [("all", *summary(frame)), *lines]),
            "Sleep level (C61):",
            table("model | free host memory | level | why", levels),
        ]
    )


INTRO = """# Fits of measured public points

Made by `benchmarks/fit_points.py`; do not edit. Errors are absolute and relative to the measurement, of
points that the fit did not see. Hyper-parameters (shared by all groups) were chosen on the same leave-
one-out errors."""
SERVING = """## Decode time of serving engines (`bidirl.models.fit.serving`)

Form and constants: the module's docstring. Free parameters: per group five non-negative coefficients
(six with experts) and one factor on the prior; shared by all groups eleven (six prior spreads, the prior
of the root term, two correlation lengths, a noise, a tail weight), and for groups of fewer than four
conditions 16 (five of the correction, eleven medians over the roofline). The other settings tried gave
medians of 2.5 to 3.1 % and means of 5.2 to 6.2 %: the choice matters little. Prior: the roofline. Where
one setup was measured twice, repeats differ by 0.3 % in the median."""
WHY = """Why the worst are bad: the source does not record speculative decoding, so DeepSeek groups
(TensorRT-LLM and SGLang) hold two curves a factor of 1.3 to 2 apart at equal settings and software
(8 x B200, SGLang 0.5.9, one date, 1K in, 8K out, 64 requests: 21.9 and 18.0 ms); six to eight
points over single curves extrapolate (one point of 1K in, 1K out and 128 requests against four of
8K in); some rows contradict any monotone model (gpt-oss on 4 H100: 15.9 ms at 32 requests, 9.7 at
64). Nothing was dropped for it. Disaggregated rows mostly do not record the number of decode
workers, so the batch of a worker is unknown, and mix speculative decoding as above: not predictable
from these columns."""


TRAINER_WHY = """Why the worst are bad: where a group has one length twice and another once (INTELLECT-3),
leaving one out leaves nothing to interpolate between; on B200 the RL row of Qwen3-4B at 16K
takes 2.84 s and the SFT row 1.92 s, on H100 those of Qwen3-0.6B 1.23 and 0.64 s, a gap that
H200 does not show and that the form lacks. Experts on B200 (FA2) run at 1 to 4 % of the
peak; no roofline foresees it."""
SYNC_WHY = """Rows of one method differ in what the table does not record (offload, number of senders,
share of changed weights in a delta), so medians of 15 to 90 % are what bytes, tensors and
links can explain. Broadcasts of the checkpoint engine, which differ in size and receivers
only, are within 7 % in the median."""


def report() -> str:
    """Return the page."""
    return (
        "\n\n".join(
            [
                INTRO,
                SERVING,
                serving_page(),
                WHY,
                "## Trainer micro-batches (`bidirl.models.fit.microbatch`)",
                trainer_page(),
                TRAINER_WHY,
                "## Weight sync (`bidirl.models.fit.sync`)",
                sync_page(),
                SYNC_WHY,
                "## Switch and sleep (`bidirl.models.fit.switch`)",
                switch_page(),
            ]
        )
        + "\n"
    )


def predict_serving(path: Path) -> pd.DataFrame:
    """Predict the aggregated serving points of ``path`` from the public ones."""
    public = fit_tables.distinct(
        fit_tables.serving_rows(fit_tables.DATA / "profiles" / "aic_silicon_serving_points.csv")
    )
    asked, rows = fit_tables.serving_rows(path), []
    for mode, keys in (("agg", fit_tables.KEY), ("disagg", fit_tables.DISAGG_KEY)):
        shown = dict(list(public[public["mode"] == mode].groupby(keys, dropna=False)))
        spelled = {str(key): group for key, group in shown.items()}
        for key, group in asked[asked["mode"] == mode].groupby(keys, dropna=False):
            prior, own = fit_tables.prior_of(group), spelled.get(str(key))
            fitted = fit_serving(fit_tables.points_of(own if own is not None else group.head(1)), prior, mode)  # type: ignore[arg-type]
            for point in fit_tables.points_of(group):
                estimate = fitted.tpot_s(*point.condition, campaign=point.campaign)
                value = estimate.value if own is not None else fitted.physical_s(*point.condition)
                inside = estimate.low <= point.tpot_s <= estimate.high
                rows.append((mode, len(own) if own is not None else 0, point.tpot_s, value, inside))
    return pd.DataFrame(rows, columns=["mode", "points", "measured", "predicted", "inside"])


def predict(path: Path) -> None:
    """Print the errors of predictions for the rows of ``path``."""
    columns = set(pd.read_csv(path, nrows=0).columns)
    if "silicon_tpot_ms" in columns:
        frame = predict_serving(path)
        for mode, part in frame.groupby("mode"):
            print(mode, HEAD, summary(part))
            for least in (1, fit_tables.MIN_CONDITIONS):
                print(f"  groups with {least} or more public points", summary(part[part.points >= least]))
        return
    if "micro_batch_time_s" in columns:
        fitted = microbatch.fit_microbatch(
            fit_tables.trainer_rows(fit_tables.DATA / "published" / "prime_rl_trainer_bench.csv")
        )
        asked = [(str(r.run.group), r.seconds, fitted.seconds(r.run)) for r in fit_tables.trainer_rows(path)]
        print(HEAD, summary(estimate_frame(asked)))
        return
    if "baseline_s" in columns:
        public, pairs = fit_tables.sync_rows(fit_tables.DATA / "published" / "weight_sync.csv"), []
        for name, found in fit_tables.sync_rows(path).items():
            kept, refused = sync.screen_sync(found)
            for line in refused:
                print(line.reason)
            model = sync.fit_sync(public.get(name) or [r for rows in public.values() for r in rows])
            pairs += [
                (
                    r.name,
                    r.seconds,
                    model.seconds(r.num_bytes, r.num_tensors, r.link_bytes_per_s, r.num_receivers),
                )
                for r in kept
            ]
        print(HEAD, summary(estimate_frame(pairs)))
        return
    sys.exit(f"{path}: has the columns of no public table of this page: give serving, trainer or sync rows")


def main(arguments: list[str]) -> None:
    """Write the page, or print predictions."""
    if not (fit_tables.DATA / "profiles").is_dir():
        print(f"no public data at {fit_tables.DATA}: set BIDIRL_DATA to their folder; nothing done")
    elif arguments[:1] == ["predict"]:
        predict(Path(arguments[1]))
    else:
        (fit_tables.ROOT / "docs" / "fit_points.md").write_text(report(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
