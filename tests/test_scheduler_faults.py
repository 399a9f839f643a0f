"""Failures at any moment: nothing is lost, nothing runs twice, and the run still ends."""

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bidirl.models.faults import Faults, FaultsConfig
from bidirl.planner import events as ev
from bidirl.sim.metrics import summarise
from tests.job_strategies import Case, UnevenDriver, cases
from tests.test_scheduler_properties import Books, check_record


class FaultyBooks(Books):
    """Books that know what a failure undoes."""

    def __init__(self, case: Case) -> None:
        super().__init__(case.plan)
        self.down: set[int] = set()

    def _take_event(self, event: ev.Event) -> None:
        match event:
            case ev.SyncFailed():
                del self.syncing[event.replica]
            case ev.ChunkFailed():
                assert self.running[event.side] is not None
                self.running[event.side] = None
            case ev.LeaseFailed():
                self.lease_state = "returning"
                self._returned()
            case ev.SideLost():
                self._side_lost()
            case ev.ReplicaLost():
                self._lost(event.replica)
            case ev.ReplicaJoined():
                lent = self.lease is not None and event.replica in self.lease.replicas
                self.down.remove(event.replica)
                self.owns[event.replica] = event.replica < self.num_primary and not lent
                self.version[event.replica] = event.version
            case _:
                if isinstance(event, ev.SyncApplied):
                    self.lost.discard(event.replica)  # one that came back counts from its first version on
                super()._take_event(event)

    def _lost(self, replica: int) -> None:
        assert replica not in self.down
        self.down.add(replica)
        self.owns[replica] = False
        self.lost.add(replica)
        self.syncing.pop(replica, None)
        for sample in sorted(self.held[replica]):
            self._leave(sample, replica, "queue")

    def _side_lost(self) -> None:
        self.running[1] = None
        if self.unmerged:
            done = self.run_chunks[len(self.kinds) - 1]
            done[:] = [chunk for chunk in done if chunk not in self.unmerged]
        self.unmerged.clear()
        self.merging = None
        self.side_replicas[1] = 0

    def _entered(self) -> None:
        super()._entered()
        self._bury()

    def _returned(self) -> None:
        super()._returned()
        self._bury()

    def _bury(self) -> None:
        for replica in self.down:
            self.owns[replica] = False

    def _start(self, action: ev.StartSamples) -> None:
        assert action.replica not in self.down
        self.lost.discard(action.replica)
        super()._start(action)


@st.composite
def configs(draw: Callable[..., Any]) -> FaultsConfig:
    """Draw failures frequent enough that most runs of a minute meet some, and rare enough to end."""
    pick = st.sampled_from
    return FaultsConfig(
        replica_mtbf_s=draw(pick((None, 60.0, 15.0))),
        restart_s=draw(pick((0.0, 1.0, 8.0))),
        side_mtbf_s=draw(pick((None, 5.0, 1.0))),
        sync_failure_rate=draw(pick((0.0, 0.3))),
        lease_failure_rate=draw(pick((0.0, 0.3))),
        chunk_failure_rate=draw(pick((0.0, 0.2))),
        straggler_share=draw(pick((0.0, 0.5))),
        straggler_factor=3.0,
    )


def run_with_faults(case: Case, config: FaultsConfig, seed: int) -> None:
    if case.plan.train_gpus == 0:  # a lost device would take the trainer with it: no fault to get over
        config = config.model_copy(update={"replica_mtbf_s": None})
    books = FaultyBooks(case)
    driver: UnevenDriver = UnevenDriver(
        case.plan,
        case.workload,
        sink=lambda now, event, actions: books(now, event, actions, driver.scheduler),
        faults=Faults(config, seed),
    )
    driver.apply_spread_s = case.apply_spread_s
    record = driver.run()
    assert books.published == case.plan.num_steps
    check_record(case.plan, record)
    summarise(record)


@given(case=cases(), config=configs(), seed=st.integers(0, 99))
def test_a_faulty_run_ends_with_sound_books(case: Case, config: FaultsConfig, seed: int) -> None:
    run_with_faults(case, config, seed)


@given(case=cases(lending=True), config=configs(), seed=st.integers(0, 99))
def test_faults_inside_leases_lose_nothing(case: Case, config: FaultsConfig, seed: int) -> None:
    run_with_faults(case, config, seed)
