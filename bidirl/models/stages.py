"""All stage-time models of one job in one value, with their sources; their prior, and their file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from bidirl.errors import InputError
from bidirl.models import memory
from bidirl.models.cluster import ClusterConfig
from bidirl.models.estimate import Estimate, Source, from_mapping
from bidirl.models.iteration import AffineIteration
from bidirl.models.memory import EngineInputs
from bidirl.models.roofline import MICRO_TOKENS, ExpertIteration, Links, rollout_prior, trainer_prior
from bidirl.models.trainer import TrainerModel
from bidirl.models.transfer import SYNC_FASTEST_LINK, SwitchCosts, SyncModel, switch_prior, sync_prior

if TYPE_CHECKING:
    from bidirl.models.architecture import Architecture
    from bidirl.models.catalogue import Gpu
    from bidirl.models.iteration import IterationModel
    from bidirl.models.replica import EngineLimits

__all__ = ["StageModels", "WorkloadSizes", "predict_stage_models"]

SCHEMA = "bidirl-models"
VERSION = 1


@dataclass(frozen=True, slots=True)
class StageModels:
    """Everything that predicts time in one job; simulator, gates and planner share it."""

    iteration: IterationModel
    limits: EngineLimits
    trainer: TrainerModel
    sync: SyncModel
    switch: SwitchCosts
    sources: dict[str, Estimate] = field(default_factory=dict)
    """Source and interval of each coefficient, by its dotted name ("trainer.update.alpha_s")."""
    provenance: dict[str, str] = field(default_factory=dict)
    """What the models were made from: cluster, model, files and their hashes."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data; ``from_json`` reads it back to an equal value."""
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "provenance": dict(self.provenance),
            "iteration": _iteration_to_json(self.iteration),
            "limits": asdict(self.limits),
            "trainer": asdict(self.trainer),
            "sync": asdict(self.sync),
            "switch": asdict(self.switch),
            "sources": {name: estimate.to_mapping() for name, estimate in sorted(self.sources.items())},
        }

    @classmethod
    def from_json(cls, data: object) -> StageModels:
        """Read what ``to_json`` wrote; raise ``InputError`` naming the first wrong key."""
        from bidirl.models.replica import EngineLimits

        root = _table(data, "models")
        if root.get("schema") != SCHEMA:
            raise InputError(f"schema = {root.get('schema')!r}: must be {SCHEMA!r}; give a models.json")
        if root.get("version") != VERSION:
            raise InputError(
                f"version = {root.get('version')!r}: this release reads {VERSION}; calibrate again"
            )
        _only(root, "models", {"schema", "version", *(f.name for f in fields(cls))})
        provenance = _table(root.get("provenance", {}), "provenance")
        sources = _table(root.get("sources", {}), "sources")
        return cls(
            iteration=_iteration_from_json(_table(root.get("iteration"), "iteration")),
            limits=_read(EngineLimits, root.get("limits"), "limits"),
            trainer=_read(TrainerModel, root.get("trainer"), "trainer"),
            sync=_read(SyncModel, root.get("sync"), "sync"),
            switch=_read(SwitchCosts, root.get("switch"), "switch"),
            sources={name: _estimate(value, name) for name, value in sources.items()},
            provenance={name: str(value) for name, value in provenance.items()},
        )

    def save(self, path: Path) -> None:
        """Write the models as JSON; raise ``InputError`` if the file cannot be written."""
        try:
            path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror}): choose another path") from None

    @classmethod
    def load(cls, path: Path) -> StageModels:
        """Read a models.json; raise one-line ``InputError`` for a missing or malformed file."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror}): give a models.json") from None
        except ValueError as error:
            raise InputError(f"{path}: is not JSON ({error}): give a models.json") from None
        try:
            return cls.from_json(data)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None


@dataclass(frozen=True, slots=True)
class WorkloadSizes:
    """Token counts of a workload that the priors depend on."""

    prompt_mean_tokens: float
    response_mean_tokens: float
    max_total_tokens: int
    """Longest prompt and response together."""


def predict_stage_models(
    cluster: ClusterConfig,
    model: Architecture,
    engine: EngineInputs,
    *,
    rollout_tp: int,
    train_tp: int,
    rollout_gpus: int,
    train_gpus: int,
    workload: WorkloadSizes,
) -> StageModels:
    """Return the prior models of a job: rooflines, and published sync and switch costs.

    ``rollout_gpus`` and ``train_gpus`` are the pools' sizes (colocated: all GPUs, twice). Raises
    ``InputError`` where the catalogue lacks a number that the job does not give, or a size is wrong.
    """
    from bidirl.models.replica import EngineLimits

    for name, value in (("rollout_tp", rollout_tp), ("train_tp", train_tp)):
        if value < 1:
            raise InputError(f"{name} = {value}: must be at least 1; give the GPUs of one replica")
    for name, gpus, tp in (("rollout_gpus", rollout_gpus, rollout_tp), ("train_gpus", train_gpus, train_tp)):
        if gpus < tp or gpus % tp:
            raise InputError(
                f"{name} = {gpus}: must be a positive multiple of its tp {tp}; change one of them"
            )
    rollout, train = cluster.rollout_device, cluster.train_device
    kv = engine.kv_tokens
    kv_estimate = (
        memory.kv_estimate(rollout, model, rollout_tp, engine)
        if kv is None
        else Estimate.exact(kv, Source.MEASURED, "given in the job")
    )
    limits = EngineLimits(
        kv_tokens=int(kv_estimate.value),
        block_size=engine.block_size,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        prefix_caching=engine.prefix_caching,
    )
    iteration, sources = rollout_prior(rollout, model, rollout_tp, _links(cluster, rollout, rollout_tp))
    longest = workload.max_total_tokens
    micro = memory.fitting_micro_tokens(
        train, model, train_tp, train_gpus, at_least=longest, at_most=MICRO_TOKENS
    )
    trainer, more = trainer_prior(
        train, model, train_tp, train_gpus, _links(cluster, train, train_gpus), micro or longest
    )
    sync, sync_sources = sync_prior(model, _sync_link(cluster, train))
    switch, switch_sources = switch_prior(model, rollout_tp)
    return StageModels(
        iteration=iteration,
        limits=limits,
        trainer=trainer,
        sync=sync,
        switch=switch,
        sources=sources | more | sync_sources | switch_sources | {"limits.kv_tokens": kv_estimate},
        provenance={
            "kind": "prior",
            "model": model.name,
            "rollout": f"{rollout_gpus} x {rollout.name}, tp={rollout_tp}",
            "train": f"{train_gpus} x {train.name}, tp={train_tp}",
        },
    )


def _links(cluster: ClusterConfig, device: Gpu, num_gpus: int) -> Links:
    """Return the links of a pool; the network's rate is asked for only where the pool spans nodes."""
    in_node = min(num_gpus, cluster.gpus_per_node)
    peer = cluster.peer_bytes_per_s(device, in_node) if in_node > 1 else 1e12
    node = cluster.node_bytes_per_s(device) if num_gpus > cluster.gpus_per_node else 1e12
    return Links(peer, node, cluster.gpus_per_node)


def _sync_link(cluster: ClusterConfig, device: Gpu) -> float:
    """Return the rate of one sender of weights: its network card, or its peers in a cluster of one node.

    A node's rate is spread over cards nobody lists: one sender uses at most the typical rate per GPU of
    its board, or of the boards of the sync fit where the catalogue has none.
    """
    if cluster.num_nodes == 1:
        return cluster.peer_bytes_per_s(device, cluster.gpus_per_node)
    return min(cluster.node_bytes_per_s(device), device.inter_node_bytes_per_s or SYNC_FASTEST_LINK)


T = TypeVar("T")


def _iteration_to_json(iteration: IterationModel) -> dict[str, Any]:
    if isinstance(iteration, ExpertIteration):
        return {"kind": "experts", **asdict(iteration)}
    if isinstance(iteration, AffineIteration):
        return {"kind": "affine", **asdict(iteration)}
    from bidirl.models.profiled import iteration_to_json

    return dict(iteration_to_json(iteration))


def _iteration_from_json(data: dict[str, Any]) -> IterationModel:
    numbers = {key: value for key, value in data.items() if key != "kind"}
    if data.get("kind") == "experts":
        return _read(ExpertIteration, numbers, "iteration")
    if data.get("kind") == "affine":
        return _read(AffineIteration, numbers, "iteration")
    from bidirl.models.profiled import iteration_from_json

    return iteration_from_json(data)


def _table(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{where} is {type(value).__name__}: must be a table; give a models.json")
    return value


def _only(data: dict[str, Any], where: str, known: set[str]) -> None:
    unknown = sorted(set(data) - known)
    if unknown:
        raise InputError(
            f"{where} has the unknown key {unknown[0]!r}: the keys are {', '.join(sorted(known))}"
        )


def _estimate(value: object, name: str) -> Estimate:
    try:
        return from_mapping(_table(value, f"sources.{name}"))
    except InputError as error:
        raise InputError(f"sources.{name}: {error}") from None


def _read(cls: type[T], value: object, where: str) -> T:
    """Build a flat or nested dataclass of numbers from JSON data, strictly."""
    data = _table(value, where)
    assert is_dataclass(cls)
    hints = get_type_hints(cls)
    _only(data, where, set(hints))
    numbers: dict[str, Any] = {}
    for spec in fields(cls):
        if spec.name not in data:
            raise InputError(f"{where}.{spec.name} is missing: add it, or calibrate again")
        kind, given = hints[spec.name], data[spec.name]
        if is_dataclass(kind):
            numbers[spec.name] = _read(kind, given, f"{where}.{spec.name}")  # type: ignore[arg-type]
            continue
        accepts = {bool: (bool,), int: (int,), float: (int, float)}[kind]
        right = isinstance(given, accepts) and isinstance(given, bool) is (kind is bool)
        if not right or not isfinite(given) or given < 0:
            raise InputError(
                f"{where}.{spec.name} = {given!r}: must be a finite {kind.__name__} >= 0; correct it"
            )
        numbers[spec.name] = kind(given)
    return cls(**numbers)
