"""Draw docs/workloads.png: survival curves of the packaged response-length laws."""

from pathlib import Path

import matplotlib as mpl
import numpy as np

from bidirl.traces.length_sources import packaged_law, packaged_names

mpl.use("Agg")
from matplotlib import pyplot as plt  # the backend must be chosen first

COLOURS = {
    "gsm8k": "#0072B2",
    "geo3k": "#D55E00",
    "dapo_math_17k": "#009E73",
    "long_tail_agentic": "#CC79A7",
}
CAPS = (1024, 2048, 4096)


def main() -> None:
    """Write the figure beside this script."""
    figure, axis = plt.subplots(figsize=(8.0, 4.6), layout="constrained")
    tokens = np.geomspace(30, 40_000, 500)
    for name in packaged_names():
        law = packaged_law(name, 10**9)
        share = [law.survival(x) for x in tokens.tolist()]
        style = "--" if law.assumed else "-"
        label = f"{name} (assumed)" if name == "geo3k" else f"{name} (transferred)" if law.assumed else name
        axis.plot(tokens, share, style, color=COLOURS[name], label=label, linewidth=1.8)
    for cap in CAPS:
        axis.axvline(cap, color="0.75", linewidth=0.8, zorder=0)
        axis.text(cap * 1.03, 1.02, f"{cap // 1024}K", color="0.4", fontsize=8, ha="left", va="bottom")
    axis.set_xscale("log")
    axis.set_xlim(30, 40_000)
    axis.set_ylim(0.0, 1.1)
    axis.set_xlabel("response length (tokens, before the cap)")
    axis.set_ylabel("share of responses that are longer")
    axis.set_title(
        "Packaged response-length laws; where a curve crosses a cap, that share is truncated", fontsize=10
    )
    axis.legend(frameon=False, loc="lower left", fontsize=9)
    figure.savefig(Path(__file__).with_name("workloads.png"), dpi=130)


if __name__ == "__main__":
    main()
