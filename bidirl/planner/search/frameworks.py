"""What a framework can run: rules on the replicas of each role, on staleness and on lending.

Every rule was read in the framework's public source; its ``source`` names project, path and commit. What was
not found there is no rule here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import gcd

from bidirl.errors import InputError
from bidirl.planner.policy import Lending
from bidirl.planner.search.layouts import RolloutLayout, Style, TrainLayout
from bidirl.planner.search.question import Question

__all__ = ["FRAMEWORKS", "Framework", "RolloutRule", "StalenessUnit", "TrainRule", "framework"]

NOBODY = frozenset({Lending.NONE})
TRAINERS = frozenset({Lending.NONE, Lending.ROLLOUT_ON_TRAIN})


class StalenessUnit(StrEnum):
    """Which staleness bounds a framework can keep."""

    FRACTION = "fraction"
    """Any number of batches."""
    FROM_ONE = "from_one"
    """None, or any number from one batch on."""
    WHOLE = "whole"
    """Whole batches."""


@dataclass(frozen=True, slots=True)
class RolloutRule:
    """A rule on rollout pools: ``broken`` returns it with its numbers, or None."""

    broken: Callable[[Question, RolloutLayout, int], str | None]
    source: str


@dataclass(frozen=True, slots=True)
class TrainRule:
    """A rule on training pools: ``broken`` returns it with its numbers, or None."""

    broken: Callable[[Question, TrainLayout, int], str | None]
    source: str


@dataclass(frozen=True, slots=True)
class Framework:
    """Rules of one framework."""

    name: str
    rollout: tuple[RolloutRule, ...]
    train: tuple[TrainRule, ...]
    staleness: StalenessUnit
    staleness_source: str
    lending: frozenset[Lending] = NOBODY
    lending_source: str = ""
    """Empty where the framework lends nothing: no option for it was found."""

    def rollout_reason(self, question: Question, layout: RolloutLayout, gpus: int) -> str | None:
        """Return why the framework cannot run this rollout pool; None if it can."""
        return self._first(rule.broken(question, layout, gpus) for rule in self.rollout)

    def train_reason(self, question: Question, layout: TrainLayout, gpus: int) -> str | None:
        """Return why the framework cannot run this training pool; None if it can."""
        return self._first(rule.broken(question, layout, gpus) for rule in self.train)

    def _first(self, reasons: Iterable[str | None]) -> str | None:
        return next((f"{self.name}: {reason}" for reason in reasons if reason is not None), None)

    def staleness_reason(self, staleness: float) -> str | None:
        """Return why the framework cannot bound staleness like this; None if it can."""
        match self.staleness:
            case StalenessUnit.FRACTION:
                return None
            case StalenessUnit.FROM_ONE:
                if staleness == 0 or staleness >= 1:
                    return None
                return f"{self.name}: staleness {staleness:g} lies between 0 and 1; use one of them"
            case StalenessUnit.WHOLE:
                if staleness % 1 == 0:
                    return None
                return f"{self.name}: staleness {staleness:g} is not a whole number of steps; round it"

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the sources of all rules, in order, each once."""
        rules = [rule.source for rule in self.rollout] + [rule.source for rule in self.train]
        rules += [self.staleness_source, self.lending_source]
        return tuple(dict.fromkeys(filter(None, rules)))


def _ranks_divide_step(question: Question, layout: TrainLayout, gpus: int) -> str | None:
    ranks = gpus if layout.style is Style.FSDP else gpus // layout.gpus
    samples = question.num_samples
    if samples % ranks:
        return (
            f"the {samples} samples of a step do not divide by {ranks} ranks (common {gcd(samples, ranks)})"
        )
    return None


def _replicas_divide_step(question: Question, layout: TrainLayout, gpus: int) -> str | None:
    replicas, samples = gpus // layout.gpus, question.num_samples
    if samples % replicas:
        return f"the {samples} samples of a step do not divide by {replicas} trainer replicas"
    return None


def _replicas_divide_update(question: Question, layout: TrainLayout, gpus: int) -> str | None:
    replicas, samples = gpus // layout.gpus, question.num_samples // question.mini_batches
    if samples % replicas:
        return f"the {samples} samples of a mini-batch do not divide by {replicas} trainer replicas"
    return None


def _updates_divide_share(question: Question, layout: TrainLayout, gpus: int) -> str | None:
    replicas, samples = gpus // layout.gpus, question.num_samples
    update, step = samples // question.mini_batches // replicas, samples // replicas
    if update == 0 or step % update:
        return f"a replica's {step} samples of a step do not divide by its {update} of a mini-batch"
    return None


def _megatron_divides_prompts(question: Question, layout: TrainLayout, gpus: int) -> str | None:
    replicas = gpus // layout.gpus
    if layout.style is Style.MEGATRON and question.groups % replicas:
        return f"the {question.groups} prompts of a step do not divide by {replicas} Megatron replicas"
    return None


def _engines_divide_prompts(question: Question, layout: RolloutLayout, gpus: int) -> str | None:
    engines = gpus // layout.gpus
    if question.groups % engines:
        return f"the {question.groups} prompts of a step do not divide by {engines} rollout replicas"
    return None


def _no_engine_pipeline(_question: Question, layout: RolloutLayout, _gpus: int) -> str | None:
    return None if layout.pp == 1 else f"its engines take no pipeline, and the layout has pp {layout.pp}"


def _no_wide_experts(question: Question, layout: RolloutLayout, _gpus: int) -> str | None:
    if layout.ep > layout.tp and question.staleness > 0:
        return f"asynchronous engines need ep = tp, and the layout has ep {layout.ep} and tp {layout.tp}"
    return None


def _tensor_and_pipeline_engines(_question: Question, layout: RolloutLayout, _gpus: int) -> str | None:
    if layout.ep > layout.tp:
        return f"its engines have tp x pp GPUs, and the layout spreads experts over {layout.ep}"
    return None


def _fsdp_only(_question: Question, layout: TrainLayout, _gpus: int) -> str | None:
    return None if layout.style is Style.FSDP else "there is no Megatron trainer"


def _megatron_only(_question: Question, layout: TrainLayout, _gpus: int) -> str | None:
    return None if layout.style is Style.MEGATRON else "its trainer is Megatron"


def _no_tensor_fsdp(_question: Question, layout: TrainLayout, _gpus: int) -> str | None:
    if layout.style is Style.FSDP and layout.tp > 1:
        return f"its FSDP trainer has no tensor parallelism, and the layout has tp {layout.tp}"
    return None


def _data_parallel_only(_question: Question, layout: TrainLayout, _gpus: int) -> str | None:
    return None if layout.gpus == 1 else f"every process is a replica, and the layout has {layout.gpus} GPUs"


_ROWS = (
    Framework(
        "verl",
        (
            RolloutRule(
                _no_engine_pipeline,
                "verl-project/verl verl/workers/config/rollout.py @005f2732: a pipeline size above 1 raises",
            ),
        ),
        (
            TrainRule(
                _ranks_divide_step,
                "verl-project/verl verl/utils/config.py @10f413d3: train_batch_size x n is a multiple of the "
                "GPUs (FSDP) or data-parallel ranks (Megatron), unless use_dynamic_bsz; verl/protocol.py "
                "@0660408c: chunks must be equal in any case",
            ),
            TrainRule(
                _replicas_divide_update,
                "verl-project/verl verl/protocol.py @0660408c: make_iterator needs whole mini-batches",
            ),
            TrainRule(
                _no_tensor_fsdp,
                "verl-project/verl verl/workers/config/actor.py @0123a352: FSDPActorConfig has a sequence "
                "size and no tensor size",
            ),
        ),
        StalenessUnit.FRACTION,
        "verl-project/verl docs/advance/fully_async.md @1dda039b: staleness_threshold is a fraction",
        TRAINERS,
        "verl-project/verl docs/advance/fully_async.md @1dda039b: dynamic_schedule lends trainers only",
    ),
    Framework(
        "areal",
        (
            RolloutRule(
                _engines_divide_prompts,
                "arXiv 2607.09207, excluded cells: AReaL 1.0.3 needs batch % rollout DP = 0",
            ),
        ),
        (),
        StalenessUnit.WHOLE,
        "inclusionAI/AReaL areal/api/cli_args.py, 1.0.4: max_head_offpolicyness is an integer",
    ),
    Framework(
        "roll",
        (
            RolloutRule(
                _tensor_and_pipeline_engines,
                "alibaba/ROLL roll/configs/worker_config.py @044104da: a vLLM worker has tp x pp GPUs",
            ),
        ),
        (
            TrainRule(
                _megatron_divides_prompts,
                "alibaba/ROLL roll/configs/base_config.py @0a6a47e5: validate_megatron_batch_size, "
                "rollout_batch_size % DP = 0; skipped for other strategies",
            ),
        ),
        StalenessUnit.FROM_ONE,
        "alibaba/ROLL roll/pipeline/rlvr/rlvr_config.py @2f732c04: async_generation_ratio >= 1",
        TRAINERS,
        "frameworks.md section 5 (ROLL @8eb27cc2): partial_gpu_mode lends train GPUs",
    ),
    Framework(
        "slime",
        (),
        (
            TrainRule(
                _megatron_only,
                "THUDM/slime slime/utils/arguments.py @002fa9d6: --train-backend has one choice",
            ),
            TrainRule(
                _replicas_divide_update,
                "THUDM/slime slime/utils/dp_schedule.py @04e67434: static micro-batches must fill all ranks "
                "(--use-dynamic-batch-size lifts this: one sample a rank is enough)",
            ),
        ),
        StalenessUnit.WHOLE,
        "frameworks.md section 3 (slime @624b824a): train_async.py is one rollout ahead",
    ),
    Framework(
        "nemo_rl",
        (
            RolloutRule(
                _no_wide_experts,
                "NVIDIA-NeMo/RL nemo_rl/models/generation/vllm/vllm_generation.py @00ab4ef4: ep is a "
                "multiple of tp, and async_engine needs ep = tp",
            ),
        ),
        (
            TrainRule(
                _replicas_divide_update,
                "NVIDIA-NeMo/RL nemo_rl/models/policy/lm_policy.py @007c9ca8 and "
                "nemo_rl/distributed/batched_data_dict.py @001888f6: train_global_batch_size % DP = 0",
            ),
        ),
        StalenessUnit.WHOLE,
        "frameworks.md section 7 (NeMo-RL @7ea279ab): max_trajectory_age_steps is an integer",
    ),
    Framework(
        "skyrl",
        (),
        (
            TrainRule(
                _replicas_divide_step,
                "NovaSky-AI/SkyRL skyrl/backends/skyrl_train/distributed/dispatch.py @22869760: a batch "
                "must divide by dp_size (mini-batches are padded)",
            ),
            TrainRule(
                _updates_divide_share,
                "NovaSky-AI/SkyRL skyrl/train/utils/utils.py @00cb5305: validate_batch_sizes, per rank",
            ),
            TrainRule(
                _no_tensor_fsdp,
                "NovaSky-AI/SkyRL skyrl/train/utils/utils.py @00cb5305: outside Megatron, data-parallel "
                "size is GPUs / sequence_parallel_size",
            ),
        ),
        StalenessUnit.WHOLE,
        "frameworks.md section 6 (SkyRL @a9564572): max_staleness_steps is an integer",
    ),
    Framework(
        "prime_rl",
        (
            RolloutRule(
                _no_engine_pipeline,
                "PrimeIntellect-ai/prime-rl src/prime_rl/configs/rl.py @0002457f: an engine is dp x tp",
            ),
        ),
        (
            TrainRule(
                _fsdp_only,
                "PrimeIntellect-ai/prime-rl src/prime_rl/trainer/parallel_dims.py @0111b1ba: dp, cp, ep; "
                "pp is always 1",
            ),
            TrainRule(
                _no_tensor_fsdp,
                "PrimeIntellect-ai/prime-rl src/prime_rl/trainer/parallel_dims.py @0111b1ba: no tp",
            ),
        ),
        StalenessUnit.WHOLE,
        "frameworks.md section 9 (prime-rl @559b4477): max_off_policy_steps is an integer",
    ),
    Framework(
        "openrlhf",
        (
            RolloutRule(
                _no_engine_pipeline,
                "OpenRLHF/OpenRLHF openrlhf/cli/train_ppo_ray.py, 0.11.2: its parser has no pipeline size",
            ),
        ),
        (
            TrainRule(
                _fsdp_only,
                "OpenRLHF/OpenRLHF openrlhf/utils/deepspeed/deepspeed.py @03ae817e: DeepSpeed, with tensor "
                "and ring-attention sizes",
            ),
            TrainRule(
                _replicas_divide_update,
                "OpenRLHF/OpenRLHF openrlhf/utils/deepspeed/deepspeed.py @03ae817e: train_batch_size is set "
                "beside the micro-batch, and DeepSpeed asserts their ratio is whole (deepspeedai/DeepSpeed"
                "#17; --use_dynamic_batch lifts it)",
            ),
        ),
        StalenessUnit.WHOLE,
        "frameworks.md section 12 (OpenRLHF @3c3be623): async_queue_size counts whole batches",
    ),
    Framework(
        "trl",
        (),
        (
            TrainRule(
                _fsdp_only,
                "huggingface/trl trl/experimental/async_grpo/async_grpo_trainer.py @00477b19: accelerate, "
                "FSDP2",
            ),
            TrainRule(
                _data_parallel_only,
                "huggingface/trl trl/experimental/async_grpo/async_grpo_trainer.py @00477b19: a step is "
                "per_device_train_batch_size x gradient_accumulation_steps x num_processes samples",
            ),
            TrainRule(
                _replicas_divide_update,
                "huggingface/trl trl/experimental/async_grpo/async_grpo_trainer.py @00477b19: the same",
            ),
        ),
        StalenessUnit.WHOLE,
        "huggingface/trl trl/experimental/async_grpo/async_grpo_config.py @019ac735: max_staleness: int",
    ),
)
FRAMEWORKS: dict[str, Framework] = {row.name: row for row in _ROWS}


def framework(name: str) -> Framework:
    """Return the rules of a framework; raise ``InputError`` for an unknown one."""
    if name not in FRAMEWORKS:
        raise InputError(f"framework {name!r} is unknown: choose one of {', '.join(sorted(FRAMEWORKS))}")
    return FRAMEWORKS[name]
