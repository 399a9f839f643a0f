"""Turn what a scheduler does into a run's record; shared by every driver.

A driver tells when devices were busy (``span``); everything else is read off events and actions.
"""

from math import nan

from bidirl.planner.events import (
    BeginLease,
    DropGroup,
    EndLease,
    LeaseEntered,
    LeaseReturned,
    LendingStopped,
    SegmentKind,
)
from bidirl.planner.plan import Plan
from bidirl.planner.policy import BatchOrder, Expiry, Placement, VersionMode
from bidirl.planner.scheduler import Scheduler
from bidirl.traces.run_record import Activity, Owner, RunRecord

__all__ = ["ACTIVITY_OF", "Recorder"]

ACTIVITY_OF = {
    SegmentKind.OLD_LOGPROB: Activity.OLD_LOGPROB,
    SegmentKind.REFERENCE: Activity.REFERENCE,
    SegmentKind.UPDATE: Activity.UPDATE,
}


def _enforced(plan: Plan) -> tuple[str, ...]:
    """Return which of admission, lag and span the policy guarantees (design.md section 5)."""
    policy = plan.policy
    names = ["admission"]
    if policy.expiry is not Expiry.NEVER or policy.batch_order is BatchOrder.ISSUE_ORDER:
        names.append("lag")
    if policy.version_mode is VersionMode.PINNED or policy.staleness == 0:
        names.append("span")
    return tuple(names)


class Recorder:
    """Fills a ``RunRecord`` while a driver runs."""

    def __init__(self, plan: Plan, scheduler: Scheduler) -> None:
        self.plan = plan
        self.scheduler = scheduler
        self.n = plan.samples_per_group
        self.record = RunRecord(
            rollout_gpus=plan.rollout_gpus,
            train_gpus=plan.train_gpus,
            samples_per_prompt=plan.samples_per_group,
            prompts_per_step=plan.groups_per_step,
            staleness=float(plan.policy.staleness),
            enforced=_enforced(plan),
        )
        self.colocated = plan.placement is Placement.COLOCATED
        self._state = "wait"
        self._since = 0.0
        self._parts: dict[str, float] = {}
        self._step = 0
        self._released = 0
        self._train_start = nan
        self._batch_ready = nan
        self._lease_row: dict[int, int] = {}

    # ------------------------------------------------------------------- spans

    def span(
        self, owner: Owner, unit: int, num_gpus: int, activity: Activity, start_s: float, end_s: float
    ) -> None:
        """Note that ``num_gpus`` devices of a pool, from ``unit`` on, were busy."""
        if end_s <= start_s:
            return
        spans = self.record.spans
        spans.owner.append(owner)
        spans.unit.append(unit)
        spans.num_gpus.append(num_gpus)
        spans.activity.append(activity)
        spans.start_s.append(start_s)
        spans.end_s.append(end_s)
        spans.step.append(self.scheduler.train.step)

    def rollout_unit(self, replica: int) -> tuple[Owner, int, int]:
        """Return the devices of a rollout replica: (owner, first device of the pool, number)."""
        size, primary = self.plan.rollout_replica_gpus, self.plan.rollout_replicas
        if replica < primary:
            return Owner.ROLLOUT, replica * size, size
        return Owner.TRAIN, (replica - primary) * size, size

    def side_units(self, side: int, replicas: tuple[int, ...]) -> list[tuple[Owner, int, int]]:
        """Return the devices of a trainer side; ``replicas`` are the lent ones of the auxiliary side."""
        if side == 0:
            if self.colocated:
                return [(Owner.ROLLOUT, 0, self.plan.rollout_gpus)]
            return [(Owner.TRAIN, 0, self.plan.train_gpus)]
        size = self.plan.rollout_replica_gpus
        units: list[tuple[Owner, int, int]] = []
        for replica in replicas:  # neighbours make one unit: a pool lent as a whole is one span
            if units and units[-1][1] + units[-1][2] == replica * size:
                units[-1] = (Owner.ROLLOUT, units[-1][1], units[-1][2] + size)
            else:
                units.append((Owner.ROLLOUT, replica * size, size))
        return units

    # ----------------------------------------------------------------- samples

    def started(self, group: int, prompt_tokens: int, lengths: list[int], version: int, now: float) -> None:
        """Add the rows of a group that starts; groups start in order of their ids."""
        samples, n = self.record.samples, self.n
        samples.group.extend([group] * n)
        samples.index.extend(range(n))
        samples.prompt_tokens.extend([prompt_tokens] * n)
        samples.response_tokens.extend(lengths)
        samples.generated_tokens.extend([0] * n)
        samples.start_s.extend([now] * n)
        samples.finish_s.extend([nan] * n)
        samples.version.extend([version] * n)
        samples.last_version.extend([version] * n)
        samples.step.extend([-1] * n)
        samples.dropped.extend([""] * n)
        samples.num_resumes.extend([0] * n)
        samples.prefix_tokens.extend([0] * n)
        samples.chunk.extend([-1] * n)

    def resumed(self, group: int, index: int, prefix: int, version: int) -> None:
        """Note that a sample goes on with ``prefix`` generated tokens, or (0) from the start."""
        samples, row = self.record.samples, group * self.n + index
        if prefix:
            samples.num_resumes[row] += 1
            samples.prefix_tokens[row] += samples.prompt_tokens[row] + prefix
        else:
            samples.version[row] = version

    def finished(self, sample: int, finish_s: float, version: int) -> None:
        """Note the end of a sample under a version."""
        samples = self.record.samples
        samples.finish_s[sample] = finish_s
        samples.generated_tokens[sample] = samples.response_tokens[sample]
        samples.last_version[sample] = version

    def group_dropped(self, action: DropGroup) -> None:
        """Note that the scheduler has dropped a group."""
        self.dropped(action.group, action.cause)

    def dropped(self, group: int, cause: str) -> None:
        """Note that a group will never be trained."""
        lo = group * self.n
        self.record.samples.dropped[lo : lo + self.n] = [cause] * self.n

    # ------------------------------------------------------------------- steps

    def observe(self, now: float) -> None:
        """Read the scheduler's state after it handled an event at ``now``."""
        scheduler = self.scheduler
        if scheduler.train.step != self._step:
            self._take_batch()
        state = scheduler.trainer_state()
        if state != self._state:
            self._parts[self._state] = self._parts.get(self._state, 0.0) + now - self._since
            if self._state in ("wait", "switch", "reward", "sync", "drain") and state in ACTIVITY_OF:
                if self._train_start != self._train_start:
                    self._train_start = now
                self._batch_ready = now
            self._state, self._since = state, now
        released = scheduler.rollout.published - scheduler.rollout.trainer_blocked
        if released > self._released:  # in one event, perhaps: there may be nobody to wait for
            self._released = released
            self._publish(now)

    def _publish(self, now: float) -> None:
        parts = self._parts
        if now > self._since:
            parts[self._state] = parts.get(self._state, 0.0) + now - self._since
            self._since = now
        steps = self.record.steps
        steps.published_s.append(now)
        steps.parts.append(parts)
        self._parts = {}

    def _take_batch(self) -> None:
        self._step = self.scheduler.train.step
        train, samples, n = self.scheduler.train, self.record.samples, self.n
        prompt = response = 0
        for group, chunk in zip(train.last_batch, train.last_chunk_of, strict=True):
            for row in range(group.id * n, group.id * n + n):
                samples.step[row] = self._step - 1
                samples.chunk[row] = chunk
            prompt += group.prompt_tokens * n
            response += sum(group.tokens.values())
        steps = self.record.steps
        steps.prompt_tokens.append(prompt)
        steps.response_tokens.append(response)
        steps.num_groups.append(len(train.last_batch))
        steps.batch_ready_s.append(self._batch_ready)
        steps.train_start_s.append(self._train_start)
        self._train_start = self._batch_ready = nan

    # ------------------------------------------------------------------ leases

    def lease_began(self, action: BeginLease, now: float) -> None:
        """Open the row of a lease (turns of a colocated job are not leases)."""
        if self.colocated:
            return
        leases = self.record.leases
        self._lease_row[action.lease] = len(leases.direction)
        leases.direction.append(action.direction.value)
        leases.num_gpus.append(len(action.replicas) * self.plan.rollout_replica_gpus)
        leases.requested_s.append(now)
        leases.entered_s.append(nan)
        leases.released_s.append(nan)
        leases.closed_s.append(nan)
        leases.predicted_gain_s.append(action.gain_s)
        leases.threshold_s.append(action.threshold_s)
        leases.useful_device_s.append(0.0)

    def stopped(self, action: LendingStopped) -> None:
        """Note that lending in a direction has stopped itself."""
        self.record.notes.append(
            f"{action.direction.value} stopped at step {self.scheduler.train.step} after "
            f"{action.num_losses} leases that cost more than they gave "
            f"(the last: {action.gave_s:.1f} s for {action.cost_s:.1f} s)"
        )

    def lease_changed(self, item: LeaseEntered | EndLease | LeaseReturned, now: float) -> None:
        """Note a lease's next state."""
        row = self._lease_row.get(item.lease)
        if row is None:
            return
        leases = self.record.leases
        match item:
            case LeaseEntered():
                leases.entered_s[row] = now
            case EndLease():
                leases.released_s[row] = now
            case LeaseReturned():
                leases.closed_s[row] = now

    def lease_worked(self, lease: int, device_s: float) -> None:
        """Add device-seconds of work that lent devices did."""
        row = self._lease_row.get(lease)
        if row is not None:
            self.record.leases.useful_device_s[row] += device_s

    def close(self, now: float) -> RunRecord:
        """Finish the record."""
        self.record.end_s = now
        return self.record
