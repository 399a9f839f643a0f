"""From a job to a real backend: model folder, task, roles, and workers in threads or under Ray."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bidirl.errors import InputError
from bidirl.executor.backends.blueprint import Blueprint, RealRoles, build_worker
from bidirl.executor.backends.links import ThreadTransport, Transport
from bidirl.executor.backends.messages import Role
from bidirl.executor.backends.real import BackendState, RealBackend, check_layout
from bidirl.executor.backends.scratch import scratch
from bidirl.executor.backends.store import Prompts, SampleStore
from bidirl.executor.backends.stub import StubConfig
from bidirl.executor.backends.torch.merge import check_ordered_memory
from bidirl.executor.backends.torch.settings import LossConfig, TrainerConfig
from bidirl.executor.backends.torch.tasks import Task, make_task
from bidirl.executor.backends.torch.tiny import build_tiny
from bidirl.executor.backends.vllm.args import environment, settings_from_job
from bidirl.executor.clock import RealClock
from bidirl.planner.job import Job
from bidirl.planner.learn import Filtering, LearnConfig, ResponseLengths
from bidirl.planner.plan import Plan
from bidirl.planner.policy import Lending, Merge, Placement
from bidirl.traces.workload import Workload
from bidirl.traces.workload_config import Spread

__all__ = ["Assembly", "Kind", "assembly", "device_at_hand", "trainer_config"]

ORDERED_BYTES = 8 << 30
"""Host memory that an ordered merge may take for its gradients, per primary trainer."""


class Kind(StrEnum):
    """What plays the roles."""

    STUB = "stub"
    """Numpy stand-ins in threads of this process."""
    VLLM = "vllm"
    """vLLM and torch, in processes under Ray."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """All that a real run needs beside its clock; call ``backend`` once."""

    backend: Callable[[RealClock, BackendState | None], RealBackend]
    task: Task
    device: str
    transports: Callable[[int, Role], Transport]


def _max_prompt(workload: Workload) -> int:
    """Return the longest prompt that the workload draws for the groups of the job's steps."""
    steps = range(workload.config.num_steps if isinstance(workload.config.prompt_tokens, Spread) else 1)
    return max(int(workload.block(step).prompt_tokens.max()) for step in steps)


def _vocabulary(job: Job, learn: LearnConfig) -> int:
    if learn.model_path is None:
        return job.model.resolve(job.base_dir).vocab_size
    path = Path(job.base_dir, learn.model_path, "config.json")
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return int(config.get("text_config", config)["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"learn.model_path: {path} has no vocabulary ({error}): give a Hugging Face folder"
        ) from None


def _check(job: Job, plan: Plan) -> None:
    """Raise ``InputError`` for what a real run cannot do yet."""
    check_layout(plan)
    if job.workload.turns is not None:
        raise InputError("workload.turns: the packaged tasks have one turn; remove the table")
    if job.workload.image_tokens:
        raise InputError("workload.image_tokens: the packaged tasks are text; set it to 0")


def _folder(job: Job, learn: LearnConfig, seed: int, max_tokens: int, stop: int | None, into: Path) -> Path:
    if learn.model_path is not None:
        return Path(job.base_dir, learn.model_path).absolute()
    shape = job.model.architecture
    if shape is None:
        raise InputError(
            f"model.name = {job.model.name!r} has no weights here: give learn.model_path, or a small "
            "[model.architecture]"
        )
    return build_tiny(shape, into / "model", seed=seed, max_tokens=max_tokens, stop_token=stop)


def trainer_config(learn: LearnConfig, device: str) -> TrainerConfig:
    """Return the trainer's settings of a [learn] section."""
    loss = LossConfig(
        normalisation=learn.normalisation,
        advantage_scale=learn.advantage_scale,
        old_policy=learn.old_policy,
        clip_low=learn.clip_low,
        clip_high=learn.clip_high,
        kl_weight=learn.kl_weight,
    )
    return TrainerConfig(
        loss=loss,
        learning_rate=learn.learning_rate,
        weight_decay=learn.weight_decay,
        max_gradient_norm=learn.max_gradient_norm,
        precision=learn.dtype,
        device=device,
    )


def device_at_hand() -> str:
    """Return ``cuda`` where torch sees a GPU, else ``cpu``."""
    try:
        import torch
    except ImportError:
        raise InputError(
            "torch is not installed here: use the engine environment (docs/engine_environment.md), or "
            "--backend fake"
        ) from None
    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def assembly(
    job: Job,
    plan: Plan,
    workload: Workload,
    seed: int,
    kind: Kind,
    *,
    ray: str | None = None,
    digest: bool = False,
    stub: StubConfig | None = None,
    errors: Path | None = None,
) -> Iterator[Assembly]:
    """Make the model, start Ray where it is needed, and clear everything away at the end.

    Raises:
        InputError: the job asks for what a real run cannot do, or something is not installed.
    """
    learn = job.learn or LearnConfig()
    _check(job, plan)
    vocab_size = _vocabulary(job, learn)
    longest_prompt = _max_prompt(workload)

    @lru_cache
    def task_of(prompt_tokens: int) -> Task:
        return make_task(learn.task, vocab_size=vocab_size, prompt_tokens=prompt_tokens, reward=learn.reward)

    def prompt_of(group: int, prompt_tokens: int) -> NDArray[np.int32]:
        return task_of(min(prompt_tokens, longest_prompt)).prompt_of(seed, group)

    task = task_of(longest_prompt)
    longest = max(longest_prompt, len(prompt_of(0, longest_prompt))) + job.workload.max_response_tokens
    by_model = learn.lengths is ResponseLengths.MODEL
    stop = (learn.stop_token if learn.stop_token is not None else task.stop_token) if by_model else None
    store = SampleStore(
        Prompts(workload, seed, prompt_of, max_tokens=job.workload.max_response_tokens if by_model else None),
        task.reward,
    )
    store.keep_digests = digest
    with ExitStack() as stack:
        if kind is Kind.STUB:
            device = "numpy"
            roles: StubConfig | RealRoles = replace(
                stub or StubConfig(),
                vocab_size=vocab_size,
                seed=seed,
                temperature=learn.temperature,
                max_num_seqs=job.engine.max_num_seqs,
            )
        else:
            device = device_at_hand()
            into = stack.enter_context(scratch("bidirl-"))
            folder = _folder(job, learn, seed, longest, stop, into)
            trainer = trainer_config(learn, device)
            if plan.policy.merge is Merge.ORDERED:
                chunks = -(-plan.groups_per_step // plan.mini_batches // plan.chunk_groups)
                params = job.model.resolve(job.base_dir).num_params
                check_ordered_memory(chunks, params, ORDERED_BYTES)
            engine = settings_from_job(
                job.engine,
                folder,
                max_model_tokens=longest,
                temperature=learn.temperature,
                eos_id=stop,
                device=device,
                dtype=learn.dtype.value,
                tp=plan.rollout_replica_gpus,
            )
            roles = RealRoles(str(folder), engine, trainer, learn.pace)
        transports = _transports(plan, roles, device, kind, ray, stack, errors)
        yield Assembly(
            lambda clock, resumed: RealBackend(
                plan,
                store,
                clock,
                transports,
                scale=learn.advantage_scale,
                filters=learn.filtering is Filtering.ON,
                digest=digest,
                resumed=resumed,
            ),
            task,
            device,
            transports,
        )


def _transports(
    plan: Plan,
    roles: StubConfig | RealRoles,
    device: str,
    kind: Kind,
    ray: str | None,
    stack: ExitStack,
    errors: Path | None,
) -> Callable[[int, Role], Transport]:
    colocated = plan.placement is Placement.COLOCATED
    lending = plan.policy.lending

    def blueprint(role: Role) -> Blueprint:
        lends = {Role.ROLLOUT: Lending.TRAIN_ON_ROLLOUT, Role.TRAIN: Lending.ROLLOUT_ON_TRAIN}[role]
        both = colocated or lending in (Lending.BOTH, lends)
        return Blueprint(
            role, roles, role is Role.ROLLOUT or both, role is Role.TRAIN or both, plan.policy.merge
        )

    if kind is Kind.STUB and ray is None:

        def in_thread(_: int, role: Role) -> Transport:
            return ThreadTransport(lambda emit: build_worker(blueprint(role), emit))

        return in_thread

    from bidirl.executor.backends.ray_session import ray_session
    from bidirl.executor.backends.ray_workers import RayTransport

    count = plan.rollout_replicas + (0 if colocated else plan.train_replicas)
    width = plan.rollout_replica_gpus
    num_gpus = width if device == "cuda" else 0
    session = stack.enter_context(
        ray_session(
            None if ray in (None, "local") else ray,
            num_workers=count,
            num_gpus=num_gpus * count,
        )
    )
    env = {"OMP_NUM_THREADS": "1"}
    if isinstance(roles, RealRoles):
        env = environment(device=device, num_ranks=width)

    def in_actor(number: int, role: Role) -> Transport:
        return RayTransport(session, blueprint(role), number, num_gpus=num_gpus, env=env, errors=errors)

    return in_actor
