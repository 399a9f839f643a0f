"""A replica cut over two ranks by FSDP2 (gloo on CPUs) gives what one device gives."""

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.learning import CASES, shape_of
from bidirl.executor.backends.torch.advantages import global_counts
from bidirl.executor.backends.torch.settings import LossConfig, TrainerConfig
from bidirl.executor.backends.torch.tiny import build_tiny
from bidirl.executor.roles import Draft, Row
from bidirl.planner.events import SegmentKind

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.engine

CONFIG = TrainerConfig(loss=LossConfig(kl_weight=0.1), micro_tokens=40, epsilon=1e-2)
"""Small micro-batches: an odd number of them, so that one rank has one less. A large epsilon: Adam's first
step is the sign of the gradient otherwise, and makes much of a rounding error near zero."""
RANKS = 2
NUM_STEPS = 2


def rows() -> list[Row]:
    rng = np.random.default_rng(3)
    found = []
    for at in range(9):
        prompt, tokens = (rng.integers(64, size=int(rng.integers(2, 9)), dtype=np.int32) for _ in range(2))
        noise = rng.normal(-4.0, 0.1, len(tokens)).astype(np.float32)
        draft = Draft(at, 0, prompt, at, 9, tokens, noise)
        found.append(Row(draft, 0.0, float(rng.normal())))
    return found


def play(trainer: Any, save_to: str = "") -> dict[str, Any]:
    """Return all that a trainer says in two steps."""
    chunks = [rows()[:4], rows()[4:]]
    num_tokens, num_sequences = global_counts(rows())
    counts = {"num_tokens": num_tokens, "num_sequences": num_sequences}
    said: dict[str, Any] = {"norms": [], "logprobs": trainer.logprobs(rows())}
    for step in range(NUM_STEPS):
        pieces = []
        for number, chunk in enumerate(chunks):
            found = trainer.run(SegmentKind.REFERENCE, number, chunk, **counts).logprobs
            known = [replace(row, reference=values) for row, values in zip(chunk, found, strict=True)]
            pieces.append(trainer.run(SegmentKind.UPDATE, number, known, **counts))
        said["norms"].append(trainer.apply([piece.gradient for piece in pieces])["gradient_norm"])
        said["stats"] = [piece.stats for piece in pieces]
        if save_to and step == 0:
            trainer.save(save_to)
            trainer.states.move(trainer.states.device)
    said["after"] = trainer.logprobs(rows())
    said["weights"] = {name: tensor.clone().numpy() for name, tensor in trainer.tensors()}
    said["digest"] = trainer.digest()
    if save_to:
        trainer.restore(save_to)
        said["steps"] = trainer.states.num_steps
        said["restored"] = trainer.digest()
    return said


def rank_of_two(rank: int, port: int, folder: Path, out: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from bidirl.executor.backends.torch.trainer import TorchTrainer

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    trainer = TorchTrainer(folder, CONFIG, mesh=init_device_mesh("cpu", (RANKS,)))
    said = play(trainer, str(out / "saved"))
    torch.save({**said, "num_params": trainer.num_params}, out / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]], Path]:
    from bidirl.executor.backends.torch.trainer import TorchTrainer

    out = tmp_path_factory.mktemp("sharded")
    folder = build_tiny(shape_of(CASES["constant"]), out / "model", seed=1, max_tokens=64)
    alone = TorchTrainer(folder, CONFIG)
    said = {**play(alone), "num_params": alone.num_params}
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    torch.multiprocessing.spawn(rank_of_two, args=(port, folder, out), nprocs=RANKS)
    return said, [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(RANKS)], out


def test_two_ranks_say_what_one_says(both: tuple[dict[str, Any], list[dict[str, Any]], Path]) -> None:
    alone, ranks, _ = both
    assert sum(rank["num_params"] for rank in ranks) == alone["num_params"]
    for rank in ranks:
        assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        for key in ("logprobs", "after"):
            for a, b in zip(rank[key], alone[key], strict=True):
                assert a == pytest.approx(b, abs=1e-4)
        for a, b in zip(rank["stats"], alone["stats"], strict=True):
            assert a == pytest.approx(b, abs=1e-3)
        for name, values in alone["weights"].items():
            assert rank["weights"][name] == pytest.approx(values, abs=1e-4)
    assert ranks[0]["digest"] == ranks[1]["digest"]


def test_its_checkpoint_is_that_of_one_device(
    both: tuple[dict[str, Any], list[dict[str, Any]], Path],
) -> None:
    from bidirl.executor.backends.torch.trainer import TorchTrainer

    _, ranks, out = both
    one = TorchTrainer(out / "model", CONFIG)
    one.restore(str(out / "saved"))
    assert one.states.num_steps == ranks[0]["steps"] == 1
    assert one.digest() == ranks[0]["restored"]
    assert ranks[0]["restored"] != ranks[0]["digest"]
