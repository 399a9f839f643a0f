"""The receiving end inside vLLM's worker: a weight-transfer backend that stages, checks, then applies.

Follows vLLM's own protocol (start, update, finish). vLLM's backends load while they receive, so a sender lost
half-way leaves a mixed model; here nothing of the model changes before every tensor has arrived and was
checked. The price is one copy of the weights in host memory during a sync.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from bidirl.errors import RunFault
from bidirl.executor.backends.pair import Address
from bidirl.executor.backends.vllm.args import checkpoint_shapes
from bidirl.executor.backends.wire import receive

__all__ = ["InitInfo", "StagedTransfer", "UpdateInfo", "WorkerExtension", "checked", "register"]

BACKEND = "gloo"
TIED = "lm_head.weight"
"""May be left out, or be there twice, where the output layer is the embedding."""


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc,unused-ignore]
    """Nothing to agree on beforehand: each transfer has an address of its own."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc,unused-ignore]
    """Where this worker's transfer is to be had, and which version it must be."""

    host: str
    port: int
    key: str
    version: int
    deadline_s: float


class StagedTransfer(WeightTransferEngine):  # type: ignore[misc,unused-ignore]
    """Weights over gloo, staged in host memory; works on CPU and CUDA."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._expected = checkpoint_shapes(self.model_config.model)
        self._staged: list[tuple[str, Any]] = []

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Agree on nothing."""

    def start_weight_update(self) -> None:
        """Forget what an earlier update left."""
        self._staged = []

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take the weights from the sender (the base class then waits for an accelerator, CPU has none)."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Take all weights of one version.

        Raises:
            RunFault: the transfer failed or is not what this model needs; the model is as it was.
        """
        address = Address(update_info.host, update_info.port, update_info.key)
        received = receive(address, deadline_s=update_info.deadline_s)
        if received.number != update_info.version:
            raise RunFault(
                f"weights from {address.key} are version {received.number}, asked for "
                f"{update_info.version}: ask again"
            )
        self.stage(received.tensors)

    def stage(self, tensors: Sequence[tuple[str, Any]]) -> None:
        """Check names and shapes and keep the tensors for ``finish_weight_update``."""
        self._staged = checked(tensors, self._expected)

    def finish_weight_update(self) -> None:
        """Load what was staged, layer by layer, into the memory that the engine already uses.

        Loading into the live model directly does not work on CPU: its kernels keep packed copies and free the
        originals, so vLLM rebuilds each layer from its checkpoint form.
        """
        import torch
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        staged, self._staged = self._staged, []
        if not staged:
            raise RunFault("a weight update was finished without weights: send them first")
        with torch.no_grad():
            initialize_layerwise_reload(self.model)
            try:
                self.model.load_weights(iter(staged))
            finally:  # leaves the layers in a state from which a whole load can start again
                finalize_layerwise_reload(self.model, self.model_config)
            _repack_tied_head(self.model)

    def shutdown(self) -> None:
        """Forget staged weights."""
        self._staged = []


def _repack_tied_head(model: Any) -> None:
    """Rebuild the CPU kernel of an output layer that shares the embedding's weights.

    A reload rebuilds the layers that checkpoint tensors name; a tied output layer is none of them, and would
    go on with its packed copy of the old embedding (vLLM 0.32, measured: log-probabilities off by 5).
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


class WorkerExtension:
    """Named in the engine's arguments so that vLLM imports this module in every worker process."""


def checked(
    tensors: Sequence[tuple[str, Any]], expected: dict[str, tuple[int, ...]]
) -> list[tuple[str, Any]]:
    """Return the tensors if they are exactly the checkpoint's; an empty ``expected`` accepts all.

    Raises:
        RunFault: a name or a shape that is not the checkpoint's, or one that is missing or twice.
    """
    staged = list(tensors)
    if not expected:
        return staged
    seen: set[str] = set()
    for name, tensor in staged:
        if name in seen:
            raise RunFault(f"weight {name} came twice: send each name once")
        seen.add(name)
        if name not in expected:
            if name == TIED:
                continue
            raise RunFault(f"weight {name} is not in the model's folder: send the names of its checkpoint")
        if tuple(tensor.shape) != expected[name]:
            raise RunFault(
                f"weight {name} has shape {tuple(tensor.shape)}, the model's folder {expected[name]}: "
                "send the checkpoint's shapes"
            )
    missing = sorted(expected.keys() - seen - {TIED})
    if missing:
        raise RunFault(f"weight {missing[0]} is missing ({len(missing)} in all): send every name")
    return staged


def register() -> None:
    """Make the backend known to vLLM in this process; again is harmless."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, StagedTransfer)


register()
