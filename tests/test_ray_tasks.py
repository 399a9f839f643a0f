"""The Ray scatter against a stand-in for Ray: bounded flight, results as they return, faults on one line."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from bidirl.errors import InputError, RunFault
from bidirl.executor.backends.ray_tasks import TASKS_PER_CPU, scatter_over


class RayError(Exception):
    """Stands for ``ray.exceptions.RayError``."""


class FakeRay:
    """Runs a task when it is waited for, the newest first; remembers how many were in flight."""

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self, fail: Exception | None = None) -> None:
        self.fail = fail
        self.flying: list[Any] = []
        self.most = 0
        self.is_up = False

    def init(self, **_: object) -> None:
        if isinstance(self.fail, ConnectionError):
            raise self.fail
        self.is_up = True

    def shutdown(self) -> None:
        self.is_up = False

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def remote(self, function: Any) -> Any:
        def start(item: object) -> tuple[Any, object]:
            reference = (function, item)
            self.flying.append(reference)
            self.most = max(self.most, len(self.flying))
            return reference

        return SimpleNamespace(remote=start)

    def wait(self, references: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        assert num_returns == 1
        assert set(references) == set(self.flying)
        return [self.flying.pop()], self.flying

    def get(self, reference: Any) -> object:
        if self.fail is not None:
            raise self.fail
        function, item = reference
        return function(item)


def use(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


def test_every_item_returns_once_and_flight_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = use(FakeRay(), monkeypatch)
    found = list(scatter_over("auto")(lambda item: item * 10, list(range(30))))
    assert sorted(found) == [10 * item for item in range(30)]
    assert found != sorted(found)
    assert ray.most == 2 * TASKS_PER_CPU
    assert not ray.is_up


def test_no_items_is_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    use(FakeRay(), monkeypatch)
    assert list(scatter_over("auto")(str, [])) == []


def test_a_lost_cluster_is_a_fault_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = use(FakeRay(RayError("node died\nlong story")), monkeypatch)
    with pytest.raises(RunFault, match=r"--ray auto: node died; results that returned are kept") as caught:
        list(scatter_over("auto")(str, [1]))
    assert "\n" not in str(caught.value)
    assert not ray.is_up


def test_no_cluster_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    use(FakeRay(ConnectionError("nobody home")), monkeypatch)
    with pytest.raises(InputError, match="no cluster answers"):
        list(scatter_over("auto")(str, [1]))


def test_a_closed_port_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    use(FakeRay(), monkeypatch)
    with pytest.raises(InputError, match=r"--ray 127\.0\.0\.1:1: nothing answers"):
        scatter_over("127.0.0.1:1")


def test_without_ray_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'bidirl\[ray\]'"):
        scatter_over("auto")
