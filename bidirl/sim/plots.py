"""Draw the time line of one run. Figures of sweeps are in `bidirl.sim.sweep_plots`.

Matplotlib is imported inside the functions, and the non-interactive canvas is used directly: no display and
no global state is touched.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bidirl.sim.idle import Floats, Rows, rows_of
from bidirl.traces.run_record import Activity, Owner, RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "MAX_UNITS", "save_figure", "timeline"]

COLOURS = {
    Activity.GENERATE: "#4477AA",
    Activity.OLD_LOGPROB: "#B69BD6",
    Activity.REFERENCE: "#7E57A8",
    Activity.UPDATE: "#2E9447",
    Activity.OPTIMIZER: "#124D20",
    Activity.MERGE: "#EE8866",
    Activity.SYNC: "#D62F4B",
    Activity.SWITCH_IN: "#F2C94C",
    Activity.SWITCH_OUT: "#B8860B",
    Activity.BROADCAST: "#F4A6B7",
    Activity.CHECKPOINT: "#8C8C8C",
    Activity.DOWN: "#000000",
}
"""Blue generates, green and violet train, warm colours are overhead; white is idle."""

MAX_UNITS = 64
"""More rows than this are not readable on a page: the share of GPUs by activity is drawn instead."""

NUM_BINS = 500
"""Bins of the aggregated time line: about two pixels each."""

MAX_LABELS = 16
"""Labels of versions or of units along one axis."""

POOL_NAMES = {Owner.ROLLOUT: "rollout pool", Owner.TRAIN: "training pool"}

MAX_STRONG_LINES = 60
"""With more publications on one page their lines get thinner, so that they do not hide the bars."""

MAX_LEGEND_COLUMNS = 11
"""What fits under a page of 13 inches."""

DOTS_PER_INCH = 130


def timeline(
    record: RunRecord, path: Path, *, title: str = "", window_s: tuple[float, float] | None = None
) -> Path:
    """Draw what every unit of GPUs did, coloured by activity; publications are dashed lines.

    The suffix of ``path`` chooses the format (``.png``, ``.svg``). Above ``MAX_UNITS`` units each pool is
    drawn as the share of its GPUs by activity.

    Args:
        record: the run.
        path: file to write.
        title: heading of the figure.
        window_s: seconds to show; the whole run if None.
    """
    from matplotlib.figure import Figure

    rows = rows_of(record)
    ends = [record.end_s, *record.spans.end_s, *record.steps.published_s]
    low, high = window_s or (0.0, max(ends))
    high = high if high > low else low + 1.0
    num_units = rows.segment_gpus.size
    if num_units <= MAX_UNITS:
        figure = Figure(figsize=(13.0, min(11.0, 2.0 + 0.24 * max(num_units, 4))), layout="constrained")
        axes = [figure.add_subplot()]
        _draw_units(axes[0], rows)
    else:
        figure = Figure(figsize=(13.0, 6.0), layout="constrained")
        pools = [pool for pool in Owner if (rows.segment_owner == pool).any()]
        axes = list(np.atleast_1d(figure.subplots(len(pools), 1, sharex=True)))
        for axis, pool in zip(axes, pools, strict=True):
            _draw_shares(axis, rows, pool, (low, high))
    shown = [
        (step + 1, time_s) for step, time_s in enumerate(record.steps.published_s) if low <= time_s <= high
    ]
    for axis in axes:
        axis.set_xlim(low, high)
        weight = min(1.0, MAX_STRONG_LINES / max(1, len(shown)))
        for _, time_s in shown:
            axis.axvline(time_s, color="black", linewidth=0.8 * weight, linestyle=(0, (4, 3)), alpha=0.7)
    _label_versions(axes[0], shown, "version published")
    axes[-1].set_xlabel("time since the start of the run (s)")
    _legend(figure, rows)
    if title:
        figure.suptitle(title, fontsize=11)
    return save_figure(figure, path)


def save_figure(figure: "Figure", path: Path) -> Path:
    """Write a figure in the format of the suffix; the same figure gives the same bytes."""
    date: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    figure.savefig(path, dpi=DOTS_PER_INCH, metadata=date)
    return path


def _draw_units(axis: "Axes", rows: Rows) -> None:
    """Draw one bar row per unit, the rollout pool above the training pool."""
    from matplotlib.collections import PolyCollection

    for activity, colour in COLOURS.items():
        mask = rows.activity == activity
        if not mask.any():
            continue
        left, right, centre = rows.start_s[mask], rows.end_s[mask], rows.segment[mask]
        bottom, top = centre - 0.42, centre + 0.42
        corners = np.stack(
            [
                np.stack(pair, axis=-1)
                for pair in ((left, bottom), (left, top), (right, top), (right, bottom))
            ],
            axis=1,
        )
        # No edges and no smoothing: touching chunks of one activity must not look like idle time.
        bars = PolyCollection(list(corners), facecolors=colour, edgecolors="none", antialiaseds=False)
        axis.add_collection(bars)
    count = rows.segment_gpus.size
    axis.set_ylim(count - 0.4, -0.6)
    each = -(-count // (2 * MAX_LABELS))
    ticks = [
        index
        for index in range(count)
        if (index - int(np.argmax(rows.segment_owner == rows.segment_owner[index]))) % each == 0
    ]
    axis.set_yticks(ticks, [_unit_name(rows, index) for index in ticks], fontsize=7)
    axis.tick_params(axis="y", length=0)
    border = np.flatnonzero(np.diff(rows.segment_owner))
    for position in border:
        axis.axhline(position + 0.5, color="black", linewidth=1.2)
    for pool, name in POOL_NAMES.items():
        members = np.flatnonzero(rows.segment_owner == pool)
        if members.size:
            middle = 1.0 - (float(members.mean()) + 0.6) / (count + 0.2)
            gpus = int(rows.segment_gpus[members].sum())
            text = f"{name}\n{gpus} GPUs" if members.size > 4 else name.replace(" pool", "\npool")
            axis.text(
                -0.065,
                middle,
                text,
                transform=axis.transAxes,
                rotation=90,
                ha="center",
                va="center",
                fontsize=9,
            )


def _unit_name(rows: Rows, index: int) -> str:
    first, gpus = int(rows.segment_first[index]), int(rows.segment_gpus[index])
    return f"GPU {first}" if gpus == 1 else f"GPUs {first}-{first + gpus - 1}"


def _draw_shares(axis: "Axes", rows: Rows, pool: Owner, window_s: tuple[float, float]) -> None:
    """Draw the share of a pool's GPUs by activity as stacked areas."""
    edges = np.linspace(*window_s, NUM_BINS + 1)
    members = rows.segment_owner[rows.segment] == pool
    gpus = int(rows.segment_gpus[rows.segment_owner == pool].sum())
    base = np.zeros(NUM_BINS)
    for activity, colour in COLOURS.items():
        mask = members & (rows.activity == activity)
        if not mask.any():
            continue
        busy = _busy_at(rows.start_s[mask], rows.end_s[mask], rows.segment_gpus[rows.segment[mask]], edges)
        top = base + np.diff(busy) / (np.diff(edges) * gpus)
        axis.fill_between(edges[:-1], 100 * base, 100 * top, step="post", color=colour, linewidth=0)
        base = top
    axis.set_ylim(0.0, 100.0)
    axis.set_ylabel(f"{POOL_NAMES[pool]}\nshare of {gpus:,} GPUs (%)")


def _busy_at(start_s: Floats, end_s: Floats, gpus: Any, times_s: Floats) -> Floats:
    """Return the device-seconds spent in the intervals up to each time."""
    borders = np.concatenate((start_s, end_s))
    change = np.concatenate((gpus, -gpus)).astype(np.float64)
    order = np.argsort(borders, kind="stable")
    borders, level = borders[order], np.cumsum(change[order])
    spent = np.concatenate((np.zeros(1), np.cumsum(level[:-1] * np.diff(borders))))
    busy: Floats = np.interp(times_s, borders, spent)
    return busy


def _label_versions(axis: "Axes", shown: Sequence[tuple[int, float]], name: str) -> None:
    """Put version numbers on a second axis above the figure, thinned to what fits."""
    each = -(-len(shown) // MAX_LABELS) or 1
    chosen = shown[each - 1 :: each]
    above = axis.secondary_xaxis("top")
    above.set_xticks([time_s for _, time_s in chosen], [str(version) for version, _ in chosen], fontsize=7)
    above.set_xlabel(name, fontsize=8)


def _legend(figure: "Figure", rows: Rows) -> None:
    """Explain the colours that occur, and white."""
    from matplotlib.patches import Patch

    present = set(rows.activity.tolist())
    patches = [
        Patch(facecolor=colour, label=activity.name.lower().replace("_", " "))
        for activity, colour in COLOURS.items()
        if activity in present
    ]
    patches.append(Patch(facecolor="white", edgecolor="#999999", linewidth=0.6, label="idle"))
    columns = len(patches) if len(patches) <= MAX_LEGEND_COLUMNS else -(-len(patches) // 2)
    figure.legend(
        handles=patches,
        loc="outside lower center",
        ncols=columns,
        fontsize=8,
        frameon=False,
        columnspacing=1.4,
        handlelength=1.6,
    )
