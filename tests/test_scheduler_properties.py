"""What must hold after every event of every job, checked by a second set of books."""

import math
from collections import Counter
from fractions import Fraction
from itertools import pairwise

from hypothesis import given, settings

from bidirl.planner import events as ev
from bidirl.planner.events import Direction, SegmentKind
from bidirl.planner.invariants import check
from bidirl.planner.plan import Plan
from bidirl.planner.policy import BatchOrder, InFlight, Placement, VersionMode
from bidirl.planner.scheduler import Scheduler
from bidirl.sim.metrics import summarise
from bidirl.traces.run_record import Activity, Owner, RunRecord
from tests.job_strategies import MAX_EVENTS, MAX_EVENTS_AT_ONCE, Case, UnevenDriver, cases

Sample = tuple[int, int]

thorough = settings(max_examples=4 * settings().max_examples)
"""Rare turns of events (a merge before a segment's end, say) need more jobs than a property of one value."""


class Books:
    """Follows a run by its events and actions alone, and compares with the scheduler after each."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.n = plan.samples_per_group
        self.pinned = plan.policy.version_mode is VersionMode.PINNED
        self.num_primary = plan.rollout_replicas
        count = plan.rollout_replicas + plan.auxiliary_rollouters
        self.place: dict[Sample, int | str] = {}
        """Sample -> replica that holds it, or ``queue`` or ``done``."""
        self.held: list[set[Sample]] = [set() for _ in range(count)]
        self.groups: dict[int, str] = {}
        """Group -> ``flight``, ``scoring``, ``ready`` or ``dropped``; trained ones are the scheduler's."""
        self.refunded = 0
        self.version = [0] * count
        self.syncing: dict[int, ev.SyncReplica] = {}
        self.owns = [index < self.num_primary for index in range(count)]
        """Replica plays the rollout role now."""
        self.lease: ev.BeginLease | None = None
        self.lease_state = ""
        self.side_replicas = [plan.train_replicas if plan.train_gpus else 0, 0]
        self.running: list[ev.StartChunks | None] = [None, None]
        self.unmerged: set[int] = set()
        self.merging: ev.Merge | None = None
        self.run_chunks: dict[int, list[int]] = {}
        """Segment of the step -> chunks in the order in which they were finished."""
        self.kinds: dict[int, SegmentKind] = {}
        self.num_updates = 0
        self.optimizing = False
        self.broadcasting = False
        self.published = 0
        self.confirmed = 0
        """Version that every living primary replica has had."""
        self.lost: set[int] = set()
        self.serial = 0
        self.now = 0.0
        self.at_once = self.num_events = 0

    def __call__(self, now: float, event: ev.Event, actions: list[ev.Action], scheduler: Scheduler) -> None:
        """Take an event and what it led to, and check everything."""
        assert now >= self.now
        self.at_once = self.at_once + 1 if now == self.now else 0
        self.num_events += 1
        assert self.at_once < MAX_EVENTS_AT_ONCE, "livelock"
        assert self.num_events < MAX_EVENTS, "livelock"
        self.now = now
        self._take_event(event)
        living = [v for index, v in enumerate(self.version[: self.num_primary]) if index not in self.lost]
        self.confirmed = max(self.confirmed, min(living, default=self.published))
        for action in actions:
            assert action.serial > self.serial, "serials ascend"
            self.serial = action.serial
            self._take_action(action)
        self._compare(scheduler)
        check(scheduler)

    # ------------------------------------------------------------------ events

    def _take_event(self, event: ev.Event) -> None:
        match event:
            case ev.SamplesFinished():
                for index in event.indices:
                    self._leave((event.group, index), event.replica, "done")
            case ev.Preempted():
                for group, index, _ in event.unfinished:
                    self._leave((group, index), event.replica, "queue")
                for group, index, *_ in event.finished:
                    self._leave((group, index), event.replica, "done")
            case ev.Rewarded() | ev.Filtered():
                assert self.groups[event.group] == "scoring"
                drops = isinstance(event, ev.Filtered) and not self.pinned
                self.groups[event.group] = "dropped" if drops else "ready"
                self.refunded += drops
            case ev.SyncApplied():
                action = self.syncing.pop(event.replica)
                assert (action.serial, action.version) == (event.cause, event.version)
                self.version[event.replica] = event.version
            case ev.LeaseEntered():
                self._entered()
            case ev.LeaseReturned():
                self._returned()
            case ev.ChunkFinished():
                self._chunk_finished(event)
            case ev.Merged():
                assert self.merging is not None
                self.unmerged -= set(self.merging.chunks)
                self.merging = None
            case ev.Updated():
                assert self.optimizing
                self.optimizing = False
                self.num_updates += 1
                if self.num_updates == self.plan.mini_batches:
                    self._end_step()
            case ev.BroadcastDone():
                self.broadcasting = False
            case _:
                pass

    def _leave(self, sample: Sample, replica: int, to: str) -> None:
        assert self.place[sample] == replica, f"{sample} is not on {replica} but {self.place[sample]}"
        self.held[replica].remove(sample)
        self.place[sample] = to
        group = sample[0]
        if all(self.place[group, index] == "done" for index in range(self.n)):
            assert self.groups[group] == "flight"
            self.groups[group] = "scoring" if self.plan.scoring else "ready"

    def _entered(self) -> None:
        lease = self.lease
        assert lease is not None
        assert self.lease_state == "entering"
        self.lease_state = "active"
        match lease.direction:
            case Direction.ROLLOUT_ON_TRAIN:
                for replica in lease.replicas:
                    self.owns[replica] = True
                    self.version[replica] = lease.version
            case Direction.TRAIN_ON_ROLLOUT:
                gpus = len(lease.replicas) * self.plan.rollout_replica_gpus
                self.side_replicas[1] = gpus // self.plan.train_replica_gpus
            case Direction.TIME_SHARE:
                self.side_replicas[0] = self.plan.train_replicas

    def _returned(self) -> None:
        lease = self.lease
        assert lease is not None
        assert self.lease_state == "returning"
        self.lease = None
        if lease.direction is Direction.ROLLOUT_ON_TRAIN:
            self.side_replicas[0] = self.plan.train_replicas
        else:
            for replica in lease.replicas:
                self.owns[replica] = True

    def _chunk_finished(self, event: ev.ChunkFinished) -> None:
        running = self.running[event.side]
        assert running is not None
        assert running.serial == event.cause
        self.running[event.side] = None
        self.run_chunks[event.segment].extend(range(event.first, event.last))
        if event.side == 1:
            self.unmerged.update(range(event.first, event.last))

    def _end_step(self) -> None:
        plan = self.plan
        per_update = -(-plan.groups_per_step // plan.mini_batches // plan.chunk_groups)
        chunks = list(range(per_update * plan.mini_batches))
        for kind in (*plan.segments, SegmentKind.UPDATE):
            ran = [
                chunk for seg, done in self.run_chunks.items() if self.kinds[seg] is kind for chunk in done
            ]
            assert sorted(ran) == chunks, f"{kind}: each chunk once"
        assert not self.unmerged
        self.run_chunks, self.kinds, self.num_updates = {}, {}, 0
        self.published += 1

    # ----------------------------------------------------------------- actions

    def _take_action(self, action: ev.Action) -> None:
        match action:
            case ev.StartSamples():
                self._start(action)
            case ev.ScoreGroup():
                assert self.groups[action.group] == "scoring"
            case ev.SyncReplica():
                assert self.owns[action.replica]
                assert action.replica not in self.syncing
                assert self.version[action.replica] < action.version <= self.published
                self.syncing[action.replica] = action
            case ev.BeginLease():
                self._begin(action)
            case ev.EndLease():
                self._end(action)
            case ev.StartChunks():
                self._start_chunks(action)
            case ev.Merge():
                assert self.merging is None
                assert list(action.chunks) == sorted(self.unmerged), "merged in order, each once"
                self.merging = action
            case ev.OptimizerStep():
                assert not self.optimizing
                assert (action.step, action.update) == (self.published, self.num_updates)
                assert self.running == [None, None]
                assert not self.unmerged
                self.optimizing = True
            case ev.Broadcast():
                assert self.side_replicas[1]
                self.broadcasting = True
            case _:
                pass

    def _start(self, action: ev.StartSamples) -> None:
        replica, plan = action.replica, self.plan
        assert self.owns[replica], f"replica {replica} does not generate now"
        assert replica not in self.syncing
        assert action.version == self.version[replica]
        if action.group not in self.groups:
            issued = len(self.groups)
            assert action.group == issued, "groups start in order"
            limit = (self.confirmed + 1 + Fraction(str(plan.policy.staleness))) * plan.groups_per_step
            assert issued - self.refunded < math.floor(limit), "admission"
            assert action.indices == tuple(range(self.n))
            assert not any(action.prefixes)
            self.groups[action.group] = "flight"
            self.place.update({(action.group, index): "queue" for index in action.indices})
        for index in action.indices:
            assert self.place[action.group, index] == "queue"
            self.place[action.group, index] = replica
            self.held[replica].add((action.group, index))
        policy = plan.policy
        slots = policy.concurrency_groups_per_replica or plan.group_slots
        assert len({group for group, _ in self.held[replica]}) <= slots
        if policy.max_concurrency is not None:
            assert list(self.groups.values()).count("flight") <= policy.max_concurrency

    def _begin(self, action: ev.BeginLease) -> None:
        assert self.lease is None, "one lease at a time"
        self.lease, self.lease_state = action, "entering"
        if action.direction is Direction.ROLLOUT_ON_TRAIN:
            assert self.running == [None, None]
            assert not self.optimizing
            self.side_replicas[0] = 0
        else:
            for replica in action.replicas:
                assert self.owns[replica]
                assert not self.held[replica]
                assert replica not in self.syncing
                self.owns[replica] = False

    def _end(self, action: ev.EndLease) -> None:
        lease = self.lease
        assert lease is not None
        assert lease.lease == action.lease
        assert self.lease_state in {"entering", "active"}
        self.lease_state = "returning"
        match lease.direction:
            case Direction.ROLLOUT_ON_TRAIN:
                for replica in lease.replicas:
                    self.owns[replica] = False
                    assert not self.held[replica]
                    assert replica not in self.syncing
            case Direction.TRAIN_ON_ROLLOUT:
                assert self.running[1] is None
                assert not self.unmerged
                assert not self.broadcasting, "the side still receives weights"
                self.side_replicas[1] = 0
            case Direction.TIME_SHARE:
                assert self.running[0] is None
                assert not self.optimizing
                self.side_replicas[0] = 0

    def _start_chunks(self, action: ev.StartChunks) -> None:
        side = action.side
        assert self.running[side] is None
        assert action.num_replicas == self.side_replicas[side] > 0
        assert not self.optimizing
        assert not self.broadcasting
        assert action.step == self.published
        assert action.first < action.last <= action.first + self.plan.policy.max_chunks_per_pull
        if action.segment not in self.kinds:
            assert action.segment == len(self.kinds), "segments run in order"
            assert self.running == [None, None], "a segment ends in a barrier"
            assert not self.unmerged
            updates = list(self.kinds.values()).count(SegmentKind.UPDATE)
            assert updates == self.num_updates, "an update is applied before the next segment"
            self.kinds[action.segment] = action.kind
            self.run_chunks[action.segment] = []
        assert action.segment == len(self.kinds) - 1
        assert self.kinds[action.segment] is action.kind
        started = set(self.run_chunks[action.segment])
        for other in self.running:
            if other is not None:
                started.update(range(other.first, other.last))
        assert not started & set(range(action.first, action.last)), "each chunk once"
        self.running[side] = action

    # -------------------------------------------------------------- comparison

    def _compare(self, scheduler: Scheduler) -> None:
        rollout, train = scheduler.rollout, scheduler.train
        taken = {group.id for group in train.batch}
        mine = Counter(state for group, state in self.groups.items())
        assert set(rollout.groups) == {
            g for g, state in self.groups.items() if state in {"flight", "scoring"}
        }
        batched = {g for g, state in self.groups.items() if state == "ready"} - set(rollout.ready)
        assert taken <= batched
        assert len(batched) == len(taken) + train.num_trained
        assert rollout.issued == len(self.groups)
        assert rollout.refunded == self.refunded == mine["dropped"]
        queued = Counter((group.id, index) for group, (indices, _), _ in rollout.queue for index in indices)
        for group in rollout.groups.values():
            for index in range(self.n):
                here = [replica for replica, (indices, _) in group.places.items() if index in indices]
                where = [*here, *["queue"] * queued[group.id, index], *["done"] * (index in group.tokens)]
                assert where == [self.place[group.id, index]], f"{group.id}, {index} in exactly one place"
        if self.plan.placement is Placement.DISAGGREGATED:
            playing = sum(self.owns) * self.plan.rollout_replica_gpus
            assert playing <= self.plan.rollout_gpus + self.plan.train_gpus


def check_record(plan: Plan, record: RunRecord) -> None:
    """Check what the run left behind."""
    steps, samples, n = record.steps, record.samples, plan.samples_per_group
    assert len(steps.published_s) == plan.num_steps
    assert steps.published_s == sorted(steps.published_s)
    before = 0.0
    for published_s, parts in zip(steps.published_s, steps.parts, strict=True):
        assert math.isclose(math.fsum(parts.values()), published_s - before, rel_tol=1e-9, abs_tol=1e-9)
        assert all(seconds >= 0.0 for seconds in parts.values())
        before = published_s
    assert steps.num_groups == [plan.groups_per_step] * plan.num_steps
    trained = Counter(samples.step)
    dropped = sum(map(bool, samples.dropped))
    assert trained.pop(-1, 0) == dropped, "everything issued is trained or dropped at the end"
    assert trained == dict.fromkeys(range(plan.num_steps), plan.groups_per_step * n)
    for row, group in enumerate(samples.group):
        step, version, last = samples.step[row], samples.version[row], samples.last_version[row]
        assert version <= last
        assert samples.start_s[row] <= samples.finish_s[row]
        assert samples.generated_tokens[row] == samples.response_tokens[row]
        if step < 0:
            continue
        assert version <= last <= step
        assert samples.finish_s[row] <= steps.published_s[step]
        match plan.policy.in_flight, plan.policy.version_mode:
            case _, VersionMode.PINNED:
                assert version == last
            case ((InFlight.DRAIN | InFlight.RESTART), _):
                assert version == last, "no sample spans two versions"
        if plan.policy.staleness == 0:
            assert version == step, "on-policy"
        if plan.policy.batch_order is BatchOrder.ISSUE_ORDER:
            assert step - version <= math.ceil(plan.policy.staleness)
        assert step == samples.step[group * n], "a group is trained as one"
    check_chunks(plan, record)
    leases = record.leases
    for row in range(len(leases.direction)):
        times = [leases.requested_s[row], leases.entered_s[row], leases.released_s[row], leases.closed_s[row]]
        known = [time_s for time_s in times if not math.isnan(time_s)]
        assert known == sorted(known)
    check_spans(plan, record)


def check_chunks(plan: Plan, record: RunRecord) -> None:
    """Check that chunks are cut in group order inside a mini-batch, full except for the last one."""
    samples, n = record.samples, plan.samples_per_group
    size, per_update = plan.chunk_groups, plan.groups_per_step // plan.mini_batches
    batches: dict[int, list[tuple[int, int]]] = {}
    for row in range(0, len(samples.group), n):
        assert len(set(samples.chunk[row : row + n])) == 1
        assert (samples.chunk[row] < 0) == (samples.step[row] < 0)
        if samples.step[row] >= 0:
            batches.setdefault(samples.step[row], []).append((samples.chunk[row], samples.group[row]))
    chunks_per_update = -(-per_update // size)
    for batch in batches.values():
        batch.sort()
        for update in range(plan.mini_batches):
            part = batch[update * per_update : (update + 1) * per_update]
            expected = [update * chunks_per_update + place // size for place in range(per_update)]
            assert [chunk for chunk, _ in part] == expected
            numbers = [group for _, group in part]
            assert numbers == sorted(numbers)


def check_spans(plan: Plan, record: RunRecord) -> None:
    """Check that no device does two things at once, and that only lent devices play the other role."""
    spans = record.spans
    busy: dict[tuple[int, int], list[tuple[float, float, int]]] = {}
    for row, owner in enumerate(spans.owner):
        assert spans.start_s[row] < spans.end_s[row]
        for unit in range(spans.unit[row], spans.unit[row] + spans.num_gpus[row]):
            assert unit < (plan.train_gpus if owner == Owner.TRAIN else plan.rollout_gpus)
            busy.setdefault((owner, unit), []).append(
                (spans.start_s[row], spans.end_s[row], spans.activity[row])
            )
    for device, intervals in busy.items():
        intervals.sort()
        for one, other in pairwise(intervals):
            slack = 1e-9 * max(1.0, one[1])
            assert other[0] >= one[1] - slack, (
                f"{device}: {Activity(one[2])} {one}, {Activity(other[2])} {other}"
            )


def run_with_books(plan: Plan, case: Case) -> RunRecord:
    """Run a case under the books; every assertion that fails is a bug."""
    books = Books(plan)
    driver = UnevenDriver(
        plan, case.workload, sink=lambda now, event, actions: books(now, event, actions, driver.scheduler)
    )
    driver.apply_spread_s = case.apply_spread_s
    record = driver.run()
    check_record(plan, record)
    return record


@thorough
@given(case=cases())
def test_every_job_keeps_its_books(case: Case) -> None:
    record = run_with_books(case.plan, case)
    summary = summarise(record)
    ledger = summary["ledger"]["tokens"]
    assert ledger["issued"] == ledger["trained"] + ledger["dropped"] + ledger["unfinished"]
    assert ledger["issued"] == sum(record.samples.response_tokens)


@thorough
@given(case=cases(lending=True))
def test_jobs_that_lend_keep_their_books(case: Case) -> None:
    run_with_books(case.plan, case)


@given(case=cases(lending=True, pinned=True))
def test_pinned_jobs_that_lend_keep_their_books(case: Case) -> None:
    run_with_books(case.plan, case)
