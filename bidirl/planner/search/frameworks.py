"""What a framework can run: rules on the replicas of each role, on staleness and on lending."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import gcd

from bidirl.errors import InputError
from bidirl.planner.policy import Lending
from bidirl.planner.search.layouts import RolloutLayout, Style, TrainLayout
from bidirl.planner.search.question import Question

__all__ = ["FRAMEWORKS", "Framework", "framework"]

RolloutRule = Callable[[Question, RolloutLayout, int], str | None]
TrainRule = Callable[[Question, TrainLayout, int], str | None]
NOBODY = frozenset({Lending.NONE})
TRAINERS = frozenset({Lending.NONE, Lending.ROLLOUT_ON_TRAIN})


@dataclass(frozen=True, slots=True)
class Framework:
    """Rules of one framework; a rule returns the broken one with its numbers, or None."""

    name: str
    rollout: tuple[RolloutRule, ...]
    train: tuple[TrainRule, ...]
    has_fractional_staleness: bool
    lending: frozenset[Lending]
    source: str

    def rollout_reason(self, question: Question, layout: RolloutLayout, gpus: int) -> str | None:
        """Return why the framework cannot run this rollout pool; None if it can."""
        return self._first(rule(question, layout, gpus) for rule in self.rollout)

    def train_reason(self, question: Question, layout: TrainLayout, gpus: int) -> str | None:
        """Return why the framework cannot run this training pool; None if it can."""
        return self._first(rule(question, layout, gpus) for rule in self.train)

    def _first(self, reasons: Iterable[str | None]) -> str | None:
        return next((f"{self.name}: {reason}" for reason in reasons if reason is not None), None)

    def staleness_reason(self, staleness: float) -> str | None:
        """Return why the framework cannot bound staleness like this; None if it can."""
        if self.has_fractional_staleness or staleness % 1 == 0:
            return None
        return f"{self.name}: staleness {staleness:g} is not a whole number of steps; round it"


def _step_by_trainer_gpus(question: Question, layout: TrainLayout, gpus: int) -> str | None:
    ranks = gpus if layout.style is Style.FSDP else gpus // layout.gpus
    samples = question.num_samples
    if samples % ranks:
        return (
            f"the {samples} samples of a step do not divide by {ranks} ranks (common {gcd(samples, ranks)})"
        )
    return None


def _update_by_replicas(question: Question, layout: TrainLayout, gpus: int) -> str | None:
    replicas, samples = gpus // layout.gpus, question.num_samples // question.mini_batches
    if samples % replicas:
        return f"the {samples} samples of a mini-batch do not divide by {replicas} trainer replicas"
    return None


def _prompts_by_engines(question: Question, layout: RolloutLayout, gpus: int) -> str | None:
    engines = gpus // layout.gpus
    if question.groups % engines:
        return f"the {question.groups} prompts of a step do not divide by {engines} rollout replicas"
    return None


def _fsdp_only(_question: Question, layout: TrainLayout, _gpus: int) -> str | None:
    return None if layout.style is Style.FSDP else "there is no Megatron trainer"


def _megatron_only(_question: Question, layout: TrainLayout, _gpus: int) -> str | None:
    return None if layout.style is Style.MEGATRON else "its trainer is Megatron"


_ROWS = (
    Framework(
        "verl",
        (),
        (_step_by_trainer_gpus, _update_by_replicas),
        True,
        TRAINERS,
        "verl validate_config: train_batch_size x n a multiple of the GPUs (FSDP) or data-parallel ranks "
        "(Megatron); mini-batches are floored by rank; dynamic_schedule lends trainers only",
    ),
    Framework(
        "areal",
        (_prompts_by_engines,),
        (),
        False,
        NOBODY,
        "batch % rollout DP = 0 and no fractional bound (arXiv 2607.09207, excluded cells)",
    ),
    Framework(
        "roll",
        (),
        (_update_by_replicas,),
        False,
        TRAINERS,
        "async_generation_ratio of whole steps or >= 1, partial_gpu_mode lends train GPUs (ROLL @8eb27cc2)",
    ),
    Framework(
        "slime",
        (),
        (_megatron_only, _update_by_replicas),
        False,
        NOBODY,
        "Megatron: global batch a multiple of micro-batch x DP (slime @624b824a)",
    ),
    Framework(
        "nemo_rl",
        (),
        (_update_by_replicas,),
        False,
        NOBODY,
        "max_trajectory_age_steps is an integer; global batch a multiple of DP (NeMo-RL @7ea279ab)",
    ),
    Framework(
        "skyrl",
        (),
        (_update_by_replicas,),
        False,
        NOBODY,
        "max_staleness_steps is an integer (SkyRL @a9564572)",
    ),
    Framework(
        "prime_rl", (), (_fsdp_only,), False, NOBODY, "FSDP2 trainer, batches packed by tokens (@559b4477)"
    ),
    Framework(
        "openrlhf",
        (),
        (_fsdp_only, _update_by_replicas),
        False,
        NOBODY,
        "DeepSpeed ZeRO; async_queue_size counts whole batches (OpenRLHF @3c3be623)",
    ),
)
FRAMEWORKS: dict[str, Framework] = {row.name: row for row in _ROWS}


def framework(name: str) -> Framework:
    """Return the rules of a framework; raise ``InputError`` for an unknown one."""
    if name not in FRAMEWORKS:
        raise InputError(f"framework {name!r} is unknown: choose one of {', '.join(sorted(FRAMEWORKS))}")
    return FRAMEWORKS[name]
