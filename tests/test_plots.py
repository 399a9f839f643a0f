"""Figures: every shape of run and sweep gives a file, and nothing is cut off or drawn twice."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from bidirl.sim import plots, sweep_plots
from bidirl.sim.sweep_plots import sweep_figures
from bidirl.traces.run_record import Activity, Owner, RunRecord


def run_record(rollout_gpus: int = 4, train_gpus: int = 4, num_steps: int = 3) -> RunRecord:
    """Build steps of 10 s in which each activity occurs."""
    record = RunRecord(rollout_gpus, train_gpus, 8, 64, 1.0, ("admission",))
    spans = record.spans

    def add(owner: Owner, unit: int, gpus: int, activity: Activity, start_s: float, end_s: float) -> None:
        columns = (spans.owner, spans.unit, spans.num_gpus, spans.activity, spans.step)
        for column, value in zip(columns, (owner, unit, gpus, activity, 0), strict=True):
            column.append(int(value))
        spans.start_s.append(start_s)
        spans.end_s.append(end_s)

    for step in range(num_steps):
        begin = 10.0 * step
        for unit in range(rollout_gpus):
            add(Owner.ROLLOUT, unit, 1, Activity.GENERATE, begin, begin + 4.0 + unit % 3)
        if train_gpus:
            for place, activity in enumerate(Activity):
                add(Owner.TRAIN, 0, train_gpus, activity, begin + 0.8 * place, begin + 0.8 * (place + 1))
        record.steps.published_s.append(begin + 10.0)
    record.end_s = 10.0 * num_steps
    return record


@pytest.mark.parametrize(("rollout_gpus", "train_gpus"), [(1, 1), (4, 12), (0, 4), (4, 0), (63, 1), (70, 2)])
def test_a_time_line_is_drawn_for_any_cluster(tmp_path: Path, rollout_gpus: int, train_gpus: int) -> None:
    path = plots.timeline(run_record(rollout_gpus, train_gpus), tmp_path / "timeline.png", title="a run")
    image = imread(path)
    assert image.shape[1] == pytest.approx(13 * plots.DOTS_PER_INCH, abs=2)
    colours = {tuple(pixel) for pixel in np.round(255 * image[:, :, :3].reshape(-1, 3)).astype(int)[::53]}
    if rollout_gpus:
        assert tuple(int(plots.COLOURS[Activity.GENERATE][i : i + 2], 16) for i in (1, 3, 5)) in colours


def test_an_empty_run_and_a_window_are_drawn(tmp_path: Path) -> None:
    plots.timeline(RunRecord(2, 2, 8, 64, 1.0, ()), tmp_path / "empty.png")
    plots.timeline(run_record(), tmp_path / "window.svg", window_s=(5.0, 12.0))
    assert (
        "generate" in (tmp_path / "window.svg").read_text() or (tmp_path / "window.svg").stat().st_size > 1000
    )


def test_every_activity_has_its_own_colour() -> None:
    assert set(plots.COLOURS) == set(Activity)
    assert len(set(plots.COLOURS.values())) == len(Activity)


def test_the_same_run_gives_the_same_picture(tmp_path: Path) -> None:
    one = plots.timeline(run_record(), tmp_path / "one.png").read_bytes()
    assert plots.timeline(run_record(), tmp_path / "two.png").read_bytes() == one


def sweep_rows() -> list[dict[str, object]]:
    """Build rows of three keys and two seeds with a failed corner."""
    return [
        {
            "policy.name": policy,
            "policy.staleness": staleness,
            "partition.rollout_gpus": gpus,
            "seed": seed,
            "tokens_per_s": "" if policy == "areal" and staleness == "0.5" else 1000.0 * gain * gpus + seed,
        }
        for policy, gain in (("no_borrow", 1.0), ("bidirl", 1.4), ("areal", 1.1))
        for staleness in ("0", "0.5", "1")
        for gpus in (4, 8, 12)
        for seed in range(2)
    ]


@pytest.mark.parametrize(
    ("varied", "names"),
    [
        (["policy.name"], ["throughput"]),
        (["policy.staleness"], ["throughput"]),
        (["policy.name", "policy.staleness"], ["throughput", "speedup"]),
        (["partition.rollout_gpus", "policy.staleness"], ["throughput", "speedup"]),
        (["policy.name", "policy.staleness", "partition.rollout_gpus"], ["throughput", "speedup"]),
    ],
)
def test_a_sweep_gets_the_figures_its_keys_allow(tmp_path: Path, varied: list[str], names: list[str]) -> None:
    files = sweep_figures(sweep_rows(), varied, tmp_path, formats=("png", "svg"))
    assert files == [tmp_path / f"{name}.{suffix}" for name in names for suffix in ("png", "svg")]
    assert all(file.stat().st_size > 1000 for file in files)


def test_no_result_gives_no_figure(tmp_path: Path) -> None:
    rows = [{"policy.name": "areal", "seed": 0, "tokens_per_s": None}]
    assert sweep_figures(rows, ["policy.name"], tmp_path) == []


def keep_figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Keep the figures instead of writing them."""
    kept: list[Figure] = []

    def keep(figure: Figure, path: Path) -> Path:
        kept.append(figure)
        return path

    monkeypatch.setattr(sweep_plots, "save_figure", keep)
    return kept


def test_no_line_leaves_its_panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = keep_figures(monkeypatch)
    sweep_figures(sweep_rows(), ["policy.name", "policy.staleness", "partition.rollout_gpus"], tmp_path)
    axes = [axis for axis in kept[0].axes if axis.get_visible()]
    assert len(axes) == 3
    for axis in axes:
        assert axis.get_ylim()[0] == 0.0
        assert axis.get_ylim()[1] > max(np.nanmax(np.asarray(line.get_ydata())) for line in axis.get_lines())
        assert axis.get_xlabel()


def test_a_map_holds_the_ratios_to_the_baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = keep_figures(monkeypatch)
    sweep_figures(sweep_rows(), ["policy.name", "policy.staleness"], tmp_path)
    texts = [text.get_text() for text in kept[1].axes[0].texts]
    assert texts[:3] == ["1.00x"] * 3
    assert texts[7] == "n/a"


def test_labels_carry_units() -> None:
    labels = [
        sweep_plots._label(key) for key in ("partition.rollout_gpus", "policy.staleness", "policy.name")
    ]
    assert labels == ["rollout (GPUs)", "staleness (batches)", "policy"]
