"""What the search asks of a job: sizes and works of a representative batch, and the grid of pool sizes."""

from dataclasses import dataclass
from functools import cached_property
from math import ceil

import numpy as np
import numpy.typing as npt

from bidirl.models.architecture import Architecture
from bidirl.models.cluster import ClusterConfig
from bidirl.models.roofline import Links
from bidirl.models.stages import StageModels
from bidirl.planner.job import Job
from bidirl.planner.sections import EngineConfig
from bidirl.traces.lengths import LengthPrior
from bidirl.traces.workload import Workload

__all__ = ["Question"]


@dataclass(frozen=True)
class Question:
    """A job as the search sees it; plain numbers, no randomness."""

    cluster: ClusterConfig
    model: Architecture
    engine: EngineConfig
    prior: LengthPrior
    groups: int
    samples_per_group: int
    mini_batches: int
    num_forwards: int
    """Forward-only passes of a step: old log-probabilities and reference."""
    chunk_groups: int | None
    chunks_per_pull: int
    staleness: float
    filter_rate: float = 0.0
    """Share of the groups that rewards throw away: so many more must be generated."""
    measured: StageModels | None = None
    """Models of the job's file; they hold for the layouts that they were measured in."""
    measured_tp: tuple[int, int] = (1, 1)
    """Tensor sizes of engine and trainer in which they were measured: those of the job's [partition]."""

    @classmethod
    def of(cls, job: Job, workload: Workload, measured: StageModels | None = None) -> "Question":
        """Return the question that a job poses; lengths are those of its first step."""
        written = job.partition
        config = job.workload
        return cls(
            cluster=job.cluster,
            model=job.model.resolve(job.base_dir),
            engine=job.engine,
            prior=workload.prior(0),
            groups=config.prompts_per_step,
            samples_per_group=config.samples_per_prompt,
            mini_batches=config.mini_batches,
            num_forwards=(config.old_logprob == "on") + (config.reference == "on"),
            chunk_groups=job.policy.chunk_groups,
            chunks_per_pull=job.policy.max_chunks_per_pull,
            staleness=float(job.policy.staleness),
            filter_rate=config.filter_rate,
            measured=measured,
            measured_tp=(1, 1) if written is None else (written.rollout_tp, written.train_tp),
        )

    @property
    def num_samples(self) -> int:
        """Return the samples of a step."""
        return self.groups * self.samples_per_group

    @property
    def produced_samples(self) -> int:
        """Return the samples to generate for a step: ``B n / (1 - f)``. Source: needs C44."""
        return ceil(self.groups / (1.0 - self.filter_rate) - 1e-9) * self.samples_per_group

    @property
    def longest_tokens(self) -> int:
        """Return the tokens of the longest prompt and response together."""
        return ceil(self.prior.prompt_mean_tokens) + self.prior.max_tokens

    @property
    def unit_gpus(self) -> int:
        """Return the step of the grid of pool sizes: a node where there are more than two, else one GPU."""
        nodes = self.cluster.num_nodes
        return self.cluster.gpus_per_node if nodes > 2 else 1

    @property
    def pool_sizes(self) -> range:
        """Return the node-aligned sizes that one of two pools may have, ascending."""
        unit = self.unit_gpus
        return range(unit, self.cluster.num_gpus, unit)

    @cached_property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Return ``pool_sizes`` as an array."""
        return np.asarray(self.pool_sizes, dtype=np.int64)

    def links(self, num_gpus: int, *, of_rollout: bool) -> Links:
        """Return the links of a pool of one role; the network counts only where the pool spans nodes."""
        cluster = self.cluster
        device = cluster.rollout_device if of_rollout else cluster.train_device
        inside = min(num_gpus, cluster.gpus_per_node)
        peer = cluster.peer_bytes_per_s(device, inside) if inside > 1 else 1e12
        node = cluster.node_bytes_per_s(device) if num_gpus > cluster.gpus_per_node else 1e12
        return Links(peer, node, cluster.gpus_per_node)
