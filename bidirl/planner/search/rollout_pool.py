"""What rollout takes on a pool of each size in one layout; or the rule that forbids it."""

from dataclasses import replace
from functools import cached_property
from math import ceil, floor

import numpy as np
import numpy.typing as npt

from bidirl.errors import InputError
from bidirl.models import memory
from bidirl.models.architecture import Architecture
from bidirl.models.engine_limits import EngineLimits
from bidirl.models.estimate import Estimate, Source
from bidirl.models.iteration import AffineIteration, IterationModel
from bidirl.models.makespan import batch_cap, expected_max_tokens, rollout_makespan_s
from bidirl.models.roofline import ALL_REDUCE_S, EXPERT_SPREAD, ExpertIteration, rollout_prior
from bidirl.planner.search.frameworks import Framework
from bidirl.planner.search.layouts import RolloutLayout
from bidirl.planner.search.measured import moved_iteration, moved_limits
from bidirl.planner.search.question import Question

__all__ = ["RolloutPool"]

Floats = npt.NDArray[np.float64]


class RolloutPool:
    """The rollouter in one layout; ``seconds`` is ``M_r(B_p, d)`` over the question's pool sizes."""

    def __init__(self, question: Question, layout: RolloutLayout, framework: Framework | None = None) -> None:
        self.question = question
        self.layout = layout
        self.framework = framework
        self.sources: dict[str, Estimate] = {}
        self._known: dict[int | tuple[int, int], float] = {}

    @cached_property
    def refused(self) -> str | None:
        """Return why no pool runs this layout, with numbers; None if it fits."""
        question = self.question
        try:
            limits = self.limits
        except InputError as error:
            return str(error)
        if question.longest_tokens > limits.num_blocks * limits.block_size:
            return (
                f"KV memory: a sample of {question.longest_tokens:,} tokens exceeds the engine's "
                f"{limits.kv_tokens:,}; raise tp"
            )
        return None

    @cached_property
    def limits(self) -> EngineLimits:
        """Return what bounds the engine's batch; ``InputError`` if the weights leave no KV memory."""
        question, engine = self.question, self.question.engine
        if question.measured is not None:
            return moved_limits(question, question.measured, self.layout.tp)
        if engine.kv_tokens is not None:
            kv = Estimate.exact(engine.kv_tokens, Source.MEASURED, "given in the job")
        else:
            kv = memory.kv_estimate(question.cluster.rollout_device, self.part, self.layout.tp, engine)
            kv *= self.layout.groups
        self.sources["limits.kv_tokens"] = kv
        return EngineLimits(
            kv_tokens=int(kv.value),
            block_size=engine.block_size,
            max_num_seqs=engine.max_num_seqs * self.layout.groups,
            max_num_batched_tokens=engine.max_num_batched_tokens * self.layout.groups,
            prefix_caching=engine.prefix_caching,
        )

    @cached_property
    def part(self) -> Architecture:
        """Return what ``tp`` GPUs of the engine hold, as a model of its own.

        The largest pipeline stage; or, with wide expert parallelism, all but the experts of other groups.
        """
        model, layout = self.question.model, self.layout
        if layout.groups > 1:
            others = model.routed_params * (1.0 - layout.tp / layout.ep)
            return replace(model, num_params=round(model.num_params - others))
        return _stage_of(self.question, layout.pp)

    @cached_property
    def iteration(self) -> IterationModel:
        """Return the time model of one engine iteration.

        With a pipeline of ``pp`` stages, ``pp`` micro-batches are under way: all running sequences advance by
        one token in the time that one micro-batch needs through all stages. Reading weights takes as long as
        without, work per token and per cached token is divided, and each boundary costs a message (ours).
        With wide expert parallelism see ``_spread``.
        """
        question, pp = self.question, self.layout.pp
        if question.measured is not None:
            return moved_iteration(question, question.measured, self.layout.tp)
        tp = self.layout.tp
        links = question.links(tp, of_rollout=True)
        model, sources = rollout_prior(question.cluster.rollout_device, question.model, tp, links)
        self.sources.update(sources)
        if self.layout.groups > 1:
            return self._spread(model)
        return model if pp == 1 else _pipelined(model, pp)

    def _spread(self, model: IterationModel) -> IterationModel:
        """Return the model of an engine whose groups share the experts: all of it per token of the engine.

        Groups run in step on sequences of their own, evenly split (ours: routing and load are balanced, a
        lower bound). Each reads its own copy of the other weights; an expert is read once in the engine. A
        token goes to ``k`` experts and back, ``2 k h`` values in BF16, of which ``1 - 1 / ep`` leave the GPU,
        and each layer sends two messages more. Source: bytes over links, as for tensor parallelism; the
        interval is that of ``EXPERT_SPREAD``.
        """
        question, layout = self.question, self.layout
        assert isinstance(model, ExpertIteration)
        shape, affine, groups = question.model, model.affine, layout.groups
        links = question.links(layout.ep, of_rollout=True)
        moved = 4.0 * shape.experts_per_token * shape.hidden_size * (1.0 - 1.0 / layout.ep)
        token_s = shape.num_layers * moved / links.group_bytes_per_s(layout.ep) / layout.ep
        message_s = 2.0 * shape.num_layers * ALL_REDUCE_S
        note = f"{question.cluster.rollout_device.name}, {shape.name}, {layout.label}"
        for name, seconds in (("all_to_all_s_per_token", token_s), ("all_to_all_s", message_s)):
            self.sources[f"iteration.{name}"] = Estimate.within(seconds, EXPERT_SPREAD, Source.ROOFLINE, note)
        spread = AffineIteration(
            tau_pre_s=affine.tau_pre_s + message_s,
            tau_dec_s=affine.tau_dec_s + message_s,
            beta_tok_pre_s=affine.beta_tok_pre_s / groups + token_s,
            beta_tok_dec_s=affine.beta_tok_dec_s / groups + token_s,
            beta_hist_pre_s=affine.beta_hist_pre_s / groups,
            beta_hist_dec_s=affine.beta_hist_dec_s / groups,
        )
        return replace(model, affine=spread, experts_s=model.experts_s / groups)

    def makespan_s(self, replicas: int) -> float:
        """Return ``M_r(B_p, replicas)``.

        Where all samples of a replica run at once, only their number counts: then one call serves every pool
        with that number, which keeps the search cheap on large clusters.
        """
        question, samples = self.question, self.question.produced_samples
        here = max(1, ceil(samples / replicas))
        key: int | tuple[int, int] = here if here <= self.cap else (here, replicas)
        seconds = self._known.get(key)
        if seconds is None:
            seconds = self._known[key] = rollout_makespan_s(
                self.iteration,
                self.limits,
                question.prior,
                samples,
                replicas,
                samples_per_group=question.samples_per_group,
            )
        return seconds

    @cached_property
    def alone_s(self) -> float:
        """Return the seconds of the expected longest sample of a step decoding by itself: the tail bound."""
        prior = self.question.prior
        tokens = expected_max_tokens(prior, self.question.produced_samples)
        base_s, context_s = self.iteration.decode(1)
        return tokens * (base_s + context_s * (prior.prompt_mean_tokens + tokens / 2.0))

    def steady_s(self, replicas: int) -> float:
        """Return the seconds of a step's samples where generation never stops for a batch (ours).

        ``M_r`` ends with the slowest sample of a batch; a pool that runs ahead overlaps that tail with the
        next batch. Then ``(1 + s) B n`` samples are in flight and Little's law gives the rate, down to the
        longest sample over the steps that it may span. Below ``s = 1`` the two are mixed by ``s``.
        """
        question, prior = self.question, self.question.prior
        ahead = min(1.0, question.staleness)
        barrier_s = self.makespan_s(replicas)
        if ahead <= 0.0:
            return barrier_s
        flying = floor((1.0 + question.staleness) * question.groups) * question.samples_per_group
        batch = min(self.cap, max(1, ceil(flying / replicas)))
        mean = sum(prior.quantiles) / len(prior.quantiles)
        age = sum(tokens * tokens for tokens in prior.quantiles) / len(prior.quantiles) / (2.0 * mean)
        base_s, context_s = self.iteration.decode(batch)
        step_s = base_s + context_s * batch * (prior.prompt_mean_tokens + age)
        shared = question.samples_per_group if self.limits.prefix_caching else 1
        prompt = max(1, int(prior.prompt_mean_tokens / shared))
        resident = int(batch * (prior.prompt_mean_tokens + age))
        mixed_s = self.iteration.mixed(prompt, prompt * (prompt + 1.0) / 2.0, batch, resident, batch)
        here = question.produced_samples / replicas
        flow_s = here * (mean * step_s / batch + max(0.0, mixed_s - step_s))
        flow_s = max(flow_s, self.alone_s / (1.0 + question.staleness))
        return barrier_s + ahead * (min(flow_s, barrier_s) - barrier_s)

    @cached_property
    def steady(self) -> Floats:
        """Return ``steady_s`` for each pool size; infinite where it is illegal."""
        found = np.full(len(self.seconds), np.inf)
        for index in np.flatnonzero(np.isfinite(self.seconds)):
            found[index] = self.steady_s(int(self.question.sizes[index]) // self.layout.gpus)
        return found

    @cached_property
    def cap(self) -> int:
        """Return the sequences that one engine runs at once."""
        return batch_cap(self.limits, self.question.prior, self.question.samples_per_group)

    def reason(self, gpus: int) -> str | None:
        """Return why a pool of this size cannot run the layout; None if it can."""
        match self.kind(gpus):
            case "divisibility":
                return f"divisibility: {gpus} GPUs are no multiple of a replica's {self.layout.gpus}"
            case "framework":
                assert self.framework is not None
                return self.framework.rollout_reason(self.question, self.layout, gpus)
            case _:
                return self.refused

    def kind(self, gpus: int) -> str:
        """Return which rule binds: divisibility, framework, or memory (also where all hold)."""
        if gpus % self.layout.gpus or gpus < self.layout.gpus:
            return "divisibility"
        rules = self.framework
        if rules is not None and rules.rollout_reason(self.question, self.layout, gpus) is not None:
            return "framework"
        return "memory"

    @cached_property
    def seconds(self) -> Floats:
        """Return ``M_r`` for each pool size; infinite where it is illegal."""
        sizes = self.question.pool_sizes
        found = np.full(len(sizes), np.inf)
        if self.refused is None:
            for index, gpus in enumerate(sizes):
                if gpus % self.layout.gpus == 0 and (self.framework is None or self.kind(gpus) == "memory"):
                    found[index] = self.makespan_s(gpus // self.layout.gpus)
        return found


def _stage_of(question: Question, pp: int) -> Architecture:
    """Return the largest of ``pp`` pipeline stages as a model of its own."""
    model = question.model
    if pp == 1:
        return model
    layers = -(-model.attention_layers // pp)
    return replace(
        model,
        num_layers=-(-model.num_layers // pp),
        num_attention_layers=layers,
        num_params=-(-model.num_params // pp),
    )


def _pipelined(model: IterationModel, pp: int) -> IterationModel:
    if isinstance(model, ExpertIteration):
        affine = _pipelined(model.affine, pp)
        assert isinstance(affine, AffineIteration)
        return replace(model, affine=affine)
    assert isinstance(model, AffineIteration)
    hops = pp * ALL_REDUCE_S
    return AffineIteration(
        tau_pre_s=model.tau_pre_s + hops,
        tau_dec_s=model.tau_dec_s + hops,
        beta_tok_pre_s=model.beta_tok_pre_s / pp,
        beta_tok_dec_s=model.beta_tok_pre_s / pp + (model.beta_tok_dec_s - model.beta_tok_pre_s),
        beta_hist_pre_s=model.beta_hist_pre_s / pp,
        beta_hist_dec_s=model.beta_hist_dec_s / pp,
    )
