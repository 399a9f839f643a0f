"""Rules between the sections of a job, and what follows from them: pools, layouts, notices."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bidirl.models.architecture import ModelConfig
from bidirl.models.cluster import ClusterConfig
from bidirl.models.faults import FaultsConfig
from bidirl.planner.config_file import ConfigFile, show
from bidirl.planner.learn import LearnConfig
from bidirl.planner.policy import (
    PINNED_BY_PRESET,
    Granularity,
    Lending,
    Placement,
    PolicyConfig,
    unsupported,
)
from bidirl.planner.sections import EngineConfig, ModelsConfig, Partition, PartitionConfig
from bidirl.planner.toml_lines import KeyPath
from bidirl.traces.workload import WorkloadConfig

__all__ = ["JobParts", "cross_problems", "resolve_placement"]

LENDS_TRAIN = frozenset({Lending.ROLLOUT_ON_TRAIN, Lending.BOTH})
LENDS_ROLLOUT = frozenset({Lending.TRAIN_ON_ROLLOUT, Lending.BOTH})


@dataclass(frozen=True, slots=True)
class JobParts:
    """The sections of a job, each valid by itself."""

    cluster: ClusterConfig
    model: ModelConfig
    workload: WorkloadConfig
    partition: PartitionConfig
    policy: PolicyConfig
    engine: EngineConfig
    models: ModelsConfig
    faults: FaultsConfig
    learn: LearnConfig | None = None

    @property
    def is_colocated(self) -> bool:
        """Return whether both roles take turns on all GPUs."""
        return self.partition.placement is Placement.COLOCATED

    def pools(self) -> tuple[int, int]:
        """Return the GPUs of the rollout and the training pool; what is not given is the rest."""
        total = self.cluster.num_gpus
        rollout, train = self.partition.rollout_gpus, self.partition.train_gpus
        if self.is_colocated:
            return total, 0
        if rollout is None:
            return total - (train or 0), train or 0
        return rollout, total - rollout if train is None else train

    def resolve_partition(self, *, is_written: bool) -> tuple[Partition | None, list[str]]:
        """Return the partition and notices; None where the job leaves it to the planner."""
        written = self.partition
        if not is_written:
            return None, []
        rollout, train = self.pools()
        total = self.cluster.num_gpus
        notices = []
        for key in ("rollout_gpus", "train_gpus"):
            count = getattr(written, key)
            if self.is_colocated and count not in (None, total):
                notices.append(
                    f"partition.{key} = {count} is ignored: colocated roles take turns on all {total} GPUs"
                )
        if not self.is_colocated and rollout + train < total:
            notices.append(
                f"{total - rollout - train} of the cluster's {total} GPUs are in neither pool and stay unused"
            )
        return Partition(written.placement, rollout, train, written.rollout_tp, written.train_tp), notices

    def notices(self) -> list[str]:
        """Return what is legal and probably not meant."""
        if self.workload.samples_per_prompt == 1:
            notice = (
                "workload.samples_per_prompt = 1: GRPO compares the samples of one prompt and learns nothing "
                "from one; the times hold for PPO and REINFORCE"
            )
            return [notice]
        return []


def resolve_placement(data: dict[str, Any]) -> list[str]:
    """Let placement and preset agree, in place, before validation; return a notice for what is set aside.

    A colocated placement without a policy means ``colocated_sync``; a preset that pins a choice sets it.
    """
    policy, partition = data.setdefault("policy", {}), data.get("partition", {})
    if not isinstance(policy, dict) or not isinstance(partition, dict):
        return []
    if "name" not in policy and partition.get("placement") == "colocated":
        policy["name"] = "colocated_sync"
    name = policy.get("name")
    notices = []
    for key, value in PINNED_BY_PRESET.get(name, {}).items() if isinstance(name, str) else ():
        section = data.setdefault("partition", {}) if key == "placement" else policy
        table = "partition" if key == "placement" else "policy"
        written = section.get(key)
        if written is not None and str(written) != str(value) and written != value:
            notices.append(f"{table}.{key} = {show(written)} is set aside: policy {name} means {show(value)}")
        section[key] = value
    return notices


def cross_problems(file: ConfigFile, parts: JobParts) -> list[str]:
    """Return one line for each broken rule between sections."""
    checks = (_policy_rules, _pool_rules, _layout_rules, _workload_rules, _learn_rules)
    return [line for check in checks for line in check(file, parts)]


def _policy_rules(file: ConfigFile, parts: JobParts) -> Iterator[str]:
    policy = parts.policy
    name = ("policy", "name")
    for choice, value, values in unsupported(policy):
        rule = f"the scheduler does not carry it out yet; choose one of {', '.join(sorted(values))}"
        yield file.problem(("policy", choice), str(value), rule, [name])
    if not parts.is_colocated:
        return
    at = ("partition", "placement")
    if policy.lending is not Lending.NONE:
        rule = (
            f"policy {policy.name} lends between two pools and here is one; "
            'use policy.name = "colocated_sync" or placement = "disaggregated"'
        )
        yield file.problem(at, str(parts.partition.placement), rule, [name, ("policy", "lending")])
    elif policy.staleness != 0:
        rule = "colocated roles take turns, so nothing runs ahead; set it to 0 or use disaggregated placement"
        yield file.problem(("policy", "staleness"), policy.staleness, rule, [name, at])
    elif policy.granularity is not Granularity.FULL:
        rule = 'colocated roles take turns, so training starts on the full batch; set it to "full"'
        yield file.problem(("policy", "granularity"), str(policy.granularity), rule, [name, at])


CLUSTER_SIZE: tuple[KeyPath, ...] = (("cluster", "num_nodes"), ("cluster", "gpus_per_node"))


def _pool_rules(file: ConfigFile, parts: JobParts) -> Iterator[str]:
    if parts.is_colocated or "partition" not in file.data:
        return
    written, total = parts.partition, parts.cluster.num_gpus
    rollout, train = written.rollout_gpus, written.train_gpus
    if rollout is None and train is None:
        yield (
            f"{file.where(('partition',))}: partition: gives neither rollout_gpus nor train_gpus; give one, "
            "or leave the whole section out so that the planner chooses"
        )
        return
    for key, count, other in (("rollout_gpus", rollout, "training"), ("train_gpus", train, "generating")):
        if count is not None and count > total:
            rule = f"exceeds the cluster's {total} GPUs; lower it or add nodes"
            yield file.problem(("partition", key), count, rule, CLUSTER_SIZE)
        elif count == total:
            rule = f'leaves none of the {total} GPUs for {other}; lower it or use placement = "colocated"'
            yield file.problem(("partition", key), count, rule, CLUSTER_SIZE)
    if rollout and train and max(rollout, train) < total < rollout + train:
        rule = f"with rollout_gpus = {rollout} exceeds the cluster's {total} GPUs; lower one or add nodes"
        yield file.problem(
            ("partition", "train_gpus"), train, rule, [("partition", "rollout_gpus"), *CLUSTER_SIZE]
        )


def _layout_rules(file: ConfigFile, parts: JobParts) -> Iterator[str]:
    written, node, lending = parts.partition, parts.cluster.gpus_per_node, parts.policy.lending
    layouts = {"rollout_tp": written.rollout_tp, "train_tp": written.train_tp}
    wrong = [key for key, size in layouts.items() if node % size]
    for key in wrong:
        rule = f"does not divide the {node} GPUs of a node; choose a divisor"
        yield file.problem(("partition", key), layouts[key], rule, [("cluster", "gpus_per_node")])
    rollout, train = parts.pools()
    if wrong or "partition" not in file.data or min(rollout, train or rollout) < 1:
        return
    pairs = [("rollout_gpus", rollout, "rollout_tp", "it cannot be cut into rollout replicas")]
    pairs.append(("train_gpus", train or rollout, "train_tp", "it cannot be cut into trainer replicas"))
    if lending in LENDS_TRAIN:
        pairs.append(("train_gpus", train, "rollout_tp", "it cannot lend to the rollouter"))
    if lending in LENDS_ROLLOUT:
        pairs.append(("rollout_gpus", rollout, "train_tp", "it cannot lend to the trainer"))
    for pool, count, layout, purpose in pairs:
        if count % layouts[layout]:
            rule = f"is not a multiple of {layout} = {layouts[layout]}, so {purpose}; change one of them"
            others = [("partition", layout), ("partition", "rollout_gpus"), ("partition", "train_gpus")]
            yield file.problem(("partition", pool), count, rule, [*others, *CLUSTER_SIZE, ("policy", "name")])


def _workload_rules(file: ConfigFile, parts: JobParts) -> Iterator[str]:
    workload, engine, chunk = parts.workload, parts.engine, parts.policy.chunk_groups
    per_update = workload.prompts_per_step // workload.mini_batches
    if chunk is not None and chunk > per_update:
        rule = f"exceeds the {per_update} groups of a mini-batch; lower it"
        because = [("workload", "prompts_per_step"), ("workload", "mini_batches")]
        yield file.problem(("policy", "chunk_groups"), chunk, rule, because)
    if engine.kv_tokens is not None and engine.kv_tokens <= workload.max_response_tokens:
        rule = (
            f"cannot hold one response of workload.max_response_tokens = {workload.max_response_tokens}; "
            "raise it or shorten the responses"
        )
        yield file.problem(
            ("engine", "kv_tokens"), engine.kv_tokens, rule, [("workload", "max_response_tokens")]
        )


def _learn_rules(file: ConfigFile, parts: JobParts) -> Iterator[str]:
    learn, workload = parts.learn, parts.workload
    if learn is None:
        return
    if learn.kl_weight > 0.0 and workload.reference != "on":
        rule = 'needs the log-probabilities of version 0; set workload.reference = "on", or this to 0'
        yield file.problem(("learn", "kl_weight"), learn.kl_weight, rule, [("workload", "reference")])
    if learn.old_policy != "behaviour" and workload.old_logprob != "on":
        rule = 'needs the old-logprob stage; set workload.old_logprob = "on", or this to "behaviour"'
        yield file.problem(("learn", "old_policy"), learn.old_policy, rule, [("workload", "old_logprob")])
