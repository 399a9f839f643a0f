"""Seconds of weight syncs and of role switches, and their priors from published measurements."""

import csv
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from math import ceil, log2

from bidirl.errors import InputError
from bidirl.models.architecture import Architecture
from bidirl.models.estimate import Estimate, Source

__all__ = ["SwitchCosts", "SyncModel", "check_bandwidth", "sleep_costs", "switch_prior", "sync_prior"]


@dataclass(frozen=True, slots=True)
class SyncModel:
    """Publication of one weight version: ``a + b * bytes + c * tensors + d * ceil(log2 receivers)``.

    The pause of the engines, the drain of requests and the recompute of KV caches are not in it.
    Source: design.md section 6 (form ours: fixed cost, slowest link, per-tensor metadata, broadcast tree).
    """

    fixed_s: float
    """Seconds of one sync that depend on nothing (a)."""
    s_per_byte: float
    """Seconds per byte over the slowest link of the path (b)."""
    num_bytes: float
    """Bytes of the weights that are sent."""
    per_tensor_s: float
    """Seconds of metadata and calls per tensor (c)."""
    num_tensors: int
    per_hop_s: float
    """Seconds per level of the broadcast tree (d)."""
    apply_s: float
    """Seconds one rollout replica needs to load what it received; each replica pays it for itself."""

    def transfer_s(self, num_receivers: int) -> float:
        """Return the seconds until ``num_receivers`` replicas hold the bytes, none of them applied."""
        hops = ceil(log2(num_receivers)) if num_receivers > 1 else 0
        return (
            self.fixed_s
            + self.s_per_byte * self.num_bytes
            + self.per_tensor_s * self.num_tensors
            + self.per_hop_s * hops
        )

    def seconds(self, num_receivers: int) -> float:
        """Return the seconds from the start of a sync until all ``num_receivers`` replicas applied it."""
        if num_receivers <= 0:
            return 0.0
        return self.transfer_s(num_receivers) + self.apply_s


@dataclass(frozen=True, slots=True)
class SwitchCosts:
    """Seconds that a role change costs; the paper's C_in, C_out, C_grad, and C_bcast."""

    rollout_on_train_in_s: float
    rollout_on_train_out_s: float
    train_on_rollout_in_s: float
    train_on_rollout_out_s: float
    grad_s: float
    """Auxiliary gradients to the primary trainer, once per update inside a lease."""
    broadcast_s: float
    """New weights to the auxiliary trainer, when a further segment of the lease needs them."""
    time_share_in_s: float
    """Colocated placement: trainer asleep, engine awake, once per step."""
    time_share_out_s: float
    """Colocated placement: engine asleep, trainer awake, once per step."""


SYNC_FIXED_S = 1.1
SYNC_LINK_EFFICIENCY = 0.093
SYNC_TENSOR_S = 0.82e-3
"""Fixed seconds, share of one link, seconds per tensor. Source: fit over the 8 rows of data/weight_sync.csv
marked used (7B to 235B, dense and experts, A100 and H100; predicted / measured 0.66 to 1.40). The share is
low because one sender reads, packs and sends tensor by tensor; it is the practice, not the wire."""
SYNC_SPREAD = 1.6
SYNC_FASTEST_LINK = 50e9
"""Bytes per second of the fastest link in those rows: the share is not carried to faster ones."""
APPLY_S_PER_BYTE = 1.0 / 16.5e9
"""Source: verl checkpoint_engine/README.md, update phase of Qwen3-30B-A3B (3.5 s, 16.5 GB/s; Ascend 910C)."""
HOP_S_PER_BYTE = 4.25e-13
"""Source: MoonshotAI checkpoint-engine README, broadcast to 16 against 256 H20: DeepSeek-V3.1 (671 GB in FP8)
10.19 and 11.33 s, four more levels; Kimi-K2 (14.36, 16.04 s) gives the same per byte."""
SWITCH_SPREAD = 1.3
TRANSFERRED_SPREAD = 2.0
"""Factors of the 90 % interval of switch costs: for the paper's models (its cluster is not stated), and for
others (the two points of each line are all there is)."""
TIME_SHARE_SPREAD = 3.0
"""Qwen3-VL-4B on slime-like frameworks pays 11 to 13 s per step for both switches with the sync in it
(redai-studio/Relax#152, #169); the engine's own sleep and wake explain about 5 s."""


@cache
def _rows(name: str) -> tuple[dict[str, str], ...]:
    text = files("bidirl.models").joinpath("data", name).read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))


def check_bandwidth(num_bytes: float, seconds: float, link_bytes_per_s: float) -> None:
    """Refuse a measured sync that is faster than its link: its timer missed the transfer.

    Raises ``InputError``. Source: needs C56 (verl's table has a row of 760 GB/s).
    """
    if seconds <= 0.0 or num_bytes / seconds > link_bytes_per_s:
        rate = num_bytes / seconds / 1e9 if seconds > 0.0 else float("inf")
        raise InputError(
            f"weight sync of {num_bytes / 1e9:.1f} GB in {seconds} s is {rate:.0f} GB/s: the link carries "
            f"{link_bytes_per_s / 1e9:.0f} GB/s; the timer missed the transfer, leave the row out"
        )


def sync_prior(model: Architecture, link_bytes_per_s: float) -> tuple[SyncModel, dict[str, Estimate]]:
    """Return the sync model of ``model``; one sender's slowest link carries ``link_bytes_per_s``."""
    rate = min(link_bytes_per_s, SYNC_FASTEST_LINK) * SYNC_LINK_EFFICIENCY
    num_bytes = model.weight_bytes()
    sync = SyncModel(
        fixed_s=SYNC_FIXED_S,
        s_per_byte=1.0 / rate,
        num_bytes=num_bytes,
        per_tensor_s=SYNC_TENSOR_S,
        num_tensors=model.num_tensors,
        per_hop_s=HOP_S_PER_BYTE * num_bytes,
        apply_s=APPLY_S_PER_BYTE * num_bytes,
    )
    note = "verl delta_weight_sync.md, full NCCL rows"
    sources = {
        f"sync.{name}": Estimate.within(getattr(sync, name), SYNC_SPREAD, Source.TRANSFERRED, note)
        for name in ("fixed_s", "s_per_byte", "per_tensor_s")
    }
    if link_bytes_per_s > SYNC_FASTEST_LINK:
        far = f"link of {link_bytes_per_s / 1e9:.0f} GB/s, fitted up to {SYNC_FASTEST_LINK / 1e9:.0f}"
        sources["sync.s_per_byte"] = sources["sync.s_per_byte"].flagged(far)
    sources["sync.num_bytes"] = Estimate.exact(num_bytes, Source.ROOFLINE, f"{model.name} in BF16")
    sources["sync.num_tensors"] = Estimate.within(model.num_tensors, 1.2, Source.ROOFLINE, "count by shape")
    hop_note = "MoonshotAI checkpoint-engine README, 16 against 256 receivers"
    sources["sync.per_hop_s"] = Estimate.within(sync.per_hop_s, 2.0, Source.TRANSFERRED, hop_note)
    apply_note = "verl checkpoint_engine README, update phase"
    sources["sync.apply_s"] = Estimate.within(sync.apply_s, 2.0, Source.TRANSFERRED, apply_note)
    return sync, sources


def _line(points: list[tuple[float, float]], gigabytes: float) -> float:
    """Return the value at ``gigabytes`` on the line through two points, not below zero seconds."""
    (x0, y0), (x1, y1) = sorted(points)
    return max(0.0, y0 + (y1 - y0) * (gigabytes - x0) / (x1 - x0))


def sleep_costs(weight_bytes: float) -> tuple[int, float, float]:
    """Return ``(level, sleep_s, wake_s)`` of an engine: the vLLM sleep level with the smaller sum.

    Level 1 keeps the weights in host memory, level 2 reloads them. Linear in the weight bytes of one GPU
    between and beyond the two measured models. Source: vllm-project/vllm#48337 (A100).
    """
    best: tuple[float, int, float, float] | None = None
    rows = [row for row in _rows("switch_costs.csv") if row["system"] == "vLLM"]
    for level in ("1", "2"):
        seconds = {
            operation: _line(
                [
                    (float(row["weight_gb"]), float(row["time_s"]))
                    for row in rows
                    if row["level"] == level and row["operation"] == operation
                ],
                weight_bytes / 1e9,
            )
            for operation in ("sleep", "wake")
        }
        candidate = (sum(seconds.values()), int(level), seconds["sleep"], seconds["wake"])
        best = candidate if best is None else min(best, candidate)
    assert best is not None
    return best[1], best[2], best[3]


def switch_prior(model: Architecture, rollout_tp: int) -> tuple[SwitchCosts, dict[str, Estimate]]:
    """Return what a role change of ``model`` costs.

    The paper's models carry its measured costs. Others follow the line through them in weight bytes, the
    only size both directions share; beyond twice the larger model it is marked as extrapolated. The
    broadcast into a lease moves the same bytes as the gradients and costs the same. Time sharing is the
    engine's sleep and wake, by the cheaper level.
    """
    gigabytes = model.weight_bytes() / 1e9
    paper = [row for row in _rows("switch_costs.csv") if row["system"] == "BiDiRL"]
    exact = {row["operation"]: float(row["time_s"]) for row in paper if row["model"] == model.name}
    largest = max(float(row["weight_gb"]) for row in paper)
    sources: dict[str, Estimate] = {}
    values: dict[str, float] = {}
    for field in fields(SwitchCosts)[:5]:
        points = [(float(r["weight_gb"]), float(r["time_s"])) for r in paper if r["operation"] == field.name]
        if field.name in exact:
            note = "arXiv 2607.09207 Table 5, cluster not stated"
            estimate = Estimate.within(exact[field.name], SWITCH_SPREAD, Source.MEASURED, note)
        else:
            note = f"line through Qwen3-VL-2B and 4B of arXiv 2607.09207, {gigabytes:.1f} GB of weights"
            value = _line(points, gigabytes)
            estimate = Estimate.within(value, TRANSFERRED_SPREAD, Source.TRANSFERRED, note)
            if gigabytes > 2.0 * largest:
                estimate = estimate.flagged(f"measured up to {largest:.1f} GB")
        values[field.name] = estimate.value
        sources[f"switch.{field.name}"] = estimate
    values["broadcast_s"] = values["grad_s"]
    sources["switch.broadcast_s"] = Estimate.within(
        values["grad_s"], TRANSFERRED_SPREAD, Source.TRANSFERRED, "as many bytes as the gradients"
    )
    level, sleep_s, wake_s = sleep_costs(model.weight_bytes() / rollout_tp)
    for name, seconds in (("time_share_in_s", wake_s), ("time_share_out_s", sleep_s)):
        values[name] = seconds
        note = f"vLLM sleep level {level} on A100, vllm-project/vllm#48337"
        sources[f"switch.{name}"] = Estimate.within(seconds, TIME_SHARE_SPREAD, Source.TRANSFERRED, note)
    return SwitchCosts(**values), sources
