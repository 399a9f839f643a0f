"""Read what is to be exported: a plan.json of ``bidirl-plan search``, a resolved.json, or a job file.

Keys that the export does not need are skipped, so that a plan may grow; a missing one is named.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from bidirl.errors import InputError
from bidirl.planner.job import Job, load_job
from bidirl.planner.policy import PRESETS, Placement, PolicyConfig
from bidirl.planner.sections import EngineConfig

__all__ = ["ExportPlan", "Layout", "TrainStyle", "read_plan"]

SCHEMA = "bidirl-plan"
VERSION = 1
REMEDY = "give a plan.json that bidirl-plan search wrote"

E = TypeVar("E", bound=StrEnum)
M = TypeVar("M", bound=BaseModel)


class TrainStyle(StrEnum):
    """How the trainer splits the model."""

    FSDP = "fsdp"
    MEGATRON = "megatron"


@dataclass(frozen=True, slots=True)
class Layout:
    """Parallel sizes of one replica; expert parallelism needs no GPUs of its own.

    A trainer spreads experts over GPUs of several replicas. An engine with ``ep > tp`` is ``ep / tp`` groups
    of ``tp`` GPUs, each counted as a replica here: frameworks call their number the data size.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    """GPUs among which a trainer spreads each sequence."""

    @property
    def num_gpus(self) -> int:
        """Return the GPUs of one model copy."""
        return self.tp * self.pp * self.cp

    @property
    def engine_groups(self) -> int:
        """Return the groups of one engine that attend to sequences of their own."""
        return max(1, self.ep // self.tp)


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """What a framework needs to know of a plan; replica counts follow from GPUs and layouts."""

    placement: Placement
    rollout_gpus: int
    """GPUs that generate; of the whole cluster where the roles take turns (colocated)."""
    train_gpus: int
    """GPUs that train; of the whole cluster where the roles take turns."""
    rollout: Layout
    train: Layout
    train_style: TrainStyle
    policy: PolicyConfig
    num_nodes: int
    gpus_per_node: int
    prompts_per_step: int
    samples_per_prompt: int
    mini_batches: int
    max_response_tokens: int
    reference: bool
    old_logprob: bool
    engine: EngineConfig
    model_name: str
    rollout_gpu: str = ""
    train_gpu: str = ""
    """GPU types of the pools, where they differ; else empty."""

    @property
    def staleness(self) -> Decimal:
        """Return the bound ``s`` in batches."""
        return self.policy.staleness

    @property
    def colocated(self) -> bool:
        """Return whether the roles take turns on all GPUs."""
        return self.placement is Placement.COLOCATED

    @property
    def rollout_replicas(self) -> int:
        """Return the number of rollout engines."""
        return self.rollout_gpus // self.rollout.num_gpus

    @property
    def train_dp(self) -> int:
        """Return the data-parallel size of the trainer."""
        return self.train_gpus // self.train.num_gpus

    @property
    def samples_per_step(self) -> int:
        """Return the samples that a step consumes."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def prompts_per_update(self) -> int:
        """Return the groups of one optimizer update."""
        return self.prompts_per_step // self.mini_batches


def read_plan(path: Path) -> ExportPlan:
    """Return the plan in a file.

    Raises:
        InputError: the file cannot be read, a key is missing, or the numbers do not fit together.
    """
    data: Any = None
    if path.suffix == ".json":
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}: {REMEDY}") from None
        except ValueError as error:
            raise InputError(f"{path}: is no JSON ({error}): {REMEDY}") from None
    if not isinstance(data, dict) or "schema" not in data:
        return _checked(_from_job(load_job(path), path), path)
    if data["schema"] != SCHEMA or data.get("version") != VERSION:
        found = f"schema {data['schema']!r}, version {data.get('version')!r}"
        raise InputError(f"{path}: {found} is not {SCHEMA!r}, {VERSION}: {REMEDY}")
    if "plan" not in data and "error" in data:
        raise InputError(f"{path}: holds no plan ({data['error']}): change the job and search again")
    return _checked(_from_plan(_Table(path, "", data)), path)


def _checked(plan: ExportPlan, path: Path) -> ExportPlan:
    """Return the plan, or refuse one whose pools do not hold whole replicas or exceed the cluster."""
    for role, gpus, layout in (
        ("rollout", plan.rollout_gpus, plan.rollout),
        ("train", plan.train_gpus, plan.train),
    ):
        if gpus < 1 or gpus % layout.num_gpus:
            size = f"tp {layout.tp} x pp {layout.pp}" + (f" x cp {layout.cp}" if layout.cp > 1 else "")
            raise InputError(
                f"{path}: {role}_gpus={gpus} hold no whole replicas of {size}: change one of them"
            )
    if plan.colocated and plan.staleness > 0:
        raise InputError(
            f"{path}: staleness {plan.staleness} with placement = colocated: roles that take turns never "
            "run ahead; set staleness 0 or a disaggregated placement"
        )
    total = plan.rollout_gpus if plan.colocated else plan.rollout_gpus + plan.train_gpus
    cluster = plan.num_nodes * plan.gpus_per_node
    if total > cluster:
        raise InputError(f"{path}: the pools need {total} GPUs, the cluster has {cluster}: {REMEDY}")
    if plan.prompts_per_step % plan.mini_batches:
        raise InputError(
            f"{path}: mini_batches={plan.mini_batches} does not divide "
            f"prompts_per_step={plan.prompts_per_step}: {REMEDY}"
        )
    return plan


def _from_job(job: Job, path: Path) -> ExportPlan:
    partition = job.partition
    if partition is None:
        raise InputError(
            f"{path}: has no [partition] to export: run bidirl-plan search and export its plan.json"
        )
    colocated = partition.placement is Placement.COLOCATED
    return ExportPlan(
        placement=partition.placement,
        rollout_gpus=partition.rollout_gpus,
        train_gpus=partition.rollout_gpus if colocated else partition.train_gpus,
        rollout=Layout(tp=partition.rollout_tp),
        train=Layout(tp=partition.train_tp),
        train_style=TrainStyle.FSDP,
        policy=job.policy,
        num_nodes=job.cluster.num_nodes,
        gpus_per_node=job.cluster.gpus_per_node,
        prompts_per_step=job.workload.prompts_per_step,
        samples_per_prompt=job.workload.samples_per_prompt,
        mini_batches=job.workload.mini_batches,
        max_response_tokens=job.workload.max_response_tokens,
        reference=job.workload.reference == "on",
        old_logprob=job.workload.old_logprob == "on",
        engine=job.engine,
        model_name=job.model.name or "",
        **_gpu_types(job.cluster.rollout_device.name, job.cluster.train_device.name),
    )


def _gpu_types(rollout: str, train: str) -> dict[str, str]:
    return {} if rollout == train else {"rollout_gpu": rollout, "train_gpu": train}


def _from_plan(file: "_Table") -> ExportPlan:
    plan, job = file.table("plan"), file.table("job")
    workload, cluster = job.table("workload"), job.table("cluster")
    placement = plan.choice("placement", Placement)
    rollout_gpus = plan.integer("rollout_gpus")
    rollout, train = plan.table("rollout"), plan.table("train")
    policy: PolicyConfig = plan.section("policy", PolicyConfig, name=_known_name)
    return ExportPlan(
        placement=placement,
        rollout_gpus=rollout_gpus,
        train_gpus=rollout_gpus if placement is Placement.COLOCATED else plan.integer("train_gpus"),
        rollout=_layout(rollout),
        train=_layout(train),
        train_style=train.choice("style", TrainStyle),
        policy=_with_staleness(policy, plan),
        num_nodes=_either(plan, cluster, "num_nodes"),
        gpus_per_node=_either(plan, cluster, "gpus_per_node"),
        prompts_per_step=workload.integer("prompts_per_step"),
        samples_per_prompt=workload.integer("samples_per_prompt"),
        mini_batches=workload.integer("mini_batches", 1),
        max_response_tokens=workload.integer("max_response_tokens"),
        reference=workload.text("reference", "on") == "on",
        old_logprob=workload.text("old_logprob", "on") == "on",
        engine=plan.section("engine", EngineConfig),
        model_name=job.table("model").text("name", ""),
        **_gpu_types(_gpu_name(cluster, "rollout_gpu"), _gpu_name(cluster, "train_gpu")),
    )


def _gpu_name(cluster: "_Table", key: str) -> str:
    """Return the GPU type of a pool, or the cluster's; a table of numbers may name one."""
    value = cluster.data.get(key) or cluster.data.get("gpu") or ""
    return str(value.get("name", "custom GPU")) if isinstance(value, dict) else str(value)


def _with_staleness(policy: PolicyConfig, plan: "_Table") -> PolicyConfig:
    """Return the policy with the plan's own bound, which a search may have chosen."""
    written = plan.data.get("staleness")
    if written is None:
        return policy
    try:
        return PolicyConfig.model_validate(
            policy.model_dump() | {"staleness": Decimal(str(written))}, strict=False
        )
    except (ValidationError, ArithmeticError):
        raise plan.error("staleness", f"is {written!r}, must be a number of batches from 0") from None


def _either(plan: "_Table", cluster: "_Table", key: str) -> int:
    """Return a count that the plan states, or else its job's cluster."""
    return (plan if key in plan.data else cluster).integer(key)


def _layout(table: "_Table") -> Layout:
    sizes = (table.integer(name, 1) for name in ("tp", "pp", "ep", "cp"))
    return Layout(*sizes)


def _known_name(name: Any) -> Any:
    """Return a preset's name; a plan's own label for a policy says nothing to a framework."""
    return name if isinstance(name, str) and name in PRESETS else "bidirl"


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of the file with its place, so that an error can name it."""

    path: Path
    place: str
    data: Mapping[str, Any]

    def error(self, key: str, rule: str) -> InputError:
        return InputError(f"{self.path}: {self._at(key)} {rule}: {REMEDY}")

    def table(self, key: str) -> "_Table":
        value = self._get(key, None)
        if not isinstance(value, dict):
            raise self.error(key, "must be a table")
        return replace(self, place=self._at(key), data=value)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if type(value) is not int or value < 1:
            raise self.error(key, f"is {value!r}, must be a whole number from 1")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"is {value!r}, must be a text")
        return value

    def choice(self, key: str, kind: type[E]) -> E:
        value = self._get(key, None)
        try:
            return kind(value)
        except ValueError:
            raise self.error(key, f"is {value!r}, must be one of {', '.join(kind)}") from None

    def section(self, key: str, model: type[M], **repairs: Any) -> M:
        """Return a section by its model; unknown keys are skipped, an absent section takes the defaults."""
        written = self.data.get(key) or {}
        if not isinstance(written, dict):
            raise self.error(key, "must be a table")
        known = {name: value for name, value in written.items() if name in model.model_fields}
        known |= {name: repair(known[name]) for name, repair in repairs.items() if name in known}
        try:
            return model.model_validate_json(json.dumps(known))
        except ValidationError as error:
            first = error.errors()[0]
            at = ".".join((key, *map(str, first["loc"])))
            raise self.error(at, f"breaks a rule ({first['msg']})") from None

    def _get(self, key: str, default: Any) -> Any:
        if key not in self.data and default is None:
            raise self.error(key, "is missing")
        return self.data.get(key, default)

    def _at(self, key: str) -> str:
        return f"{self.place}.{key}" if self.place else key
