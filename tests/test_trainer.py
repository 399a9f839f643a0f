import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.errors import InputError
from bidirl.models.estimate import Estimate, Source, from_mapping, total, worst
from bidirl.models.makespan import trainer_makespan_s
from bidirl.models.trainer import SegmentCost, TrainerModel, slowest_work

TRAINER = TrainerModel(
    old_logprob=SegmentCost(0.1, 1e-4),
    reference=SegmentCost(0.1, 1e-4),
    update=SegmentCost(0.2, 4e-4, 0.98),
    pair_tokens=7e-5,
    alpha_comm_s=0.003,
    beta_comm_s_per_byte=4e-11,
    beta_inter_s_per_byte=8e-11,
    overlap_p=2.0,
    optimizer_s=0.5,
    forward_bytes=8e9,
    update_bytes=32e9,
)
SEGMENTS = st.sampled_from(["old_logprob", "reference", "update"])
WORK = st.floats(1.0, 1e7)


def test_sample_work_counts_causal_pairs_of_scalars_and_arrays() -> None:
    lengths = np.array([1, 10, 1000], dtype=np.int64)
    pairs = np.array([1.0, 55.0, 500_500.0])
    work = TRAINER.sample_work(lengths)
    assert work.tolist() == pytest.approx((lengths + 7e-5 * pairs).tolist())
    assert TRAINER.sample_work(1000.0) == work[2]


def test_a_pull_ends_with_its_slowest_replica() -> None:
    assert slowest_work(100.0, 10.0, 4) == 25.0
    assert slowest_work(100.0, 60.0, 4) == 60.0
    alone = TRAINER.pull_s("reference", 1000.0, 100.0, 1)
    assert alone == 0.1 + 0.1  # one replica has nobody to talk to
    assert TRAINER.pull_s("reference", 0.0, 0.0, 4) == 0.0


@given(SEGMENTS, WORK, st.floats(0.0, 1.0), st.integers(1, 64), st.floats(1.0, 16.0))
def test_overlap_lies_between_the_longer_part_and_the_sum(
    segment: str, work: float, share: float, replicas: int, p: float
) -> None:
    longest = share * work
    part = slowest_work(work, longest, replicas)
    compute = TRAINER.segment(segment).compute_s(part)
    comm = TRAINER.communication_s(segment, part, replicas)
    model = TrainerModel(**{f: getattr(TRAINER, f) for f in TRAINER.__slots__} | {"overlap_p": p})
    time_s = model.pull_s(segment, work, longest, replicas)
    assert max(compute, comm) * (1 - 1e-12) <= time_s <= (compute + comm) * (1 + 1e-12)


@given(SEGMENTS, WORK, WORK, st.integers(2, 8))
def test_more_work_takes_longer_and_splitting_never_helps(
    segment: str, first: float, second: float, replicas: int
) -> None:
    both = TRAINER.pull_s(segment, first + second, 0.0, replicas)
    assert both >= TRAINER.pull_s(segment, first, 0.0, replicas)
    linear = TrainerModel(
        **{f: getattr(TRAINER, f) for f in TRAINER.__slots__} | {"update": SegmentCost(0.2, 4e-4)}
    )
    parts = linear.pull_s(segment, first, 0.0, replicas) + linear.pull_s(segment, second, 0.0, replicas)
    assert linear.pull_s(segment, first + second, 0.0, replicas) <= parts * (1 + 1e-12)


def test_crossing_nodes_costs_more() -> None:
    inside = TRAINER.communication_s("update", 1e5, 8)
    across = TRAINER.communication_s("update", 1e5, 9)
    assert across > 1.9 * inside
    assert TRAINER.communication_s("update", 16384, 8) == pytest.approx(0.003 + 4e-11 * 32e9 * 7 / 8)


def test_makespan_adds_segments_and_optimizer_steps() -> None:
    segments = [
        ("old_logprob", 1e5, 2e3),
        ("reference", 0.0, 0.0),
        ("update", 1e5, 2e3),
        ("update", 1e5, 2e3),
    ]
    expected = TRAINER.pull_s("old_logprob", 1e5, 2e3, 4) + 2 * (TRAINER.pull_s("update", 1e5, 2e3, 4) + 0.5)
    assert trainer_makespan_s(TRAINER, segments, 4) == pytest.approx(expected)
    assert trainer_makespan_s(TRAINER, segments, 8) < expected


def test_unknown_segment_is_an_input_error() -> None:
    with pytest.raises(InputError, match="'values' is unknown"):
        TRAINER.pull_s("values", 1.0, 1.0, 1)


def test_estimates_keep_the_worst_source() -> None:
    measured = Estimate.within(2.0, 1.1, Source.MEASURED, "timer")
    roofline = Estimate.within(3.0, 2.0, Source.ROOFLINE, "peak").flagged("far")
    both = measured + roofline
    assert (both.value, both.source, both.note, both.extrapolated) == (
        5.0,
        Source.ROOFLINE,
        "peak; far",
        True,
    )
    assert both.low == pytest.approx(2 / 1.1 + 1.5)
    assert both.high == pytest.approx(2.2 + 6.0)
    assert (2.0 * measured).high == pytest.approx(4.4)
    assert (measured * -1.0).low == pytest.approx(-2.2)
    assert total([]).value == 0.0
    assert total([measured, roofline]) == Estimate.exact(0.0) + both
    assert worst([Source.FITTED, Source.ASSUMED, Source.MEASURED]) is Source.ASSUMED
    assert worst([]) is Source.MEASURED


@given(st.floats(-1e9, 1e9), st.floats(1.0, 5.0), st.sampled_from(Source), st.text())
def test_estimates_survive_json(value: float, factor: float, source: Source, note: str) -> None:
    estimate = Estimate.within(value, factor, source, note)
    assert from_mapping(estimate.to_mapping()) == estimate


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": True}, "must be a number"),
        ({"value": 9.0}, "low <= value <= high"),
        ({"source": "guess"}, "must be one of measured"),
        ({"colour": 1}, "unknown key 'colour'"),
        ({"high": float("inf")}, "finite"),
        ({"note": 3}, "must be a text"),
    ],
)
def test_malformed_estimates(change: dict[str, object], message: str) -> None:
    good = Estimate.within(1.0, 2.0, Source.FITTED).to_mapping()
    with pytest.raises(InputError, match=message):
        from_mapping(good | change)
