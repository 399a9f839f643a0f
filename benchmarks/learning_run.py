"""Learn with borrowing on: examples/copy.toml on real vLLM and torch, as a figure.

``.venv-engine/bin/python benchmarks/learning_run.py`` trains (minutes) and writes
docs/images/learning_run.png; ``--from DIR`` only draws a run that ``bidirl-run train --out DIR`` has left.
"""

import argparse
import importlib.util
import json
import tempfile
from pathlib import Path

from bidirl.traces.tables import read_steps

ROOT = Path(__file__).parents[1]
FIGURE = ROOT / "docs" / "images" / "learning_run.png"
WINDOW = 10
"""Steps of the running mean."""


def draw(folder: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rewards = read_steps(folder / "steps.csv")["reward_mean"]
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    leases = summary["learning"]["leases"]
    smooth = [
        sum(rewards[max(0, at - WINDOW + 1) : at + 1]) / len(rewards[max(0, at - WINDOW + 1) : at + 1])
        for at in range(len(rewards))
    ]
    figure, axes = plt.subplots(figsize=(7.0, 3.6), layout="constrained")
    axes.plot(rewards, color="tab:blue", alpha=0.35, linewidth=1.0, label="batch")
    axes.plot(smooth, color="tab:blue", linewidth=2.0, label=f"mean of {WINDOW} steps")
    axes.axhline(0.8, color="tab:gray", linestyle=":", linewidth=1.0)
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.02), xlim=(0, len(rewards) - 1))
    axes.set_title(
        f"Copy task with borrowing on: {leases.get('rollout_on_train', 0)} leases R-on-T, "
        f"{leases.get('train_on_rollout', 0)} T-on-R",
        fontsize=10,
    )
    axes.legend(frameon=False, loc="lower right")
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, dpi=130)
    print(
        f"reward {smooth[min(WINDOW, len(smooth)) - 1]:.3f} -> {smooth[-1]:.3f}; {FIGURE.relative_to(ROOT)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="folder", type=Path)
    chosen = parser.parse_args()
    if chosen.folder is not None:
        draw(chosen.folder)
        return
    if importlib.util.find_spec("vllm") is None:
        print("learning_run: vLLM is not installed here; run it with .venv-engine/bin/python")
        return
    from bidirl.executor.cli import app
    from bidirl.shell import guarded

    with tempfile.TemporaryDirectory() as folder:
        code = guarded(app, ["train", str(ROOT / "examples" / "copy.toml"), "--out", folder], "bidirl-run")
        if code == 0:
            draw(Path(folder))
    raise SystemExit(code)


if __name__ == "__main__":
    main()
