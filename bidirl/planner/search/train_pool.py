"""What training takes on a pool of each size in one layout; or the rule that forbids it."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from bidirl.models import memory
from bidirl.models.estimate import Estimate, Source
from bidirl.models.memory_roles import megatron_memory
from bidirl.models.roofline import (
    ALL_REDUCE_S,
    LINK_EFFICIENCY,
    MICRO_TOKENS,
    TRAIN_SPREAD,
    UPDATE_FORWARDS,
    Links,
    trainer_prior,
)
from bidirl.models.trainer import SegmentCost, TrainerModel
from bidirl.planner.plan import SAMPLES_PER_PULL
from bidirl.planner.search.frameworks import Framework
from bidirl.planner.search.layouts import Style, TrainLayout
from bidirl.planner.search.measured import moved_trainer
from bidirl.planner.search.question import Question

__all__ = ["TrainPool", "pull_seconds", "train_seconds"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class TrainPool:
    """The trainer in one layout; ``seconds`` is ``M_t(U_B, d)`` over the question's pool sizes."""

    def __init__(self, question: Question, layout: TrainLayout, framework: Framework | None = None) -> None:
        self.question = question
        self.layout = layout
        self.framework = framework
        self.sources: dict[str, Estimate] = {}
        self._templates: dict[tuple[bool, int], TrainerModel] = {}

    def rungs(self) -> Iterator[int]:
        """Yield micro-batch sizes in tokens, largest first, down to the longest sample.

        A pipeline takes the smallest: its bubble grows with the micro-batch.
        """
        least = self.question.longest_tokens
        tokens = max(MICRO_TOKENS * self.layout.cp, least) if self.layout.pp == 1 else least
        while tokens > least:
            yield tokens
            tokens = max(least, tokens // 2)
        yield least

    def budget(self, gpus: int, micro_tokens: int) -> memory.MemoryBudget:
        """Return the memory of one GPU of a pool."""
        question, layout = self.question, self.layout
        device, model = question.cluster.train_device, question.model
        if layout.style is Style.FSDP:
            return memory.train_memory(device, model, layout.tp, gpus, micro_tokens, layout.cp)
        return megatron_memory(
            device,
            model,
            tp=layout.tp,
            pp=layout.pp,
            ep=layout.ep,
            num_gpus=gpus,
            micro_tokens=micro_tokens,
            cp=layout.cp,
        )

    @cached_property
    def legal_sizes(self) -> Ints:
        """Return the pool sizes that divide, and give each replica a sample of every mini-batch."""
        sizes = self.question.sizes
        keep = (sizes % self.layout.unit_gpus == 0) & (sizes % self.layout.gpus == 0)
        keep &= sizes // self.layout.gpus <= self.samples_per_update
        if self.framework is not None:
            rule = self.framework.train_reason
            allowed = [rule(self.question, self.layout, int(gpus)) is None for gpus in sizes[keep]]
            keep[keep] = allowed
        return np.where(keep, sizes, 0)

    @property
    def samples_per_update(self) -> int:
        """Return the samples of one mini-batch."""
        return self.question.num_samples // self.question.mini_batches

    @cached_property
    def micro_tokens(self) -> Ints:
        """Return the largest micro-batch that fits, per pool size; 0 where none does.

        Of all items only the sharded states depend on the pool: ``bytes = a / gpus + b``, read off two pools.
        """
        sizes = self.legal_sizes
        found = np.zeros(len(sizes), dtype=np.int64)
        if not sizes.any():
            return found
        unit = self.layout.unit_gpus
        for tokens in self.rungs():
            todo = (sizes > 0) & (found == 0)
            one, two = (self.budget(unit * factor, tokens) for factor in (2, 4))
            shared = (one.total_bytes - two.total_bytes) * 4 * unit
            rest = one.total_bytes - shared / (2 * unit)
            fits = shared / np.maximum(sizes, 1) + rest <= one.capacity_bytes
            fits &= (sizes != unit) | self.budget(unit, tokens).fits  # nothing is gathered within one replica
            found[todo & fits] = tokens
        return found

    def reason(self, gpus: int) -> str | None:
        """Return why a pool of this size cannot run the layout, with numbers; None if it can."""
        layout = self.layout
        match self.kind(gpus):
            case "divisibility":
                unit = layout.unit_gpus if gpus % layout.unit_gpus else layout.gpus
                return f"divisibility: {gpus} GPUs are no multiple of a replica's {unit}"
            case "batch":
                return (
                    f"batch: {gpus // layout.gpus} trainer replicas for the {self.samples_per_update} "
                    "samples of a mini-batch; at least one each"
                )
            case "framework":
                assert self.framework is not None
                return self.framework.train_reason(self.question, layout, gpus)
            case _:
                pass
        if any(self.budget(gpus, tokens).fits for tokens in self.rungs()):
            return None
        return f"memory: {self.budget(gpus, self.question.longest_tokens).verdict()}"

    def kind(self, gpus: int) -> str:
        """Return which rule binds: divisibility, batch, framework, or memory (also where all hold)."""
        layout = self.layout
        if gpus % layout.unit_gpus or gpus % layout.gpus or gpus < layout.unit_gpus:
            return "divisibility"
        if gpus // layout.gpus > self.samples_per_update:
            return "batch"
        rules = self.framework
        if rules is not None and rules.train_reason(self.question, layout, gpus) is not None:
            return "framework"
        return "memory"

    def template(self, *, spans_nodes: bool, micro_tokens: int) -> TrainerModel:
        """Return the time model, without what depends on the pool's size beyond the nodes that it spans."""
        key = (spans_nodes, micro_tokens)
        found = self._templates.get(key)
        if found is None:
            found = self._templates[key] = self._make(spans_nodes, micro_tokens)
        return found

    def _make(self, spans_nodes: bool, micro_tokens: int) -> TrainerModel:
        question, layout = self.question, self.layout
        if question.measured is not None:
            return moved_trainer(question, question.measured, layout.tp)
        node = question.cluster.gpus_per_node
        pool = node * 2 if spans_nodes else min(node, question.cluster.num_gpus)
        links = question.links(pool, of_rollout=False)
        device, model = question.cluster.train_device, question.model
        prior, sources = trainer_prior(device, model, layout.tp, 1, links, micro_tokens)
        self.sources.update(sources)
        if layout.style is Style.FSDP and layout.cp == 1:
            return prior  # optimizer_s is that of one GPU here: divided by the pool's GPUs later
        forward_s = prior.old_logprob.alpha_s
        if layout.ep > 1:
            moved = 2.0 * model.experts_per_token * model.hidden_size * 2.0 * (layout.ep - 1) / layout.ep
            rate = links.group_bytes_per_s(layout.ep) * LINK_EFFICIENCY
            forward_s += model.num_layers * moved / rate / layout.tp
        if layout.cp > 1:
            forward_s = forward_s / layout.cp + self._context_s(prior, links, micro_tokens)
        forward_s /= layout.pp
        bubble_s = (layout.pp - 1) * micro_tokens * forward_s
        tau_s = prior.old_logprob.tau_s
        forward = SegmentCost(tau_s + bubble_s, forward_s)
        update = SegmentCost(tau_s + UPDATE_FORWARDS * bubble_s, UPDATE_FORWARDS * forward_s)
        per_node = max(1, prior.replicas_per_node // layout.cp)
        made = replace(
            prior, old_logprob=forward, reference=forward, update=update, replicas_per_node=per_node
        )
        if layout.style is Style.FSDP:
            return made
        return replace(made, forward_bytes=0.0, update_bytes=0.0)

    def _alone(self, model: TrainerModel) -> TrainerModel:
        """Return the model of a single context-parallel replica under FSDP: its GPUs still shard the states.

        The gather of a micro-batch is then no communication between replicas; it is charged per token,
        without overlap.
        """
        layout = self.layout
        if layout.style is not Style.FSDP or layout.cp == 1 or self.question.measured is not None:
            return model
        per_token = model.beta_comm_s_per_byte * (1.0 - 1.0 / layout.cp) / model.micro_tokens
        forward, update = model.old_logprob, model.update
        forward = replace(forward, alpha_s=forward.alpha_s + per_token * model.forward_bytes)
        update = replace(update, alpha_s=update.alpha_s + per_token * model.update_bytes)
        return replace(model, old_logprob=forward, reference=forward, update=update)

    def _context_s(self, prior: TrainerModel, links: Links, micro_tokens: int) -> float:
        """Return the seconds per effective token in which the parts of a sequence meet in attention.

        Ulysses (FSDP) scatters and gathers the heads of queries, keys, values and outputs, all to all; a ring
        (Megatron) passes keys and values around. Each GPU holds ``1 / cp`` of the tokens. Source: Jacobs et
        al. 2023 (DeepSpeed Ulysses), Liu et al. 2023 (ring attention), by their bytes over the links; not
        overlapped with anything, which is an upper bound.
        """
        layout, model, lengths = self.layout, self.question.model, self.question.prior
        cp, tp = layout.cp, layout.tp
        if layout.style is Style.FSDP:
            heads = 2 * model.num_attention_heads + 2 * model.num_kv_heads
            moved = model.attention_layers * heads * model.head_dim * 2.0 * (cp - 1) / cp**2 / tp
        else:
            moved = model.kv_bytes_per_token() * (cp - 1) / cp / min(tp, model.num_kv_heads)
        messages_s = 2.0 * model.attention_layers * ALL_REDUCE_S / micro_tokens
        seconds = moved / (links.group_bytes_per_s(tp * cp) * LINK_EFFICIENCY) + messages_s
        tokens = [lengths.prompt_mean_tokens + response for response in lengths.quantiles]
        seconds *= sum(tokens) / sum(prior.sample_work(each) for each in tokens)
        note = f"{model.name}, cp={cp}, unoverlapped"
        self.sources["trainer.context_s_per_token"] = Estimate.within(
            seconds, TRAIN_SPREAD, Source.ROOFLINE, note
        )
        return seconds

    def optimizer_s(self, template: TrainerModel, gpus: Ints | int) -> Floats:
        """Return the seconds of one optimizer step of a pool.

        Megatron's distributed optimizer reduces FP32 gradients and gathers BF16 weights once per update:
        6 bytes a parameter of a replica's shard, experts over their own data-parallel group. Context-parallel
        GPUs hold the same shards and reduce with the rest.
        """
        question, layout = self.question, self.layout
        if question.measured is not None:
            return np.full(np.shape(gpus), template.optimizer_s)
        step_s = np.asarray(template.optimizer_s / np.asarray(gpus, dtype=np.float64))
        if layout.style is Style.FSDP:
            return step_s
        routed = question.model.routed_params
        shards = layout.tp * layout.pp
        dense = (question.model.num_params - routed) / shards
        replicas = np.asarray(gpus, dtype=np.float64) / shards
        groups = np.asarray(gpus, dtype=np.float64) / (layout.ep * layout.pp)
        moved = dense * (1.0 - 1.0 / replicas) + routed / (layout.ep * layout.pp) * (1.0 - 1.0 / groups)
        spans = np.asarray(gpus) > question.cluster.gpus_per_node
        inside = self.template(spans_nodes=False, micro_tokens=template.micro_tokens).beta_comm_s_per_byte
        if not np.any(spans):
            return step_s + 6.0 * moved * inside
        across = self.template(spans_nodes=True, micro_tokens=template.micro_tokens)
        beta = np.where(spans, across.beta_inter_s_per_byte * layout.pp, inside)
        return step_s + 6.0 * moved * beta

    def trainer(self, gpus: int) -> TrainerModel:
        """Return the trainer's time model for a pool of this size; it must be legal."""
        index = self.question.pool_sizes.index(gpus)
        micro = int(self.micro_tokens[index]) or self.question.longest_tokens
        return self.trainer_of(gpus, micro)

    def trainer_of(self, gpus: int, micro_tokens: int) -> TrainerModel:
        """Return the same for a stated micro-batch."""
        spans = gpus > self.question.cluster.gpus_per_node
        template = self.template(spans_nodes=spans, micro_tokens=micro_tokens)
        model = replace(template, optimizer_s=float(self.optimizer_s(template, gpus)))
        if gpus == self.layout.gpus:
            return self._alone(model)
        share = float(self._gather_share(np.asarray(gpus // self.layout.gpus)))
        moved = model.forward_bytes * share, model.update_bytes * share
        return replace(model, forward_bytes=moved[0], update_bytes=moved[1])

    def _gather_share(self, replicas: Ints) -> Floats:
        """Return by how much a gather over all GPUs of some replicas exceeds one over the replicas.

        ``TrainerModel`` moves ``(d - 1) / d`` of the bytes between ``d`` replicas; under FSDP the members of
        a gather are the ``d cp`` GPUs of a tensor shard.
        """
        count = replicas.astype(np.float64)
        if self.question.measured is not None or self.layout.style is not Style.FSDP:
            return np.ones_like(count)
        members = count * self.layout.cp
        return np.where(count > 1.0, (members - 1.0) / members * count / np.maximum(count - 1.0, 1.0), 1.0)

    @cached_property
    def seconds(self) -> Floats:
        """Return ``M_t`` for each pool size; infinite where it is illegal."""
        sizes, micro = self.legal_sizes, self.micro_tokens
        found = np.full(len(sizes), np.inf)
        node = self.question.cluster.gpus_per_node
        for tokens in np.unique(micro[micro > 0]):
            for spans in (False, True):
                here = (micro == tokens) & ((sizes > node) == spans)
                if here.any():
                    template = self.template(spans_nodes=spans, micro_tokens=int(tokens))
                    step_s = self.optimizer_s(template, sizes[here])
                    replicas = sizes[here] // self.layout.gpus
                    share = self._gather_share(replicas)
                    found[here] = train_seconds(self.question, template, replicas, step_s, share)
        for index in np.flatnonzero((sizes == self.layout.gpus) & (micro > 0) & (self.layout.cp > 1)):
            found[index] = self._seconds_of(self.trainer(int(sizes[index])), 1)
        return found

    def seconds_on(self, gpus: int) -> float:
        """Return ``M_t`` on a pool that is not in the grid (the whole cluster), infinite if illegal."""
        if self.reason(gpus) is not None:
            return float("inf")
        micro = next(tokens for tokens in self.rungs() if self.budget(gpus, tokens).fits)
        return self._seconds_of(self.trainer_of(gpus, micro), gpus // self.layout.gpus)

    def _seconds_of(self, model: TrainerModel, replicas: int) -> float:
        step_s = np.asarray([model.optimizer_s])
        return float(train_seconds(self.question, model, np.asarray([replicas]), step_s)[0])


def pull_seconds(
    trainer: TrainerModel,
    segment: str,
    work: float | Floats,
    longest: float,
    replicas: Ints,
    moved: float | Floats = 1.0,
) -> Floats:
    """Return ``TrainerModel.pull_s`` for arrays of works and replica counts; the same formula and numbers.

    ``moved`` scales the bytes of a gather per replica count.
    """
    count = replicas.astype(np.float64)
    slowest = np.maximum(work / count, longest)
    cost = trainer.segment(segment)
    compute = cost.tau_s + cost.alpha_s * (slowest if cost.power == 1.0 else slowest**cost.power)
    num_bytes = trainer.update_bytes if segment == "update" else trainer.forward_bytes
    crosses = replicas > trainer.replicas_per_node
    beta = np.where(crosses, trainer.beta_inter_s_per_byte, trainer.beta_comm_s_per_byte)
    each = trainer.alpha_comm_s + beta * (num_bytes * moved) * (count - 1.0) / count
    moved = np.where(count > 1.0, np.ceil(slowest / trainer.micro_tokens) * each, 0.0)
    if trainer.overlap_p == 1.0:
        return np.asarray(compute + moved)
    larger = np.maximum(compute, moved)
    ratio = np.minimum(compute, moved) / larger
    return np.asarray(larger * (1.0 + ratio**trainer.overlap_p) ** (1.0 / trainer.overlap_p))


def train_seconds(
    question: Question,
    trainer: TrainerModel,
    replicas: Ints,
    optimizer_s: Floats,
    moved: float | Floats = 1.0,
) -> Floats:
    """Return ``M_t(U_B, d)`` for an array of replica counts: all segments of a step, in pulls of ``s_max``.

    The same sum as ``Predictor.train_s(batch_work(plan), d)``; a test holds the two together.
    """
    prior, n = question.prior, question.samples_per_group
    works = [trainer.sample_work(prior.prompt_mean_tokens + tokens) for tokens in prior.quantiles]
    batch, longest = sum(works) / len(works) * question.groups * n, max(works)
    pull = question.chunks_per_pull
    if question.chunk_groups is not None:
        chunk = np.full(replicas.shape, question.chunk_groups, dtype=np.int64)
    else:
        chunk = np.ceil(SAMPLES_PER_PULL * replicas / (n * pull)).astype(np.int64)
        chunk = np.minimum(chunk, question.groups // question.mini_batches)
    chunks = -(-question.groups // chunk)
    pulls = np.ceil(chunks / pull)
    forward = pulls * pull_seconds(trainer, "old_logprob", batch / pulls, longest, replicas, moved)
    parts = np.ceil(np.maximum(1, chunks // question.mini_batches) / pull)
    part = batch / question.mini_batches / parts
    update = parts * pull_seconds(trainer, "update", part, longest, replicas, moved) + optimizer_s
    return np.asarray(question.num_forwards * forward + question.mini_batches * update)
