"""The planner's answer: everything that a scheduler and a driver need to run one job."""

from dataclasses import dataclass, field
from functools import cached_property
from math import ceil

from bidirl.errors import InputError
from bidirl.models.stages import StageModels
from bidirl.planner.admission import Admission
from bidirl.planner.events import SegmentKind
from bidirl.planner.policy import Granularity, Lending, Placement, PolicyConfig
from bidirl.traces.lengths import LengthPrior

__all__ = ["Plan"]

SAMPLES_PER_PULL = 4
"""Samples of a pull that each trainer replica gets, at least: with fewer, the longest sample of a pull
rather than the work decides how long it takes. (12 replicas, 8 samples a group and 8 chunks a pull: 1 group a
chunk, as in the public re-implementation's setting.)"""


@dataclass(frozen=True)
class Plan:
    """A resolved job; plain values only, so that a journal can carry it.

    The layouts of the two roles must be hot-switch compatible for lending: each pool divides by both
    replica sizes. Replica counts follow from devices and layouts and are never stated twice.
    """

    num_steps: int
    groups_per_step: int
    samples_per_group: int
    mini_batches: int
    rollout_gpus: int
    train_gpus: int
    """0 where the two roles take turns on ``rollout_gpus`` (colocated)."""
    rollout_replica_gpus: int
    train_replica_gpus: int
    policy: PolicyConfig
    models: StageModels
    priors: tuple[LengthPrior, ...]
    """What is known of the lengths, per step; the last one holds for all later steps."""
    old_logprob: bool = True
    reference: bool = False
    scoring: bool = False
    """Whether groups have a reward latency or a filter, so that scoring is an event of its own."""
    reward_capacity: int | None = None
    group_slots: int = 64
    """Groups that one rollout replica may hold at a time."""
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.placement is Placement.COLOCATED:
            if self.policy.staleness != 0 or self.policy.granularity is not Granularity.FULL:
                raise InputError(
                    "placement = colocated takes turns, so it needs policy.staleness = 0 and full batches: "
                    "use preset colocated_sync or a disaggregated placement"
                )
        elif self.train_replicas < 1:
            raise InputError(
                f"train_gpus={self.train_gpus} hold no trainer replica of {self.train_replica_gpus} GPUs: "
                "give the training pool more GPUs"
            )
        if self.rollout_replicas < 1:
            raise InputError(
                f"rollout_gpus={self.rollout_gpus} hold no rollout replica of {self.rollout_replica_gpus} "
                "GPUs: give the rollout pool more GPUs"
            )
        if self.groups_per_step % self.mini_batches:
            raise InputError(
                f"prompts_per_step={self.groups_per_step} is not a multiple of mini_batches="
                f"{self.mini_batches}: choose a divisor"
            )

    @property
    def placement(self) -> Placement:
        """Whether the roles have pools of their own."""
        return Placement.COLOCATED if self.train_gpus == 0 else Placement.DISAGGREGATED

    @property
    def total_groups(self) -> int:
        """Groups that the job trains."""
        return self.num_steps * self.groups_per_step

    @cached_property
    def rollout_replicas(self) -> int:
        """Primary rollout replicas ``d_r``."""
        return self.rollout_gpus // self.rollout_replica_gpus

    @cached_property
    def train_replicas(self) -> int:
        """Trainer replicas of the primary side ``d_t``."""
        gpus = self.train_gpus or self.rollout_gpus
        return gpus // self.train_replica_gpus

    @cached_property
    def auxiliary_rollouters(self) -> int:
        """Rollout replicas that fit on the training pool (0 where the policy lends none)."""
        if self.policy.lending not in (Lending.ROLLOUT_ON_TRAIN, Lending.BOTH):
            return 0
        return self.train_gpus // self.rollout_replica_gpus

    @cached_property
    def chunk_groups(self) -> int:
        """Groups in one trainer chunk: the policy's, else ``SAMPLES_PER_PULL`` a replica and pull."""
        if self.policy.chunk_groups is not None:
            return self.policy.chunk_groups
        samples = SAMPLES_PER_PULL * self.train_replicas
        groups = ceil(samples / (self.samples_per_group * self.policy.max_chunks_per_pull))
        return min(groups, self.groups_per_step // self.mini_batches)

    @cached_property
    def admission(self) -> Admission:
        """The staleness bound as a counting rule."""
        return Admission.of(self.groups_per_step, self.policy.staleness)

    @cached_property
    def segments(self) -> tuple[SegmentKind, ...]:
        """Forward-only segments that run before the updates of a batch, in order."""
        kinds = []
        if self.old_logprob:
            kinds.append(SegmentKind.OLD_LOGPROB)
        if self.reference:
            kinds.append(SegmentKind.REFERENCE)
        return tuple(kinds)

    def prior(self, step: int) -> LengthPrior:
        """Return what is known of the response lengths of the groups of a step."""
        return self.priors[min(step, len(self.priors) - 1)]
