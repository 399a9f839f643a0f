"""Sourced facts about GPUs and models: look-up by name, and gaps that stay gaps."""

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from bidirl.errors import InputError

__all__ = ["Gpu", "gpu", "gpu_matches", "gpu_names", "model_names", "model_row"]

GPU_ALIASES = MappingProxyType(
    {
        "a100": ("A100 40GB SXM", "A100 80GB SXM", "A100 80GB PCIe"),
        "a100 sxm": ("A100 40GB SXM", "A100 80GB SXM"),
        "a100 80gb": ("A100 80GB SXM", "A100 80GB PCIe"),
        "a100 pcie": ("A100 80GB PCIe",),
        "a6000": ("RTX A6000",),
        "4090": ("RTX 4090",),
        "geforce rtx 4090": ("RTX 4090",),
        "rtx pro 6000": (
            "RTX PRO 6000 Blackwell Server Edition",
            "RTX PRO 6000 Blackwell Workstation Edition",
        ),
        "h100": ("H100 SXM",),
        "h100 80gb hbm3": ("H100 SXM",),
        "h20": ("H20 96GB",),
        "h20-3e": ("H20 141GB (H20-3e)",),
        "h200 sxm": ("H200",),
        "gb200": ("GB200 (per GPU)",),
        "mi300": ("MI300X",),
    }
)
"""Short names people write. One that fits several boards is refused with the list. H100 means the SXM
board and H20 the 96 GB one, the boards that RL clusters are built of (frameworks' tables say no more)."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Numbers of one GPU in SI units; None where no source was found.

    Rates are peaks, without sparsity and one way. Read a number with ``need``, which explains a gap.
    """

    name: str
    memory_bytes: float | None = None
    memory_bandwidth_bytes_per_s: float | None = None
    bf16_flop_per_s: float | None = None
    fp8_flop_per_s: float | None = None
    nvlink_bytes_per_s: float | None = None
    """GPU-to-GPU link; None also where the board has PCIe only."""
    pcie_bytes_per_s: float | None = None
    inter_node_bytes_per_s: float | None = None
    """Network per GPU of typical servers; an assumption of its source, not a property of the chip."""
    nvlink_gpus: int = 8
    """GPUs of a node that the NVLink connects; 2 for boards with a bridge."""
    source: str = ""
    note: str = ""

    def need(self, field: str) -> float:
        """Return the number ``field``; raise ``InputError`` naming the gap and how to fill it."""
        number: float | None = getattr(self, field)
        if number is None:
            key = JOB_KEYS.get(field, field)
            raise InputError(
                f"gpu {self.name!r} has no {key} in the catalogue: no source gives it; "
                f"give it in the job, cluster.gpu = {{name = {self.name!r}, {key} = ...}}"
            )
        return number

    def peer_bytes_per_s(self, num_gpus: int) -> float:
        """Return the one-way rate among ``num_gpus`` GPUs of a node: NVLink where it spans them, or PCIe."""
        if self.nvlink_bytes_per_s is not None and num_gpus <= self.nvlink_gpus:
            return self.nvlink_bytes_per_s
        return self.need("pcie_bytes_per_s")


COLUMNS = MappingProxyType(
    {
        "memory_gib": ("memory_bytes", 2.0**30),
        "memory_bandwidth_gb_per_s": ("memory_bandwidth_bytes_per_s", 1e9),
        "bf16_dense_tflops": ("bf16_flop_per_s", 1e12),
        "fp8_dense_tflops": ("fp8_flop_per_s", 1e12),
        "nvlink_gb_per_s": ("nvlink_bytes_per_s", 1e9),
        "pcie_gb_per_s": ("pcie_bytes_per_s", 1e9),
        "typical_inter_node_gbit_per_s": ("inter_node_bytes_per_s", 1e9 / 8),
    }
)
"""Column of gpus.csv (and key of a job's GPU table) -> field of ``Gpu`` and factor to SI."""
JOB_KEYS = MappingProxyType({field: column for column, (field, _) in COLUMNS.items()})


NVLINK_GPUS = MappingProxyType({"RTX A6000": 2, "A40": 2, "GB200 (per GPU)": 72})
"""GPUs that the link connects where it is not the usual 8 of a node. Source: the notes of data/gpus.csv."""


@cache
def _rows(name: str) -> tuple[Mapping[str, str], ...]:
    text = files("bidirl.models").joinpath("data", name).read_text(encoding="utf-8")
    return tuple(MappingProxyType(row) for row in csv.DictReader(text.splitlines()))


def _fold(name: str) -> str:
    """Return ``name`` without case, vendor words, and with single spaces for underscores."""
    words = name.casefold().replace("_", " ").split()
    return " ".join(word for word in words if word not in ("nvidia", "amd", "instinct"))


def _one(kind: str, name: str, keys: Mapping[str, tuple[str, ...]]) -> str:
    """Return the catalogue name that ``name`` means; raise one line for none or several."""
    found = keys.get(_fold(name), ())
    if len(found) == 1:
        return found[0]
    if found:
        raise InputError(f"{kind} {name!r} is ambiguous: write one of {', '.join(map(repr, found))}")
    near = get_close_matches(_fold(name), keys, n=1, cutoff=0.5)
    hint = f"did you mean {keys[near[0]][0]!r}?" if near else f"known are {', '.join(_names(keys.values()))};"
    raise InputError(f"{kind} {name!r} is not in the catalogue: {hint} or give its numbers as a table")


def _names(values: Iterable[tuple[str, ...]]) -> list[str]:
    return sorted({name for names in values for name in names})


def gpu_names() -> tuple[str, ...]:
    """Return the GPU names of the catalogue."""
    return tuple(row["name"] for row in _rows("gpus.csv"))


def model_names() -> tuple[str, ...]:
    """Return the model names of the catalogue."""
    return tuple(row["name"] for row in _rows("models.csv"))


def _gpu_keys() -> dict[str, tuple[str, ...]]:
    return dict(GPU_ALIASES) | {_fold(full): (full,) for full in gpu_names()}


def gpu_matches(name: str) -> tuple[str, ...]:
    """Return the catalogue names that ``name`` may mean: none, one, or several if it is ambiguous."""
    return _gpu_keys().get(_fold(name), ())


@cache
def gpu(name: str) -> Gpu:
    """Return the GPU that ``name`` means, case ignored; raise ``InputError`` if unknown or ambiguous.

    Source: data/gpus.csv, whose rows name theirs.
    """
    full = _one("gpu", name, _gpu_keys())
    row = next(row for row in _rows("gpus.csv") if row["name"] == full)
    numbers: dict[str, Any] = {
        field: float(row[column]) * factor for column, (field, factor) in COLUMNS.items() if row[column]
    }
    connected = NVLINK_GPUS.get(full, 8)
    return Gpu(name=full, nvlink_gpus=connected, source=row["source"], note=row["note"], **numbers)


@cache
def model_row(name: str) -> Mapping[str, str]:
    """Return the row of models.csv that ``name`` means (short name or Hugging Face id, case ignored).

    An ``-Instruct``, ``-Chat`` or ``-Base`` ending is dropped where the catalogue has no such row: it has
    the same shape. Raises ``InputError`` if unknown. Source: data/models.csv, whose rows name theirs.
    """
    rows = _rows("models.csv")
    keys: dict[str, tuple[str, ...]] = {}
    for row in rows:
        for alias in (row["name"], row["hf_id"], row["hf_id"].rpartition("/")[2]):
            keys[_fold(alias)] = (row["name"],)
    folded = _fold(name)
    for ending in ("-instruct-2507", "-instruct", "-chat", "-base", "-it"):
        if folded not in keys and folded.endswith(ending):
            folded = folded.removesuffix(ending)
    full = _one("model", name if folded not in keys else folded, keys)
    return next(row for row in rows if row["name"] == full)
