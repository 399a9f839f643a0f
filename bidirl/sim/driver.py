"""The simulated clock: turns the scheduler's actions into events of a SimPy environment.

No policy lives here. An action becomes one event at a later model time; ties are broken by the kind of
event and the serial of its cause, packed into SimPy's priority, never by insertion order.
"""

from collections.abc import Callable
from dataclasses import fields
from heapq import heappush
from math import inf
from time import perf_counter
from typing import Any

import simpy

from bidirl.errors import InputError, InvariantBroken
from bidirl.models.faults import COLOCATED_LOSS, Faults
from bidirl.models.replica import Replica, Request
from bidirl.planner import costs
from bidirl.planner import events as ev
from bidirl.planner.events import RANK, Action, Direction, Event
from bidirl.planner.plan import Plan
from bidirl.planner.policy import Placement
from bidirl.planner.recalibrator import Recalibrator
from bidirl.planner.recorder import ACTIVITY_OF, Recorder
from bidirl.planner.scheduler import Scheduler
from bidirl.sim.losses import Losses
from bidirl.traces.records import GroupBlock
from bidirl.traces.run_record import Activity, RunRecord
from bidirl.traces.workload import Workload

__all__ = ["Driver", "Environment", "Sink"]

Sink = Callable[[float, Event, list[Action]], None]
"""Where the journal goes: called with each event, its time, and the actions that it led to."""

_RANK_SHIFT = 48
"""Bits for the cause's serial below the event kind's rank."""


class Environment(simpy.Environment):
    """SimPy's environment with absolute times.

    ``schedule`` takes a delay, and ``now + (t - now)`` is not always ``t`` in floating point; two drivers
    that must agree to the last bit need ``t`` itself.
    """

    def pending(self) -> bool:
        """Return whether anything is scheduled."""
        return bool(self._queue)

    def at(self, time_s: float, priority: int, call: Callable[[Any], None], payload: Any) -> None:
        """Call ``call(event)`` with ``event.value = payload`` at ``time_s``."""
        event = simpy.Event(self)
        event._ok = True
        event._value = payload
        event.callbacks = [call]
        heappush(self._queue, (time_s, priority, next(self._eid), event))  # type: ignore[misc]


class Driver:
    """Runs one plan on the simulated clock."""

    def __init__(
        self, plan: Plan, workload: Workload, *, sink: Sink | None = None, faults: Faults | None = None
    ) -> None:
        """Build the run; raise InputError for losses of replicas in a colocated job."""
        if faults is not None and plan.placement is Placement.COLOCATED and faults.config.replica_mtbf_s:
            raise InputError(COLOCATED_LOSS.format(faults.config.replica_mtbf_s))
        self.plan = plan
        self.workload = workload
        self.sink = sink
        self.env = Environment()
        self.scheduler = Scheduler(plan)
        self.recorder = Recorder(plan, self.scheduler)
        self.recalibrator = Recalibrator.of(plan)
        self.n = plan.samples_per_group
        self.num_primary = plan.rollout_replicas
        self.faults = faults
        self.replicas = [
            self._engine(index) for index in range(plan.rollout_replicas + plan.auxiliary_rollouters)
        ]
        self.versions = [0] * len(self.replicas)
        self.posted: list[tuple[float, int]] = [(inf, 0)] * len(self.replicas)
        """Per replica: time and token of its next completion in the event queue."""
        self.token = 0
        self.causes: list[dict[int, int]] = [{} for _ in self.replicas]
        """Per replica: group -> serial of its last hand-over."""
        self.dirty: set[int] = set()
        self.blocks: dict[int, GroupBlock] = {}
        self.num_started = 0
        self.lease: ev.BeginLease | None = None
        self.lease_since = 0.0
        self.lease_entered = False
        self.lease_released = False
        self.stale = [0] * len(self.replicas)
        """Per replica: answers to actions up to this serial are void; it was lost since."""
        self.stale_side = 0
        """The same for pulls and merges of the auxiliary trainer side."""
        self.newest = 0
        """Newest version that a replica was asked to load: what a restarted one gets."""
        self.losses = Losses(self)
        self.num_events = 0
        self.syncs: list[ev.SyncReplica] = []
        self._do: dict[type[Any], Callable[[Any], None]] = {
            ev.StartSamples: self._start_samples,
            ev.Preempt: self._preempt,
            ev.RequestProgress: self._progress,
            ev.ScoreGroup: self._score,
            ev.DropGroup: self.recorder.group_dropped,
            ev.StartChunks: self._start_chunks,
            ev.Merge: self._merge,
            ev.OptimizerStep: self._optimizer_step,
            ev.Broadcast: self._broadcast,
            ev.Publish: self._publish,
            ev.SyncReplica: self.syncs.append,
            ev.BeginLease: self._begin_lease,
            ev.EndLease: self._end_lease,
            ev.GateDecision: lambda _: None,
            ev.LendingStopped: self.recorder.stopped,
            ev.SetTimer: self._set_timer,
            ev.RestartReplica: self.losses.restart,
        }

    def _engine(self, index: int) -> Replica:
        models = self.plan.models
        iteration = (
            models.iteration if self.faults is None else self.faults.iteration(models.iteration, index)
        )
        return Replica(iteration, models.limits)

    def adopt(self) -> None:
        """Make a copy of a driver whole: what a deep copy cannot follow is bound to it again."""
        self._do[ev.SyncReplica] = self.syncs.append

    # -------------------------------------------------------------------- loop

    def run(self) -> RunRecord:
        """Run the job to its end and return its record; InvariantBroken if it stalls."""
        start = perf_counter()
        self._post(0.0, ev.RunStarted())
        for index in range(self.num_primary):
            self.losses.live(index)
        env, queue, done = self.env, self.env._queue, self.scheduler
        while not done.done:
            if not queue:
                raise InvariantBroken(
                    f"stall at {env.now} s: {self.scheduler.train.phase}, nothing scheduled"
                )
            env.step()
        record = self.recorder.close(env.now)
        self._close(record)
        record.wall_s = perf_counter() - start
        return record

    def _post(self, time_s: float, event: Event) -> None:
        self.env.at(time_s, RANK[type(event)] << _RANK_SHIFT | event.cause, self._fire, event)

    def _fire(self, simpy_event: Any) -> None:
        self.handle(simpy_event._value)

    def _fire_if_up(self, simpy_event: Any) -> None:
        """Hand over what a replica reports, unless the replica was lost since it was asked."""
        event: ev.Preempted = simpy_event._value
        if event.cause > self.stale[event.replica]:
            self.handle(event)

    def _fire_if_lent(self, simpy_event: Any) -> None:
        """Hand over what the auxiliary trainer side reports, unless it was lost; credit its lease."""
        event, device_s = simpy_event._value
        if event.cause <= self.stale_side and not isinstance(event, ev.BroadcastDone):
            return
        if self.lease is not None and not isinstance(event, ev.ChunkFailed):
            self.recorder.lease_worked(self.lease.lease, device_s)
        self.handle(event)

    def _post_lent(self, start_s: float, end_s: float, event: Event) -> None:
        """Post an event of work in which the auxiliary trainer side takes part."""
        lent = self.lease.replicas if self.lease is not None else ()
        num_gpus = sum(unit[2] for unit in self.recorder.side_units(1, lent))
        priority = RANK[type(event)] << _RANK_SHIFT | event.cause
        self.env.at(end_s, priority, self._fire_if_lent, (event, (end_s - start_s) * num_gpus))

    def handle(self, event: Event) -> None:
        """Hand an event to the scheduler and carry its actions out."""
        now = self.env.now
        self.num_events += 1
        actions = self.scheduler.handle(event, now)
        if self.sink is not None:
            self.sink(now, event, actions)
        if self.recalibrator is not None:
            factors = self.recalibrator.note(now, event, actions)
            if factors is not None:
                self._post(now, factors)
        self.carry_out(actions)

    def carry_out(self, actions: list[Action]) -> None:
        """Turn the actions of one ``handle`` call into events to come."""
        now, do = self.env.now, self._do
        for action in actions:
            do[type(action)](action)
        if self.syncs:
            self._sync(self.syncs)
            self.syncs.clear()
        self.recorder.observe(now)
        if self.dirty:
            for index in self.dirty:
                self._repost(index)
            self.dirty.clear()

    # ----------------------------------------------------------------- rollout

    def _repost(self, index: int) -> None:
        replica = self.replicas[index]
        time_s = replica.peek()
        self.token += 1
        self.posted[index] = (time_s, self.token)
        if time_s != inf:
            cause = self.causes[index][replica.peek_group()]
            priority = RANK[ev.SamplesFinished] << _RANK_SHIFT | cause
            self.env.at(time_s, priority, self._complete, (index, self.token))

    def _complete(self, simpy_event: Any) -> None:
        index, token = simpy_event._value
        if self.posted[index][1] != token:
            return  # the replica was interrupted and has another next completion
        _, number, seqs = self.replicas[index].pop()
        self._drain(index)
        lo = number * self.n
        lengths = self.recorder.record.samples.response_tokens
        seqs.sort()
        self.dirty.add(index)
        self.handle(
            ev.SamplesFinished(
                index,
                number,
                tuple([seq - lo for seq in seqs]),
                tuple([lengths[seq] for seq in seqs]),
                self.recorder.record.samples.prompt_tokens[lo],
                self.causes[index].pop(number),
            )
        )

    def _drain(self, index: int) -> None:
        version, finished = self.versions[index], self.recorder.finished
        for seq, time_s in self.replicas[index].take_finished():
            finished(seq, time_s, version)

    def _block(self, group: int) -> GroupBlock:
        number = group // self.plan.groups_per_step
        block = self.blocks.get(number)
        if block is None:
            block = self.blocks[number] = self.workload.block(number)
        return block

    def _start_samples(self, action: ev.StartSamples) -> None:
        group, now, lo = action.group, self.env.now, action.group * self.n
        fresh = group == self.num_started
        if fresh:
            self.num_started += 1
            block = self._block(group)
            row = group - block.first_group
            lengths = block.response_tokens[row].tolist()
            self.recorder.started(group, int(block.prompt_tokens[row]), lengths, action.version, now)
        samples = self.recorder.record.samples
        targets, prompt = samples.response_tokens, samples.prompt_tokens[lo]
        block_turns = self._block(group).turns
        requests = []
        for index, prefix in zip(action.indices, action.prefixes, strict=True):
            seq = lo + index
            turns = self._turns(group, index) if block_turns is not None else None
            requests.append(Request(seq, group, prompt, prefix, targets[seq], turns))
            if not fresh:
                self.recorder.resumed(group, index, prefix, action.version)
        self.replicas[action.replica].submit(now, requests, front=any(action.prefixes))
        self.causes[action.replica][group] = action.serial
        self.dirty.add(action.replica)

    def _turns(self, group: int, index: int) -> tuple[tuple[int, int, float], ...] | None:
        block = self._block(group)
        if block.turns is None:
            return None
        row = (group - block.first_group) * self.n + index
        turns = block.turns
        lo, hi = int(turns.offsets[row]), int(turns.offsets[row + 1])
        return tuple(
            zip(
                turns.response_tokens[lo:hi].tolist(),
                turns.tool_tokens[lo:hi].tolist(),
                turns.tool_s[lo:hi].tolist(),
                strict=True,
            )
        )

    def _preempt(self, action: ev.Preempt) -> None:
        index, n = action.replica, self.n
        time_s, unfinished, finished = self.replicas[index].preempt(self.env.now, action.groups)
        self._drain(index)
        samples = self.recorder.record.samples
        for group in action.groups:
            self.causes[index].pop(group, None)
        for seq, tokens in unfinished:
            samples.generated_tokens[seq] = tokens
            samples.last_version[seq] = self.versions[index]
        self.dirty.add(index)
        event = ev.Preempted(
            index,
            tuple((seq // n, seq % n, tokens) for seq, tokens in unfinished),
            tuple(
                (seq // n, seq % n, samples.response_tokens[seq], samples.prompt_tokens[seq])
                for seq in finished
            ),
            action.serial,
        )
        self.env.at(time_s, RANK[ev.Preempted] << _RANK_SHIFT | action.serial, self._fire_if_up, event)

    def _progress(self, action: ev.RequestProgress) -> None:
        found = self.replicas[action.replica].progress(self.env.now)
        rows = tuple((seq // self.n, seq % self.n, tokens) for seq, tokens in found)
        event = ev.Progress(action.replica, rows, action.serial)
        self.env.at(self.env.now, RANK[ev.Progress] << _RANK_SHIFT | action.serial, self._fire_if_up, event)

    def _score(self, action: ev.ScoreGroup) -> None:
        block = self._block(action.group)
        row = action.group - block.first_group
        filtered = bool(block.filtered[row])
        if filtered and not self.scheduler.rollout.pinned:
            self.recorder.dropped(action.group, "filtered")
        kind = ev.Filtered if filtered else ev.Rewarded
        self._post(self.env.now + float(block.reward_s[row]), kind(action.group, action.serial))

    def _sync(self, syncs: list[ev.SyncReplica]) -> None:
        """Transfer one version to all replicas that were asked at once, starting when all have paused."""
        now = self.env.now
        self.newest = max(self.newest, syncs[0].version)
        paused = []
        for action in syncs:
            paused.append(self.replicas[action.replica].pause(now))
            self._drain(action.replica)
            self.dirty.add(action.replica)
        end_s = max(paused) + self.plan.models.sync.seconds(syncs[0].num_receivers)
        for action, pause_s in zip(syncs, paused, strict=True):
            self.recorder.span(*self.recorder.rollout_unit(action.replica), Activity.SYNC, pause_s, end_s)
            if self.faults is not None and self.faults.sync_fails(action.replica, action.serial):
                priority = RANK[ev.SyncFailed] << _RANK_SHIFT | action.serial
                self.env.at(end_s, priority, self._not_applied, action)
            else:
                priority = RANK[ev.SyncApplied] << _RANK_SHIFT | action.serial
                self.env.at(end_s, priority, self._applied, action)

    def _not_applied(self, simpy_event: Any) -> None:
        action: ev.SyncReplica = simpy_event._value
        if action.serial <= self.stale[action.replica]:
            return
        self.replicas[action.replica].resume(self.env.now, recompute=False)
        self.dirty.add(action.replica)
        self.handle(ev.SyncFailed(action.replica, action.version, action.serial))

    def _applied(self, simpy_event: Any) -> None:
        action: ev.SyncReplica = simpy_event._value
        if action.serial <= self.stale[action.replica]:
            return
        self.replicas[action.replica].resume(self.env.now, recompute=action.recompute)
        self.versions[action.replica] = action.version
        self.dirty.add(action.replica)
        self.handle(ev.SyncApplied(action.replica, action.version, action.serial))

    # ------------------------------------------------------------------- train

    def _train_span(self, side: int, activity: Activity, start_s: float, end_s: float) -> None:
        lent = self.lease.replicas if side and self.lease is not None else ()
        units = self.recorder.side_units(side, lent)
        for unit in units:
            self.recorder.span(*unit, activity, start_s, end_s)

    def _start_chunks(self, action: ev.StartChunks) -> None:
        now = self.env.now
        end_s = now
        if action.work > 0.0:
            end_s += self.plan.models.trainer.pull_s(
                action.kind.value, action.work, action.longest, action.num_replicas
            )
        share = None if self.faults is None else self.faults.chunk_fails_at(action.side, action.serial)
        kind = ev.ChunkFinished if share is None else ev.ChunkFailed
        if share is not None:
            end_s = now + share * (end_s - now)
        self._train_span(action.side, ACTIVITY_OF[action.kind], now, end_s)
        event = kind(
            action.side,
            action.step,
            action.segment,
            action.first,
            action.last,
            action.attempt,
            action.serial,
        )
        if action.side:
            self._post_lent(now, end_s, event)
        else:
            self._post(end_s, event)

    def _merge(self, action: ev.Merge) -> None:
        now = self.env.now
        end_s = now + costs.merge_s(self.plan, action)
        self._train_span(1, Activity.MERGE, now, end_s)
        self._post_lent(now, end_s, ev.Merged(action.step, action.segment, action.serial))

    def _optimizer_step(self, action: ev.OptimizerStep) -> None:
        now = self.env.now
        end_s = now + self.plan.models.trainer.optimizer_s
        self._train_span(0, Activity.OPTIMIZER, now, end_s)
        self._post(end_s, ev.Updated(action.step, action.update, action.serial))

    def _broadcast(self, action: ev.Broadcast) -> None:
        now = self.env.now
        end_s = now + self.plan.models.switch.broadcast_s
        for side in (0, 1):
            self._train_span(side, Activity.BROADCAST, now, end_s)
        self._post_lent(now, end_s, ev.BroadcastDone(action.step, action.update, action.serial))

    def _publish(self, action: ev.Publish) -> None:
        now = self.env.now
        end_s = now + costs.publish_s(self.plan)
        self._train_span(0, Activity.SYNC, now, end_s)
        self._post(end_s, ev.Published(action.version, action.serial))

    # ------------------------------------------------------------------ leases

    def _lease_span(self, activity: Activity, start_s: float, end_s: float) -> None:
        assert self.lease is not None
        for replica in self.lease.replicas:
            if not self.losses.ended(replica, activity):
                self.recorder.span(*self.recorder.rollout_unit(replica), activity, start_s, end_s)

    def _begin_lease(self, action: ev.BeginLease) -> None:
        now = self.env.now
        self.lease, self.lease_since, self.lease_entered, self.lease_released = action, now, False, False
        self.losses.lost_entering.clear()
        self.recorder.lease_began(action, now)
        end_s = now + costs.enter_s(self.plan, action)
        if self.faults is not None and self.faults.lease_fails(action.lease):
            self.fail_lease(action, end_s)
            return
        event = ev.LeaseEntered(action.lease, action.serial)
        self.env.at(end_s, RANK[ev.LeaseEntered] << _RANK_SHIFT | action.serial, self._entered, event)

    def _entered(self, simpy_event: Any) -> None:
        event: ev.LeaseEntered = simpy_event._value
        lease = self.lease
        if lease is None or lease.lease != event.lease or self.lease_entered:
            return  # revoked while it was entering
        now = self.env.now
        self.lease_entered = True
        self._lease_span(Activity.SWITCH_IN, self.lease_since, now)
        self.recorder.lease_changed(event, now)
        if lease.direction is Direction.ROLLOUT_ON_TRAIN:
            for replica in lease.replicas:
                self.versions[replica] = lease.version
                self.losses.live(replica)
        elif lease.direction is Direction.TRAIN_ON_ROLLOUT and self.faults is not None:
            lifetime_s = self.faults.side_lifetime_s(lease.lease)
            if lifetime_s != inf:
                self.losses.lose_side(now + lifetime_s, lease)
        self.handle(event)

    def fail_lease(self, lease: ev.BeginLease, time_s: float) -> None:
        """Let the role change of a lease fail at ``time_s``."""
        priority = RANK[ev.LeaseFailed] << _RANK_SHIFT | lease.serial
        self.env.at(time_s, priority, self._lease_failed, lease)

    def _lease_failed(self, simpy_event: Any) -> None:
        lease: ev.BeginLease = simpy_event._value
        if self.lease is not lease or self.lease_entered:
            return  # revoked while it was entering
        now = self.env.now
        self._lease_span(Activity.SWITCH_IN, self.lease_since, now)
        self.recorder.lease_changed(ev.LeaseReturned(lease.lease, lease.serial), now)
        self.lease = None
        self.handle(ev.LeaseFailed(lease.lease, lease.serial))

    def _end_lease(self, action: ev.EndLease) -> None:
        now, lease = self.env.now, self.lease
        assert lease is not None
        share = 1.0
        if not self.lease_entered:
            needed = costs.enter_s(self.plan, lease)
            share = (now - self.lease_since) / needed if needed else 1.0
            self._lease_span(Activity.SWITCH_IN, self.lease_since, now)
            self.lease_entered = True
        self.lease_released = True
        self.recorder.lease_changed(action, now)
        end_s = now + costs.return_s(self.plan, lease.direction, share)
        self._lease_span(Activity.SWITCH_OUT, now, end_s)
        event = ev.LeaseReturned(action.lease, action.serial)
        self.env.at(end_s, RANK[ev.LeaseReturned] << _RANK_SHIFT | action.serial, self._returned, event)

    def _returned(self, simpy_event: Any) -> None:
        event: ev.LeaseReturned = simpy_event._value
        lease = self.lease
        if lease is not None and lease.direction is Direction.ROLLOUT_ON_TRAIN:
            self._take_busy(lease)
            for replica in lease.replicas:
                self.losses.release(replica)
        self.recorder.lease_changed(event, self.env.now)
        self.lease = None
        self.handle(event)

    def _take_busy(self, lease: ev.BeginLease) -> None:
        for replica in lease.replicas:
            self._generated(replica)

    def _generated(self, index: int) -> None:
        """Write the spans in which a replica has generated, up to now, and credit its lease."""
        unit, now, lease = self.recorder.rollout_unit(index), self.env.now, self.lease
        for start_s, end_s in self.replicas[index].take_busy():
            self.recorder.span(*unit, Activity.GENERATE, start_s, min(end_s, now))
            if index >= self.num_primary and lease is not None:
                self.recorder.lease_worked(lease.lease, (min(end_s, now) - start_s) * unit[2])

    def _set_timer(self, action: ev.SetTimer) -> None:
        self._post(self.env.now + action.delay_s, ev.TimerFired(action.timer, action.serial))

    def lose_engine(self, index: int) -> None:
        """Put a new, idle engine in the place of one that is lost; its time and tokens still count."""
        self.causes[index].clear()
        self.replicas[index].pause(self.env.now)
        self._generated(index)
        self._account(index)
        self.replicas[index] = self._engine(index)
        self.dirty.add(index)

    def _account(self, index: int) -> None:
        record, replica = self.recorder.record, self.replicas[index]
        record.decode_tokens += replica.decode_tokens
        record.recomputed_tokens += replica.recomputed_tokens
        record.recompute_s += replica.recompute_s

    # --------------------------------------------------------------------- end

    def _close(self, record: RunRecord) -> None:
        now = self.env.now
        record.num_events = self.num_events
        samples = record.samples
        for index, replica in enumerate(self.replicas):
            replica.pause(now)
            self._drain(index)
            for seq, tokens in replica.progress(now):
                samples.generated_tokens[seq] = tokens
                samples.last_version[seq] = self.versions[index]
            self._generated(index)
            self.losses.close(index)
            self._account(index)
        spans = record.spans
        for row, end_s in enumerate(spans.end_s):
            if end_s > now:  # still going on; an unfinished sync has no start that counts
                spans.end_s[row] = spans.start_s[row] if spans.activity[row] == Activity.SYNC else now
        kept = [row for row, end_s in enumerate(spans.end_s) if end_s > spans.start_s[row]]
        if len(kept) < len(spans.end_s):
            for column in fields(spans):
                values = getattr(spans, column.name)
                values[:] = [values[row] for row in kept]
