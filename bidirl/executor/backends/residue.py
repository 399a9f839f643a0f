"""What a role that sleeps leaves on the device, held against what the memory model plans for it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bidirl.models.memory import TRAIN_OVERHEAD_BYTES
from bidirl.models.memory_roles import engine_residue_bytes

__all__ = ["Residue", "device_residue"]

SLACK = 1.1
"""The planned figures are of other boards: a tenth more is no sign of memory that was not given up."""


@dataclass(frozen=True, slots=True)
class Residue:
    """Measures a worker's devices while both roles sleep."""

    limit_bytes: float
    used_bytes: Callable[[], float]
    """Memory in use on the fullest device."""

    def check(self) -> None:
        """Raise ``MemoryError`` if more was left than is planned: the role that wakes would not fit."""
        used = self.used_bytes()
        if used > self.limit_bytes:
            raise MemoryError(
                f"{used / 1e9:.2f} GB stay on a device while both roles sleep, "
                f"{self.limit_bytes / 1e9:.2f} GB are planned: look for another process there"
            )


def device_residue(device: str, num_devices: int) -> Residue | None:
    """Return what measures a worker's GPUs; None on a CPU, where a role that sleeps frees nothing.

    Planned are a sleeping engine and the context and buffers of a trainer's process (``models.memory``).
    Written to torch's documented API; not run on a GPU so far.
    """
    if not device.startswith("cuda"):
        return None
    return Residue(SLACK * (engine_residue_bytes(num_devices) + TRAIN_OVERHEAD_BYTES), _used_bytes)


def _used_bytes() -> float:
    import torch

    cuda: Any = torch.cuda
    pairs = [cuda.mem_get_info(number) for number in range(cuda.device_count())]
    return float(max((total - free for free, total in pairs), default=0))
