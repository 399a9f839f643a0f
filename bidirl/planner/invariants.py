"""What must hold after every event: conservation, admission, one role per device, order of merges."""

from collections import Counter

from bidirl.errors import InvariantBroken
from bidirl.planner.events import Direction
from bidirl.planner.lending import LeaseState
from bidirl.planner.policy import AdmissionRule
from bidirl.planner.scheduler import Scheduler
from bidirl.planner.train import AUXILIARY, PRIMARY, Phase

__all__ = ["check"]


def _fail(scheduler: Scheduler, rule: str, story: str) -> None:
    raise InvariantBroken(f"at {scheduler.core.now} s: {rule}: {story}")


def check(scheduler: Scheduler) -> None:
    """Raise ``InvariantBroken``, with the story of the object, unless the state is sound.

    Costs time in proportion to the groups in flight; meant for tests and for runs that ask for it.
    """
    _check_samples(scheduler)
    _check_ledger(scheduler)
    _check_devices(scheduler)
    _check_training(scheduler)


def _check_samples(scheduler: Scheduler) -> None:
    rollout = scheduler.rollout
    queued: Counter[int] = Counter()
    for group, (indices, _), prefixes in rollout.queue:
        queued[group.id] += len(indices)
        if len(indices) != len(prefixes):
            _fail(scheduler, "a queued sample has one prefix", f"group {group.id}: {indices} {prefixes}")
    busy = 0
    for replica in rollout.replicas:
        if not replica.auxiliary and replica.groups:
            busy += 1
        if not replica.active and not replica.lost and replica.groups:
            _fail(
                scheduler,
                "only an active rollouter holds samples",
                f"replica {replica.id}: {list(replica.groups)}",
            )
        for number, group in replica.groups.items():
            if rollout.groups.get(number) is not group or replica.id not in group.places:
                _fail(scheduler, "a held group is in flight", f"group {number} on replica {replica.id}")
    if busy != rollout.num_busy_primary:
        _fail(scheduler, "busy replicas are counted", f"{busy} != {rollout.num_busy_primary}")
    for group in rollout.groups.values():
        held = [index for indices, _ in group.places.values() for index in indices]
        placed = len(held) + queued[group.id] + len(group.tokens)
        if group.expired:
            continue  # its samples are leaving
        if placed != rollout.n or len(set(held)) != len(held) or set(held) & set(group.tokens):
            _fail(
                scheduler,
                "every sample is in exactly one place",
                f"group {group.id}: held {group.places}, queued {queued[group.id]}, "
                f"ended {sorted(group.tokens)}",
            )
        if group.unfinished != rollout.n - len(group.tokens):
            _fail(scheduler, "unfinished samples are counted", f"group {group.id}: {group.unfinished}")
    if rollout.groups.keys() & rollout.ready.keys():
        _fail(scheduler, "a group is in flight or ready", f"{rollout.groups.keys() & rollout.ready.keys()}")


def _check_ledger(scheduler: Scheduler) -> None:
    rollout, train = scheduler.rollout, scheduler.train
    total = train.num_trained + len(train.batch) + len(rollout.ready) + len(rollout.groups) + rollout.refunded
    if total != rollout.issued:
        _fail(
            scheduler,
            "issued = trained + in training + ready + in flight + refunded",
            f"{rollout.issued} != {train.num_trained} + {len(train.batch)} + {len(rollout.ready)} + "
            f"{len(rollout.groups)} + {rollout.refunded}",
        )
    limit = rollout.limit
    if scheduler.plan.policy.admission is AdmissionRule.COUNTING:
        limit = scheduler.plan.admission.limit(rollout.confirmed)
    if rollout.issued - rollout.refunded > limit:
        _fail(
            scheduler,
            "admission holds",
            f"{rollout.issued} - {rollout.refunded} > A({rollout.confirmed}) = {limit}",
        )
    confirmed = min(
        (r.version for r in rollout.replicas[: rollout.num_primary] if r.active), default=rollout.confirmed
    )
    if confirmed < rollout.confirmed and not rollout.num_syncing:
        _fail(scheduler, "the confirmed version is confirmed", f"{rollout.confirmed} > {confirmed}")
    if rollout.confirmed > rollout.published:
        _fail(scheduler, "no version before its publication", f"{rollout.confirmed} > {rollout.published}")


def _check_devices(scheduler: Scheduler) -> None:
    rollout, train, lease = scheduler.rollout, scheduler.train, scheduler.lender.lease
    primary, auxiliary = train.sides[PRIMARY], train.sides[AUXILIARY]
    lent = set(lease.replicas) if lease is not None else set()
    for replica in rollout.replicas:
        if replica.auxiliary and replica.active and replica.id not in lent:
            _fail(scheduler, "an auxiliary rollouter works inside a lease", f"replica {replica.id}")
    if lease is None:
        if auxiliary.may_pull or auxiliary.running is not None or auxiliary.results:
            _fail(scheduler, "an auxiliary trainer works inside a lease", f"{auxiliary}")
    elif lease.direction is Direction.ROLLOUT_ON_TRAIN:
        if primary.running is not None or primary.may_pull:
            _fail(scheduler, "one role per device", f"lease {lease} while the trainer may pull: {primary}")
    else:
        active = [number for number in lease.replicas if rollout.replicas[number].active]
        if active:
            _fail(scheduler, "one role per device", f"lease {lease} while replicas {active} generate")
        if lease.state is LeaseState.RETURNING and (auxiliary.running is not None or auxiliary.results):
            _fail(scheduler, "no unmerged work leaves with a lease", f"lease {lease}: {auxiliary}")


def _check_training(scheduler: Scheduler) -> None:
    train = scheduler.train
    if train.phase in (Phase.SEGMENT, Phase.MERGING):
        segment = train.segments[train.at]
        parts = [range(s.running.first, s.running.last) for s in train.sides if s.running is not None]
        running = [chunk for part in parts for chunk in part]
        if len(train.pending) + len(running) != train.unfinished:
            _fail(scheduler, "unfinished chunks are counted", f"{train.pending} {running} {train.unfinished}")
        chunks = [*train.pending, *running, *train.sides[AUXILIARY].results]
        if len(set(chunks)) != len(chunks) or not set(chunks) <= set(range(segment.first, segment.last)):
            _fail(
                scheduler,
                "a chunk is in one place",
                f"segment {segment}: {train.pending} {running} {train.sides}",
            )
    elif any(side.running is not None for side in train.sides):
        _fail(scheduler, "chunks run inside a segment", f"{train.phase}: {train.sides}")
