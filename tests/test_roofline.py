import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.errors import InputError
from bidirl.models import catalogue
from bidirl.models.architecture import from_catalogue
from bidirl.models.catalogue import Gpu
from bidirl.models.estimate import Source
from bidirl.models.roofline import ExpertIteration, Links, rollout_prior, trainer_prior

LINKS = Links(peer_bytes_per_s=450e9, node_bytes_per_s=400e9, gpus_per_node=8)
NAMES = ["Qwen3-0.6B", "Qwen3-8B", "Qwen3-32B", "Qwen3-30B-A3B", "Qwen3-VL-4B"]


def test_h100_decode_against_a_measured_point() -> None:
    """H100, Llama-3.1-8B in BF16, tp 1: aiconfigurator's own model says 6.4 + 0.012 b + 4.2e-5 C ms."""
    model, _ = rollout_prior(catalogue.gpu("H100"), from_catalogue("Llama-3.1-8B"), 1, LINKS)
    base_s, context_s = model.decode(32)
    assert base_s + 32 * 1000 * context_s == pytest.approx(8.1e-3, rel=0.25)


@given(st.sampled_from(NAMES), st.sampled_from(["A6000", "H100", "H20", "B200"]), st.integers(1, 255))
def test_decode_is_monotone_and_faster_in_parallel(name: str, board: str, seqs: int) -> None:
    shape, device = from_catalogue(name), catalogue.gpu(board)
    one, _ = rollout_prior(device, shape, 1, LINKS)
    four, _ = rollout_prior(device, shape, 4, LINKS)
    base_s, context_s = one.decode(seqs)
    assert 0 < base_s < one.decode(seqs + 1)[0]
    assert four.decode(seqs)[1] < context_s
    assert one.mixed(1000, 1e6, seqs, 1000, seqs) > one.mixed(10, 100.0, seqs, 1000, seqs)


def test_experts_are_read_as_they_are_touched() -> None:
    shape = from_catalogue("Qwen3-30B-A3B")
    model, sources = rollout_prior(catalogue.gpu("H100"), shape, 1, LINKS)
    assert isinstance(model, ExpertIteration)
    few, many = model.decode(1)[0], model.decode(256)[0]
    assert many - few > 0.8 * model.experts_s
    assert shape.decode_bytes(1e9) == pytest.approx(
        2 * (shape.num_params - shape.vocab_size * shape.hidden_size)
    )
    dense_s = (shape.decode_bytes(1.0)) / (3.35e12 * 0.78)
    assert few == pytest.approx(dense_s, abs=2e-3)
    assert sources["iteration.experts_s"].source is Source.ROOFLINE


@given(st.sampled_from(NAMES), st.sampled_from([1, 2, 4]), st.sampled_from([8, 16, 64]))
def test_trainer_prior_names_every_coefficient(name: str, tp: int, gpus: int) -> None:
    shape = from_catalogue(name)
    trainer, sources = trainer_prior(catalogue.gpu("H100"), shape, tp, gpus, LINKS)
    for key, estimate in sources.items():
        value: object = trainer
        for part in key.split(".")[1:]:
            value = getattr(value, part)
        assert value == estimate.value, key
    assert trainer.update.alpha_s == pytest.approx(4 * trainer.reference.alpha_s)
    assert trainer.pair_tokens == shape.pair_tokens
    half, _ = trainer_prior(catalogue.gpu("H100"), shape, tp, gpus * 2, LINKS)
    assert half.optimizer_s == pytest.approx(trainer.optimizer_s / 2)


@pytest.mark.parametrize(
    ("model", "seq_len", "board", "num_gpus", "measured_s"),
    [  # prime-rl benchmarks/results/BENCHMARKS.md @559b4477, SFT Full, FA2/FA3, recompute
        ("Qwen3-0.6B", 8192, "H100", 1, 0.32),
        ("Qwen3-0.6B", 16384, "H100", 1, 0.64),
        ("Qwen3-4B", 16384, "H200", 8, 2.47),
        ("Qwen3-4B", 16384, "B200", 8, 1.92),
        ("Qwen3-30B-A3B", 16384, "H200", 8, 3.74),
    ],
)
def test_trainer_prior_covers_measured_micro_batches(
    model: str, seq_len: int, board: str, num_gpus: int, measured_s: float
) -> None:
    shape = from_catalogue(model)
    trainer, sources = trainer_prior(catalogue.gpu(board), shape, 1, num_gpus, LINKS)
    work = trainer.sample_work(float(seq_len))
    alpha = sources["trainer.update.alpha_s"]
    assert alpha.low * work <= measured_s <= 1.2 * (alpha.high * work)


def test_missing_numbers_are_named() -> None:
    blank = Gpu(name="X", bf16_flop_per_s=1e14, pcie_bytes_per_s=1e10)
    with pytest.raises(InputError, match="gpu 'X' has no memory_bandwidth_gb_per_s"):
        rollout_prior(blank, from_catalogue("Qwen3-8B"), 1, LINKS)
