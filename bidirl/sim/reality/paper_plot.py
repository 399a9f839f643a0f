"""Draw the paper's ranges beside ours."""

from pathlib import Path

from bidirl.sim.reality.paper import MARGIN, Comparison

__all__ = ["plot_paper"]

PAPER, OURS, OTHER = "#9aa5b1", "#c44e2b", "#3b6ea5"


def plot_paper(found: Comparison, path: Path) -> None:
    """Write a figure: per row the paper's range (grey, with its margin), ours, and both on one split."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in found.rows if row.ours is not None]
    figure, axis = plt.subplots(figsize=(9, 0.36 * len(rows) + 1.2), layout="constrained")
    for place, row in enumerate(rows):
        low, high = row.low * (1 - MARGIN), row.high * (1 + MARGIN)
        axis.barh(place, high - low, left=low, height=0.8, color=PAPER, alpha=0.3)
        axis.plot([row.low, row.high], [place, place], color=PAPER, linewidth=6, solid_capstyle="butt")
        for span, offset, color in ((row.ours, 0.16, OURS), (row.same_split, -0.16, OTHER)):
            if span is not None:
                ends = [span.low, span.high]
                axis.plot(ends, [place + offset] * 2, color=color, marker="|", markersize=8, linewidth=2)
    axis.set_yticks(range(len(rows)), [f"{row.quantity}: {row.setting}"[:64] for row in rows], fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel("ratio")
    legend = ((PAPER, f"paper, +-{MARGIN:.0%}"), (OURS, "ours"), (OTHER, "ours, both on one split"))
    for color, label in legend:
        axis.plot([], [], color=color, linewidth=3, label=label)
    axis.legend(loc="lower right", fontsize=7)
    figure.savefig(path, dpi=100, metadata={"Software": None})
    plt.close(figure)
