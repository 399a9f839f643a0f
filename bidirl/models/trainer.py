"""Time of trainer segments: compute, communication, their overlap, and the slowest replica."""

from dataclasses import dataclass
from math import ceil
from typing import Literal, overload

import numpy as np
import numpy.typing as npt

from bidirl.errors import InputError

__all__ = ["Segment", "SegmentCost", "TrainerModel", "slowest_work"]

Segment = Literal["old_logprob", "reference", "update"]
"""Kinds of trainer work of a step, in the order in which they run."""

Numbers = npt.NDArray[np.float64] | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SegmentCost:
    """Compute time of one pull of a segment on one replica: ``tau_s + alpha_s * W ** power``.

    ``W`` is the replica's work in effective tokens (``TrainerModel.sample_work``).
    Source: design.md section 6 (coefficient names the paper's, form ours).
    """

    tau_s: float
    alpha_s: float
    power: float = 1.0

    def compute_s(self, work: float) -> float:
        """Return the compute seconds of ``work`` effective tokens; no work takes no time."""
        if work <= 0.0:
            return 0.0
        return self.tau_s + self.alpha_s * (work if self.power == 1.0 else work**self.power)


def slowest_work(work: float, longest: float, num_replicas: int) -> float:
    """Return the work of the slowest replica: ``max(work / num_replicas, longest)``.

    ``work`` is the sum over all samples and ``longest`` the largest single sample, both in effective
    tokens. This is the lower bound of a balanced assignment: no assignment beats it, and longest-first
    assignment stays within ``longest * (1 - 1 / num_replicas)`` of it.
    Source: Graham 1969, list scheduling bounds (the bound itself is the usual makespan lower bound).
    """
    return max(work / num_replicas, longest)


@dataclass(frozen=True, slots=True)
class TrainerModel:
    """Stage-time model of the trainer, for any number of data-parallel replicas in lockstep.

    A *pull* is a set of micro-batches of one segment, spread over the replicas of one side; it ends with
    the slowest replica. Communication is that of sharded data parallelism: each micro-batch gathers the
    weights (twice, and scatters gradients once, in an update). ``T = (T_comp**p + T_comm**p) ** (1/p)``.
    Source: design.md section 6 (functional form ours; coefficient names the paper's).
    """

    old_logprob: SegmentCost
    reference: SegmentCost
    update: SegmentCost
    pair_tokens: float
    """Effective tokens of one (query, visible token) pair: attention work beside the linear layers."""
    alpha_comm_s: float = 0.0
    """Fixed seconds of the collectives of one micro-batch."""
    beta_comm_s_per_byte: float = 0.0
    """Seconds per byte that a replica moves while the side fits in one node."""
    beta_inter_s_per_byte: float = 0.0
    """The same once the side spans nodes."""
    overlap_p: float = 1.0
    """Exponent of the overlap norm: 1 adds compute and communication, infinity hides the shorter."""
    optimizer_s: float = 0.0
    """Seconds of one optimizer step of the primary trainer."""
    forward_bytes: float = 0.0
    """Bytes one replica gathers per forward-only micro-batch (all of a replica's weights)."""
    update_bytes: float = 0.0
    """Bytes one replica gathers and scatters per update micro-batch."""
    micro_tokens: int = 16384
    """Effective tokens that one micro-batch of one replica may hold."""
    replicas_per_node: int = 8

    @overload
    def sample_work(self, total_tokens: float) -> float: ...
    @overload
    def sample_work(self, total_tokens: Numbers) -> npt.NDArray[np.float64]: ...
    def sample_work(self, total_tokens: float | Numbers) -> float | npt.NDArray[np.float64]:
        """Return the effective tokens of samples of ``total_tokens`` = prompt + response tokens.

        ``L + pair_tokens * L * (L + 1) / 2``: causal attention sees each token's predecessors and itself.
        """
        if isinstance(total_tokens, np.ndarray):
            lengths = total_tokens.astype(np.float64)
            return lengths + self.pair_tokens * (lengths * (lengths + 1.0) / 2.0)
        return total_tokens + self.pair_tokens * (total_tokens * (total_tokens + 1.0) / 2.0)

    def segment(self, name: str) -> SegmentCost:
        """Return the cost of the segment kind ``name``; raise ``InputError`` for an unknown one."""
        match name:
            case "old_logprob":
                return self.old_logprob
            case "reference":
                return self.reference
            case "update":
                return self.update
            case _:
                raise InputError(
                    f"segment {name!r} is unknown: use one of 'old_logprob', 'reference', 'update'"
                )

    def communication_s(self, name: str, work: float, num_replicas: int) -> float:
        """Return the communication seconds of one replica with ``work`` effective tokens in a pull.

        ``num_micro * (alpha_comm + beta_comm * bytes * (d - 1) / d)``, nothing for one replica.
        Source: ring all-gather and reduce-scatter move ``(d - 1) / d`` of the buffer per member (Thakur,
        Rabenseifner, Gropp 2005, "Optimization of collective communication operations in MPICH").
        """
        if num_replicas <= 1 or work <= 0.0:
            return 0.0
        num_micro = ceil(work / self.micro_tokens)
        nbytes = self.update_bytes if name == "update" else self.forward_bytes
        crosses_nodes = num_replicas > self.replicas_per_node
        beta = self.beta_inter_s_per_byte if crosses_nodes else self.beta_comm_s_per_byte
        return num_micro * (self.alpha_comm_s + beta * nbytes * (num_replicas - 1) / num_replicas)

    def pull_s(self, segment: str, work: float, longest: float, num_replicas: int) -> float:
        """Return the seconds of one pull of ``segment``, spread over ``num_replicas`` in lockstep.

        ``work`` sums ``sample_work`` over the pull's samples, ``longest`` is its maximum; the slowest
        replica holds ``slowest_work``, a lower bound of a balanced assignment. The optimizer step is not
        in it.
        """
        slowest = slowest_work(work, longest, num_replicas)
        compute_s = self.segment(segment).compute_s(slowest)
        communication_s = self.communication_s(segment, slowest, num_replicas)
        if communication_s == 0.0:
            return compute_s
        if self.overlap_p == 1.0:
            return compute_s + communication_s
        larger = max(compute_s, communication_s)
        ratio = min(compute_s, communication_s) / larger
        return float(larger * (1.0 + ratio**self.overlap_p) ** (1.0 / self.overlap_p))
