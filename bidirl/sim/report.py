"""Say what a run shows: a verdict sentence first, then tables for the terminal."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bidirl.sim.cells import BASELINES, Cell, Key, Row, cells_of, name_of, policy_key, ratio, values_of
from bidirl.sim.compare import CONFIDENCE, Comparison, Gain
from bidirl.sim.diagnosis import Summary, diagnose
from bidirl.sim.text import count, decimal, divide, percent, seconds, times

__all__ = [
    "compare_table",
    "compare_verdict",
    "print_summary",
    "summary_tables",
    "sweep_table",
    "sweep_verdict",
    "verdict",
]

TIE_SHARE = 0.02
"""Cells that differ by less with one seed are not told apart: seeds of one job spread by about this much."""

LEASES = ("rollout_on_train", "train_on_rollout")
"""Directions of leases, in the order of the column."""

MAX_PIVOT_COLUMNS = 8
"""More columns do not fit a terminal of 120 characters."""


def verdict(summary: Summary, name: str) -> str:
    """Return one sentence: throughput, step time, idle shares and what limits the run."""
    idle = summary["idle"]
    return (
        f"{name}: {count(summary['tokens_per_s'])} tokens/s "
        f"({count(summary['tokens_per_s_per_gpu'])} per GPU); "
        f"step {seconds(summary['step_time_s']['mean'])}; rollout pool idle {percent(idle['rollout'])}, "
        f"training pool idle {percent(idle['train'])}, {diagnose(summary)}"
    )


def print_summary(summary: Summary, name: str, console: Console) -> None:
    """Print the verdict and the tables of one run."""
    console.print(verdict(summary, name), style="bold", highlight=False, markup=False, soft_wrap=True)
    for table in summary_tables(summary):
        console.print(table)


def summary_tables(summary: Summary) -> list[Table]:
    """Return the tables of one run: step, idle, ledger, facts, and leases if there were any."""
    tables = [_parts_table(summary), _idle_table(summary), _ledger_table(summary), _facts_table(summary)]
    if any(direction["count"] for direction in summary["borrow"].values()):
        tables.append(_borrow_table(summary))
    return tables


def compare_table(comparison: Comparison) -> Table:
    """Return one row per policy, means over seeds; speed-ups are against the first."""
    title = (
        f"Comparison (means over {len(comparison.seeds)} seeds; leases: rollout on train + train on rollout)"
    )
    if len(comparison.seeds) == 1:
        title = f"Comparison (seed {comparison.seeds[0]}; leases: rollout on train + train on rollout)"
    head = ("policy", "tokens/s", "per GPU", f"speed-up ({percent(CONFIDENCE)} interval)", "step s")
    table = _table(title, *head, "idle (rollout, training)", "leases", "limit")
    for name in comparison.policies:
        runs = comparison.summaries[name]
        if not runs:
            table.add_row(escape(name), *["n/a"] * 7)
            continue
        gain = comparison.gain(name, comparison.base)
        idle = [percent(comparison.mean(name, "idle", pool)) for pool in ("rollout", "train")]
        if not comparison.mean(name, "gpus", "train"):
            idle = idle[:1]  # one pool takes turns
        limits = [str(diagnose(summary).limit) for summary in runs.values()]
        table.add_row(
            escape(name),
            count(comparison.mean(name, "tokens_per_s")),
            count(comparison.mean(name, "tokens_per_s_per_gpu")),
            "1" if name == comparison.base else _speed_up(gain),
            seconds(comparison.mean(name, "step_time_s", "mean"), unit=""),
            ", ".join(idle),
            _leases(comparison, name),
            max(dict.fromkeys(limits), key=limits.count),
        )
    return table


def _leases(comparison: Comparison, name: str) -> str:
    """Return leases per run: rollout on train, train on rollout."""
    both = [comparison.mean(name, "borrow", direction, "count") for direction in LEASES]
    return " + ".join(f"{mean:.3g}" for mean in both if mean is not None) if any(both) else "0"


def _speed_up(gain: Gain | None) -> str:
    if gain is None:
        return times(None)
    return f"{gain.ratio:.3f}x ({_interval(gain)})" if gain.low is not None else f"{gain.ratio:.3f}x"


def _interval(gain: Gain) -> str:
    return "none" if gain.low is None or gain.high is None else f"{gain.low:.3f}-{gain.high:.3f}"


def compare_verdict(comparison: Comparison) -> str:
    """Return one sentence; a winner is named only where its intervals over all others leave out 1."""
    ranked = comparison.ranked()
    missing = [name for name in comparison.policies if name not in ranked]
    without = "".join(f"; {name} has no result: {comparison.errors.get(name, 'no step')}" for name in missing)
    if len(ranked) < 2:
        return f"cannot tell: {ranked[0] if ranked else 'no policy'} alone has a result{without}".replace(
            "no policy alone", "no policy"
        )
    best = ranked[0]
    speed = f"{count(comparison.mean(best, 'tokens_per_s'))} tokens/s"
    gains = {name: comparison.gain(best, name) for name in comparison.policies if name in ranked[1:]}
    known = {name: gain for name, gain in gains.items() if gain is not None}
    if len(comparison.seeds) == 1:
        over = ", ".join(f"{gain.ratio:.3f}x {name}" for name, gain in known.items())
        return (
            f"cannot tell, one seed gives no interval: {best} has {speed}, {over}; "
            f"run more seeds{_per_gpu(comparison, best)}{without}"
        )
    sure = {name: gain for name, gain in known.items() if gain.is_sure}
    unsure = {name: gain for name, gain in known.items() if not gain.is_sure}
    if comparison.winner() is not None:
        return f"{best} wins with {speed}: {_over(sure)}{_per_gpu(comparison, best)}{without}"
    text = f"cannot tell {best} ({speed}) from {_over(unsure)}"
    if not all(gain.is_identical for gain in unsure.values()):
        text += ": run more seeds"
    faster = f"; it is faster than {_over(sure)}" if sure else ""
    return text + faster + _per_gpu(comparison, best) + without


def _over(gains: Mapping[str, Gain]) -> str:
    """Return ``1.120x no_borrow (95 % interval 1.100-1.140, 5 seeds)`` for each."""
    texts = []
    for name, gain in gains.items():
        if gain.is_identical:
            texts.append(f"{name} (equally fast under every seed)")
        else:
            interval = f"{percent(CONFIDENCE)} interval {_interval(gain)}, {len(gain.by_seed)} seeds"
            texts.append(f"{name} ({gain.ratio:.3f}x, {interval})")
    return ", ".join(texts)


def _per_gpu(comparison: Comparison, best: str) -> str:
    """Return the speed-up per GPU over the first policy where the two use different numbers of GPUs."""
    num_gpus = [comparison.mean(name, "gpus", "total") for name in (best, comparison.base)]
    gain = comparison.gain(best, comparison.base, per_gpu=True)
    if num_gpus[0] == num_gpus[1] or gain is None:
        return ""
    counts = f"{count(num_gpus[0])} against {count(num_gpus[1])} GPUs"
    return f"; per GPU it is {gain.ratio:.3f}x {comparison.base} ({counts})"


def sweep_verdict(rows: Sequence[Row], varied: Sequence[str]) -> str:
    """Return the best cell of a sweep, how sure that is, and the gains of policies over a baseline."""
    cells = cells_of(rows, varied)
    ranked = sorted((cell for cell in cells.values() if cell.by_seed), key=lambda cell: -cell.mean)
    failed = len(cells) - len(ranked)
    without = f"; {failed} of {len(cells)} cells have no result" if failed else ""
    if not ranked:
        return f"cannot tell: none of {len(cells)} cells has a result"
    best = ranked[0]
    seeds = "one seed" if len(best.by_seed) == 1 else f"mean of {len(best.by_seed)} seeds"
    text = (
        f"best of {len(cells)} cells: {name_of(varied, best.key)} with {count(best.mean)} tokens/s ({seeds})"
    )
    if len(ranked) > 1:
        text += (
            f", {times(divide(best.mean, ranked[-1].mean))} the slowest ({name_of(varied, ranked[-1].key)})"
        )
        text += _doubt(varied, best, ranked[1])
    return text + _policy_gains(cells, varied) + without


def _doubt(varied: Sequence[str], best: Cell, second: Cell) -> str:
    """Say that the two best cannot be told apart, where that is so; seeds are paired."""
    gain = ratio(best, second)
    if gain is None:
        return f"; cannot tell it from {name_of(varied, second.key)}: they share no seed"
    behind = f"{name_of(varied, second.key)} ({percent(1.0 - 1.0 / gain.mean, 1)} behind)"
    if gain.num_seeds == 1 and gain.mean < 1.0 + TIE_SHARE:
        return f"; cannot tell it from {behind} with one seed: run more seeds"
    if gain.num_seeds > 1 and gain.low <= 1.0:
        return f"; cannot tell it from {behind}: the order changes between seeds"
    return ""


def _policy_gains(cells: Mapping[Key, Cell], varied: Sequence[str]) -> str:
    """Say how each policy compares with the baseline over all cells that have both."""
    index = policy_key(varied)
    if index is None:
        return ""
    policies = values_of(cells, index)
    base = next((name for name in BASELINES if name in policies), policies[0])
    gains = []
    for policy in policies:
        pairs = (
            (cell, cells.get((*key[:index], base, *key[index + 1 :])))
            for key, cell in cells.items()
            if key[index] == policy != base
        )
        found = [
            gain.mean for one, other in pairs if other is not None and (gain := ratio(one, other)) is not None
        ]
        if found:
            low, high = times(min(found)), times(max(found))
            middle = (
                f", median {times(statistics.median(found))} of {len(found)} cells" if len(found) > 1 else ""
            )
            gains.append(f"{policy} {low}{'-' + high if high != low else ''}{middle}")
    return f". Over {base}: {'; '.join(gains)}" if gains else ""


def sweep_table(rows: Sequence[Row], varied: Sequence[str]) -> Table:
    """Return the mean throughput by cell, pivoted over the policy (else the last key).

    The best of a row is bold. One varied key gives a row per value with step time and idle shares instead.
    """
    cells = cells_of(rows, varied)
    index = policy_key(varied)
    index = len(varied) - 1 if index is None else index
    columns = values_of(cells, index)
    if len(varied) < 2 or len(columns) > MAX_PIVOT_COLUMNS:
        return _list_table(rows, varied, cells)
    others = [name for place, name in enumerate(varied) if place != index]
    table = _table(
        f"tokens/s by {varied[index]} (mean over seeds, half the range)", *map(escape, (*others, *columns))
    )
    for rest in itertools.product(
        *(values_of(cells, place) for place in range(len(varied)) if place != index)
    ):
        row = [cells.get((*rest[:index], column, *rest[index:])) for column in columns]
        if not any(row):
            continue
        top = max((cell.mean for cell in row if cell is not None and cell.by_seed), default=math.nan)
        table.add_row(*map(escape, rest), *(_cell_text(cell, top) for cell in row))
    return table


def _list_table(rows: Sequence[Row], varied: Sequence[str], cells: Mapping[Key, Cell]) -> Table:
    table = _table(
        "Sweep (means over seeds)",
        *varied,
        "tokens/s",
        "of the best",
        "step s",
        "rollout idle",
        "training idle",
    )
    top = max((cell.mean for cell in cells.values() if cell.by_seed), default=math.nan)
    steps, rollout, train = (
        cells_of(rows, varied, metric) for metric in ("step_time_s.mean", "idle.rollout", "idle.train")
    )
    for key, cell in cells.items():
        table.add_row(
            *map(escape, key),
            _cell_text(cell, top),
            percent(divide(cell.mean, top)),
            seconds(steps[key].mean, unit=""),
            percent(rollout[key].mean),
            percent(train[key].mean),
        )
    return table


def _cell_text(cell: Cell | None, top: float) -> str:
    if cell is None or not cell.by_seed:
        return "n/a"
    spread = (
        f" ±{percent((cell.high - cell.low) / 2 / cell.mean, 1)}"
        if len(cell.by_seed) > 1 and cell.mean
        else ""
    )
    return f"[bold]{count(cell.mean)}[/bold]{spread}" if cell.mean == top else f"{count(cell.mean)}{spread}"


def _parts_table(summary: Summary) -> Table:
    table = _table("Step (critical path of the trainer, mean)", "part", "seconds", "share")
    step_s = summary["step_time_s"]["mean"]
    for name, part_s in sorted(summary["parts_s"].items(), key=lambda item: -item[1]):
        if part_s:
            table.add_row(name, seconds(part_s, unit=""), percent(divide(part_s, step_s)))
    table.add_row("step", seconds(step_s, unit=""), percent(1.0 if step_s else None), style="bold")
    return table


def _idle_table(summary: Summary) -> Table:
    table = _table("Idle (share of the pool's device-seconds)", "cause", "rollout pool", "training pool")
    by_cause = summary["idle"]["by_cause"]
    for cause in dict.fromkeys((*by_cause["rollout"], *by_cause["train"])):
        shares = [by_cause[pool].get(cause) for pool in ("rollout", "train")]
        if any(shares):
            table.add_row(cause, *("" if share is None else percent(share, 1) for share in shares))
    idle = summary["idle"]
    table.add_row("idle", percent(idle["rollout"], 1), percent(idle["train"], 1), style="bold")
    return table


def _ledger_table(summary: Summary) -> Table:
    table = _table("Ledger (whole run)", "", "samples", "response tokens")
    samples, tokens = summary["ledger"]["samples"], summary["ledger"]["tokens"]
    for place in ("issued", "trained", "dropped", "unfinished"):
        table.add_row(place, count(samples[place]), count(tokens[place]))
        if place == "dropped":
            for cause, number in samples["dropped_by_cause"].items():
                table.add_row(f"  {cause}", count(number), count(tokens["dropped_by_cause"][cause]))
    return table


def _facts_table(summary: Summary) -> Table:
    table = _table("Facts", "quantity", "value")
    lag, span, bound, resume = (summary[key] for key in ("lag", "span", "bound", "resume"))
    enforced = ", ".join(lag["enforced"]) or "none"
    table.add_row("lag in versions (mean, max)", f"{decimal(lag['mean'])}, {count(lag['max'])}")
    table.add_row("versions in one sample (mean, max)", f"{decimal(span['mean'])}, {count(span['max'])}")
    table.add_row("enforced by the policy", enforced)
    table.add_row(
        "work bound, tail bound of a step", f"{seconds(bound['work_s'])}, {seconds(bound['tail_s'])}"
    )
    table.add_row("step over the larger bound", times(bound["achieved_over_bound"]))
    quartiles = [f"{percent(part['trained_share'])}" for part in summary["inclusion_by_length"].values()]
    table.add_row("trained, by length quartile", ", ".join(quartiles) or "n/a")
    table.add_row(
        "resumes, tokens recomputed", f"{count(resume['count'])}, {count(resume['recomputed_tokens'])}"
    )
    measured = summary.get("measured")
    if measured:
        table.add_row(
            "steps measured (head, tail dropped)",
            "{num_steps} ({head_dropped}, {tail_dropped})".format_map(measured),
        )
    return table


def _borrow_table(summary: Summary) -> Table:
    table = _table(
        "Leases", "direction", "count", "device-seconds", "useful", "switch cost", "saved (predicted)"
    )
    for direction, lease in summary["borrow"].items():
        useful = percent(divide(lease["useful_device_seconds"], lease["device_seconds"]))
        lent, cost, saved = (
            count(lease["device_seconds"]),
            seconds(lease["cost_s"]),
            seconds(lease["saved_s"]),
        )
        table.add_row(direction, count(lease["count"]), lent, useful, cost, saved)
    return table


def _table(title: str, *columns: str) -> Table:
    """Return a table with the first column on the left and numbers on the right."""
    table = Table(title=title, title_justify="left", title_style="bold", min_width=len(title))
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table
