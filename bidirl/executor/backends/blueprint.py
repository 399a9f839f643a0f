"""What a worker process builds its roles from: plain values that can be sent to it."""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bidirl.executor.backends.messages import Message, Post, Role
from bidirl.executor.backends.paced import PacedEngine, PacedTrainer
from bidirl.executor.backends.residue import Residue, device_residue
from bidirl.executor.backends.stub import StubConfig, StubEngine, StubTrainer
from bidirl.executor.backends.torch.settings import TrainerConfig
from bidirl.executor.backends.vllm.args import EngineSettings
from bidirl.executor.backends.worker import Worker
from bidirl.executor.roles import Engine, Trainer
from bidirl.planner.learn import PaceConfig

__all__ = ["Blueprint", "RealRoles", "build_worker"]


@dataclass(frozen=True, slots=True)
class RealRoles:
    """vLLM and torch on one model folder; both have the devices that ``engine.tp`` counts."""

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
        residue=_residue(blueprint.roles),
    )


def _residue(roles: RealRoles | StubConfig) -> Residue | None:
    return None if isinstance(roles, StubConfig) else device_residue(roles.trainer.device, roles.engine.tp)


def _builders(
    roles: RealRoles | StubConfig,
) -> tuple[Callable[[], Engine], Callable[[], Trainer], Callable[[], tuple[str, ...]] | None]:
    if isinstance(roles, StubConfig):
        return lambda: StubEngine(roles), lambda: StubTrainer(roles), None

    def engine() -> Engine:
        made = _engine(roles.engine)
        return made if roles.pace is None else PacedEngine(made, roles.pace)

    def trainer() -> Trainer:
        made = _trainer(Path(roles.folder), roles.trainer, roles.engine.tp)
        return made if roles.pace is None else PacedTrainer(made, roles.pace)

    return engine, trainer, lambda: _devices(roles.trainer.device, roles.engine.tp)


def _engine(settings: EngineSettings) -> Engine:
    """Return vLLM in this process, or in processes of its own where it has several devices."""
    if settings.tp == 1:
        from bidirl.executor.backends.vllm.engine import VllmEngine

        return VllmEngine(settings)
    from bidirl.executor.backends.vllm.async_engine import AsyncVllmEngine

    return AsyncVllmEngine(settings)


def _trainer(folder: Path, config: TrainerConfig, num_devices: int) -> Trainer:
    """Return a plain trainer, or one that is cut over several devices."""
    if num_devices == 1:
        from bidirl.executor.backends.torch.trainer import TorchTrainer

        return TorchTrainer(folder, config)
    from bidirl.executor.backends.torch.ranks import RankedTrainer

    return RankedTrainer(folder, config, num_devices)


def _devices(device: str, count: int) -> tuple[str, ...]:
    """Name the devices that this process really uses: CUDA UUIDs, or host, process and rank on a CPU."""
    if not device.startswith("cuda"):
        own = f"{socket.gethostname()}/{os.getpid()}"
        return (own,) if count == 1 else tuple(f"{own}/{rank}" for rank in range(count))
    import torch

    cuda: Any = torch.cuda
    return tuple(str(cuda.get_device_properties(number).uuid) for number in range(cuda.device_count()))
