"""Borrowing leaves samples and weights untouched; and faults that would touch them are found."""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from bidirl.errors import InputError
from bidirl.executor.backends import worker
from bidirl.executor.backends.stub import StubConfig, StubEngine, StubTrainer, _log_softmax, _noise
from bidirl.executor.backends.torch.merge import arrange
from bidirl.executor.neutral import Neutrality, latest_job, neutrality, pinned_job
from bidirl.executor.roles import Draft, NamedTensors
from tests.real_jobs import run_stub, tiny_job


def compare(staleness: str, *, steps: int = 10, seed: int = 0) -> Neutrality:
    job = tiny_job(f"policy.staleness={staleness}", 'learn.task="constant"', steps=steps)
    runs = {
        "pinned, alone": run_stub(pinned_job(job, lends=False), seed),
        "pinned, lending": run_stub(pinned_job(job, lends=True), seed),
    }
    return neutrality(runs, lambda _: None)


@pytest.mark.parametrize("staleness", ["0", "0.5", "1", "2"])
def test_samples_and_weights_are_identical(staleness: str) -> None:
    found = compare(staleness)
    assert found.difference is None
    assert found.num_samples == 10 * 6 * 4
    assert found.num_versions == 11
    assert found.leases["rollout_on_train"] > 0


def test_both_directions_are_covered_on_policy() -> None:
    found = compare("0")
    assert found.missing == ()
    assert found.verdict().startswith("identical, bit by bit, in pinned mode")
    assert found.to_json()["proven"] == "pinned"


BURSTS = (
    "workload.prompts_per_step=4",
    "workload.max_response_tokens=36",
    "workload.lengths={p50 = 3, p95 = 5}",
    "workload.prompt_tokens=3",
    "workload.drift=[12, 1, 1, 1, 12, 1, 1, 1, 12, 1]",
    'learn.task="constant"',
)
"""One step in four is long, as in benchmarks/neutral.py: it keeps first the one pool busy, then the other."""
PACED = StubConfig(step_s=1.5e-3, token_s=1.2e-4)
"""Rollout and training of a long step take about as long: 60 ms."""


@pytest.mark.parametrize("staleness", ["1", "2"])
def test_both_directions_are_covered_where_lengths_come_in_bursts(staleness: str) -> None:
    job = tiny_job(*BURSTS, f"policy.staleness={staleness}", steps=10, rollout_gpus=1, gpus=2)
    runs = {
        name: run_stub(pinned_job(job, lends=lends), stub=PACED)
        for name, lends in (("pinned, alone", False), ("pinned, lending", True))
    }
    found = neutrality(runs, lambda _: None)
    assert found.difference is None
    assert found.missing == ()


def plant_reversed_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the lent side's gradients last, whatever their chunks."""

    def wrong(kind: Any, mine: Any, theirs: Sequence[Any], chunks: Any) -> list[Any]:
        found = arrange(kind, mine, theirs, chunks)
        lent = {id(gradient.values) for gradient in theirs}
        return sorted(found, key=lambda values: id(values) in lent)

    monkeypatch.setattr(worker, "arrange", wrong)


def plant_restarted_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a resumed sample draw its noise from the start again, as a plain per-request seed does."""

    def step(self: StubEngine) -> list[Draft]:
        ended = []
        for draft in self._queue[: self.config.max_num_seqs]:
            began = draft.segments[-1][0]
            logits = self._weights[int(draft.tokens[-1] if len(draft.tokens) else draft.prompt[-1])]
            noise = _noise(draft.seed, len(draft.tokens) - began, len(logits))
            token = int(np.argmax(logits + noise))
            draft.tokens = np.append(draft.tokens, np.int32(token)).astype(np.int32)
            draft.logprobs = np.append(draft.logprobs, _log_softmax(logits)[token]).astype(np.float32)
            if len(draft.tokens) >= draft.max_tokens:
                ended.append(draft)
        self._queue = [draft for draft in self._queue if len(draft.tokens) < draft.max_tokens]
        return ended

    monkeypatch.setattr(StubEngine, "step", step)


def plant_stale_auxiliary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the auxiliary trainer keep the weights that it started with."""
    monkeypatch.setattr(StubTrainer, "load", lambda self, tensors: None)


def plant_wrong_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an engine load the right version only on the rollout pool."""
    inner = StubEngine.load

    def load(self: StubEngine, version: int, tensors: NamedTensors) -> float:
        asleep = bool(np.isnan(self._weights).any())
        if asleep:  # it enters a lease: version 0 is what it finds
            fresh = StubEngine(self.config)
            return inner(self, version, iter({"bigram.weight": fresh._weights}.items()))
        return inner(self, version, tensors)

    monkeypatch.setattr(StubEngine, "load", load)


PLANTED = [
    (plant_reversed_merge, "0", "weights"),
    (plant_stale_auxiliary, "0", "weights"),
    (plant_wrong_version, "0", "tokens"),
    (plant_restarted_noise, "0", "tokens"),
]


@pytest.mark.parametrize(
    ("plant", "staleness", "where"), PLANTED, ids=lambda item: getattr(item, "__name__", str(item))
)
def test_a_planted_fault_is_found(
    plant: Any, staleness: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    found = compare(staleness, steps=12)
    assert found.difference is not None
    assert where in found.difference
    assert found.verdict().startswith("not identical")


def test_a_direction_without_a_lease_proves_nothing() -> None:
    job = tiny_job("policy.name=rollout_on_train", "policy.staleness=0", steps=4)
    runs = {
        "pinned, alone": run_stub(pinned_job(job, lends=False)),
        "pinned, lending": run_stub(pinned_job(job, lends=True)),
        "latest, lending": run_stub(latest_job(job)),
    }
    found = neutrality(runs, lambda record: record.end_s)
    assert found.missing == ("train_on_rollout",)
    assert found.verdict().startswith("cannot tell")
    assert found.to_json()["proven"] is None
    assert set(found.tokens_per_s) == set(runs)


def test_a_single_pool_has_nothing_to_lend() -> None:
    job = tiny_job("policy.name=colocated_sync", gpus=2)
    with pytest.raises(InputError, match="nothing is lent"):
        pinned_job(job, lends=True)


def test_the_page_says_how_many_leases_worked() -> None:
    page: Any = importlib.import_module("benchmarks.neutral")
    found = Neutrality(
        difference=None,
        num_samples=4800,
        num_tokens=50_000,
        num_versions=301,
        leases={"rollout_on_train": 90, "train_on_rollout": 80},
        lent={"rollout_on_train": 700, "train_on_rollout": 110},
        num_resumed=1200,
        tokens_per_s={"pinned, alone": 800.4, "pinned, lending": None, "latest, lending": 900.0},
        weights="",
    )
    data = {"staleness": "1", "num_steps": 300, "reward": (0.05, 0.7), "worked": {"rollout_on_train": 75}}
    text = page.page([data | found.to_json()])
    assert (
        "| 1 | 300 | 4,800 (50,000) | 301 | 75 of 90 (700) | 0 of 80 (110) | 1,200 | identical | 0.05, 0.70 |"
        in text
    )
    assert "| 1 | 800 | - | 900 |" in text
