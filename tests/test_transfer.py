import csv
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.errors import InputError
from bidirl.models.architecture import from_catalogue
from bidirl.models.estimate import Source
from bidirl.models.transfer import check_bandwidth, sleep_costs, switch_prior, sync_prior

PAPER = {
    "Qwen3-VL-2B": (5.54, 4.20, 3.58, 3.40, 0.66),
    "Qwen3-VL-4B": (7.70, 5.59, 6.16, 5.62, 1.21),
}


def _rows() -> list[dict[str, str]]:
    text = files("bidirl.models").joinpath("data/weight_sync.csv").read_text("utf-8")
    return list(csv.DictReader(text.splitlines()))


def test_used_rows_are_explained_within_their_interval() -> None:
    ratios = []
    for row in _rows():
        if row["used"] != "yes":
            continue
        sync, _ = sync_prior(from_catalogue(row["model"]), float(row["link_gb_per_s"]) * 1e9)
        ratios.append(sync.seconds(1) / float(row["time_s"]))
    assert len(ratios) == 8
    assert min(ratios) > 1 / 1.6
    assert max(ratios) < 1.6


def test_table_agrees_with_the_catalogue_and_holds_no_impossible_row() -> None:
    for row in _rows():
        shape = from_catalogue(row["model"])
        assert shape.weight_bytes() / 1e9 == pytest.approx(float(row["weight_gb"]), abs=1e-3)
        assert shape.num_tensors == int(row["num_tensors"])
        if row["used"] == "yes":
            check_bandwidth(shape.weight_bytes(), float(row["time_s"]), float(row["link_gb_per_s"]) * 1e9)


@pytest.mark.parametrize("seconds", [0.12, 0.02, 0.0])
def test_a_sync_faster_than_its_link_is_refused(seconds: float) -> None:
    with pytest.raises(InputError, match="the timer missed the transfer"):
        check_bandwidth(15.2e9, seconds, 50e9)


@given(st.integers(1, 4096), st.sampled_from(["Qwen3-0.6B", "Qwen3-8B", "Qwen3-30B-A3B", "Qwen2.5-72B"]))
def test_sync_grows_with_receivers_and_slower_links(receivers: int, name: str) -> None:
    shape = from_catalogue(name)
    fast, _ = sync_prior(shape, 50e9)
    slow, sources = sync_prior(shape, 12.5e9)
    assert fast.seconds(receivers) <= fast.seconds(receivers + 1)
    assert fast.seconds(receivers) < slow.seconds(receivers)
    assert fast.transfer_s(receivers) < fast.seconds(receivers)
    assert {e.source for e in sources.values()} <= {Source.TRANSFERRED, Source.ROOFLINE}
    assert fast.seconds(0) == 0.0


def test_links_beyond_the_fit_are_capped_and_flagged() -> None:
    shape = from_catalogue("Qwen3-8B")
    nvlink, sources = sync_prior(shape, 450e9)
    assert nvlink == sync_prior(shape, 50e9)[0]
    assert sources["sync.s_per_byte"].extrapolated


@pytest.mark.parametrize("name", sorted(PAPER))
def test_the_papers_switch_costs_are_carried_as_measured(name: str) -> None:
    costs, sources = switch_prior(from_catalogue(name), 1)
    given_s = (
        costs.rollout_on_train_in_s,
        costs.rollout_on_train_out_s,
        costs.train_on_rollout_in_s,
        costs.train_on_rollout_out_s,
        costs.grad_s,
    )
    assert given_s == PAPER[name]
    assert sources["switch.grad_s"].source is Source.MEASURED
    assert sources["switch.broadcast_s"].source is Source.TRANSFERRED
    assert costs.broadcast_s == costs.grad_s


def test_other_models_follow_the_line_in_bytes() -> None:
    small, _ = switch_prior(from_catalogue("Qwen3-VL-4B"), 1)
    large, sources = switch_prior(from_catalogue("Qwen3-8B"), 1)
    huge, far = switch_prior(from_catalogue("Qwen3-32B"), 1)
    for name in small.__slots__:
        if not name.startswith("time_share"):
            assert getattr(small, name) < getattr(large, name) < getattr(huge, name)
    assert sources["switch.grad_s"].source is Source.TRANSFERRED
    assert not sources["switch.grad_s"].extrapolated
    assert far["switch.grad_s"].extrapolated


def test_sleep_level_is_the_smaller_sum() -> None:
    level, sleep_s, wake_s = sleep_costs(1.192e9)
    assert (level, round(sleep_s, 2), round(wake_s, 2)) == (1, 0.22, 1.22)
    level, sleep_s, wake_s = sleep_costs(16.381e9)
    assert (level, round(sleep_s, 2), round(wake_s, 2)) == (2, 0.31, 6.53)
    assert min(sleep_costs(0.0)[1:]) >= 0.0
