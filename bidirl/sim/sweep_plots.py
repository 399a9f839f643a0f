"""Draw the figures of a sweep: throughput over a number, bars over names, speed-up maps over two keys."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bidirl.sim.cells import (
    BASELINES,
    Cell,
    Key,
    Row,
    cells_of,
    is_numeric,
    name_of,
    policy_key,
    ratio,
    values_of,
)
from bidirl.sim.plots import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["sweep_figures"]

Floats = npt.NDArray[np.float64]

LINE_COLOURS = ("#4477AA", "#D62F4B", "#2E9447", "#B8860B", "#7E57A8", "#44AACC", "#EE8866", "#666666")
MARKERS = "osD^vP*X"

MAX_PANELS = 9
"""Panels on one page; further combinations are in the table and in sweep.csv."""

LOG_SPAN = 8.0
"""Values that span this factor, all positive, are spaced by their logarithm."""

UNITS = {
    "tokens": "tokens",
    "gpus": "GPUs",
    "s": "s",
    "bytes": "bytes",
    "staleness": "batches",
    "steps": "steps",
}
"""Unit of a key by the last word of its name."""


def sweep_figures(
    rows: Sequence[Row], varied: Sequence[str], folder: Path, *, formats: Sequence[str] = ("png",)
) -> list[Path]:
    """Draw every figure that the varied keys allow, and return the files.

    ``throughput`` has a line per policy (or other key) over the numeric key with most values, a panel per
    combination of further keys, seeds as a band (bars if no key is numeric). ``speedup`` has a map over two
    keys per policy, relative to a baseline policy (or to the slowest cell if no policy was varied).

    Args:
        rows: rows of ``sweep.csv``.
        varied: the varied keys, at least one.
        folder: existing folder for the files.
        formats: file suffixes, ``png`` and ``svg``.
    """
    cells = cells_of(rows, varied)
    if not any(cell.by_seed for cell in cells.values()):
        return []
    figures = {"throughput": _throughput(cells, varied)}
    speedup = _speedup(cells, varied)
    if speedup is not None:
        figures["speedup"] = speedup
    return [
        save_figure(figure, folder / f"{name}.{suffix}")
        for name, figure in figures.items()
        for suffix in formats
    ]


def _label(key: str) -> str:
    """Return an axis label: the key and its unit."""
    short = "policy" if key == "policy.name" else key.rpartition(".")[2]
    words = short.split("_")
    unit = UNITS.get(words[-1])
    if unit is None:
        return " ".join(words)
    return f"{' '.join(words[:-1]) or words[0]} ({unit})"


def _throughput(cells: Mapping[Key, Cell], varied: Sequence[str]) -> "Figure":
    """Draw throughput over the numeric key with most values, or bars where there is none."""
    from matplotlib.figure import Figure

    counts = {index: len(values_of(cells, index)) for index in range(len(varied))}
    numeric = [index for index in counts if is_numeric(values_of(cells, index)) and counts[index] > 1]
    if not numeric:
        return _bars(cells, varied)
    over = max(numeric, key=counts.__getitem__)
    others = [index for index in counts if index != over]
    policy = policy_key(varied)
    line = policy if policy in others else max(others, key=counts.__getitem__, default=None)
    panel_keys = [index for index in others if index != line]
    panels = list(itertools.product(*(values_of(cells, index) for index in panel_keys)))
    shown = panels[:MAX_PANELS]
    columns = min(3, len(shown))
    lines = -(-len(shown) // columns)
    figure = Figure(figsize=(2.0 + 4.6 * columns, 1.2 + 3.2 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, sharey=True, squeeze=False)
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    for number, (axis, panel) in enumerate(zip(axes.flat, shown, strict=False)):
        fixed = dict(zip(panel_keys, panel, strict=True))
        _lines(axis, cells, over, line, fixed)
        axis.set_xlabel(_label(varied[over]))
        if number % columns == 0:
            axis.set_ylabel("throughput (tokens/s)")
        if panel:
            names = [varied[index] for index in panel_keys]
            axis.set_title(name_of(names, tuple(panel)), fontsize=9)
    axes.flat[0].set_ylim(0.0, 1.06 * max(cell.high for cell in cells.values() if cell.by_seed))
    if len(panels) > len(shown):
        figure.suptitle(f"first {len(shown)} of {len(panels)} combinations", fontsize=10)
    if line is not None:
        handles, labels = axes.flat[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, title=_label(varied[line]), loc="outside right upper", fontsize=8, frameon=False
        )
    return figure


def _lines(
    axis: "Axes", cells: Mapping[Key, Cell], over: int, line: int | None, fixed: Mapping[int, str]
) -> None:
    """Draw the lines of one panel with the range of seeds as a band."""
    places = values_of(cells, over)
    numbers = [float(value) for value in places]
    for number, name in enumerate(values_of(cells, line) if line is not None else [""]):
        chosen = dict(fixed) | ({line: name} if line is not None else {})
        found = [
            cells.get(tuple((chosen | {over: value})[i] for i in range(len(chosen) + 1))) for value in places
        ]
        mean, low, high = (
            [getattr(cell, part) if cell is not None else math.nan for cell in found]
            for part in ("mean", "low", "high")
        )
        colour = LINE_COLOURS[number % len(LINE_COLOURS)]
        style = ("-", "--", ":")[number // len(LINE_COLOURS) % 3]
        marker = MARKERS[number % len(MARKERS)]
        axis.plot(numbers, mean, style, color=colour, marker=marker, markersize=5, linewidth=1.6, label=name)
        axis.fill_between(numbers, low, high, color=colour, alpha=0.18, linewidth=0)
    if min(numbers) > 0 and max(numbers) / min(numbers) >= LOG_SPAN:
        axis.set_xscale("log", base=2)
        axis.minorticks_off()
    each = -(-len(numbers) // 10)
    axis.set_xticks(numbers[::each], places[::each])
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.grid(color="#DDDDDD", linewidth=0.6)
    axis.set_axisbelow(True)


def _bars(cells: Mapping[Key, Cell], varied: Sequence[str]) -> "Figure":
    """Draw a horizontal bar per cell, the fastest on top, with the range of seeds."""
    from matplotlib.figure import Figure

    ranked = sorted((cell for cell in cells.values() if cell.by_seed), key=lambda cell: cell.mean)
    figure = Figure(figsize=(9.0, 1.2 + 0.32 * len(ranked)), layout="constrained")
    axis = figure.add_subplot()
    mean = np.array([cell.mean for cell in ranked])
    reach = np.array([[cell.mean - cell.low, cell.high - cell.mean] for cell in ranked]).T
    axis.barh(range(len(ranked)), mean, xerr=reach, color=LINE_COLOURS[0], error_kw={"elinewidth": 1.2})
    labels = [cell.key[0] if len(varied) == 1 else name_of(varied, cell.key) for cell in ranked]
    axis.set_yticks(range(len(ranked)), labels, fontsize=8)
    for place, cell in enumerate(ranked):
        axis.text(cell.high, place, f"  {cell.mean:,.0f}", va="center", fontsize=8)
    axis.set_xlim(0.0, 1.12 * max(cell.high for cell in ranked))
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.set_xlabel("throughput (tokens/s)")
    if len(varied) == 1:
        axis.set_ylabel(_label(varied[0]))
    return figure


@dataclass(frozen=True, slots=True)
class _Maps:
    """Which keys span the maps, and what the ratios are against."""

    down: int
    across: int
    policy: int | None
    panels: tuple[str, ...]
    """Policies, one map each; one empty name where the policy is an axis or was not varied."""
    base: str | None
    """Policy in the denominator; None: the slowest cell."""


def _plan_maps(cells: Mapping[Key, Cell], varied: Sequence[str]) -> _Maps | None:
    """Choose the axes; None unless exactly two keys (policy aside), or one key and the policy, vary."""
    policy = policy_key(varied)
    counts = [len(values_of(cells, index)) for index in range(len(varied))]
    free = [index for index in range(len(varied)) if index != policy and counts[index] > 1]
    free.sort(key=lambda index: -counts[index])
    if policy is None or counts[policy] < 2:
        return _Maps(free[1], free[0], policy, ("",), None) if len(free) == 2 else None
    names = values_of(cells, policy)
    base = next((name for name in BASELINES if name in names), names[0])
    match len(free):
        case 1:
            return _Maps(policy, free[0], policy, ("",), base)
        case 2:
            return _Maps(free[1], free[0], policy, tuple(name for name in names if name != base), base)
        case _:
            return None


def _grid(cells: Mapping[Key, Cell], maps: _Maps, panel: str, slowest: Cell) -> Floats:
    """Return the ratios of one map, shape [values down, values across]; nan where a cell has no result."""
    rows, columns = values_of(cells, maps.down), values_of(cells, maps.across)
    template = list(next(iter(cells)))
    if panel and maps.policy is not None:
        template[maps.policy] = panel
    grid = np.full((len(rows), len(columns)), math.nan)
    for y, x in itertools.product(range(len(rows)), range(len(columns))):
        key = list(template)
        key[maps.down], key[maps.across] = rows[y], columns[x]
        one, other = cells.get(tuple(key)), slowest
        if maps.base is not None and maps.policy is not None:
            key[maps.policy] = maps.base
            other = cells.get(tuple(key), Cell(tuple(key)))
            gain = ratio(one, other) if one is not None else None
            grid[y, x] = gain.mean if gain is not None else math.nan
        elif one is not None:
            grid[y, x] = one.mean / other.mean
    return grid


def _speedup(cells: Mapping[Key, Cell], varied: Sequence[str]) -> "Figure | None":
    """Draw speed-ups as maps over two keys; None where the varied keys do not span one."""
    from matplotlib.figure import Figure

    maps = _plan_maps(cells, varied)
    positive = [cell for cell in cells.values() if cell.by_seed and cell.mean > 0]
    if maps is None or not positive:
        return None
    slowest = min(positive, key=lambda cell: cell.mean)
    shown = maps.panels[:MAX_PANELS]
    rows, columns = values_of(cells, maps.down), values_of(cells, maps.across)
    wide = min(3, len(shown))
    high = -(-len(shown) // wide)
    size = (max(6.0, (2.2 + 0.75 * len(columns)) * wide + 1.0), (1.6 + 0.5 * len(rows)) * high + 0.6)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(high, wide, squeeze=False)
    grids = [_grid(cells, maps, panel, slowest) for panel in shown]
    known = np.concatenate([grid[np.isfinite(grid) & (grid > 0)] for grid in grids])
    reach = float(max(1.05, known.max(), 1.0 / known.min())) if known.size else 1.05
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    for axis, panel, grid in zip(axes.flat, shown, grids, strict=False):
        _map(axis, grid, reach)
        axis.set_xticks(range(len(columns)), columns, fontsize=8)
        axis.set_yticks(range(len(rows)), rows, fontsize=8)
        axis.set_xlabel(_label(varied[maps.across]))
        axis.set_ylabel(_label(varied[maps.down]))
        axis.set_title(panel, fontsize=9)
    against = f"policy {maps.base}" if maps.base else f"the slowest cell ({name_of(varied, slowest.key)})"
    figure.suptitle(f"throughput relative to {against}", fontsize=10)
    return figure


def _map(axis: "Axes", grid: Floats, reach: float) -> None:
    """Draw one map: red is slower, blue is faster, the number in each cell is the ratio."""
    limit = math.log(reach)
    axis.set_facecolor("#E4E4E4")
    axis.imshow(np.log(grid), cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto")
    for (y, x), value in np.ndenumerate(grid):
        text = "n/a" if math.isnan(value) else f"{value:.2f}x"
        dark = not math.isnan(value) and abs(math.log(value)) > 0.6 * limit
        axis.text(x, y, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
    axis.set_xticks(np.arange(grid.shape[1] + 1) - 0.5, minor=True)
    axis.set_yticks(np.arange(grid.shape[0] + 1) - 0.5, minor=True)
    axis.grid(which="minor", color="white", linewidth=1.0)
    axis.tick_params(which="minor", length=0)
