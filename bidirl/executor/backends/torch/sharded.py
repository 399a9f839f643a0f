"""The states of a replica over several devices: FSDP2 shards, with the interface of ``FlatStates``.

Every rank runs the same calls in the same order; a gradient is the flat vector of the rank's own shards, so
that of rank ``r`` on one side adds to that of rank ``r`` on the other, and nothing is resharded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from bidirl.errors import InputError
from bidirl.executor.backends.torch.settings import Summation, TrainerConfig
from bidirl.executor.backends.torch.states import MOMENTS, adamw, add_on, checked_tensors, clip_factor
from bidirl.executor.roles import NamedTensors
from bidirl.planner.learn import Precision

__all__ = ["ShardedStates"]


class ShardedStates:
    """Weights, gradients and AdamW of a model that is cut over the ranks of a mesh, layer by layer."""

    def __init__(self, scorer: Any, config: TrainerConfig, mesh: Any) -> None:
        if config.summation is Summation.EXACT:
            raise InputError("summation = 'exact': is for replicas of one device; use 'float32'")
        self.config = config
        self.mesh = mesh
        self.scorer = scorer
        self.device = torch.device(config.device)
        self.model = scorer.model
        scorer.to(self.device)
        narrow = config.precision is Precision.BFLOAT16
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if narrow else None, reduce_dtype=torch.float32 if narrow else None
        )
        for module in (*self.model.get_decoder().layers, scorer):
            fully_shard(module, mesh=mesh, mp_policy=policy)
            module.set_gradient_divide_factor(1.0)  # losses are normalised: gradients add up
            module.set_force_sum_reduction_for_comms(self.device.type == "cpu")  # all that gloo can do
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = adamw(list(self.parameters.values()), config)

    @property
    def num_params(self) -> int:
        """Return the length of a gradient: the parameters in this rank's shards."""
        return sum(parameter.to_local().numel() for parameter in self.parameters.values())

    # ---------------------------------------------------------------- gradients

    def zero(self) -> None:
        """Forget the gradient."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def bank(self) -> None:
        """Do nothing: sums are float32 here."""

    def take(self) -> Any:
        """Return the flat gradient of this rank's shards; a numpy array on a CPU, a tensor on a device."""
        flat = torch.cat(
            [
                torch.zeros_like(p.to_local()).reshape(-1)
                if p.grad is None
                else p.grad.to_local().reshape(-1)
                for p in self.parameters.values()
            ]
        )
        return flat.numpy() if self.device.type == "cpu" else flat

    def step(self, gradients: Sequence[Any]) -> dict[str, float]:
        """Add gradients from the first to the last, clip by the norm over all ranks, take one step."""
        total = add_on(self.device, gradients)
        square = total.square().sum()
        dist.all_reduce(square, group=self.mesh.get_group())
        norm = float(square.sqrt())
        total *= clip_factor(norm, self.config.max_gradient_norm)
        at = 0
        for parameter in self.parameters.values():
            local = parameter.to_local()
            piece = total[at : at + local.numel()].view(local.shape)
            parameter.grad = DTensor.from_local(
                piece, self.mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
            )
            at += local.numel()
        self.optimizer.step()
        self.zero()
        return {"gradient_norm": norm}

    # ------------------------------------------------------------------ weights

    def tensors(self) -> NamedTensors:
        """Return the whole weights under their checkpoint names, gathered one by one; all ranks must ask."""
        for name, parameter in self.parameters.items():
            yield name, parameter.detach().full_tensor()

    def load(self, tensors: NamedTensors) -> None:
        """Replace the weights by whole ones that every rank has."""
        shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        with torch.no_grad():
            for name, tensor in checked_tensors(shapes, tensors):
                self.parameters[name].copy_(self._cut(self.parameters[name], tensor))

    def _cut(self, parameter: Any, whole: Any) -> Any:
        return distribute_tensor(whole.to(self.device), self.mesh, parameter.placements, src_data_rank=None)

    def _local(self) -> list[Any]:
        return [parameter.detach().to_local() for parameter in self.parameters.values()]

    def reference_of(self, model: Any) -> Any:
        """Return another model's weights in the form that ``replaced`` takes."""
        whole = dict(model.named_parameters())
        return [
            self._cut(parameter, whole[name].detach()).to_local()
            for name, parameter in self.parameters.items()
        ]

    @contextmanager
    def replaced(self, reference: Any) -> Iterator[None]:
        """Run with other weights for a while."""
        own = [shard.clone() for shard in self._local()]
        self._write(reference)
        try:
            yield
        finally:
            self._write(own)

    def _write(self, shards: Sequence[Any]) -> None:
        for target, shard in zip(self._local(), shards, strict=True):
            target.copy_(shard)

    def digest(self) -> str:
        """Return the SHA-256 of the whole weights; all ranks must ask."""
        found = hashlib.sha256()
        for _, tensor in self.tensors():
            found.update(tensor.float().cpu().numpy().tobytes())
        return found.hexdigest()

    # ---------------------------------------------------------------- optimizer

    @property
    def num_steps(self) -> int:
        """Return the optimizer steps taken."""
        state = self.optimizer.state
        return int(next(iter(state.values()))["step"]) if state else 0

    def moments(self) -> dict[str, Any]:
        """Return the optimizer's vectors, whole and flat as those of ``FlatStates``; all ranks must ask."""
        if not self.num_steps:
            return {}
        parts = [self.optimizer.state[parameter] for parameter in self.parameters.values()]
        return {
            name: torch.cat([part[name].full_tensor().reshape(-1).cpu() for part in parts])
            for name in MOMENTS
        }

    def set_moments(self, num_steps: int, moments: dict[str, Any]) -> None:
        """Put the optimizer where it was after ``num_steps`` steps."""
        self.optimizer.state.clear()
        at = 0
        for parameter in self.parameters.values() if num_steps else ():
            end = at + parameter.numel()
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(num_steps)),
                **{
                    name: self._cut(parameter, moments[name][at:end].view(parameter.shape))
                    for name in MOMENTS
                },
            }
            at = end

    # -------------------------------------------------------------------- ranks

    @property
    def rank(self) -> int:
        """Return this process's place in the replica."""
        return int(self.mesh.get_local_rank())

    @property
    def num_ranks(self) -> int:
        """Return the devices of the replica."""
        return int(self.mesh.size())

    def share(self, values: Any) -> list[Any]:
        """Return what every rank gave, by rank."""
        found: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(found, values, group=self.mesh.get_group())
        return found

    def forget_gathered(self) -> None:
        """Free what a forward pass without a backward pass leaves gathered, and would use again, stale."""
        self.scorer.reshard()

    def move(self, device: Any) -> None:
        """Move shards and moments to another device; gradients are forgotten. Not run on GPUs so far."""
        self.zero()
        self.scorer.to(device)
        for state in self.optimizer.state.values():
            for name in MOMENTS:
                state[name] = state[name].to(device)
