"""The GRPO loss of one micro-batch, from token log-probabilities to a sum that is already normalised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear, log_softmax
from torch.utils.checkpoint import checkpoint

from bidirl.executor.backends.torch.settings import LossConfig
from bidirl.planner.learn import OldPolicy

__all__ = ["Tokens", "policy_loss", "token_logprobs"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut to +-20 so that an exponential stays finite; a ratio of e^20 is clipped anyway."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The response tokens of one micro-batch, row after row, each field a float32 vector over them."""

    behaviour: Any
    """Log-probabilities while sampling."""
    advantage: Any
    coefficient: Any
    """What a token's loss is multiplied with: weight over the global count."""
    old: Any = None
    reference: Any = None


def token_logprobs(hidden: Any, matrix: Any, targets: Any, logit_tokens: int) -> Any:
    """Return the float32 log-probability of each target.

    ``hidden``: [tokens, hidden]; ``matrix``: [vocabulary, hidden]; ``targets``: [tokens]. Logits exist in
    float32 for ``logit_tokens`` tokens at a time; the backward pass computes them again.
    """

    def part(hidden: Any, matrix: Any, targets: Any) -> Any:
        logits = linear(hidden, matrix).float()
        return log_softmax(logits, dim=-1).gather(1, targets[:, None]).squeeze(1)

    total = hidden.shape[0]
    if total <= logit_tokens:
        return part(hidden, matrix, targets)
    slices = [slice(at, at + logit_tokens) for at in range(0, total, logit_tokens)]
    if not torch.is_grad_enabled():
        return torch.cat([part(hidden[s], matrix, targets[s]) for s in slices])
    return torch.cat([checkpoint(part, hidden[s], matrix, targets[s], use_reentrant=False) for s in slices])


def _ratio(new: Any, old: Any) -> Any:
    return (new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def policy_loss(config: LossConfig, logprobs: Any, tokens: Tokens) -> tuple[Any, dict[str, Any]]:
    """Return the loss (a scalar: the micro-batch's share of the mini-batch's mean) and sums over tokens.

    Per token ``-min(r * A, clip(r, 1 - low, 1 + high) * A)`` with ``r = exp(logp - old)``, weighted by
    ``min(exp(old - behaviour), cap)`` where decoupled, plus ``kl_weight * (exp(d) - d - 1)`` with
    ``d = reference - logp``. A token of advantage 0 gives exactly no gradient without the KL part.
    Source: Schulman et al. 2017 (PPO); Shao et al. 2024 (GRPO, its KL estimate from Schulman's note "k3").
    """
    old = tokens.behaviour if config.old_policy is OldPolicy.BEHAVIOUR else tokens.old
    ratio = _ratio(logprobs, old)
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    free, bound = ratio * tokens.advantage, clipped * tokens.advantage
    loss = -torch.minimum(free, bound)
    counted = (tokens.coefficient != 0).float()
    sums = {
        "tokens": counted.sum(),
        "ratio": (ratio.detach() * counted).sum(),
        "clipped": ((bound < free).float() * counted).sum(),
        "logprob": (logprobs.detach() * counted).sum(),
        "mismatch": ((logprobs.detach() - tokens.behaviour).abs() * counted).sum(),
        "mismatch_max": ((logprobs.detach() - tokens.behaviour).abs() * counted).max(),
    }
    if config.old_policy is OldPolicy.DECOUPLED:
        correction = _ratio(old, tokens.behaviour)
        sums["capped"] = ((correction > config.behaviour_cap).float() * counted).sum()
        loss = loss * correction.clamp(max=config.behaviour_cap)
    if config.kl_weight:
        distance = (tokens.reference - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        kl = distance.exp() - distance - 1.0
        sums["kl"] = (kl.detach() * counted).sum()
        loss = loss + config.kl_weight * kl
    total = (loss * tokens.coefficient).sum()
    sums["loss"] = total.detach()
    return total, sums
