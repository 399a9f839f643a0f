"""Online calibration as both drivers use it: what a run measures becomes factors on predicted times.

Outside the scheduler, which hears of new factors by the event ``CoefficientsUpdated`` like of anything else;
a replay feeds that event and never calibrates again.
"""

from bidirl.models.online import Calibration, Observation, Side, observe
from bidirl.planner import events as ev
from bidirl.planner.events import Action, Event
from bidirl.planner.plan import Plan
from bidirl.planner.policy import Recalibration

__all__ = ["Recalibrator"]

MIN_ITERATIONS = 8
"""Iterations between two reports of progress, at least: with fewer, the boundary that each report waited for
is a large share of the time."""

Tokens = dict[tuple[int, int], int]


class Recalibrator:
    """Folds events and actions, in the order of the journal, into factors.

    *Training*: every pull, from its start to its end. *Rollout*: two reports of progress of one replica
    between which it ran the same samples and did nothing else; their tokens say how many iterations that
    were.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.state = Calibration()
        self.pulls: dict[int, tuple[float, ev.StartChunks]] = {}
        self.reports: dict[int, tuple[float, Tokens]] = {}
        """Per replica: when it last reported, and the tokens of its samples; gone once it did more."""

    @classmethod
    def of(cls, plan: Plan) -> "Recalibrator | None":
        """Return one for a plan that asks for it."""
        return cls(plan) if plan.policy.recalibration is Recalibration.ONLINE else None

    def note(self, now: float, event: Event, actions: list[Action]) -> ev.CoefficientsUpdated | None:
        """Take what happened at ``now`` (seconds) and what it led to; return new factors if they moved."""
        seen = self._observation(now, event)
        for action in actions:
            match action:
                case ev.StartChunks() if action.work > 0.0:
                    self.pulls[action.serial] = now, action
                case ev.StartSamples() | ev.Preempt() | ev.SyncReplica():
                    self.reports.pop(action.replica, None)
                case ev.BeginLease() | ev.EndLease():
                    self.reports.clear()
                case _:
                    pass
        if seen is None or not (seen.predicted_s > 0.0 and seen.measured_s > 0.0):
            return None
        self.state, factors = observe(self.state, seen)
        if factors is None:
            return None
        return ev.CoefficientsUpdated(factors.rollout_factor, factors.train_factor)

    def _observation(self, now: float, event: Event) -> Observation | None:
        match event:
            case ev.ChunkFinished() if event.cause in self.pulls:
                start_s, pull = self.pulls.pop(event.cause)
                predicted_s = self.plan.models.trainer.pull_s(
                    pull.kind.value, pull.work, pull.longest, pull.num_replicas
                )
                return Observation(Side.TRAIN, predicted_s, now - start_s)
            case ev.ChunkFailed():
                self.pulls.pop(event.cause, None)
            case ev.SideLost():
                self.pulls = {serial: held for serial, held in self.pulls.items() if not held[1].side}
            case ev.Progress():
                return self._progressed(now, event)
            case ev.SamplesFinished() | ev.Preempted() | ev.ReplicaLost() | ev.ReplicaJoined():
                self.reports.pop(event.replica, None)
            case _:
                pass
        return None

    def _progressed(self, now: float, event: ev.Progress) -> Observation | None:
        """Compare a report with the replica's last one."""
        tokens = {(group, index): count for group, index, count in event.samples}
        since_s, before = self.reports.get(event.replica, (now, {}))
        self.reports[event.replica] = now, tokens
        steps = {tokens[sample] - before[sample] for sample in tokens if sample in before}
        if before.keys() != tokens.keys() or len(steps) != 1 or min(steps) < MIN_ITERATIONS:
            return None
        (iterations,) = steps
        base_s, context_s = self.plan.models.iteration.decode(len(tokens))
        prompts = len(tokens) * self.plan.priors[0].prompt_mean_tokens
        context = prompts + sum(before.values()) + len(tokens) * (iterations + 1) / 2
        return Observation(Side.ROLLOUT, iterations * (base_s + context_s * context), now - since_s)
