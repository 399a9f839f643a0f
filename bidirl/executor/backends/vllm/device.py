"""What an engine can do on its device, asked of vLLM rather than assumed."""

from __future__ import annotations

from typing import Any

from bidirl.executor.backends.vllm.args import EngineSettings
from bidirl.executor.roles import Capabilities

__all__ = ["capabilities_of"]


def capabilities_of(settings: EngineSettings, vllm_config: Any) -> Capabilities:
    """Return the capabilities of a started engine.

    Sleep: vLLM accepts it everywhere and frees memory only where its platform says so, which CPU's does not.
    Seeds: the second model runner keys a request's noise by position, the first restarts it at a resume.
    Batch invariance is never claimed: kernels may be chosen by batch size (seen on CPU at 33M parameters).
    """
    from vllm.platforms import current_platform

    cuda = settings.device == "cuda"
    return Capabilities(
        sleep_frees_memory=cuda and bool(current_platform.is_sleep_mode_available()),
        native_seed_resumes=cuda and bool(vllm_config.use_v2_model_runner),
        batch_invariant=False,
        device=settings.device,
    )
