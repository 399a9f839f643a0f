"""Stage models made slower or faster, so that they meet what a log measured."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bidirl.models.iteration import AffineIteration, IterationModel
from bidirl.models.roofline import ExpertIteration
from bidirl.models.trainer import SegmentCost, TrainerModel

__all__ = ["SlowedIteration", "slowed_iteration", "slowed_trainer"]


@dataclass(frozen=True, slots=True)
class SlowedIteration:
    """Any engine model with all its times multiplied by a factor."""

    iteration: IterationModel
    factor: float

    def decode(self, num_seqs: int) -> tuple[float, float]:
        """Return ``(base_s, per_context_token_s)``; see ``IterationModel``."""
        base_s, context_s = self.iteration.decode(num_seqs)
        return base_s * self.factor, context_s * self.factor

    def mixed(
        self, prefill_tokens: int, prefill_pairs: float, num_seqs: int, context_tokens: int, num_outputs: int
    ) -> float:
        """Return the seconds of an iteration with prefill; see ``IterationModel``."""
        return self.factor * self.iteration.mixed(
            prefill_tokens, prefill_pairs, num_seqs, context_tokens, num_outputs
        )


def slowed_iteration(iteration: IterationModel, factor: float, tilt: float = 1.0) -> IterationModel:
    """Return the engine with all times multiplied by ``factor``, those of decoding per token by ``tilt`` too.

    A model made of profile tables has no such parts: it takes the factor alone.
    """
    match iteration:
        case ExpertIteration():
            affine = slowed_iteration(iteration.affine, factor, tilt)
            assert isinstance(affine, AffineIteration)
            return replace(iteration, affine=affine, experts_s=iteration.experts_s * factor)
        case AffineIteration():
            return AffineIteration(
                iteration.tau_pre_s * factor,
                iteration.tau_dec_s * factor,
                iteration.beta_tok_pre_s * factor,
                iteration.beta_tok_dec_s * factor * tilt,
                iteration.beta_hist_pre_s * factor,
                iteration.beta_hist_dec_s * factor * tilt,
            )
        case _:
            return SlowedIteration(iteration, factor)


def slowed_trainer(
    trainer: TrainerModel,
    factors: Mapping[str, float],
    fixed_s: Mapping[str, float],
    pulls: Mapping[str, int],
) -> TrainerModel:
    """Return the trainer with each segment's times multiplied by its factor, plus fixed seconds of a step.

    ``fixed_s`` is spread evenly over the segment's ``pulls`` of a step. Communication, which the segments
    share, takes the update's factor.
    """

    def cost(name: str, segment: SegmentCost) -> SegmentCost:
        factor, fixed = factors[name], fixed_s.get(name, 0.0) / max(1, pulls[name])
        return SegmentCost(segment.tau_s * factor + fixed, segment.alpha_s * factor, segment.power)

    factor = factors["update"]
    return replace(
        trainer,
        old_logprob=cost("old_logprob", trainer.old_logprob),
        reference=cost("reference", trainer.reference),
        update=cost("update", trainer.update),
        alpha_comm_s=trainer.alpha_comm_s * factor,
        beta_comm_s_per_byte=trainer.beta_comm_s_per_byte * factor,
        beta_inter_s_per_byte=trainer.beta_inter_s_per_byte * factor,
        optimizer_s=trainer.optimizer_s * factor,
    )
