"""Draw a comparison of policies: throughput, speed-up with its interval, idle shares of the pools."""

from typing import TYPE_CHECKING

import numpy as np

from bidirl.sim.compare import CONFIDENCE, Comparison
from bidirl.sim.text import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["compare_figure"]

COLOURS = {"rollout": "#4477AA", "train": "#2E9447"}
"""The colours that generating and training have in time lines."""

POOL_NAMES = {"rollout": "rollout pool", "train": "training pool"}


def compare_figure(comparison: Comparison) -> "Figure | None":
    """Draw a row per policy, the first on top; None where no policy has a throughput."""
    from matplotlib.figure import Figure

    known = set(comparison.ranked())
    names = [name for name in comparison.policies if name in known]
    if not names:
        return None
    figure = Figure(figsize=(12.0, 1.4 + 0.5 * len(names)), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    _throughput(axes[0], comparison, names)
    _speed_up(axes[1], comparison, names)
    _idle(axes[2], comparison, names)
    axes[0].set_yticks(range(len(names)), names, fontsize=9)
    axes[0].set_ylim(len(names) - 0.5, -0.5)
    for axis in axes:
        axis.grid(axis="x", color="#DDDDDD", linewidth=0.6)
        axis.set_axisbelow(True)
    return figure


def _throughput(axis: "Axes", comparison: Comparison, names: list[str]) -> None:
    """Draw the mean as a bar and every seed as a dot."""
    means = [comparison.mean(name, "tokens_per_s") or 0.0 for name in names]
    axis.barh(range(len(names)), means, color="#BBCCDD", height=0.6)
    for place, name in enumerate(names):
        seeds = list(comparison.values(name, "tokens_per_s").values())
        axis.plot(seeds, [place] * len(seeds), "o", color="#333333", markersize=3)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.set_xlim(0.0, None)
    axis.set_xlabel("throughput (tokens/s)\nbar: mean, dots: seeds")


def _speed_up(axis: "Axes", comparison: Comparison, names: list[str]) -> None:
    """Draw the paired speed-up over the first policy with its interval; 1 is a line."""
    axis.axvline(1.0, color="#666666", linewidth=1.0)
    for place, name in enumerate(names):
        gain = comparison.gain(name, comparison.base)
        if gain is None:
            continue
        low, high = (gain.ratio if end is None else end for end in (gain.low, gain.high))
        axis.plot([low, high], [place, place], color="#333333", linewidth=1.6)
        axis.plot([gain.ratio], [place], "o", color="#D62F4B" if gain.is_sure else "#333333", markersize=6)
        axis.annotate(
            f"{gain.ratio:.3f}x",
            (gain.ratio, place),
            (0, 7),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    axis.margins(x=0.15)
    without = ", one seed: no interval" if len(comparison.seeds) == 1 else f", {percent(CONFIDENCE)} interval"
    axis.set_xlabel(f"speed-up over {comparison.base}{without}\nred: the interval leaves out 1")


def _idle(axis: "Axes", comparison: Comparison, names: list[str]) -> None:
    """Draw the mean idle share of both pools."""
    places = np.arange(len(names))
    for offset, pool in ((-0.18, "rollout"), (0.18, "train")):
        shares = [100.0 * (comparison.mean(name, "idle", pool) or 0.0) for name in names]
        axis.barh(places + offset, shares, height=0.34, color=COLOURS[pool], label=POOL_NAMES[pool])
    axis.set_xlim(0.0, None)
    axis.set_xlabel("idle (% of the pool's device-seconds)")
    axis.legend(fontsize=8, frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1.0, 0.99))
