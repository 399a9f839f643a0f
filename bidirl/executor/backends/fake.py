"""A backend without devices: engines and trainers are the models, and every call takes its modelled time.

On a virtual clock its times are those of the simulator to the last bit: the same formulas on the same
floats, and absolute due times. On a real clock it behaves like a backend whose engines are exactly as fast
as modelled.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from math import inf
from typing import Any, TypeVar

from bidirl.errors import InputError
from bidirl.executor.backends import CallFailed, Counters, Ended, Listener, Taken
from bidirl.executor.clock import Clock, Timer
from bidirl.models.faults import COLOCATED_LOSS, Faults
from bidirl.models.replica import Replica, Request
from bidirl.planner import costs
from bidirl.planner import events as ev
from bidirl.planner.events import Direction
from bidirl.planner.plan import Plan
from bidirl.planner.policy import Placement
from bidirl.traces.records import GroupBlock
from bidirl.traces.workload import Workload

__all__ = ["FakeBackend"]

T = TypeVar("T")


class FakeBackend:
    """Stage models as a backend; ``faults`` adds losses, failures and stragglers."""

    def __init__(self, plan: Plan, workload: Workload, clock: Clock, faults: Faults | None = None) -> None:
        """Build idle engines; raise InputError for losses in a colocated job (as the simulator does)."""
        if faults is not None and plan.placement is Placement.COLOCATED and faults.config.replica_mtbf_s:
            raise InputError(COLOCATED_LOSS.format(faults.config.replica_mtbf_s))
        self.plan = plan
        self.workload = workload
        self.clock = clock
        self.faults = faults
        self.n = plan.samples_per_group
        count = plan.rollout_replicas + plan.auxiliary_rollouters
        self.engines = [self._engine(replica) for replica in range(count)]
        self.versions = [0] * count
        self.incarnations = [0] * count
        self.due: list[Timer | None] = [None] * count
        """Per replica: the timer of its next completion."""
        self.lives: list[Timer | None] = [None] * count
        """Per replica: the timer of its loss."""
        self.side_life: Timer | None = None
        self.changed: set[int] = set()
        """Replicas whose next completion must be looked for again."""
        self.ended: list[dict[int, tuple[float, int]]] = [{} for _ in range(count)]
        """Per replica: finish time and version of ended samples that were not handed over, by sample."""
        self.busy: list[list[tuple[float, float]]] = [[] for _ in range(count)]
        """Per replica: busy intervals of engines that were lost."""
        self.blocks: dict[int, GroupBlock] = {}
        self.past = Counters()
        """What lost engines had done."""
        self.lease: ev.BeginLease | None = None
        self.lease_since_s = 0.0
        self.listener: Listener | None = None

    def _engine(self, replica: int) -> Replica:
        iteration = self.plan.models.iteration
        if self.faults is not None:
            iteration = self.faults.iteration(iteration, replica)
        return Replica(iteration, self.plan.models.limits)

    async def open(self, listener: Listener) -> None:
        self.listener = listener
        for replica in range(self.plan.rollout_replicas):
            self._live(replica)

    async def close(self) -> None:
        for timer in (*self.due, *self.lives, self.side_life):
            if timer is not None:
                timer.cancel()
        self.listener = None

    def _answer(self, time_s: float, value: T) -> asyncio.Future[T]:
        """Return a future that holds ``value`` from ``time_s`` on."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.clock.at(time_s, self._resolve, future, value)
        return future

    def _failure(self, time_s: float, error: CallFailed) -> asyncio.Future[Any]:
        """Return a future that fails at ``time_s``."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.clock.at(time_s, self._reject, future, error)
        return future

    @staticmethod
    def _resolve(future: asyncio.Future[T], value: T) -> None:
        if not future.done():
            future.set_result(value)

    @staticmethod
    def _reject(future: asyncio.Future[Any], error: CallFailed) -> None:
        if not future.done():
            future.set_exception(error)

    # ------------------------------------------------------------------ engines

    def _block(self, group: int) -> GroupBlock:
        number = group // self.plan.groups_per_step
        block = self.blocks.get(number)
        if block is None:
            block = self.blocks[number] = self.workload.block(number)
        return block

    def describe(self, group: int) -> tuple[int, Sequence[int]]:
        block = self._block(group)
        row = group - block.first_group
        lengths: list[int] = block.response_tokens[row].tolist()
        return int(block.prompt_tokens[row]), lengths

    def _turns(self, group: int, index: int) -> tuple[tuple[int, int, float], ...] | None:
        block = self._block(group)
        turns = block.turns
        if turns is None:
            return None
        row = (group - block.first_group) * self.n + index
        part = slice(int(turns.offsets[row]), int(turns.offsets[row + 1]))
        return tuple(
            zip(
                turns.response_tokens[part].tolist(),
                turns.tool_tokens[part].tolist(),
                turns.tool_s[part].tolist(),
                strict=True,
            )
        )

    def _change(self, replica: int) -> None:
        """Look for the next completion of a replica once the commands of this instant are given."""
        if not self.changed:
            asyncio.get_running_loop().call_soon(self._look)
        self.changed.add(replica)

    def _look(self) -> None:
        changed, self.changed = self.changed, set()
        if self.listener is None:
            return
        for replica in sorted(changed):
            timer = self.due[replica]
            if timer is not None:
                timer.cancel()
            time_s = self.engines[replica].peek()
            self.due[replica] = None if time_s == inf else self.clock.at(time_s, self._announce, replica)

    def _announce(self, replica: int) -> None:
        engine = self.engines[replica]
        if self.listener is not None and engine.peek() <= self.clock.now():  # else it was interrupted
            self.listener.ready(replica, engine.peek_group())

    def _drain(self, replica: int) -> None:
        version, ended = self.versions[replica], self.ended[replica]
        for seq, time_s in self.engines[replica].take_finished():
            ended[seq] = (time_s, version)

    def _ended(self, replica: int, seqs: Sequence[int]) -> tuple[Ended, ...]:
        found = []
        for seq in seqs:
            group, index = divmod(seq, self.n)
            prompt_tokens, lengths = self.describe(group)
            found.append(Ended(group, index, lengths[index], prompt_tokens, *self.ended[replica].pop(seq)))
        return tuple(found)

    def start_samples(self, action: ev.StartSamples) -> None:
        prompt_tokens, lengths = self.describe(action.group)
        requests = [
            Request(
                action.group * self.n + index,
                action.group,
                prompt_tokens,
                prefix,
                lengths[index],
                self._turns(action.group, index),
            )
            for index, prefix in zip(action.indices, action.prefixes, strict=True)
        ]
        self.engines[action.replica].submit(self.clock.now(), requests, front=any(action.prefixes))
        self._change(action.replica)

    def collect(self, replica: int, group: int) -> tuple[Ended, ...] | None:
        engine = self.engines[replica]
        if engine.peek() > self.clock.now() or engine.peek_group() != group:
            return None
        _, _, seqs = engine.pop()
        self._drain(replica)
        self._change(replica)
        return self._ended(replica, sorted(seqs))

    def preempt(self, action: ev.Preempt) -> Awaitable[Taken]:
        replica, n = action.replica, self.n
        time_s, unfinished, finished = self.engines[replica].preempt(self.clock.now(), action.groups)
        self._drain(replica)
        self._change(replica)
        taken = Taken(
            tuple((seq // n, seq % n, tokens) for seq, tokens in unfinished),
            self._ended(replica, finished),
            self.versions[replica],
        )
        return self._answer(time_s, taken)

    def progress(self, action: ev.RequestProgress) -> Awaitable[Sequence[tuple[int, int, int]]]:
        now, n = self.clock.now(), self.n
        found = self.engines[action.replica].progress(now)
        return self._answer(now, tuple((seq // n, seq % n, tokens) for seq, tokens in found))

    def score(self, action: ev.ScoreGroup) -> Awaitable[bool]:
        block = self._block(action.group)
        row = action.group - block.first_group
        return self._answer(self.clock.now() + float(block.reward_s[row]), bool(block.filtered[row]))

    def drop(self, group: int) -> None:
        """Do nothing: a group is drawn anew whenever it is asked for."""

    def sync(self, actions: Sequence[ev.SyncReplica]) -> Sequence[Awaitable[float]]:
        now = self.clock.now()
        paused = []
        for action in actions:
            paused.append(self.engines[action.replica].pause(now))
            self._drain(action.replica)
            self._change(action.replica)
        end_s = max(paused) + self.plan.models.sync.seconds(actions[0].num_receivers)
        answers: list[Awaitable[float]] = []
        for action, pause_s in zip(actions, paused, strict=True):
            if self.faults is not None and self.faults.sync_fails(action.replica, action.serial):
                failed = CallFailed("the weights did not arrive", since_s=pause_s)
                answers.append(self._failure(end_s, failed))
            else:
                answers.append(self._answer(end_s, pause_s))
        return answers

    def resume(self, action: ev.SyncReplica, *, applied: bool) -> None:
        self.engines[action.replica].resume(self.clock.now(), recompute=applied and action.recompute)
        if applied:
            self.versions[action.replica] = action.version
        self._change(action.replica)

    def take_busy(self, replica: int) -> Sequence[tuple[float, float]]:
        now = self.clock.now()
        found = self.busy[replica]
        found += [(start_s, min(end_s, now)) for start_s, end_s in self.engines[replica].take_busy()]
        self.busy[replica] = []
        return found

    def stop(self, replica: int) -> None:
        self.engines[replica].pause(self.clock.now())
        self._drain(replica)

    def counters(self) -> Counters:
        total = self.past
        for engine in self.engines:
            total = _plus(total, engine)
        return total

    # -------------------------------------------------------------------- losses

    def _live(self, replica: int) -> None:
        """Start the life of a primary replica, or of an auxiliary one inside a lease."""
        if self.faults is None:
            return
        if replica < self.plan.rollout_replicas:
            lifetime_s = self.faults.replica_lifetime_s(replica, self.incarnations[replica])
        else:
            assert self.lease is not None
            lifetime_s = self.faults.auxiliary_lifetime_s(replica, self.lease.lease)
        if lifetime_s != inf:
            self.lives[replica] = self.clock.at(self.clock.now() + lifetime_s, self._lose, replica)

    def _lose(self, replica: int) -> None:
        if self.listener is not None:
            self.listener.lost(replica)

    def _lose_side(self) -> None:
        if self.listener is not None:
            self.listener.side_lost()

    def discard(self, replica: int) -> None:
        now, engine, life = self.clock.now(), self.engines[replica], self.lives[replica]
        if life is not None:
            life.cancel()
        engine.pause(now)
        self.busy[replica] += [(start_s, min(end_s, now)) for start_s, end_s in engine.take_busy()]
        self.past = _plus(self.past, engine)
        self.engines[replica] = self._engine(replica)
        self.incarnations[replica] += 1
        self.ended[replica].clear()
        self._change(replica)

    def restart(self, action: ev.RestartReplica) -> Awaitable[None]:
        delay_s = self.faults.config.restart_s if self.faults is not None else 0.0
        return self._answer(self.clock.now() + delay_s, None)

    def join(self, replica: int, version: int) -> None:
        self.versions[replica] = version
        if replica < self.plan.rollout_replicas:
            self._live(replica)

    # ------------------------------------------------------------------ training

    def run_chunks(self, action: ev.StartChunks) -> Awaitable[None]:
        now = self.clock.now()
        end_s = now
        if action.work > 0.0:
            end_s += self.plan.models.trainer.pull_s(
                action.kind.value, action.work, action.longest, action.num_replicas
            )
        if self.faults is not None:
            share = self.faults.chunk_fails_at(action.side, action.serial)
            if share is not None:
                return self._failure(now + share * (end_s - now), CallFailed("the pull broke off"))
        return self._answer(end_s, None)

    def merge(self, action: ev.Merge) -> Awaitable[None]:
        return self._answer(self.clock.now() + costs.merge_s(self.plan, action), None)

    def optimizer_step(self, action: ev.OptimizerStep) -> Awaitable[None]:
        return self._answer(self.clock.now() + self.plan.models.trainer.optimizer_s, None)

    def broadcast(self, action: ev.Broadcast) -> Awaitable[None]:
        return self._answer(self.clock.now() + self.plan.models.switch.broadcast_s, None)

    def publish(self, action: ev.Publish) -> Awaitable[None]:
        return self._answer(self.clock.now() + costs.publish_s(self.plan), None)

    # -------------------------------------------------------------------- leases

    def enter(self, action: ev.BeginLease) -> Awaitable[None]:
        now = self.clock.now()
        self.lease, self.lease_since_s = action, now
        end_s = now + costs.enter_s(self.plan, action)
        if self.faults is not None and self.faults.lease_fails(action.lease):
            return self._failure(end_s, CallFailed("the role change did not work"))
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.clock.at(end_s, self._enter, action, future)
        return future

    def _enter(self, action: ev.BeginLease, future: asyncio.Future[None]) -> None:
        if future.done():
            return
        future.set_result(None)
        if action.direction is Direction.ROLLOUT_ON_TRAIN:
            for replica in action.replicas:
                self.versions[replica] = action.version
                self._live(replica)
        elif action.direction is Direction.TRAIN_ON_ROLLOUT and self.faults is not None:
            lifetime_s = self.faults.side_lifetime_s(action.lease)
            if lifetime_s != inf:
                self.side_life = self.clock.at(self.clock.now() + lifetime_s, self._lose_side)

    def leave(self, action: ev.EndLease, *, entered: bool) -> Awaitable[None]:
        lease, now = self.lease, self.clock.now()
        assert lease is not None
        for timer in (self.side_life, *self.lives[self.plan.rollout_replicas :]):
            if timer is not None:
                timer.cancel()
        share = 1.0
        if not entered:
            needed_s = costs.enter_s(self.plan, lease)
            share = (now - self.lease_since_s) / needed_s if needed_s else 1.0
        return self._answer(now + costs.return_s(self.plan, lease.direction, share), None)


def _plus(total: Counters, engine: Replica) -> Counters:
    return Counters(
        total.decode_tokens + engine.decode_tokens,
        total.recomputed_tokens + engine.recomputed_tokens,
        total.recompute_s + engine.recompute_s,
    )
