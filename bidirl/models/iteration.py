"""Time of one engine iteration: the interface of every rollout time model, and the affine one.

One engine iteration runs ``b`` decoding sequences of total cached context ``C`` tokens and, if it is a
mixed iteration, prefill chunks beside them. All times are seconds.
"""

from dataclasses import dataclass
from typing import Protocol

__all__ = ["AffineIteration", "IterationModel"]


class IterationModel(Protocol):
    """What the replica model asks of a rollout time model."""

    def decode(self, num_seqs: int) -> tuple[float, float]:
        """Return ``(base_s, per_context_token_s)`` of a pure decode iteration of ``num_seqs`` sequences.

        The iteration takes ``base_s + per_context_token_s * C``, with ``C`` the cached tokens of the
        decoding sequences before it. ``k`` iterations with a fixed set then sum to
        ``k * base_s + per_context_token_s * (k * C + num_seqs * k * (k - 1) / 2)``.
        """
        ...

    def mixed(
        self, prefill_tokens: int, prefill_pairs: float, num_seqs: int, context_tokens: int, num_outputs: int
    ) -> float:
        """Return the seconds of an iteration that holds prefill work.

        ``prefill_tokens`` new prompt tokens over all chunks; ``prefill_pairs`` the (query token x visible
        token) pairs of the chunks, ``n * h + n * (n + 1) / 2`` for ``n`` tokens after ``h`` cached ones;
        ``num_seqs`` decoding sequences beside them with ``context_tokens`` cached tokens in all;
        ``num_outputs`` sequences that emit a token at the end (decodes and finished prefills).
        """
        ...


@dataclass(frozen=True, slots=True)
class AffineIteration:
    """One constant per iteration, plus terms linear in new tokens and in (query, cached) pairs.

    Source: design.md section 6 (functional form ours; coefficient names the paper's). The layout's
    communication is folded into the coefficients by whoever builds them.
    """

    tau_pre_s: float
    """Fixed seconds of an iteration that holds any prefill."""
    tau_dec_s: float
    """Fixed seconds of a pure decode iteration."""
    beta_tok_pre_s: float
    """Seconds per prefilled token."""
    beta_tok_dec_s: float
    """Seconds per decoded token (one per running sequence)."""
    beta_hist_pre_s: float
    """Seconds per prefill (query, visible token) pair."""
    beta_hist_dec_s: float
    """Seconds per cached token of a decoding sequence."""

    def decode(self, num_seqs: int) -> tuple[float, float]:
        return self.tau_dec_s + self.beta_tok_dec_s * num_seqs, self.beta_hist_dec_s

    def mixed(
        self, prefill_tokens: int, prefill_pairs: float, num_seqs: int, context_tokens: int, num_outputs: int
    ) -> float:
        return (
            self.tau_pre_s
            + self.beta_tok_pre_s * prefill_tokens
            + self.beta_hist_pre_s * prefill_pairs
            + self.beta_tok_dec_s * num_seqs
            + self.beta_hist_dec_s * context_tokens
        )
