"""Weights, gradient and optimizer of one replica, each one flat vector on one device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any

import numpy as np
import torch

from bidirl.errors import RunFault
from bidirl.executor.backends.torch.settings import TrainerConfig
from bidirl.executor.roles import NamedTensors

__all__ = ["MOMENTS", "FlatStates", "adamw", "add_on", "as_tensor", "checked_tensors", "clip_factor"]

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The two moments of AdamW, under torch's names."""
NORM_EPSILON = 1e-6
"""Keeps the clipping factor finite; torch's ``clip_grad_norm_`` uses the same."""


EXACT_STEP = 2.0**-44
"""Grid of exact summation. Below it nothing is kept: 6e-14, far under what AdamW's epsilon of 1e-8 sees."""
EXACT_LIMIT = 2.0**8
"""Multiples of the grid up to here are exact in float64's 53 bits, and so are their sums."""


def adamw(parameters: list[Any], config: TrainerConfig) -> Any:
    """Return the optimizer over parameters, one after the other."""
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        foreach=False,
    )


def as_tensor(values: Any) -> Any:
    """Return a tensor of a tensor's or a numpy array's values; a read-only array is copied."""
    if isinstance(values, np.ndarray):
        return torch.from_numpy(values if values.flags.writeable else values.copy())
    return values


def add_on(device: Any, gradients: Sequence[Any]) -> Any:
    """Return the sum of gradients, added from the first to the last in their type; a fresh float32 tensor.

    Raises ``RunFault`` where exact gradients (float64) are too large to be summed exactly.
    """
    total = as_tensor(gradients[0]).to(device, copy=True)
    for gradient in gradients[1:]:
        total += as_tensor(gradient).to(device)
    if total.dtype == torch.float64:
        largest = float(total.abs().max())
        if largest >= EXACT_LIMIT:
            raise RunFault(
                f"largest gradient = {largest:.3g}: exact summation holds below {EXACT_LIMIT:.0f}; "
                "use summation = 'float32'"
            )
    return total.float()


def clip_factor(norm: float, limit: float) -> float:
    """Return what a gradient of this norm is multiplied with; raise ``RunFault`` if it is not finite."""
    if not isfinite(norm):
        raise RunFault(f"gradient norm = {norm}: must be finite; lower learning_rate, or check the rewards")
    return limit / (norm + NORM_EPSILON) if limit and norm > limit else 1.0


def checked_tensors(shapes: Mapping[str, Any], tensors: NamedTensors) -> NamedTensors:
    """Yield tensors that fit a model; raise ``RunFault`` for a foreign, misshapen or missing one."""
    missing = set(shapes)
    for name, tensor in tensors:
        if name not in shapes:
            if name == "lm_head.weight":
                continue  # tied to the embedding, which comes under its own name
            raise RunFault(f"weight {name!r} is none of this model's: send those of the same model")
        if tuple(shapes[name]) != tuple(tensor.shape):
            raise RunFault(
                f"weight {name!r} has shape {tuple(tensor.shape)}, this model's {tuple(shapes[name])}: "
                "send those of the same model"
            )
        missing.discard(name)
        yield name, as_tensor(tensor)
    if missing:
        raise RunFault(f"weight {min(missing)!r} was not sent ({len(missing)} missing): send all")


def _flatten(model: Any) -> Any:
    """Return a model's parameters as one float32 vector, tied ones once."""
    with torch.no_grad():
        return torch.cat([p.detach().reshape(-1).float() for p in model.parameters()])


class FlatStates:
    """The states of a model whose parameters are views of one float32 vector.

    One vector makes gradients, merges, snapshots and the optimizer one operation each, and gives every
    replica the same order. The optimizer's moments exist once the first step was taken: an auxiliary
    trainer never has them.
    """

    def __init__(self, model: Any, config: TrainerConfig) -> None:
        self.model = model
        self.config = config
        self.device = torch.device(config.device)
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.weights = torch.nn.Parameter(_flatten(model).to(self.device))
        self.gradient = torch.zeros_like(self.weights.data)
        self.exact: Any = None
        self._bind()
        model.to(self.device)
        self.parked: dict[str, Any] = {}
        self.optimizer = adamw([self.weights], config)

    @property
    def num_params(self) -> int:
        """Return the length of the vectors."""
        return int(self.weights.numel())

    def _views(self, flat: Any) -> Iterator[tuple[str, Any]]:
        at = 0
        for name, shape in self.shapes.items():
            end = at + shape.numel()
            yield name, flat[at:end].view(shape)
            at = end

    def _bind(self) -> None:
        """Make the model's parameters and their gradients views of the vectors."""
        parameters = dict(self.model.named_parameters())
        for name, view in self._views(self.weights.data):
            parameters[name].data = view
        for name, view in self._views(self.gradient):
            parameters[name].grad = view

    # ---------------------------------------------------------------- gradients

    def zero(self) -> None:
        """Forget the gradient."""
        self.gradient.zero_()
        if self.exact is not None:
            self.exact.zero_()

    def bank(self) -> None:
        """Add the gradient to an exact sum and forget it."""
        if self.exact is None:
            self.exact = torch.zeros_like(self.gradient, dtype=torch.float64)
        self.exact += (self.gradient.double() / EXACT_STEP).round() * EXACT_STEP
        self.gradient.zero_()

    def take(self) -> Any:
        """Return a copy of the gradient (exact: of the sum); a numpy array on a CPU, a tensor on a device."""
        copy = self.gradient.clone() if self.exact is None else self.exact.clone()
        return copy.numpy() if self.device.type == "cpu" else copy

    def step(self, gradients: Sequence[Any]) -> dict[str, float]:
        """Add gradients from the first to the last, clip the sum by its norm, take one AdamW step.

        Raises ``RunFault`` where the sum is not finite; the weights are untouched then.
        """
        total = add_on(self.device, gradients)
        norm = float(total.norm())
        total *= clip_factor(norm, self.config.max_gradient_norm)
        self.weights.grad = total
        self.optimizer.step()
        self.weights.grad = None
        return {"gradient_norm": norm}

    # ------------------------------------------------------------------ weights

    def tensors(self) -> NamedTensors:
        """Return the weights under their checkpoint names; views, not copies."""
        return self._views(self.weights.data)

    def load(self, tensors: NamedTensors) -> None:
        """Replace the weights; raise ``RunFault`` for a foreign, misshapen or missing tensor."""
        views = dict(self._views(self.weights.data))
        with torch.no_grad():
            for name, tensor in checked_tensors(self.shapes, tensors):
                views[name].copy_(tensor)

    def reference_of(self, model: Any) -> Any:
        """Return another model's weights in the form that ``replaced`` takes."""
        return _flatten(model).to(self.device)

    @contextmanager
    def replaced(self, reference: Any) -> Iterator[None]:
        """Run with other weights for a while."""
        own = self.weights.data.clone()
        self.weights.data.copy_(reference)
        try:
            yield
        finally:
            self.weights.data.copy_(own)

    def digest(self) -> str:
        """Return the SHA-256 of the weights in the order of the parameters."""
        return hashlib.sha256(self.weights.data.cpu().numpy().tobytes()).hexdigest()

    # ---------------------------------------------------------------- optimizer

    def moments(self) -> dict[str, Any]:
        """Return the optimizer's vectors by name; nothing before the first step."""
        state = self.optimizer.state.get(self.weights, {})
        return {name: state[name] for name in MOMENTS if name in state}

    @property
    def num_steps(self) -> int:
        """Return the optimizer steps taken."""
        state = self.optimizer.state.get(self.weights, {})
        return int(state["step"]) if "step" in state else 0

    def set_moments(self, num_steps: int, moments: dict[str, Any]) -> None:
        """Put the optimizer where it was after ``num_steps`` steps."""
        self.optimizer.state.clear()
        if num_steps:
            self.optimizer.state[self.weights] = {
                "step": torch.tensor(float(num_steps)),
                **{name: moments[name].to(self.device, copy=True) for name in MOMENTS},
            }

    # ------------------------------------------------------------ ranks, device

    rank = 0
    num_ranks = 1

    def share(self, values: Any) -> list[Any]:
        """Return what every rank gave: there is one."""
        return [values]

    def forget_gathered(self) -> None:
        """Do nothing: all weights are here."""

    def move(self, device: Any) -> None:
        """Move weights and moments to another device; the gradient there is zero.

        Host memory is pinned where a GPU is there, and kept for the next time: to pin it takes longer than
        to copy.
        """

        def moved(name: str, tensor: Any) -> Any:
            if device == self.device:
                return tensor.to(device, copy=True)
            if name not in self.parked:
                self.parked[name] = torch.empty_like(
                    tensor, device=device, pin_memory=torch.cuda.is_available()
                )
            return self.parked[name].copy_(tensor, non_blocking=True)

        self.weights.data = moved("weights", self.weights.data)
        for name, vector in self.moments().items():
            self.optimizer.state[self.weights][name] = moved(name, vector)
        if device == self.device:
            self.gradient = torch.zeros_like(self.weights.data)
            self._bind()
        else:
            self.gradient, self.exact = torch.empty(0), None
            for parameter in self.model.parameters():
                parameter.data, parameter.grad = torch.empty(0), None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
