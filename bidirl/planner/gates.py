"""Predict whether a lease shortens the step by more than it costs: the paper's two gates.

Source: paper.md, "Bidirectional scheduler". Predictions come from the stage-time models and the length
prior; the scheduler never sees a true length before the sample has ended.
"""

from dataclasses import dataclass
from math import ceil

from bidirl.models.makespan import rollout_makespan_s
from bidirl.planner.events import SegmentKind
from bidirl.planner.plan import Plan

__all__ = ["Forecast", "Predictor", "SegmentWork", "batch_work", "eq6_share"]


@dataclass(frozen=True, slots=True)
class Forecast:
    """A gate's answer: take the lease iff ``gain_s > threshold_s``."""

    gain_s: float
    threshold_s: float

    @property
    def pays(self) -> bool:
        """Whether the predicted gain exceeds the cost."""
        return self.gain_s > self.threshold_s


@dataclass(frozen=True, slots=True)
class SegmentWork:
    """What is left of one trainer segment."""

    kind: SegmentKind
    work: float
    longest: float
    num_chunks: int


def eq6_share(groups: int, primary: int, auxiliary: int) -> int:
    """Return ``Q_a = round(d_a / (d_p + d_a) * Q_r)``, halves away from zero.

    Source: paper.md, Eq. 6 (split by capacity, no length prediction).
    """
    return (2 * auxiliary * groups + primary + auxiliary) // (2 * (primary + auxiliary))


class Predictor:
    """Stage-time predictions of one plan, with the factors of the online calibration."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rollout_factor = 1.0
        self.train_factor = 1.0
        self._rollout: dict[tuple[int, int, int], float] = {}
        self._batch: dict[int, float] = {}

    def recalibrate(self, rollout_factor: float, train_factor: float) -> None:
        """Take new factors on the predicted times."""
        self.rollout_factor, self.train_factor = rollout_factor, train_factor
        self._batch.clear()

    def rollout_s(self, groups: int, replicas: int, step: int) -> float:
        """Predict ``M_r(groups, replicas)``: the slowest replica's seconds for fresh groups."""
        plan = self.plan
        key = (groups, replicas, min(step, len(plan.priors) - 1))
        seconds = self._rollout.get(key)
        if seconds is None:
            models = plan.models
            seconds = rollout_makespan_s(
                models.iteration,
                models.limits,
                plan.prior(step),
                groups * plan.samples_per_group,
                replicas,
                samples_per_group=plan.samples_per_group,
            )
            self._rollout[key] = seconds
        return seconds * self.rollout_factor

    def batch_s(self, step: int) -> float:
        """Predict the primary trainer's seconds for a representative batch of a step."""
        seconds = self._batch.get(step)
        if seconds is None:
            seconds = self._batch[step] = self.train_s(batch_work(self.plan, step), self.plan.train_replicas)
        return seconds

    def train_s(self, segments: list[SegmentWork], replicas: int) -> float:
        """Predict ``M_t(U, replicas)``: one segment after the other, in pulls of ``s_max`` chunks."""
        trainer, pull = self.plan.models.trainer, self.plan.policy.max_chunks_per_pull
        seconds = 0.0
        for segment in segments:
            if segment.num_chunks and segment.work > 0.0:
                pulls = ceil(segment.num_chunks / pull)
                seconds += pulls * trainer.pull_s(
                    segment.kind.value, segment.work / pulls, segment.longest, replicas
                )
                if segment.kind is SegmentKind.UPDATE:
                    seconds += trainer.optimizer_s
        return seconds * self.train_factor

    def joint_s(self, segments: list[SegmentWork], primary: int, auxiliary: int) -> float:
        """Predict ``M_t(U, d_p + d_a)`` for two sides that pull by themselves.

        In a segment of ``k`` pulls that take ``t_p`` on one side and ``t_a`` on the other, both end after
        ``k / (1 / t_p + 1 / t_a)`` (JointTailSplit levels the ends).
        """
        trainer, pull = self.plan.models.trainer, self.plan.policy.max_chunks_per_pull
        seconds = 0.0
        for segment in segments:
            if segment.num_chunks and segment.work > 0.0:
                pulls = segment.num_chunks / pull
                work = segment.work / max(1.0, pulls)
                mine_s, other_s = (
                    trainer.pull_s(segment.kind.value, work, segment.longest, side)
                    for side in (primary, auxiliary)
                )
                if mine_s > 0.0 and other_s > 0.0:
                    seconds += max(1.0, pulls) / (1.0 / mine_s + 1.0 / other_s)
                if segment.kind is SegmentKind.UPDATE:
                    seconds += trainer.optimizer_s
        return seconds * self.train_factor

    def drain_prefix(self, segments: list[SegmentWork], seconds: float, replicas: int) -> list[SegmentWork]:
        """Return what is left of ``segments`` after the primary trainer alone has worked for ``seconds``.

        Source: paper.md, Algorithm 2, DrainPrefix (taken in proportion inside a segment: ours).
        """
        rest: list[SegmentWork] = []
        for segment in segments:
            if rest or seconds <= 0.0:
                rest.append(segment)
                continue
            needed = self.train_s([segment], replicas)
            if needed <= seconds:
                seconds -= needed
                continue
            share = 1.0 - seconds / needed
            seconds = 0.0
            rest.append(
                SegmentWork(
                    segment.kind,
                    segment.work * share,
                    segment.longest,
                    max(1, round(segment.num_chunks * share)),
                )
            )
        return rest

    def rollout_on_train(self, missing: int, primary: int, auxiliary: int, step: int) -> Forecast:
        """Weigh lending the training pool to rollout for ``missing`` groups.

        Borrow iff ``M_r(Q_r, d_p) - M_r(Q_r, d_p + d_a) > C_in + C_out``. Source: paper.md, R-on-T gate.
        """
        switch = self.plan.models.switch
        gain = self.rollout_s(missing, primary, step) - self.rollout_s(missing, primary + auxiliary, step)
        return Forecast(gain, switch.rollout_on_train_in_s + switch.rollout_on_train_out_s)

    def train_on_rollout(self, segments: list[SegmentWork], primary: int, auxiliary: int) -> Forecast:
        """Weigh lending the rollout pool to training for the remaining ``segments``.

        Borrow iff ``T_borrow < T_no`` with ``T_borrow = C_in + M_t(U', d_p + d_a) + C_out + u * C_grad +
        (u - 1) * C_bcast`` for ``u`` updates in ``U'``. Source: paper.md, Algorithm 2; design.md section 5
        for several updates.
        """
        switch = self.plan.models.switch
        rest = self.drain_prefix(segments, switch.train_on_rollout_in_s, primary)
        updates = sum(segment.kind is SegmentKind.UPDATE for segment in rest)
        threshold = (
            switch.train_on_rollout_in_s
            + switch.train_on_rollout_out_s
            + updates * switch.grad_s
            + max(0, updates - 1) * switch.broadcast_s
        )
        alone = self.train_s(segments, primary)
        return Forecast(alone - self.joint_s(rest, primary, auxiliary), threshold)

    def train_on_rollout_hidden(self, segments: list[SegmentWork], primary: int, auxiliary: int) -> Forecast:
        """Weigh the same lease when the auxiliary side leaves early enough to be back in time.

        While it merges and returns (``h = C_grad + C_out``) the primary trains on alone, so ``h`` is not
        waited for: of the work ``X`` left after entering, ``X - h`` runs jointly. Gradients and broadcasts
        of earlier updates stay on the path. Source: ours.
        """
        switch = self.plan.models.switch
        alone = self.train_s(segments, primary)
        rest = self.drain_prefix(segments, switch.train_on_rollout_in_s, primary)
        left, joint = self.train_s(rest, primary), self.joint_s(rest, primary, auxiliary)
        hidden = switch.train_on_rollout_out_s + switch.grad_s
        updates = sum(segment.kind is SegmentKind.UPDATE for segment in rest)
        path = max(0, updates - 1) * (switch.grad_s + switch.broadcast_s)
        if left <= hidden or left <= 0.0:
            return Forecast(0.0, hidden + path)
        lent = switch.train_on_rollout_in_s + hidden + (left - hidden) * joint / left
        return Forecast(alone - lent, path)


def batch_work(plan: Plan, step: int = 0) -> list[SegmentWork]:
    """Return ``U_B``: the stage-ordered trainer work of a representative batch of a step."""
    prior, trainer, n = plan.prior(step), plan.models.trainer, plan.samples_per_group
    works = [trainer.sample_work(prior.prompt_mean_tokens + tokens) for tokens in prior.quantiles]
    batch = sum(works) / len(works) * plan.groups_per_step * n
    chunks = -(-plan.groups_per_step // plan.chunk_groups)
    segments = [SegmentWork(kind, batch, max(works), chunks) for kind in plan.segments]
    part = SegmentWork(
        SegmentKind.UPDATE,
        batch / plan.mini_batches,
        max(works),
        max(1, chunks // plan.mini_batches),
    )
    return segments + [part] * plan.mini_batches
