"""Rules of frameworks: each forbids what its source forbids, with numbers, and names that source."""

import re

import pytest

from bidirl.planner.policy import Lending
from bidirl.planner.search.frameworks import FRAMEWORKS, framework
from bidirl.planner.search.layouts import RolloutLayout, Style, TrainLayout
from tests.search_cases import question

FSDP, MEGATRON = TrainLayout(Style.FSDP, 1), TrainLayout(Style.MEGATRON, 1)
READ = re.compile(r"@[0-9a-f]{7,8}\b|\b\d+\.\d+\.\d+\b|arXiv \d{4}\.\d{5}")
"""A commit, a release, or a paper."""


def test_every_rule_names_project_path_and_commit() -> None:
    for name, rules in FRAMEWORKS.items():
        assert rules.sources, name
        for source in rules.sources:
            assert READ.search(source), source
        assert (rules.lending == {Lending.NONE}) == (rules.lending_source == "")


@pytest.mark.parametrize(
    ("name", "layout", "gpus", "words"),
    [
        ("verl", FSDP, 12, "64 samples of a step do not divide by 12 ranks"),
        ("verl", TrainLayout(Style.FSDP, 1, cp=2), 16, None),
        ("verl", TrainLayout(Style.FSDP, 2), 16, "no tensor parallelism, and the layout has tp 2"),
        ("areal", FSDP, 12, None),
        ("roll", TrainLayout(Style.MEGATRON, 1), 16, "8 prompts of a step do not divide by 16 Megatron"),
        ("roll", FSDP, 12, None),
        ("slime", FSDP, 8, "its trainer is Megatron"),
        ("slime", MEGATRON, 12, "do not divide by 12 trainer replicas"),
        ("nemo_rl", MEGATRON, 12, "do not divide by 12 trainer replicas"),
        ("nemo_rl", TrainLayout(Style.FSDP, 2), 16, None),
        ("skyrl", MEGATRON, 12, "do not divide by 12 trainer replicas"),
        ("skyrl", TrainLayout(Style.FSDP, 2), 16, "no tensor parallelism"),
        ("prime_rl", MEGATRON, 8, "no Megatron trainer"),
        ("prime_rl", TrainLayout(Style.FSDP, 1, cp=4), 12, None),
        ("openrlhf", TrainLayout(Style.FSDP, 2), 16, None),
        ("openrlhf", FSDP, 12, "do not divide by 12 trainer replicas"),
        ("trl", TrainLayout(Style.FSDP, 1, cp=2), 8, "every process is a replica, and the layout has 2 GPUs"),
        ("trl", FSDP, 8, None),
    ],
)
def test_training_pools(name: str, layout: TrainLayout, gpus: int, words: str | None) -> None:
    """The job has 8 prompts of 8 samples."""
    reason = framework(name).train_reason(question(), layout, gpus)
    assert (reason is None) is (words is None)
    assert words is None or (reason is not None and reason.startswith(f"{name}: ") and words in reason)


def test_mini_batches_count_per_replica() -> None:
    """SkyRL: 64 samples on 3 replicas would be 21 each and 5 of a mini-batch."""
    asked = question("workload.mini_batches=4", "workload.prompts_per_step=12")
    assert framework("skyrl").train_reason(asked, FSDP, 12) is None  # 8 each, 2 of a mini-batch
    assert "do not divide" in (framework("slime").train_reason(asked, MEGATRON, 16) or "")


@pytest.mark.parametrize(
    ("name", "layout", "gpus", "words"),
    [
        ("verl", RolloutLayout(2, 2), 8, "no pipeline"),
        ("verl", RolloutLayout(1, 1, 8), 8, None),
        ("areal", RolloutLayout(1), 3, "8 prompts of a step do not divide by 3 rollout replicas"),
        ("roll", RolloutLayout(1, 1, 8), 8, "spreads experts over 8"),
        ("nemo_rl", RolloutLayout(1, 1, 8), 8, "asynchronous engines need ep = tp"),
        ("prime_rl", RolloutLayout(2, 2), 8, "no pipeline"),
        ("openrlhf", RolloutLayout(2, 2), 8, "no pipeline"),
        ("slime", RolloutLayout(2, 2), 8, None),
        ("skyrl", RolloutLayout(1, 1, 8), 8, None),
    ],
)
def test_rollout_pools(name: str, layout: RolloutLayout, gpus: int, words: str | None) -> None:
    reason = framework(name).rollout_reason(question(), layout, gpus)
    assert (reason is None) is (words is None)
    assert words is None or words in (reason or "")


def test_staleness_in_the_units_of_the_framework() -> None:
    broken = {
        bound: sorted(name for name, rules in FRAMEWORKS.items() if rules.staleness_reason(bound))
        for bound in (0.0, 0.5, 1.0, 1.5)
    }
    assert broken[0.0] == broken[1.0] == []
    assert broken[0.5] == sorted(set(FRAMEWORKS) - {"verl"})
    assert broken[1.5] == sorted(set(FRAMEWORKS) - {"verl", "roll"})
