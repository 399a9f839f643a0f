"""What a worker process builds its roles from: plain values that can be sent to it."""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bidirl.executor.backends.messages import Message, Post, Role
from bidirl.executor.backends.paced import PacedEngine, PacedTrainer
from bidirl.executor.backends.stub import StubConfig, StubEngine, StubTrainer
from bidirl.executor.backends.torch.settings import TrainerConfig
from bidirl.executor.backends.vllm.args import EngineSettings
from bidirl.executor.backends.worker import Worker
from bidirl.executor.roles import Engine, Trainer
from bidirl.planner.learn import PaceConfig

__all__ = ["Blueprint", "RealRoles", "build_worker"]


@dataclass(frozen=True, slots=True)
class RealRoles:
    """vLLM and torch on one model folder."""

    folder: str
    engine: EngineSettings
    trainer: TrainerConfig
    pace: PaceConfig | None = None


@dataclass(frozen=True, slots=True)
class Blueprint:
    """The roles of one worker; those that nobody will ask for are not built."""

    role: Role
    roles: RealRoles | StubConfig
    has_engine: bool
    has_trainer: bool
    merge: str


def build_worker(blueprint: Blueprint, emit: Callable[[Message], None], post: Post | None = None) -> Worker:
    """Return a worker that will build its roles in its own thread when it starts."""
    engine, trainer, devices = _builders(blueprint.roles)
    return Worker(
        blueprint.role,
        engine if blueprint.has_engine else None,
        trainer if blueprint.has_trainer else None,
        emit,
        post=post,
        merge=blueprint.merge,
        devices=devices,
    )


def _builders(
    roles: RealRoles | StubConfig,
) -> tuple[Callable[[], Engine], Callable[[], Trainer], Callable[[], tuple[str, ...]] | None]:
    if isinstance(roles, StubConfig):
        return lambda: StubEngine(roles), lambda: StubTrainer(roles), None

    def engine() -> Engine:
        from bidirl.executor.backends.vllm.engine import VllmEngine

        made = VllmEngine(roles.engine)
        return made if roles.pace is None else PacedEngine(made, roles.pace)

    def trainer() -> Trainer:
        from bidirl.executor.backends.torch.trainer import TorchTrainer

        made = TorchTrainer(Path(roles.folder), roles.trainer)
        return made if roles.pace is None else PacedTrainer(made, roles.pace)

    return engine, trainer, lambda: _devices(roles.trainer.device)


def _devices(device: str) -> tuple[str, ...]:
    """Name the devices that this process really uses: CUDA UUIDs, or host and process on a CPU."""
    if not device.startswith("cuda"):
        return (f"{socket.gethostname()}/{os.getpid()}",)
    import torch

    cuda: Any = torch.cuda
    return tuple(str(cuda.get_device_properties(number).uuid) for number in range(cuda.device_count()))
