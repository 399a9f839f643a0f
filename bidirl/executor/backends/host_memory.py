"""Weights in host memory: copied off a device, hashed, and as numpy."""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import numpy as np

__all__ = ["digest_of", "host_copy", "plain"]


def host_copy(tensor: Any) -> Any:
    """Return a copy in host memory: numpy where its type exists there (not bfloat16)."""
    if hasattr(tensor, "detach"):
        host = tensor.detach().to("cpu", copy=True)
        return host if str(host.dtype) == "torch.bfloat16" else host.numpy()
    return np.array(tensor)


def digest_of(weights: Mapping[str, Any]) -> str:
    """Hash names and bytes of weights in host memory."""
    found = sha256()
    for name in sorted(weights):
        found.update(name.encode())
        found.update(np.ascontiguousarray(plain(weights[name])).tobytes())
    return found.hexdigest()


def plain(array: Any) -> Any:
    """Return a tensor in host memory as numpy, bfloat16 widened to float32."""
    return array if isinstance(array, np.ndarray) else array.float().numpy()
