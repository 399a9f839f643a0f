"""Turn drafts into vLLM requests and vLLM outputs into tokens; the same for both engines."""

from __future__ import annotations

from typing import Any

from bidirl.executor.backends.vllm.args import EngineSettings
from bidirl.executor.roles import Draft

__all__ = ["delta", "prompt_of", "sampling_of"]

KEY = "bidirl_gumbel"
"""Entry of ``SamplingParams.extra_args``: [seed, response tokens before this request, temperature]."""
SEED_BITS = 63
"""vLLM's own per-request seed is a signed 64-bit number."""


def sampling_of(draft: Draft, settings: EngineSettings) -> Any:
    """Return the sampling parameters of the rest of a draft.

    Only the sampled token's raw log-probability is asked for (``logprobs=0``), and only new tokens are
    reported. The model's own end tokens are ignored: the task's, if it has one, is the only one.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    offset = len(draft.tokens)
    noise: dict[str, Any] = {"temperature": 0.0}
    if settings.temperature > 0 and settings.device == "cpu":
        noise["extra_args"] = {KEY: [draft.seed, offset, settings.temperature]}
    elif settings.temperature > 0:
        noise = {"temperature": settings.temperature, "seed": draft.seed & ((1 << SEED_BITS) - 1)}
    return SamplingParams(
        max_tokens=draft.max_tokens - offset,
        logprobs=0,
        ignore_eos=True,
        stop_token_ids=None if settings.eos_id is None else [settings.eos_id],
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        **noise,
    )


def prompt_of(draft: Draft, salt: int) -> Any:
    """Return prompt and prefix as vLLM's input.

    ``salt`` is the version under which the request starts: prefixes are shared only within one version, so a
    block that was computed under older weights is never taken over, whatever is still running.
    """
    from vllm.inputs import TokensPrompt

    return TokensPrompt(
        prompt_token_ids=[*draft.prompt.tolist(), *draft.tokens.tolist()], cache_salt=str(salt)
    )


def delta(output: Any) -> tuple[list[int], list[float]]:
    """Return the new tokens of a request output and their log-probabilities."""
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    entries = completion.logprobs or []
    return tokens, [entry[token].logprob for token, entry in zip(tokens, entries, strict=True)]
