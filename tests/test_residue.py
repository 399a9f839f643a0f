"""What a sleeping role leaves on a device is measured, and a role change beside too much is refused."""

import queue

import pytest

from bidirl.executor.backends.messages import Message, Role
from bidirl.executor.backends.residue import Residue, device_residue
from bidirl.executor.backends.stub import StubConfig, StubEngine, StubTrainer
from bidirl.executor.backends.worker import Worker
from bidirl.models.memory import TRAIN_OVERHEAD_BYTES
from bidirl.models.memory_roles import engine_residue_bytes


@pytest.mark.parametrize(("used", "problem"), [(2e9, None), (3e9, "3.00 GB stay on a device")])
@pytest.mark.parametrize("own", list(Role))
def test_a_role_is_not_woken_beside_more_than_is_planned(own: Role, used: float, problem: str | None) -> None:
    heard: queue.Queue[Message] = queue.Queue()
    config = StubConfig(vocab_size=8)
    residue = Residue(2.5e9, lambda: used)
    worker = Worker(own, lambda: StubEngine(config), lambda: StubTrainer(config), heard.put, residue=residue)
    worker.start()
    other = Role.TRAIN if own is Role.ROLLOUT else Role.ROLLOUT
    worker.put(0, 1, "snapshot", (False,))
    snapshot = heard.get(timeout=10).value
    worker.put(1, 2, "enter", (other, 0, snapshot))
    said = heard.get(timeout=10).problem
    if problem is None:
        assert said is None
        assert worker.role is other
    else:
        assert said is not None
        assert problem in said.text
        assert not said.is_fatal
        assert worker.role is own
    worker.stop()
    worker.thread.join(10)


def test_the_plan_has_the_engine_and_the_trainers_process() -> None:
    assert device_residue("cpu", 1) is None
    for num_devices in (1, 2):
        found = device_residue("cuda", num_devices)
        assert found is not None
        assert found.limit_bytes > engine_residue_bytes(num_devices) + TRAIN_OVERHEAD_BYTES
