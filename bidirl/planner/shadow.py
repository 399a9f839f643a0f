"""Shadow mode: what the gates would have lent in a running job, and saved, from its log; nothing is touched.

The gates are those of the scheduler (``Predictor``), calibrated on the steps seen so far; the step itself is
judged with what was known before it. A step's log has no times inside it, so the gate is asked once a step,
when the trainer begins to wait, and once when it begins to train.
"""

from dataclasses import dataclass, field
from math import isfinite, nan
from statistics import median

from bidirl.planner.events import Direction
from bidirl.planner.gates import Predictor, batch_work
from bidirl.planner.plan import Plan
from bidirl.planner.policy import Lending, Placement
from bidirl.planner.search.algorithm1 import compatible
from bidirl.traces.step_log import StepLog

__all__ = ["Shadow", "ShadowStep"]

WINDOW = 20
"""Steps whose median calibrates the gates: a drift of lengths is followed within as many."""
FEWEST = 3
"""Steps before the first judgement: fewer do not carry a calibration."""


@dataclass(frozen=True, slots=True)
class ShadowStep:
    """One step's judgement in one direction."""

    step: int
    """Place among the steps seen, from 0."""
    direction: Direction
    idle_s: float
    """Time in which the pool that would have lent had nothing to do."""
    gain_s: float
    threshold_s: float
    most_s: float
    """Seconds saved after all costs if the lent pool worked at full capacity at once."""

    @property
    def lends(self) -> bool:
        """Return whether the gate would have lent."""
        return self.gain_s > self.threshold_s

    @property
    def saved_s(self) -> float:
        """Return the predicted seconds saved after all costs; 0 where nothing was lent."""
        return max(0.0, self.gain_s - self.threshold_s)


@dataclass
class Shadow:
    """Judges the steps of a run one by one; state is its calibration and the judgements so far."""

    plan: Plan
    steps: list[ShadowStep] = field(default_factory=list)
    num_steps: int = 0
    wall_s: float = 0.0
    """Seconds of the steps that were judged."""
    _rollout: list[float] = field(default_factory=list)
    _train: list[float] = field(default_factory=list)
    _idle_known: int = 0

    def __post_init__(self) -> None:
        self._predictor = Predictor(self.plan)

    def refusal(self) -> str | None:
        """Return why nothing can be lent in this job, None if it can."""
        plan = self.plan
        if plan.placement is Placement.COLOCATED:
            return "the roles take turns on all GPUs: there is no other pool to lend to"
        if plan.policy.lending is Lending.BOTH:
            return (
                "the job's policy lends both ways already; give the one that runs (policy.name = no_borrow)"
            )
        sizes = plan.rollout_replica_gpus, plan.train_replica_gpus
        if not compatible(plan.rollout_gpus, plan.train_gpus, *sizes):
            return (
                f"pools of {plan.rollout_gpus} and {plan.train_gpus} GPUs do not both divide by replicas of "
                f"{sizes[0]} and {sizes[1]}: a switch would reshard"
            )
        return None

    def take(self, log: StepLog, first: int, last: int) -> None:
        """Judge rows ``first`` to ``last`` (exclusive) of a table."""
        for row in range(first, last):
            self._row({name: float(column[row]) for name, column in log.columns.items()})

    def _row(self, row: dict[str, float]) -> None:
        wait = row.get("wait_s", nan)
        names = ("old_logprob_s", "reference_s", "values_s", "update_s")
        parts = [value for name in names if isfinite(value := row.get(name, nan))]
        train = sum(parts) if parts else row.get("train_s", nan)
        step = row.get("step_s", nan)
        if not isfinite(step):
            step = wait + train
        if not (isfinite(step) and step > 0.0 and isfinite(wait)):
            return
        if self.refusal() is None and (
            len(self._train) >= FEWEST or (len(self._rollout) >= FEWEST and not isfinite(train))
        ):
            self._judge(row, step, wait)
            self.wall_s += step
        self._learn(row, step, wait, train)
        self.num_steps += 1

    def _learn(self, row: dict[str, float], step: float, wait: float, train: float) -> None:
        """Take a step into the calibration."""
        plan, predictor = self.plan, self._predictor
        if isfinite(train) and train > 0.0:
            predictor.train_factor = 1.0
            work = predictor.train_s(batch_work(plan), plan.train_replicas)
            self._train = [*self._train[1 - WINDOW :], train / work]
        if self._train:
            predictor.train_factor = median(self._train)
        generation = row.get("generation_s", nan)
        if not isfinite(generation):
            generation = wait if plan.policy.staleness == 0 else step
        predictor.rollout_factor = 1.0
        whole = predictor.rollout_s(plan.groups_per_step, plan.rollout_replicas, 0)
        self._rollout = [*self._rollout[1 - WINDOW :], generation / whole]
        predictor.rollout_factor = median(self._rollout)

    def _judge(self, row: dict[str, float], step: float, wait: float) -> None:
        plan, predictor = self.plan, self._predictor
        helpers = plan.train_gpus // plan.rollout_replica_gpus
        told = row.get("missing_groups", nan)
        if isfinite(told):
            predictor.rollout_factor = 1.0
        missing = int(told) if isfinite(told) else self._missing(wait)
        if missing and helpers and wait > 0.0:
            forecast = predictor.rollout_on_train(missing, plan.rollout_replicas, helpers, 0)
            whole = wait * helpers / (helpers + plan.rollout_replicas)
            gain, cost = min(forecast.gain_s, whole), forecast.threshold_s
            self.steps.append(
                ShadowStep(
                    self.num_steps, Direction.ROLLOUT_ON_TRAIN, wait, gain, cost, max(0.0, whole - cost)
                )
            )
        idle = self._rollout_idle(row, step)
        helpers = plan.rollout_gpus // plan.train_replica_gpus
        if idle is None or not helpers:
            return
        self._idle_known += 1
        if idle <= 0.0 or not self._train:
            return
        forecast = predictor.train_on_rollout(batch_work(plan), plan.train_replicas, helpers)
        whole = self._most_on_rollout(idle, helpers)
        gain, cost = min(forecast.gain_s, whole), forecast.threshold_s
        self.steps.append(
            ShadowStep(self.num_steps, Direction.TRAIN_ON_ROLLOUT, idle, gain, cost, max(0.0, whole - cost))
        )

    def _most_on_rollout(self, idle: float, helpers: int) -> float:
        """Return the most that ``helpers`` gain in an idle window: lending shortens the window itself.

        With ``r`` helpers a primary, ``x`` seconds of joint work save ``r x``; window, switches and saving
        add up: ``idle = x + C_in + C_out + r x``. The trainer works on while helpers enter, so ``C_in`` is
        gained beside it, as in the gate. Source: ours.
        """
        switch = self.plan.models.switch
        free = idle - switch.train_on_rollout_in_s - switch.train_on_rollout_out_s
        ratio = helpers / self.plan.train_replicas
        return max(0.0, free) * ratio / (1.0 + ratio) + switch.train_on_rollout_in_s

    def _missing(self, wait: float) -> int:
        """Return the groups that the primary rollout pool makes in the wait (bisection)."""
        plan, predictor = self.plan, self._predictor
        low, high = 0, plan.groups_per_step
        while low < high:
            middle = (low + high + 1) // 2
            if predictor.rollout_s(middle, plan.rollout_replicas, 0) <= wait:
                low = middle
            else:
                high = middle - 1
        return low

    @staticmethod
    def _rollout_idle(row: dict[str, float], step: float) -> float | None:
        """Return the rollout pool's idle seconds of a step beside the weight sync, None if not logged."""
        active, version = row.get("rollouter_active_s", nan), row.get("rollouter_version_s", nan)
        sync = row.get("weight_sync_s", nan)
        stopped = sync if isfinite(sync) else 0.0
        if isfinite(active) and isfinite(version):
            return max(0.0, version - active - stopped)
        waited = row.get("rollout_wait_s", nan)
        return max(0.0, min(step, waited) - stopped) if isfinite(waited) else None

    @property
    def knows_rollout_idle(self) -> bool:
        """Return whether any step told when the rollout pool was idle."""
        return self._idle_known > 0

    def summary(self) -> dict[str, object]:
        """Return the totals as plain JSON data."""
        plan = self.plan
        devices = {
            Direction.ROLLOUT_ON_TRAIN: plan.train_gpus,
            Direction.TRAIN_ON_ROLLOUT: plan.rollout_gpus,
        }
        found: dict[str, object] = {"num_steps": self.num_steps, "judged_s": self.wall_s}
        for direction, gpus in devices.items():
            mine = [each for each in self.steps if each.direction is direction]
            lent = [each for each in mine if each.lends]
            saved = sum(each.saved_s for each in lent)
            is_open = direction is Direction.TRAIN_ON_ROLLOUT and not self.knows_rollout_idle
            found[direction.value] = {
                "judged": len(mine),
                "leases": len(lent),
                "idle_s": sum(each.idle_s for each in mine),
                "lent_device_s": sum(gpus * max(0.0, each.idle_s - each.saved_s) for each in lent),
                "cost_s": sum(each.threshold_s for each in lent),
                "saved_s": None if is_open else saved,
                "saved_at_most_s": None if is_open else sum(each.most_s for each in mine),
                "saved_share": None if is_open or not self.wall_s else saved / self.wall_s,
            }
        return found

    def verdict(self) -> str:
        """Return the totals as one sentence."""
        if (reason := self.refusal()) is not None:
            return f"Nothing would have been lent: {reason}."
        if not self.wall_s:
            return (
                f"Cannot tell yet: {self.num_steps} usable steps, and {FEWEST + 1} are needed (step time or "
                "training time, and the trainer's wait)."
            )
        saved = sum(each.saved_s for each in self.steps)
        most = sum(each.most_s for each in self.steps)
        leases = sum(each.lends for each in self.steps)
        text = (
            f"Over {self.num_steps} steps the gates would have lent {leases} times and saved {saved:.0f} s "
            f"of {self.wall_s:.0f} s ({saved / self.wall_s:.1%}), by the stage models; with the lent pool at "
            f"full capacity it would be {most:.0f} s ({most / self.wall_s:.1%})"
        )
        if not self.knows_rollout_idle:
            text += "; lending rollout GPUs to training cannot be judged: the log has no rollout idle time"
        return f"{text}."
