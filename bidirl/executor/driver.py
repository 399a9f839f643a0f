"""The executor's driver: turns the scheduler's actions into calls of a backend, and answers into events.

No policy lives here. Every answer and every report of the backend becomes an entry of the inbox; the loop
takes one entry at a time, hands its event to the scheduler and gives the actions out in order. On a virtual
clock the entries of one instant are taken in the order (rank of the kind, serial of the cause), as the
simulator does; on a real clock in the order of their arrival.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

from bidirl.errors import InputError, InvariantBroken
from bidirl.executor.backends import Backend, CallFailed, Ended, Taken
from bidirl.executor.clock import Clock
from bidirl.executor.inbox import Inbox, key_of
from bidirl.executor.leases import Leases
from bidirl.executor.resume import AGAIN, DriverState, resume
from bidirl.executor.spans import OpenSpans
from bidirl.executor.training import Training
from bidirl.planner import events as ev
from bidirl.planner.events import Action, Event
from bidirl.planner.plan import Plan
from bidirl.planner.policy import Gate
from bidirl.planner.recalibrator import Recalibrator
from bidirl.planner.recorder import Recorder
from bidirl.planner.scheduler import Scheduler
from bidirl.traces.run_record import Activity, RunRecord

__all__ = ["Deadlines", "Driver", "Sink"]

Sink = Callable[[float, Event, list[Action]], None]
"""Where the journal goes: called with each event, its time, and the actions that it led to."""

MAX_FAILED_RESTARTS = 8
"""Restarts of one replica that may fail in a row; more is a broken machine, not a hiccup."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds after which a call without an answer counts as failed; None: never.

    Scores, optimizer steps and publications have no failure that training could get over: there, a missed
    deadline ends the run.
    """

    replica_s: float | None = None
    """Preemption, progress, weight sync, restart."""
    train_s: float | None = None
    """Pulls, merges, optimizer steps, broadcasts, publications."""
    lease_s: float | None = None
    """Entering and returning."""
    score_s: float | None = None


class Driver:
    """Runs one plan on a backend. Build one per run, inside the running loop."""

    def __init__(
        self,
        plan: Plan,
        backend: Backend,
        clock: Clock,
        *,
        sink: Sink | None = None,
        deadlines: Deadlines | None = None,
        resumed: "DriverState | None" = None,
        keep: "Callable[[Driver, int], None] | None" = None,
    ) -> None:
        """Take where the journal goes, what a checkpoint holds of a driver, and who is to keep one.

        ``keep`` is called with the number of steps done, after each step.
        """
        if plan.policy.gate is Gate.ORACLE:
            raise InputError(
                "policy.gate = oracle: it needs the lengths before they are generated, which only a "
                'simulation has; use gate = "models"'
            )
        self.plan = plan
        self.backend = backend
        self.clock = clock
        self.sink = sink
        self.deadlines = deadlines or Deadlines()
        self.resumed = resumed
        self.keep = keep
        self.recorder = Recorder(plan, Scheduler(plan)) if resumed is None else resumed.recorder
        self.recalibrator = Recalibrator.of(plan)
        self.scheduler = self.recorder.scheduler
        self.spans = OpenSpans(self.recorder)
        self.inbox = Inbox(clock)
        self.n = plan.samples_per_group
        count = plan.rollout_replicas + plan.auxiliary_rollouters
        self.newest = 0
        """Newest version that a replica was asked to load: what a restarted one gets."""
        self.down: set[int] = set()
        self.failed_restarts = [0] * count
        self.stale = [0] * count
        """Per replica: answers to actions up to this serial are void; it was lost since."""
        self.causes: list[dict[int, int]] = [{} for _ in range(count)]
        """Per replica: group -> serial of its last hand-over."""
        self.announced = [0] * count
        """Per replica: number of its last announcement; earlier ones are void."""
        self.num_started = 0
        self.num_events = 0
        self.syncs: list[ev.SyncReplica] = []
        self.unanswered: dict[int, Action] = {}
        """Actions that a resumed run must give out again, by serial."""
        shared = backend, clock, self.inbox, self.recorder, self.spans
        self.leases = leases = Leases(*shared, self, self.deadlines.lease_s)
        training = Training(*shared, leases, self.deadlines.train_s)
        self._do: dict[type[Any], Callable[[Any], None]] = {
            ev.StartSamples: self._start_samples,
            ev.Preempt: self._preempt,
            ev.RequestProgress: self._progress,
            ev.ScoreGroup: self._score,
            ev.DropGroup: self._drop,
            ev.StartChunks: training.start_chunks,
            ev.Merge: training.merge,
            ev.OptimizerStep: training.optimizer_step,
            ev.Broadcast: training.broadcast,
            ev.Publish: training.publish,
            ev.SyncReplica: self.syncs.append,
            ev.BeginLease: leases.begin,
            ev.EndLease: leases.end,
            ev.GateDecision: lambda _: None,
            ev.LendingStopped: self.recorder.stopped,
            ev.SetTimer: self._set_timer,
            ev.RestartReplica: self._restart,
        }

    # -------------------------------------------------------------------- loop

    async def run(self) -> RunRecord:
        """Run the job to its end and return its record; whatever happens, nothing is left running.

        Raises:
            InvariantBroken: the run stalls, or another bug of the scheduler or a driver.
            RunFault: a call failed that training cannot do without; its cause is chained.
        """
        start = perf_counter()
        try:
            await self.backend.open(self)
            if self.resumed is None:
                self.inbox.put_event(ev.RunStarted())
            else:
                resume(self, self.resumed)
            while not self.scheduler.done:
                take = await self.inbox.next(self._stalled)
                event = take()
                if event is not None:
                    self._handle(event)
            record = self._close()
        finally:
            try:
                await self.inbox.close()
            finally:
                await self.backend.close()
        record.wall_s = perf_counter() - start
        return record

    def recalibrate(self, rollout_factor: float, train_factor: float) -> None:
        """Hand new factors on the predicted times to the scheduler, as an event like any other."""
        self.inbox.put_event(ev.CoefficientsUpdated(rollout_factor, train_factor))

    def _stalled(self) -> InvariantBroken | None:
        if any(self.causes):
            return None
        phase = self.scheduler.train.phase
        return InvariantBroken(f"stall at {self.clock.now()} s: {phase}, nothing is on its way")

    def _handle(self, event: Event) -> None:
        now = self.clock.now()
        self.num_events += 1
        actions = self.scheduler.handle(event, now)
        if self.sink is not None:
            self.sink(now, event, actions)
        if self.recalibrator is not None:
            factors = self.recalibrator.note(now, event, actions)
            if factors is not None:
                self.inbox.put_event(factors)
        self.unanswered.pop(event.cause, None)
        for action in actions:
            if isinstance(action, AGAIN):
                self.unanswered[action.serial] = action
            self._do[type(action)](action)
        if self.syncs:
            self._sync(self.syncs)
            self.syncs.clear()
        self.recorder.observe(now)
        if self.keep is not None and type(event) is ev.Updated and self.scheduler.train.step > event.step:
            self.keep(self, self.scheduler.train.step)

    def again(self, action: Action) -> None:
        """Give an action out again, in a resumed run."""
        self._do[type(action)](action)

    def _close(self) -> RunRecord:
        now = self.clock.now()
        record = self.recorder.close(now)
        record.num_events = self.num_events
        self.spans.close(now)
        for replica in range(len(self.causes)):
            self.backend.stop(replica)
            for start_s, end_s in self.backend.take_busy(replica):
                self.recorder.span(*self.recorder.rollout_unit(replica), Activity.GENERATE, start_s, end_s)
        done = self.backend.counters()
        record.decode_tokens = done.decode_tokens
        record.recomputed_tokens = done.recomputed_tokens
        record.recompute_s = done.recompute_s
        return record

    # ----------------------------------------------------------------- rollout

    def ready(self, replica: int, group: int) -> None:
        """Take the backend's word that a group's samples can be collected."""
        self.announced[replica] += 1
        take = partial(self._collect, replica, group, self.announced[replica])
        self.inbox.put(key_of(ev.SamplesFinished, self.causes[replica].get(group, 0)), take)

    def _collect(self, replica: int, group: int, number: int) -> Event | None:
        if self.announced[replica] != number or group not in self.causes[replica]:
            return None  # overtaken, lost, or on its way back with a preemption
        ended = self.backend.collect(replica, group)
        if ended is None:
            return None
        self._finished(ended)
        return ev.SamplesFinished(
            replica,
            group,
            tuple([sample.index for sample in ended]),
            tuple([sample.tokens for sample in ended]),
            ended[0].prompt_tokens,
            self.causes[replica].pop(group),
        )

    def _finished(self, ended: Sequence[Ended]) -> None:
        lengths = self.recorder.record.samples.response_tokens
        for sample in ended:
            row = sample.group * self.n + sample.index
            lengths[row] = sample.tokens
            self.recorder.finished(row, sample.finish_s, sample.version)

    def _start_samples(self, action: ev.StartSamples) -> None:
        group = action.group
        if group == self.num_started:
            self.num_started += 1
            prompt_tokens, lengths = self.backend.describe(group)
            self.recorder.started(group, prompt_tokens, list(lengths), action.version, self.clock.now())
        else:
            for index, prefix in zip(action.indices, action.prefixes, strict=True):
                self.recorder.resumed(group, index, prefix, action.version)
        self.causes[action.replica][group] = action.serial
        self.backend.start_samples(action)

    def _preempt(self, action: ev.Preempt) -> None:
        for group in action.groups:
            self.causes[action.replica].pop(group, None)

        def then(taken: Taken) -> None:
            self.inbox.put(key_of(ev.Preempted, action.serial), partial(self._taken, action, taken))

        self._ask_replica(action, self.backend.preempt(action), then, partial(self._gone, action.replica))

    def _ask_replica(
        self, action: Any, answer: Any, then: Callable[[Any], None], failed: Callable[[BaseException], None]
    ) -> None:
        self.inbox.ask(
            action.serial,
            answer,
            then,
            failed,
            deadline_s=self.deadlines.replica_s,
            owner=action.replica,
        )

    def _taken(self, action: ev.Preempt, taken: Taken) -> Event | None:
        if action.serial <= self.stale[action.replica]:
            return None
        samples = self.recorder.record.samples
        for group, index, tokens in taken.unfinished:
            row = group * self.n + index
            samples.generated_tokens[row] = tokens
            samples.last_version[row] = taken.version
        self._finished(taken.ended)
        finished = tuple((it.group, it.index, it.tokens, it.prompt_tokens) for it in taken.ended)
        return ev.Preempted(action.replica, taken.unfinished, finished, action.serial)

    def _progress(self, action: ev.RequestProgress) -> None:
        def then(rows: Sequence[tuple[int, int, int]]) -> None:
            event = ev.Progress(action.replica, tuple(rows), action.serial)
            self.inbox.put(key_of(ev.Progress, action.serial), partial(self._unless_stale, event))

        self._ask_replica(action, self.backend.progress(action), then, partial(self._gone, action.replica))

    def _unless_stale(self, event: ev.Progress) -> Event | None:
        return None if event.cause <= self.stale[event.replica] else event

    def _score(self, action: ev.ScoreGroup) -> None:
        def then(filtered: bool) -> None:
            if filtered and not self.scheduler.rollout.pinned:
                self.recorder.dropped(action.group, "filtered")
            kind = ev.Filtered if filtered else ev.Rewarded
            self.inbox.put_event(kind(action.group, action.serial))

        self.inbox.ask(action.serial, self.backend.score(action), then, deadline_s=self.deadlines.score_s)

    def _drop(self, action: ev.DropGroup) -> None:
        self.recorder.group_dropped(action)
        self.backend.drop(action.group)

    def _sync(self, actions: Sequence[ev.SyncReplica]) -> None:
        """Have one version loaded by all replicas that were asked at once."""
        actions = tuple(actions)
        self.newest = max(self.newest, *[action.version for action in actions])
        for action, answer in zip(actions, self.backend.sync(actions), strict=True):
            unit = self.recorder.rollout_unit(action.replica)
            self.spans.open(action.serial, [unit], Activity.SYNC, self.clock.now(), waits=True)
            self._ask_replica(action, answer, partial(self._synced, action), partial(self._unsynced, action))

    def _synced(self, action: ev.SyncReplica, paused_s: float) -> None:
        done = ev.SyncApplied(action.replica, action.version, action.serial)
        self.spans.began(action.serial, paused_s)
        self.inbox.put(key_of(ev.SyncApplied, action.serial), partial(self._resume, action, done))

    def _unsynced(self, action: ev.SyncReplica, error: BaseException) -> None:
        self.spans.began(action.serial, error.since_s if isinstance(error, CallFailed) else None)
        done = ev.SyncFailed(action.replica, action.version, action.serial)
        self.inbox.put(key_of(ev.SyncFailed, action.serial), partial(self._resume, action, done))

    def _resume(self, action: ev.SyncReplica, done: Event) -> Event | None:
        """Let a replica go on after its sync."""
        if action.serial <= self.stale[action.replica]:
            return None
        self.spans.shut(action.serial, self.clock.now())
        self.backend.resume(action, applied=isinstance(done, ev.SyncApplied))
        return done

    # ------------------------------------------------------------------- losses

    def lost(self, replica: int) -> None:
        """Take the backend's word that a replica is gone."""
        self.inbox.put(key_of(ev.ReplicaLost, replica), partial(self._bury, replica))

    def _gone(self, replica: int, _: BaseException) -> None:
        """Take a replica that does not answer as lost."""
        self.lost(replica)

    def _bury(self, replica: int) -> Event | None:
        if replica in self.down:
            return None
        now = self.clock.now()
        self.down.add(replica)
        self.stale[replica] = self.scheduler.core.serial
        self.inbox.void(owner=replica)
        self.causes[replica].clear()
        self.backend.discard(replica)
        unit = self.recorder.rollout_unit(replica)
        self.spans.cut(unit, now)
        self.generated(replica)
        if replica < self.plan.rollout_replicas:  # an auxiliary one restarts beside the devices' owner
            self.spans.open(-1 - replica, [unit], Activity.DOWN, now)
        self.leases.replica_lost(replica)
        return ev.ReplicaLost(replica)

    def generated(self, replica: int) -> None:
        """Write the spans in which a replica has generated, and credit its lease."""
        unit, lease = self.recorder.rollout_unit(replica), self.leases.lease
        lent = lease is not None and replica >= self.plan.rollout_replicas
        for start_s, end_s in self.backend.take_busy(replica):
            self.recorder.span(*unit, Activity.GENERATE, start_s, end_s)
            if lent and lease is not None:
                self.recorder.lease_worked(lease.lease, (end_s - start_s) * unit[2])

    def _restart(self, action: ev.RestartReplica) -> None:
        replica = action.replica

        def then(_: None) -> None:
            self.inbox.put(key_of(ev.ReplicaJoined, action.serial), partial(self._joined, action))

        def failed(error: BaseException) -> None:
            self.failed_restarts[replica] += 1
            if self.failed_restarts[replica] < MAX_FAILED_RESTARTS:
                self._restart(action)
            else:
                self.inbox.fail(error)

        self.inbox.ask(
            action.serial, self.backend.restart(action), then, failed, deadline_s=self.deadlines.replica_s
        )

    def _joined(self, action: ev.RestartReplica) -> Event:
        replica = action.replica
        self.down.discard(replica)
        self.failed_restarts[replica] = 0
        if replica < self.plan.rollout_replicas:
            self.spans.shut(-1 - replica, self.clock.now())
        self.backend.join(replica, self.newest)
        return ev.ReplicaJoined(replica, self.newest, action.serial)

    def side_lost(self) -> None:
        """Take the backend's word that the auxiliary trainer side is gone."""
        self.leases.side_lost()

    def broken(self, error: BaseException) -> None:
        """Take the backend's word that the run cannot go on."""
        self.inbox.fail(error)

    def chunk_groups(self, first: int, last: int) -> Sequence[Sequence[int]]:
        """Return the groups of some chunks of the step in progress, chunk by chunk."""
        train = self.scheduler.train
        found: list[list[int]] = [[] for _ in range(first, last)]
        for group, chunk in zip(train.batch, train.chunk_of, strict=True):
            if first <= chunk < last:
                found[chunk - first].append(group.id)
        return found

    def segment_chunks(self, segment: int) -> tuple[int, int]:
        """Return the range of a segment's chunks of the step in progress."""
        found = self.scheduler.train.segments[segment]
        return found.first, found.last

    def _set_timer(self, action: ev.SetTimer) -> None:
        event = ev.TimerFired(action.timer, action.serial)
        over = asyncio.get_running_loop().create_future()
        self.clock.at(self.clock.now() + action.delay_s, _end, over)
        self.inbox.ask(action.serial, over, lambda _: self.inbox.put_event(event))


def _end(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
