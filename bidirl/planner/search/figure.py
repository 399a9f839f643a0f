"""The partition landscape: throughput over rollout GPUs, a line per layout, illegal cells marked."""

from pathlib import Path

import numpy as np

from bidirl.planner.search.algorithm1 import step_seconds
from bidirl.planner.search.run import Found

__all__ = ["landscape"]

MAX_LINES = 8
"""Pairs of layouts drawn: the colours of one cycle that remain distinguishable."""


def landscape(found: Found, path: Path) -> None:
    """Draw groups per second over the rollout pool's GPUs for the best pairs of layouts.

    Crosses at the bottom are pool sizes at which the pair is illegal; stars are simulated candidates.
    """
    from matplotlib.figure import Figure

    search, question = found.search, found.search.question
    figure = Figure(figsize=(9, 5.2), layout="constrained")
    axes = figure.add_subplot()
    sizes = search.sizes
    pairs = []
    for rollout in search.rollouts:
        for train in search.trains:
            seconds = step_seconds(rollout.seconds, train.seconds[::-1], question.staleness)
            if np.isfinite(seconds).any():
                pairs.append((float(seconds.min()), rollout, train, seconds))
    pairs.sort(key=lambda pair: (pair[0], pair[1].layout, pair[2].layout.label))
    for place, (_, rollout, train, seconds) in enumerate(pairs[:MAX_LINES]):
        legal = np.isfinite(seconds)
        label = f"{rollout.layout.label} / {train.layout.label}"
        [line] = axes.plot(
            sizes[legal], question.groups / seconds[legal], marker=".", linewidth=1, label=label
        )
        illegal = sizes[~legal]
        level = 0.012 * (place + 1)
        axes.plot(
            illegal,
            np.full(len(illegal), level),
            linestyle="none",
            marker="x",
            markersize=3,
            color=line.get_color(),
            transform=axes.get_xaxis_transform(),
        )
    alive = [each for each in found.ranked if each.error is None and each.candidate.train_gpus]
    for lends, marker in ((False, "o"), (True, "*")):
        chosen = [each for each in alive if (str(each.candidate.lending) != "none") is lends]
        if chosen:
            axes.plot(
                [each.candidate.rollout_gpus for each in chosen],
                [question.groups / each.step_s for each in chosen],
                linestyle="none",
                marker=marker,
                markersize=10 if lends else 6,
                color="black",
                markerfacecolor="none" if not lends else "black",
                label="simulated, lending" if lends else "simulated, no lending",
            )
    colocated = [each for each in found.priced if each.train_gpus == 0]
    if colocated:
        axes.axhline(
            question.groups / colocated[0].step_s, linestyle=":", color="gray", label=colocated[0].label
        )
    axes.set_xlabel("GPUs of the rollout pool (crosses: no legal plan with these layouts)")
    axes.set_ylabel("prompt groups per second")
    axes.set_ylim(bottom=0.0)
    axes.set_title(f"{question.model.name} on {question.cluster.num_gpus} GPUs")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize="small", ncols=2, loc="upper right")
    figure.savefig(path, dpi=120)
