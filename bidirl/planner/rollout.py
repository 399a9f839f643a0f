"""The rollout half of the scheduler: admission, hand-over, preemption, and weight versions of replicas."""

from collections import deque
from heapq import heappop, heappush

from bidirl.errors import InvariantBroken
from bidirl.planner.core import Core, Group, Place
from bidirl.planner.events import (
    DropGroup,
    Filtered,
    Preempt,
    Preempted,
    Publish,
    Published,
    RestartReplica,
    Rewarded,
    SamplesFinished,
    ScoreGroup,
    StartSamples,
    SyncApplied,
    SyncFailed,
    SyncReplica,
)
from bidirl.planner.policy import AdmissionRule, Dispatch, InFlight, VersionMode

__all__ = ["RolloutSide", "Rollouter"]


class Rollouter:
    """What the scheduler knows of one rollout replica."""

    __slots__ = (
        "accepting",
        "active",
        "auxiliary",
        "groups",
        "id",
        "leaving",
        "lost",
        "restarting",
        "syncing",
        "version",
    )

    def __init__(self, replica: int, auxiliary: bool) -> None:
        self.id = replica
        self.auxiliary = auxiliary
        self.active = not auxiliary
        """Plays the rollout role now."""
        self.accepting = not auxiliary
        """May take new work (an auxiliary one only within its share)."""
        self.leaving: set[int] = set()
        """Groups that were asked off it and have not been reported yet."""
        self.restarting: set[int] = set()
        """Groups among ``leaving`` that lose what they have generated."""
        self.lost = False
        self.syncing = False
        self.version = 0
        self.groups: dict[int, Group] = {}


class RolloutSide:
    """Owns groups until they are ready to be trained."""

    def __init__(self, core: Core) -> None:
        plan = core.plan
        self.core = core
        self.n = plan.samples_per_group
        self.slots = plan.policy.concurrency_groups_per_replica or plan.group_slots
        self.round_robin = plan.policy.dispatch is Dispatch.ROUND_ROBIN
        self.pinned = plan.policy.version_mode is VersionMode.PINNED
        self.drains = plan.policy.in_flight is InFlight.DRAIN and not self.pinned
        self.recompute = plan.policy.in_flight is not InFlight.CONTINUE_STALE
        self.num_primary = plan.rollout_replicas
        self.replicas = [
            Rollouter(index, index >= self.num_primary)
            for index in range(plan.rollout_replicas + plan.auxiliary_rollouters)
        ]
        self.groups: dict[int, Group] = {}
        """Groups that are started and not yet ready."""
        self.ready: dict[int, Group] = {}
        """Complete, rewarded groups in the order in which they became ready."""
        self.queue: deque[tuple[Group, Place, tuple[int, ...]]] = deque()
        """Samples that left a replica and wait for another: (group, place, prefixes)."""
        self.issued = 0
        self.refunded = 0
        self.total = plan.num_steps * plan.groups_per_step
        """Groups that the job trains; no more are started, refunds apart."""
        self.published = 0
        """Newest version of the trainer."""
        self.confirmed = 0
        """Lowest version that every active primary replica has confirmed: the ``v`` of admission."""
        self.limit = plan.admission.limit(0)
        self.round_open: set[int] = set()
        """Replicas whose confirmation the running sync round waits for."""
        self.round_version = 0
        self.trainer_blocked = False
        """Whether the trainer waits for the round (or for a publication)."""
        self.num_busy_primary = 0
        self.num_busy_auxiliary = 0
        self.num_syncing_auxiliary = 0
        self.num_leaving = 0
        """(replica, group) pairs that were asked off a replica and have not been reported yet."""
        self.num_syncing = 0
        self.scoring: deque[int] = deque()
        self.num_scoring = 0
        self.auxiliary_share = 0
        """Groups that auxiliary rollouters may still take in this lease."""
        self.auxiliary_tokens = 0
        """Tokens that auxiliary rollouters have generated in this lease."""
        self._prefixes: dict[tuple[int, int], int] = {}
        """(auxiliary replica, group) -> tokens that its samples had when they came."""
        self.max_groups = plan.policy.max_concurrency
        self.restarts = plan.policy.in_flight is InFlight.RESTART and not self.pinned
        self._turn = 0
        self._loads: list[tuple[int, int]] = [(0, index) for index in range(self.num_primary)]

    # ---------------------------------------------------------------- credit

    def credit(self) -> int:
        """Return how many new groups may start now."""
        if self.drains and self.published > self.confirmed:
            return 0
        return min(self.limit, self.total) + self.refunded - self.issued

    def startable(self) -> int:
        """Return how many new groups may start now: credit within the limit on concurrency."""
        credit = self.credit()
        if self.max_groups is None:
            return credit
        return min(credit, self.max_groups - self.groups_in_flight())

    # ------------------------------------------------------------- hand-over

    def note_load(self, replica: Rollouter) -> None:
        """Put a replica where the next hand-over finds it, after its load or standing changed."""
        if replica.accepting and not self.round_robin:
            heappush(self._loads, (len(replica.groups), replica.id))

    def _takes(self, replica: Rollouter) -> bool:
        if replica.auxiliary and self.auxiliary_share <= 0:
            return False
        return replica.accepting and not replica.syncing

    def _pick(self) -> Rollouter | None:
        if self.round_robin:
            # what was taken off a primary for a lease goes to an auxiliary rollouter
            first = self.num_primary if self.queue and self.auxiliary_share > 0 else 0
            count = len(self.replicas) - first
            for step in range(count):
                replica = self.replicas[first + (self._turn + step) % count]
                if self._takes(replica) and len(replica.groups) < self.slots:
                    self._turn = replica.id + 1 - first
                    return replica
            return None
        loads, replicas = self._loads, self.replicas
        while loads:
            load, index = loads[0]
            replica = replicas[index]
            if self._takes(replica) and len(replica.groups) == load:
                return replica if load < self.slots else None
            heappop(loads)
        return None

    def fill(self) -> None:
        """Hand out waiting samples, then new groups, to the least loaded replicas."""
        queue = self.queue
        credit = self.startable()
        while queue or credit > 0:
            replica = self._pick()
            if replica is None:
                return
            if queue:
                group, (indices, _), prefixes = queue.popleft()
                self._start(replica, group, indices, prefixes)
            else:
                group = Group(self.issued, replica.version, self.n)
                self.groups[group.id] = group
                self.issued += 1
                credit -= 1
                self._start(replica, group, tuple(range(self.n)), (0,) * self.n)

    def _start(
        self, replica: Rollouter, group: Group, indices: tuple[int, ...], prefixes: tuple[int, ...]
    ) -> None:
        core = self.core
        serial = core.next_serial()
        if replica.auxiliary:
            if not replica.groups:
                self.num_busy_auxiliary += 1
            self.auxiliary_share -= 1
            key = replica.id, group.id
            self._prefixes[key] = self._prefixes.get(key, 0) + sum(prefixes)
        elif not replica.groups:
            self.num_busy_primary += 1
        held = group.places.get(replica.id)
        group.places[replica.id] = (indices if held is None else held[0] + indices, serial)
        if not any(prefixes) and len(indices) == self.n:
            group.version = replica.version
        replica.groups[group.id] = group
        core.actions.append(
            StartSamples(serial, replica.id, group.id, indices, prefixes, replica.version, group.attempt)
        )
        self.note_load(replica)

    def preempt(self, replica: Rollouter, groups: tuple[int, ...]) -> None:
        """Ask groups off a replica."""
        if groups:
            self.num_leaving -= len(replica.leaving)
            replica.leaving.update(groups)
            self.num_leaving += len(replica.leaving)
            self.core.actions.append(Preempt(self.core.next_serial(), replica.id, groups))

    # ------------------------------------------------------------ completion

    def _release(self, replica: Rollouter, group: Group) -> None:
        del group.places[replica.id]
        del replica.groups[group.id]
        if group.id in replica.leaving:
            replica.leaving.discard(group.id)
            self.num_leaving -= 1
        replica.restarting.discard(group.id)
        if not replica.groups:
            if replica.auxiliary:
                self.num_busy_auxiliary -= 1
            else:
                self.num_busy_primary -= 1
                self.core.gate_due = True
        self.note_load(replica)

    def on_samples_finished(self, event: SamplesFinished) -> None:
        """Take the end of a group's samples on one replica."""
        group = self.groups.get(event.group)
        if group is None:
            return
        held = group.places.get(event.replica)
        if held is None or held[1] != event.cause:
            return
        self._release(self.replicas[event.replica], group)
        if event.replica >= self.num_primary:
            self._book(event.replica, event.group, sum(event.tokens))
        group.prompt_tokens = event.prompt_tokens
        group.tokens.update(zip(event.indices, event.tokens, strict=True))
        self._count(group)

    def _book(self, replica: int, group: int, tokens: int) -> None:
        self.auxiliary_tokens += tokens - self._prefixes.pop((replica, group), 0)

    def _count(self, group: Group) -> None:
        if group.expired:
            self._forget(group)
            return
        group.unfinished = self.n - len(group.tokens)
        if group.unfinished == 0:
            if self.core.plan.scoring:
                self.scoring.append(group.id)
                self._score()
            else:
                self._become_ready(group)

    def _score(self) -> None:
        capacity = self.core.plan.reward_capacity
        while self.scoring and (capacity is None or self.num_scoring < capacity):
            self.num_scoring += 1
            self.core.actions.append(ScoreGroup(self.core.next_serial(), self.scoring.popleft()))

    def _become_ready(self, group: Group) -> None:
        del self.groups[group.id]
        self.ready[group.id] = group

    def on_scored(self, event: Rewarded | Filtered) -> None:
        """Take the rewards of a group; a filtered one gives its credit back (kept in pinned mode)."""
        group = self.groups.get(event.group)
        if group is None:
            return
        self.num_scoring -= 1
        self._score()
        if isinstance(event, Filtered):
            group.filtered = True
            if not self.pinned:
                del self.groups[group.id]
                self.refunded += 1
                self.core.gate_due = True
                return
        self._become_ready(group)

    def on_preempted(self, event: Preempted) -> None:
        """Take samples that left a replica; the unfinished ones go to the front of the queue."""
        replica = self.replicas[event.replica]
        left: dict[int, list[tuple[int, int]]] = {}
        for number, index, tokens in event.unfinished:
            left.setdefault(number, []).append((index, tokens))
        touched = dict.fromkeys(left)
        for number, index, tokens, prompt in event.finished:
            group = self.groups[number]
            group.tokens[index] = tokens
            group.prompt_tokens = prompt
            touched[number] = None
        if replica.auxiliary:
            for number in touched:
                here = [tokens for _, tokens in left.get(number, ())]
                here += [tokens for found, _, tokens, _ in event.finished if found == number]
                self._book(replica.id, number, sum(here))
        back: list[tuple[Group, Place, tuple[int, ...]]] = []
        for number in sorted(touched):
            group = self.groups[number]
            restarts = number in replica.restarting
            self._release(replica, group)
            if number in left and not group.expired:
                indices, prefixes = zip(*left[number], strict=True)
                if restarts:
                    prefixes = (0,) * len(indices)
                    group.attempt += 1
                back.append((group, (indices, 0), prefixes))
            self._count(group)
        self.queue.extendleft(reversed(back))
        self.core.gate_due = True

    def expire(self, oldest: int, *, running: bool) -> None:
        """Drop ready groups older than version ``oldest``; cancel those in flight too if ``running``."""
        for group in [group for group in self.ready.values() if group.version < oldest]:
            del self.ready[group.id]
            self._drop(group, "expired")
        if not running:
            return
        old = [group for group in self.groups.values() if group.version < oldest and group.unfinished]
        for group in old:
            group.expired = True
        if not old:
            return
        self.queue = deque(entry for entry in self.queue if not entry[0].expired)
        for replica in self.replicas:
            held = tuple(
                sorted(g.id for g in replica.groups.values() if g.expired and g.id not in replica.leaving)
            )
            self.preempt(replica, held)
        for group in old:
            self._forget(group)

    def _forget(self, group: Group) -> None:
        """Drop a cancelled group once none of its samples is on a replica."""
        if group.expired and not group.places and group.id in self.groups:
            del self.groups[group.id]
            self._drop(group, "expired")

    def _drop(self, group: Group, cause: str) -> None:
        self.refunded += 1
        self.core.gate_due = True
        self.core.actions.append(DropGroup(self.core.next_serial(), group.id, cause))

    def train(self, groups: list[Group]) -> None:
        """Hand ready groups over to the trainer."""
        for group in groups:
            del self.ready[group.id]

    # --------------------------------------------------------------- versions

    def publish(self, version: int) -> None:
        """Take note of a new version of the trainer, which waits until it has been handed over."""
        self.published = version
        self.trainer_blocked = True
        self.advance()
        if self.pinned and not (self.round_open and self.round_version == version):
            self.trainer_blocked = True  # until it lies ready, also where nobody was there to receive it
            self.core.actions.append(Publish(self.core.next_serial(), version))

    def advance(self) -> bool:
        """Start a sync round if one is due; return whether one is running."""
        if self.round_open:
            return True
        if self.published == self.confirmed or not self._round_due():
            return False
        self.round_version = self.confirmed + 1 if self.pinned else self.published
        receivers = [replica for replica in self.replicas if replica.active and not replica.lost]
        self.round_open = {replica.id for replica in receivers}
        for replica in self.replicas[: self.num_primary]:
            if not replica.active and not replica.lost:
                self.round_open.add(replica.id)  # lent: it takes the version when it is back
        if self.restarts:
            self._restart_queued()
        for replica in receivers:
            if not replica.syncing:  # one that still catches up is sent on when it has
                self._sync(replica, len(receivers))
        self.close_round()  # at once if nobody is there to receive
        return bool(self.round_open)

    def _restart_queued(self) -> None:
        """Let samples that wait for a replica start again under the new version."""
        for place, (group, where, prefixes) in enumerate(self.queue):
            if any(prefixes):
                group.attempt += 1
                self.queue[place] = (group, where, (0,) * len(prefixes))

    def _round_due(self) -> bool:
        if self.pinned:
            # every group pinned to the confirmed version or an older one must be complete
            return not self.groups_in_flight() and self.issued >= min(self.limit, self.total)
        return not self.drains or not self.groups_in_flight()

    def groups_in_flight(self) -> int:
        """Return the number of started groups with samples that have not ended."""
        return len(self.groups) - self.num_scoring - len(self.scoring)

    def _sync(self, replica: Rollouter, num_receivers: int) -> None:
        self._set_syncing(replica, True)
        if self.restarts:
            replica.restarting.update(replica.groups)
            self.preempt(replica, tuple(sorted(replica.groups)))
        self.core.actions.append(
            SyncReplica(
                self.core.next_serial(), replica.id, self.round_version, num_receivers, self.recompute
            )
        )

    def _set_syncing(self, replica: Rollouter, syncing: bool) -> None:
        change = syncing - replica.syncing
        replica.syncing = syncing
        self.num_syncing += change
        if replica.auxiliary:
            self.num_syncing_auxiliary += change

    def catch_up(self, replica: Rollouter) -> None:
        """Bring a replica that (again) plays the rollout role to the version that the others hold."""
        wanted = self.round_version if self.round_open else self.confirmed
        if replica.version < wanted and not replica.syncing:
            self._sync(replica, 1)
        else:
            self.note_load(replica)

    def on_sync_applied(self, event: SyncApplied) -> None:
        """Take a replica's confirmation; the last one of a round opens the credit of its version."""
        replica_id, version = event.replica, event.version
        replica = self.replicas[replica_id]
        self._set_syncing(replica, False)
        if version < replica.version:
            raise InvariantBroken(
                f"replica {replica_id} went back from version {replica.version} to {version}"
            )
        replica.version = version
        if self.round_open and replica.active and version < self.round_version:
            self._sync(replica, 1)
            return
        self.note_load(replica)
        if self.round_open:
            self.round_open.discard(replica_id)
            self.close_round()

    def on_sync_failed(self, event: SyncFailed) -> None:
        """Try again: the replica still runs the old version, and the round still waits for it."""
        replica = self.replicas[event.replica]
        self._set_syncing(replica, False)
        if replica.active and not replica.lost:
            self.catch_up(replica)

    def close_round(self) -> None:
        """End the round when no confirmation is missing."""
        if self.round_open or self.confirmed == self.round_version:
            return
        self.confirmed = self.round_version
        self._renew_limit()
        self.core.gate_due = True
        if self.confirmed == self.published:
            self.trainer_blocked = False

    def on_lost(self, replica_id: int) -> None:
        """Queue again, from the start, whatever a lost replica held; ask for the replica back."""
        replica = self.replicas[replica_id]
        self._set_syncing(replica, False)
        replica.lost, replica.active, replica.accepting = True, False, False
        back: list[tuple[Group, Place, tuple[int, ...]]] = []
        for group in sorted(replica.groups.values(), key=lambda group: group.id):
            indices = group.places[replica_id][0]
            group.attempt += 1
            self._release(replica, group)
            if group.expired:
                self._forget(group)
            else:
                back.append((group, (indices, 0), (0,) * len(indices)))
        self.queue.extendleft(reversed(back))
        self.core.actions.append(RestartReplica(self.core.next_serial(), replica_id))
        self.core.gate_due = True
        if self.round_open:
            self.round_open.discard(replica_id)
            self.close_round()

    def on_joined(self, replica_id: int, version: int, *, lent: bool) -> None:
        """Take a replica back with an empty engine; a ``lent`` one generates when its lease is over."""
        replica = self.replicas[replica_id]
        replica.lost, replica.version = False, version
        if not replica.auxiliary and not lent:
            replica.active = replica.accepting = True
            self.catch_up(replica)

    def _renew_limit(self) -> None:
        plan = self.core.plan
        if plan.policy.admission is AdmissionRule.COUNTING:
            self.limit = plan.admission.limit(self.confirmed)
            return
        backlog = len(self.groups) + len(self.ready)
        if plan.policy.admission is AdmissionRule.BUDGET_DOUBLE_COUNTED:
            backlog += len(self.ready)
        used = self.issued - self.refunded
        self.limit = max(used, used - backlog + plan.admission.limit(0))

    def on_published(self, event: Published) -> None:
        """Let the trainer go on once its version lies ready for replicas that still drain, or lend."""
        if event.version == self.published:
            self.trainer_blocked = False
            self.core.gate_due = True
