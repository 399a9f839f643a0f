"""The backend of real workers: one process (or thread) per replica's devices, both roles in each.

Workers are numbered as replicas are: primary rollouters first, then those of the training pool, which are
the auxiliary rollouters. How a worker is reached is its transport's business.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bidirl.errors import InputError, RunFault
from bidirl.executor.backends import CallFailed, Counters, Ended, Listener, Taken
from bidirl.executor.backends.crew import Crew, MakeTransport
from bidirl.executor.backends.links import Link
from bidirl.executor.backends.messages import Message, Role, Snapshot, WorkerLost
from bidirl.executor.backends.real_training import StepLearning, TrainingHalf
from bidirl.executor.backends.store import SampleStore
from bidirl.executor.clock import RealClock
from bidirl.planner import events as ev
from bidirl.planner.events import Direction
from bidirl.planner.learn import AdvantageScale
from bidirl.planner.plan import Plan
from bidirl.planner.policy import Placement, VersionMode

__all__ = ["BackendState", "RealBackend", "check_layout"]

MAX_FAILED_TURNS = 4
"""Colocated, without its turn the trainer waits for ever: a run ends after so many failures in a row."""
RETRY_S, MAX_RETRY_S = 0.1, 60.0
"""Seconds before a failed role change is answered, doubled with each in a row: one that does not fit will
not fit at once, and an owner that wants its devices back meanwhile has them."""


def check_layout(plan: Plan) -> None:
    """Raise ``InputError`` unless one worker can hold both roles of one replica."""
    if plan.rollout_replica_gpus != plan.train_replica_gpus:
        raise InputError(
            f"partition.rollout_tp = {plan.rollout_replica_gpus} differs from train_tp = "
            f"{plan.train_replica_gpus}: a worker plays both roles on the same devices; make them equal"
        )


class RealBackend:
    """Carries actions out on workers; see ``executor.backends.Backend`` for what each call promises."""

    def __init__(
        self,
        plan: Plan,
        store: SampleStore,
        clock: RealClock,
        transports: MakeTransport,
        *,
        scale: AdvantageScale = AdvantageScale.GROUP_STD,
        filters: bool = False,
        digest: bool = False,
        resumed: "BackendState | None" = None,
    ) -> None:
        """Take ``transports(worker, role)``, and where to go on."""
        check_layout(plan)
        self.plan = plan
        self.store = store
        self.clock = clock
        self.filters = filters
        self.pinned = plan.policy.version_mode is VersionMode.PINNED
        self._resumed = resumed
        self._digest = digest
        self.num_rollout = plan.rollout_replicas
        self.colocated = plan.placement is Placement.COLOCATED
        count = self.num_rollout + (0 if self.colocated else plan.train_replicas)
        self.crew = Crew(count, self.num_rollout, transports, self._heard, self._lost)
        self.links = self.crew.links
        primary = range(count) if self.colocated else range(self.num_rollout, count)
        self.training = TrainingHalf(plan, store, self.links, primary, scale, digest=digest)
        self.listener: Listener | None = None
        self.versions = [0] * count
        self.leaving: list[set[int]] = [set() for _ in range(count)]
        self.announced: list[int | None] = [None] * count
        self.busy: list[list[tuple[float, float]]] = [[] for _ in range(count)]
        self.free_s = [0.0] * count
        self.doomed: set[int] = set()
        """Replicas that a resumed run is about to declare lost: what they are given meanwhile comes back."""
        """When each replica was last told to generate, after a sync or another interruption."""
        self.lease: ev.BeginLease | None = None
        self.costs: dict[str, list[float]] = {}
        """Measured seconds of role changes, merges and syncs, by kind."""
        self.faults: dict[str, tuple[int, str]] = {}
        """What went wrong without ending the run -> how often, and why the last time."""
        self._failed_entries = 0
        """Role changes that failed in a row."""
        self._closed = False

    # ---------------------------------------------------------------- workers

    async def open(self, listener: Listener) -> None:
        self.listener = self.training.listener = listener
        await self.crew.open()
        if self._resumed is None:
            await asyncio.shield(self.training.snapshots.publish(0))
            self._start_clock(0.0)
        else:
            await self._resume(self._resumed)

    async def _resume(self, state: "BackendState") -> None:
        """Give trainer and store what the checkpoint has; engines load what they are told to later."""
        self.store.restore(state.store)
        training, folder = self.training, str(state.folder)
        training.learning.extend(state.learning)
        training.snapshots.digests.update(state.digests)
        self.costs, self.faults = state.costs, state.faults
        for number in training.primary:
            await self.links[number].call("restore", folder)
        for version in state.versions:
            first = self.links[training.primary[0]]
            training.snapshots.restore(version, first.call("read_snapshot", folder, version, self._digest))
        training.snapshots.publish(state.step)
        for version in training.snapshots.held():
            await asyncio.shield(training.snapshots.of(version))
        self.lease = state.lease
        self.crew.fresh.update(range(len(self.links)))
        self.doomed.update(range(len(self.links)))
        self._start_clock(state.now_s)

    def _start_clock(self, now_s: float) -> None:
        self.clock.start(now_s)
        self.crew.start_clock(now_s)

    def save(self, folder: Path, step: int) -> "tuple[BackendState, asyncio.Future[Any]]":
        """Have the trainer written as it is after a step; return the rest, and when it is written."""
        training = self.training
        held = training.snapshots.held()
        versions = [version for version in held if version != step and training.snapshots.of(version).done()]
        state = BackendState(
            folder,
            step,
            versions,
            self.store.state(),
            training.learning,
            training.snapshots.digests,
            self.costs,
            self.faults,
            self.lease,
            self.clock.now(),
        )
        kept = {version: training.snapshots.of(version) for version in versions}
        plain = {version: promise.result() for version, promise in kept.items()}
        answer = self.links[training.primary[0]].call("save", str(folder), plain)
        for promise in kept.values():
            training.snapshots.carried(promise, answer)
        return state, answer

    async def close(self) -> None:
        self._closed = True
        self.listener = self.training.listener = None
        await self.crew.close()

    def _heard(self, number: int, message: Message) -> None:
        if message.ended:
            for draft in message.ended:
                draft.finish_s = min(self.crew.time(number, draft.finish_s), self.clock.now())
            self.store.take_ended(number, message.ended)
            self._announce(number)
        now = self.clock.now()
        for start_s, end_s in message.busy:  # clocks of two hosts agree to a fraction of a round trip
            began_s = max(self.crew.time(number, start_s), self.free_s[number])
            self.busy[number].append((began_s, min(self.crew.time(number, end_s), now)))

    def _announce(self, replica: int) -> None:
        """Tell of the next whole group of a replica, unless one is announced and not collected."""
        if self.listener is None or self.announced[replica] is not None:
            return
        group = self.store.next_whole(replica, self.leaving[replica])
        if group is not None:
            self.announced[replica] = group
            self.listener.ready(replica, group)

    def _look_again(self, replica: int) -> None:
        self.announced[replica] = None
        asyncio.get_running_loop().call_soon(self._announce, replica)

    def _lost(self, number: int, reason: str) -> None:
        """Take the end of a worker: a rollouter can be replaced, the primary trainer cannot."""
        if self._closed or self.listener is None:
            return
        if self.colocated or number >= self.num_rollout:
            self.listener.broken(RunFault(f"training worker {number} is gone: {reason}"))
        elif self.crew.wears_out(number):
            self.listener.broken(RunFault(f"rollout worker {number} was lost too often: {reason}"))
        else:
            self._note(f"rollout worker {number} was lost", reason)
            self.listener.lost(number)

    def _note(self, fault: str, reason: str) -> None:
        self.faults[fault] = self.faults.get(fault, (0, ""))[0] + 1, reason

    # ---------------------------------------------------------------- rollout

    def describe(self, group: int) -> tuple[int, Sequence[int]]:
        return len(self.store.prompts.prompt(group)), (0,) * self.plan.samples_per_group

    def start_samples(self, action: ev.StartSamples) -> None:
        drafts = self.store.start(action.replica, action.group, action.indices, action.prefixes)
        if self.announced[action.replica] == action.group:
            self._look_again(action.replica)
        if action.replica not in self.doomed:
            self.links[action.replica].call("submit", drafts)

    def collect(self, replica: int, group: int) -> tuple[Ended, ...] | None:
        found = self.store.collect(replica, group)
        self._look_again(replica)
        return found

    def preempt(self, action: ev.Preempt) -> Awaitable[Taken]:
        replica = action.replica
        self.leaving[replica].update(action.groups)
        if self.announced[replica] in action.groups:
            self._look_again(replica)
        return self._taken(action, self.links[replica].call("preempt", action.groups))

    async def _taken(self, action: ev.Preempt, answer: "asyncio.Future[Any]") -> Taken:
        drafts = await answer
        replica = action.replica
        self.leaving[replica].difference_update(action.groups)
        return self.store.take_back(replica, action.groups, drafts, self.versions[replica])

    def progress(self, action: ev.RequestProgress) -> Awaitable[Sequence[tuple[int, int, int]]]:
        return self.links[action.replica].call("progress")

    def score(self, action: ev.ScoreGroup) -> Awaitable[bool]:
        return self._scored(action.group)

    async def _scored(self, group: int) -> bool:
        rewards = await asyncio.to_thread(self.store.score, group)
        if not self.filters or max(rewards) > min(rewards):
            return False
        if self.pinned:
            self.store.filter(group)
        else:
            self.store.forget([group])
        return True

    def drop(self, group: int) -> None:
        self.store.forget([group])

    def sync(self, actions: Sequence[ev.SyncReplica]) -> Sequence[Awaitable[float]]:
        since_s = self.clock.now()
        return [
            self._synced(
                action, since_s, self._sync(self.links[action.replica], action.version, action.recompute)
            )
            for action in actions
        ]

    def _sync(self, link: Link, version: int, recompute: bool) -> "asyncio.Future[Any]":
        snapshot = self.training.snapshots.of(version)
        return self.training.snapshots.carried(snapshot, link.call("sync", version, snapshot, recompute))

    async def _synced(self, action: ev.SyncReplica, since_s: float, answer: "asyncio.Future[Any]") -> float:
        paused_s = self.crew.time(action.replica, await answer)
        self._cost("sync", since_s)
        return min(max(paused_s, since_s), self.clock.now())

    def resume(self, action: ev.SyncReplica, *, applied: bool) -> None:
        if applied:
            self.versions[action.replica] = action.version
            self._forget_versions()
        self.free_s[action.replica] = self.clock.now()
        self.links[action.replica].call("resume")

    def _forget_versions(self) -> None:
        """Drop the weights that no replica can be asked to load again: all older than the oldest in use."""
        live = [
            version
            for version, link in zip(self.versions, self.links[: self.num_rollout], strict=False)
            if link.broken is None
        ]
        if live:
            self.training.snapshots.forget_before(min(live))

    def discard(self, replica: int) -> None:
        self.doomed.discard(replica)
        self.store.lose(replica)
        self.leaving[replica].clear()
        self.announced[replica] = None
        if replica < self.num_rollout or replica in self.crew.fresh:
            self.crew.retire(replica)
        elif self.listener is not None:
            self.listener.broken(RunFault(f"training worker {replica} does not answer"))

    def restart(self, action: ev.RestartReplica) -> Awaitable[None]:
        return self.crew.replace(action.replica)

    def join(self, replica: int, version: int) -> None:
        self.doomed.discard(replica)  # down at the cut already: it joins without a further loss
        self.versions[replica] = version
        if replica >= self.num_rollout:
            return  # an auxiliary rollouter loads its weights when it enters a lease
        self.free_s[replica] = self.clock.now()
        link = self.links[replica]
        loaded = self._sync(link, version, recompute=False)
        loaded.add_done_callback(partial(_must_have_loaded, link))
        link.call("resume")

    def take_busy(self, replica: int) -> Sequence[tuple[float, float]]:
        if replica >= len(self.busy):
            return ()
        now = self.clock.now()
        found = [(start_s, min(end_s, now)) for start_s, end_s in self.busy[replica]]
        self.busy[replica] = []
        return found

    def stop(self, replica: int) -> None:
        """Do nothing: the worker ends with the backend."""

    def counters(self) -> Counters:
        return Counters(self.store.decode_tokens, self.store.recomputed_tokens, 0.0)

    # ---------------------------------------------------------------- training

    def run_chunks(self, action: ev.StartChunks) -> Awaitable[None]:
        return self.training.run_chunks(action)

    def merge(self, action: ev.Merge) -> Awaitable[None]:
        return self._timed("merge", self.training.merge(action))

    def optimizer_step(self, action: ev.OptimizerStep) -> Awaitable[None]:
        return self.training.optimizer_step(action)

    def broadcast(self, action: ev.Broadcast) -> Awaitable[None]:
        return self._timed("broadcast", self.training.broadcast(action))

    def publish(self, action: ev.Publish) -> Awaitable[None]:
        return self.training.publish(action)

    async def _timed(self, kind: str, answer: Awaitable[None]) -> None:
        since_s = self.clock.now()
        await answer
        self._cost(kind, since_s)

    def _cost(self, kind: str, since_s: float) -> None:
        self.costs.setdefault(kind, []).append(self.clock.now() - since_s)

    # ---------------------------------------------------------------- leases

    def enter(self, action: ev.BeginLease) -> Awaitable[None]:
        self.lease = action
        match action.direction:
            case Direction.ROLLOUT_ON_TRAIN:
                snapshot: asyncio.Future[Snapshot] | None = self.training.snapshots.of(action.version)
                self.doomed.difference_update(action.replicas)  # asleep at the cut: nobody misses them
                role = Role.ROLLOUT
            case Direction.TRAIN_ON_ROLLOUT:
                snapshot = self.training.lent_weights = self.training.snapshots.present()
                self.training.lent = action.replicas
                role = Role.TRAIN
            case Direction.TIME_SHARE:
                snapshot, role = None, Role.TRAIN
        calls = [
            self.links[number].call("enter", role, action.version, snapshot) for number in action.replicas
        ]
        if snapshot is not None:
            for call in calls:
                self.training.snapshots.carried(snapshot, call)
        future = _Entering(partial(self._leave, action))
        asyncio.gather(*calls).add_done_callback(partial(self._entered, action, self.clock.now(), future))
        return future

    def _entered(
        self, action: ev.BeginLease, since_s: float, future: "_Entering", done: "asyncio.Future[Any]"
    ) -> None:
        error = None if done.cancelled() else done.exception()
        if future.done() or self._closed:
            return
        if done.cancelled() or error is not None:
            self._not_entered(action, future, error or CallFailed("the role change was called off"))
            return
        self._failed_entries = 0
        if action.direction is Direction.ROLLOUT_ON_TRAIN:
            for replica in action.replicas:
                self.versions[replica] = action.version
                self.free_s[replica] = self.clock.now()
        self._cost(f"{action.direction}_in", since_s)
        future.set_result(None)

    def _not_entered(self, action: ev.BeginLease, future: "_Entering", error: BaseException) -> None:
        """Take a role change back; the more have failed in a row, the later this one is answered."""
        self._leave(action)
        self._failed_entries += 1
        self._note(f"a lease of kind {action.direction} was not entered", str(error))
        if action.direction is Direction.TIME_SHARE and self._failed_entries >= MAX_FAILED_TURNS:
            fault = RunFault(f"the trainer did not get its turn {MAX_FAILED_TURNS} times in a row: {error}")
            if self.listener is not None:
                self.listener.broken(fault)
            return
        wait_s = min(RETRY_S * 2 ** (self._failed_entries - 1), MAX_RETRY_S)
        asyncio.get_running_loop().call_later(wait_s, _fail, future, error)

    def _leave(self, lease: ev.BeginLease) -> list["asyncio.Future[Any]"]:
        if lease.direction is Direction.TRAIN_ON_ROLLOUT:
            self.training.lent = ()
            self.training.lent_weights = None
            self.training.forget_side()
        return [
            self.links[number].call("leave")
            for number in lease.replicas
            if self.links[number].broken is None and not self._closed
        ]

    def leave(self, action: ev.EndLease, *, entered: bool) -> Awaitable[None]:
        lease, self.lease = self.lease, None
        assert lease is not None
        assert lease.lease == action.lease
        return self._left(lease, self._leave(lease), self.clock.now(), entered=entered)

    async def _left(
        self,
        lease: ev.BeginLease,
        calls: list["asyncio.Future[Any]"],
        since_s: float,
        *,
        entered: bool,
    ) -> None:
        for call in calls:
            try:
                await call
            except WorkerLost:
                if lease.direction is not Direction.TRAIN_ON_ROLLOUT:
                    raise  # a lost rollouter has been reported as such
        if entered:
            self._cost(f"{lease.direction}_out", since_s)


@dataclass(slots=True)
class BackendState:
    """What a checkpoint holds of a backend beside the trainer's own files."""

    folder: Path
    step: int
    versions: list[int]
    """Older versions whose weights lie in the folder: pinned samples still need them."""
    store: dict[str, Any]
    learning: list[StepLearning]
    digests: dict[int, str]
    costs: dict[str, list[float]]
    faults: dict[str, tuple[int, str]]
    lease: ev.BeginLease | None
    now_s: float


def _must_have_loaded(link: Link, done: "asyncio.Future[Any]") -> None:
    """Take a new worker as lost that did not get its weights: it would generate with its first ones."""
    if not done.cancelled() and done.exception() is not None:
        link.fail(f"it did not get its weights: {done.exception()}")


def _fail(future: "asyncio.Future[None]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


class _Entering(asyncio.Future[None]):
    """The answer to a role change; cancelled, it queues the way back before anything else can be queued."""

    def __init__(self, undo: Callable[[], object]) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self._undo = undo

    def cancel(self, msg: Any | None = None) -> bool:
        if not self.done():
            self._undo()
        return super().cancel(msg)
