"""Stage times from hardware and architecture alone: the prior that any measurement replaces.

Every efficiency is one named number for a whole class (dense or experts), set once against public
measurements of many boards and models (docs/models.md has the residuals) and never for one case.
"""

from dataclasses import dataclass, fields
from math import isfinite

from bidirl.errors import InputError
from bidirl.models.architecture import Architecture
from bidirl.models.catalogue import Gpu
from bidirl.models.estimate import Estimate, Source
from bidirl.models.iteration import AffineIteration, IterationModel
from bidirl.models.trainer import SegmentCost, TrainerModel

__all__ = ["ExpertIteration", "Links", "rollout_prior", "trainer_prior"]

BANDWIDTH_EFFICIENCY = 0.78
"""Share of peak memory bandwidth that decoding reaches.
Source: fit over 643 serving points (H100, H200, B200; 8B to 671B; vLLM, SGLang, TensorRT-LLM) of
aiconfigurator's measured set, all groups weighted equally; docs/models.md."""
ENGINE_COMPUTE_EFFICIENCY = 0.80
"""Share of peak tensor throughput that an engine's linear layers reach. Source: the same fit."""
SEQUENCE_S = 20e-6
"""Engine seconds per running sequence and iteration (scheduling, sampling, detokenising).
Source: the same fit; a CPU engine of a 0.2M-parameter model shows 30e-6 (vLLM 0.32, m64, measured)."""
ALL_REDUCE_S = 28e-6
"""Seconds of one all-reduce of a small message beyond its bytes. Source: the same fit."""
ITERATION_S = 0.9e-3
"""Engine seconds per iteration that no GPU number explains.
Source: vLLM 0.32 on CPU with a 0.2M-parameter model, 0.90 to 0.95 ms; the serving points only bound it
(0 to 0.9 ms fit equally well), so small models on fast boards are the least certain."""
DENSE_SPREAD = 1.4
EXPERT_SPREAD = 2.0
"""Factors of the 90 % interval of a decode iteration. Source: residuals of the same fit (p90 factor 1.4
for dense models in BF16 and FP8, 1.7 for experts)."""

TRAIN_EFFICIENCY = 0.28
"""Share of peak BF16 throughput, recomputed work counted, of dense training and of its forward passes.
Source: geometric middle of prime-rl's SFT and full RL rows on H100, H200, B200 (0.16 to 0.41), verl's
deepseek-7b GRPO log on MI300X (0.24 update, 0.25 forward) and RLinf's verl row on H100 (0.24, 0.23)."""
EXPERT_TRAIN_EFFICIENCY = 0.20
"""The same with experts. Source: prime-rl's Qwen3-30B-A3B rows on H200 (0.17 to 0.30)."""
TRAIN_SPREAD = 1.9
EXPERT_TRAIN_SPREAD = 2.5
"""Factors of the 90 % interval of trainer compute. Source: the range of the rows above."""
UPDATE_FORWARDS = 4.0
"""Work of an update in forward passes: forward, backward (two), and the forward again, because RL runs
checkpoint activations (the default of the frameworks' recipes; without it the factor is 3)."""
PULL_S = 0.3
"""Seconds of one pull that do not grow with its tokens.
Source: half of the constant 0.6 s per mini-batch that a regression over 1,116 steps of verl's deepseek-7b
GRPO log leaves (MI300X; update_actor against tokens); how it divides by pull and segment is unknown."""
PULL_HIGH_S = 0.6
LINK_EFFICIENCY = 0.8
"""Share of a link that ring collectives of large buffers reach. ASSUMED: no public row isolates it."""
OVERLAP_P = 2.0
"""Overlap exponent of compute and communication. ASSUMED: between none (1) and perfect (infinity)."""
OPTIMIZER_BYTES_PER_PARAM = 28.0
"""Memory traffic of AdamW on FP32 state: read weight, gradient and two moments, write weight and moments."""
MICRO_TOKENS = 16384
"""Tokens of one micro-batch of one replica. Source: veRL's ppo_max_token_len_per_gpu default (16384)."""


@dataclass(frozen=True, slots=True)
class ExpertIteration:
    """An engine iteration of a mixture of experts: affine, plus the experts that its tokens touch.

    ``experts_s * (1 - (1 - share)**tokens)``: reading all experts takes ``experts_s``, and each token picks
    the share ``k / E`` of them, as if at random. Source: uniform routing, ours.
    """

    affine: AffineIteration
    experts_s: float
    share: float

    def decode(self, num_seqs: int) -> tuple[float, float]:
        """Return ``(base_s, per_context_token_s)`` as ``IterationModel.decode`` does."""
        base_s, context_s = self.affine.decode(num_seqs)
        return base_s + self._touched_s(num_seqs), context_s

    def mixed(
        self, prefill_tokens: int, prefill_pairs: float, num_seqs: int, context_tokens: int, num_outputs: int
    ) -> float:
        """Return the seconds of an iteration with prefill as ``IterationModel.mixed`` does."""
        plain_s = self.affine.mixed(prefill_tokens, prefill_pairs, num_seqs, context_tokens, num_outputs)
        return plain_s + self._touched_s(prefill_tokens + num_seqs)

    def _touched_s(self, num_tokens: int) -> float:
        return self.experts_s * (1.0 - (1.0 - self.share) ** num_tokens)


@dataclass(frozen=True, slots=True)
class Links:
    """Rates of the links around one pool, bytes per second and one way."""

    peer_bytes_per_s: float
    """One GPU to its peers in a node."""
    node_bytes_per_s: float
    """One node to the others; infinite in a cluster of one node, which never uses it."""
    gpus_per_node: int

    def group_bytes_per_s(self, num_gpus: int) -> float:
        """Return the rate per GPU inside a group of ``num_gpus`` neighbours."""
        if num_gpus <= self.gpus_per_node:
            return self.peer_bytes_per_s
        return min(self.peer_bytes_per_s, self.node_bytes_per_s / self.gpus_per_node)


def _all_reduce_s_per_token(model: Architecture, tp: int, rate_bytes_per_s: float) -> float:
    """Return the seconds to all-reduce one BF16 hidden state once: ``2 (tp - 1) / tp`` of it moves."""
    return 2.0 * (tp - 1) / tp * model.hidden_size * 2.0 / rate_bytes_per_s


def rollout_prior(
    device: Gpu, model: Architecture, tp: int, links: Links, dtype_bytes: float = 2.0
) -> tuple[IterationModel, dict[str, Estimate]]:
    """Return the iteration model of one engine on ``tp`` GPUs, and its coefficients with intervals.

    Decoding reads weights and cache once per iteration; each token costs its FLOP; tensor parallelism adds
    two all-reduces a layer. Raises ``InputError`` where the catalogue lacks a number of ``device``.
    Source: roofline model (Williams, Waterman, Patterson 2009) with the efficiencies above.
    """
    bandwidth = device.need("memory_bandwidth_bytes_per_s") * BANDWIDTH_EFFICIENCY * tp
    flop_rate = device.need("bf16_flop_per_s" if dtype_bytes > 1.0 else "fp8_flop_per_s")
    flop_rate *= ENGINE_COMPUTE_EFFICIENCY * tp
    cache_gpus = min(tp, model.num_kv_heads) if model.kv_values_per_layer == 0 else 1
    cache_rate = device.need("memory_bandwidth_bytes_per_s") * BANDWIDTH_EFFICIENCY * cache_gpus
    reduce_s = 0.0
    fixed_s = ITERATION_S
    if tp > 1:
        rate = links.group_bytes_per_s(tp)
        reduce_s = 2 * model.num_layers * _all_reduce_s_per_token(model, tp, rate)
        fixed_s += 2 * model.num_layers * ALL_REDUCE_S
    token_s = model.flop_per_token / flop_rate + reduce_s
    routed = model.routed_params * dtype_bytes
    weights_s = (model.decode_bytes(0.0, dtype_bytes)) / bandwidth
    affine = AffineIteration(
        tau_pre_s=fixed_s + weights_s,
        tau_dec_s=fixed_s + weights_s,
        beta_tok_pre_s=token_s,
        beta_tok_dec_s=token_s + SEQUENCE_S,
        beta_hist_pre_s=model.flop_per_pair / flop_rate,
        beta_hist_dec_s=model.kv_bytes_per_token() / cache_rate,
    )
    spread = DENSE_SPREAD if model.num_experts == 0 else EXPERT_SPREAD
    note = f"{device.name}, {model.name}, tp={tp}"
    sources = {
        f"iteration.{field.name}": Estimate.within(getattr(affine, field.name), spread, Source.ROOFLINE, note)
        for field in fields(affine)
    }
    if model.num_experts == 0:
        return affine, sources
    experts = ExpertIteration(affine, routed / bandwidth, model.experts_per_token / model.num_experts)
    sources["iteration.experts_s"] = Estimate.within(experts.experts_s, spread, Source.ROOFLINE, note)
    return experts, sources


def trainer_prior(
    device: Gpu, model: Architecture, tp: int, num_gpus: int, links: Links, micro_tokens: int = MICRO_TOKENS
) -> tuple[TrainerModel, dict[str, Estimate]]:
    """Return the trainer model of ``num_gpus`` GPUs in replicas of ``tp``, and its coefficients.

    Fully sharded data parallelism over the replicas: a forward pass gathers all BF16 weights of its tensor
    shard, an update gathers them twice and scatters FP32 gradients. A replica works
    through micro-batches of ``micro_tokens``. Raises ``InputError`` where ``device`` lacks a number.
    """
    dense = model.num_experts == 0
    efficiency = TRAIN_EFFICIENCY if dense else EXPERT_TRAIN_EFFICIENCY
    spread = TRAIN_SPREAD if dense else EXPERT_TRAIN_SPREAD
    rate = device.need("bf16_flop_per_s") * efficiency * tp
    reduce_s = 0.0
    if tp > 1:
        group_rate = links.group_bytes_per_s(tp) * LINK_EFFICIENCY
        reduce_s = 2 * model.num_layers * _all_reduce_s_per_token(model, tp, group_rate)
    forward_s = model.flop_per_token / rate + reduce_s
    forward = SegmentCost(PULL_S, forward_s)
    update = SegmentCost(PULL_S, UPDATE_FORWARDS * forward_s)
    peer_rate = links.peer_bytes_per_s * LINK_EFFICIENCY
    inter_rate = min(links.node_bytes_per_s / tp, links.peer_bytes_per_s) * LINK_EFFICIENCY
    state = model.num_params * OPTIMIZER_BYTES_PER_PARAM / num_gpus
    optimizer_s = state / (device.need("memory_bandwidth_bytes_per_s") * BANDWIDTH_EFFICIENCY)
    trainer = TrainerModel(
        old_logprob=forward,
        reference=forward,
        update=update,
        pair_tokens=model.pair_tokens,
        alpha_comm_s=3 * model.num_layers * ALL_REDUCE_S,
        beta_comm_s_per_byte=1.0 / peer_rate,
        beta_inter_s_per_byte=1.0 / inter_rate,
        overlap_p=OVERLAP_P,
        optimizer_s=optimizer_s,
        forward_bytes=model.weight_bytes(2.0) / tp,
        update_bytes=model.weight_bytes(8.0) / tp,
        micro_tokens=micro_tokens,
        replicas_per_node=max(1, links.gpus_per_node // tp),
    )
    note = f"{device.name}, {model.name}, tp={tp}"
    pull = Estimate(PULL_S, 0.0, PULL_HIGH_S, Source.TRANSFERRED, "verl deepseek-7b GRPO log, MI300X")
    sources = {
        "trainer.pair_tokens": Estimate.exact(trainer.pair_tokens, Source.ROOFLINE, model.name),
        "trainer.alpha_comm_s": Estimate.within(trainer.alpha_comm_s, 2.0, Source.ROOFLINE, note),
        "trainer.beta_comm_s_per_byte": _assumed(trainer.beta_comm_s_per_byte, "link efficiency 0.8"),
        "trainer.beta_inter_s_per_byte": _assumed(trainer.beta_inter_s_per_byte, "link efficiency 0.8"),
        "trainer.overlap_p": Estimate(OVERLAP_P, 1.0, 8.0, Source.ASSUMED, "partial overlap"),
        "trainer.optimizer_s": Estimate.within(optimizer_s, 2.0, Source.ROOFLINE, note),
    }
    for name, segment in (("old_logprob", forward), ("reference", forward), ("update", update)):
        sources[f"trainer.{name}.tau_s"] = pull
        sources[f"trainer.{name}.alpha_s"] = Estimate.within(segment.alpha_s, spread, Source.ROOFLINE, note)
        sources[f"trainer.{name}.power"] = Estimate.exact(1.0, Source.ROOFLINE, "FLOP are linear in tokens")
    return trainer, sources


def _assumed(value: float, note: str) -> Estimate:
    if not isfinite(value):
        raise InputError(f"{note}: a link of rate 0; give a positive rate")
    return Estimate(value, value * 0.8 / 0.95, value * 0.8 / 0.5, Source.ASSUMED, note)
