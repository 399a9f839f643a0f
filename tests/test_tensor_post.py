"""Values kept by one process and fetched by others: exact, on time, and gone when they should be."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from bidirl.executor.backends import CallFailed
from bidirl.executor.backends.tensor_post import Handle, TensorPost

pytestmark = pytest.mark.engine

DEADLINE_S = 20.0
"""Patience of the tests' posts: far above a transfer on a busy machine."""


def value() -> dict[str, Any]:
    """Return arrays and tensors of many types and shapes."""
    import torch

    rng = np.random.default_rng(0)
    kinds = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"]
    arrays: dict[str, Any] = {f"array.{kind}": rng.integers(0, 2, (2, 3)).astype(kind) for kind in kinds}
    arrays["empty"] = np.empty((0, 4), np.float32)
    arrays["single"] = np.array(2.5, np.float32)
    arrays["turned"] = rng.random((5, 7), np.float32).T
    arrays["read-only"] = rng.random(3)
    arrays["read-only"].flags.writeable = False
    arrays["half"] = torch.arange(7).to(torch.bfloat16)
    arrays["tensor"] = torch.randn(4, 5).T
    return arrays


def hold(pipe: Connection) -> None:
    """Run as a process of its own: do what is asked with a post, and answer."""
    post = TensorPost(deadline_s=DEADLINE_S)
    do: dict[str, Callable[..., Any]] = {
        "put": lambda size: post.put(np.arange(size, dtype=np.float32)),
        "put many": lambda: (post.put(values := value()), values),
        "put once": lambda size: post.put(np.arange(size, dtype=np.float32), once=True),
        "drop": post.drop,
        "drop unclaimed": post.drop_unclaimed,
        "count": lambda: len(post),
        "get": lambda handle: len(post.get(handle)),
        "close": post.close,
        "threads": lambda: [thread.name for thread in threading.enumerate()],
    }
    while True:
        name, *args = pipe.recv()
        if name == "end":
            return
        pipe.send(do[name](*args))


class Holder:
    """A process with a post."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=hold, args=(theirs,), daemon=True)
        self.process.start()

    def ask(self, *command: Any) -> Any:
        """Have something done, and return what it gave."""
        self.pipe.send(command)
        assert self.pipe.poll(60)
        return self.pipe.recv()

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


def holder_process() -> Iterator[Holder]:
    found = Holder()
    yield found
    found.process.kill()
    found.process.join()


module_holder = pytest.fixture(scope="module", name="module_holder")(holder_process)
doomed = pytest.fixture(name="doomed")(holder_process)


@pytest.fixture
def holder(module_holder: Holder) -> Holder:
    """Give a holder that keeps nothing."""
    module_holder.ask("close")
    return module_holder


@pytest.fixture
def post() -> Iterator[TensorPost]:
    found = TensorPost(deadline_s=DEADLINE_S)
    yield found
    found.close()


def soon(said: Callable[[], bool]) -> bool:
    """Wait for something that follows a transfer."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not said() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return said()


def test_every_type_and_shape_arrives_as_it_was(holder: Holder, post: TensorPost) -> None:
    import torch

    handle, sent = holder.ask("put many")
    found = post.get(handle)
    assert list(found) == list(sent)
    for name, there in sent.items():
        here = found[name]
        assert type(here) is type(there), name
        assert (here.dtype, here.shape) == (there.dtype, there.shape), name
        if isinstance(there, np.ndarray):
            assert np.array_equal(here, there), name
            assert here.flags.writeable, name
        else:
            assert torch.equal(here, there), name


def test_a_lone_array(holder: Holder, post: TensorPost) -> None:
    assert np.array_equal(post.get(holder.ask("put", 10)), np.arange(10, dtype=np.float32))


def test_at_home_it_is_the_value_itself(post: TensorPost) -> None:
    array = np.arange(3.0)
    often, once = post.put(array), post.put({"a": array}, once=True)
    assert post.get(often) is array
    assert post.get(often) is array
    assert post.get(once)["a"] is array
    with pytest.raises(CallFailed, match="was dropped"):
        post.get(once)
    assert len(post) == 1


def test_what_is_no_number_is_refused_at_once(post: TensorPost) -> None:
    for wrong in (np.array(["text"]), [1.0], 2):
        with pytest.raises(TypeError, match="put arrays of numbers"):
            post.put({"a": wrong})


def test_an_unused_post_has_no_thread() -> None:
    before = threading.active_count()
    idle = TensorPost()
    assert threading.active_count() == before
    idle.close()


def test_several_receivers_at_once(holder: Holder) -> None:
    handles = [holder.ask("put", 300_000 + number) for number in range(2)]
    with ThreadPoolExecutor(4) as pool:
        posts = [TensorPost(deadline_s=DEADLINE_S) for _ in range(4)]
        found = list(pool.map(lambda pair: pair[0].get(pair[1]), zip(posts, handles * 2, strict=True)))
    assert [len(array) for array in found] == [300_000, 300_001] * 2


def test_what_was_dropped_is_refused_at_once(holder: Holder, post: TensorPost) -> None:
    handle = holder.ask("put", 10)
    holder.ask("drop", handle)
    assert holder.ask("count") == 0
    start_s = time.monotonic()
    for unknown in (handle, replace(handle, number=99)):
        with pytest.raises(CallFailed, match="was dropped"):
            post.get(unknown)
    assert time.monotonic() - start_s < DEADLINE_S / 2


def test_a_later_post_at_the_same_port_is_another(holder: Holder, post: TensorPost) -> None:
    with pytest.raises(CallFailed, match="was dropped"):
        post.get(replace(holder.ask("put", 10), post="earlier"))


def test_once_is_once(holder: Holder, post: TensorPost) -> None:
    handle = holder.ask("put once", 10)
    kept = holder.ask("put", 10)
    assert len(post.get(handle)) == 10
    assert soon(lambda: holder.ask("count") == 1)
    with pytest.raises(CallFailed, match="was dropped"):
        post.get(handle)
    assert len(post.get(kept)) == 10


def test_unclaimed_values_are_dropped_and_others_are_not(holder: Holder, post: TensorPost) -> None:
    holder.ask("put once", 10)
    kept = holder.ask("put", 10)
    holder.ask("drop unclaimed")
    assert holder.ask("count") == 1
    assert len(post.get(kept)) == 10


def test_what_is_dropped_on_its_way_arrives(post: TensorPost, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow receiver gets what it was promised: the holder's thread has the value."""
    from bidirl.executor.backends import wire
    from bidirl.executor.backends.pair import Pair

    monkeypatch.setattr(wire, "BUCKET_BYTES", 1000)
    handle = post.put(np.arange(10_000, dtype=np.float32))
    take = Pair.take

    def late(self: Any, data: Any) -> None:
        post.drop(handle)
        take(self, data)

    monkeypatch.setattr(Pair, "take", late)
    assert len(TensorPost(deadline_s=DEADLINE_S).get(handle)) == 10_000
    assert len(post) == 0


def test_a_dead_holder_is_told_at_once(doomed: Holder, post: TensorPost) -> None:
    handle = doomed.ask("put", 10)
    doomed.signal(signal.SIGKILL)
    doomed.process.join()
    start_s = time.monotonic()
    with pytest.raises(CallFailed, match="its process has ended"):
        post.get(handle)
    assert time.monotonic() - start_s < DEADLINE_S / 2


def test_a_stopped_holder_is_given_up(doomed: Holder) -> None:
    handle = doomed.ask("put", 10)
    doomed.signal(signal.SIGSTOP)
    with pytest.raises(CallFailed, match="did not arrive within 1 s"):
        TensorPost(deadline_s=1.0).get(handle)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_holder_that_is_lost_half_way(doomed: Holder, monkeypatch: pytest.MonkeyPatch, number: int) -> None:

    from bidirl.executor.backends.pair import Pair

    handle = doomed.ask("put", 34_000_000)
    taken: list[int] = []
    take = Pair.take

    def losing(self: Any, data: Any) -> None:
        if len(taken) == 1:
            doomed.signal(number)
        take(self, data)
        taken.append(len(data))

    monkeypatch.setattr(Pair, "take", losing)
    with pytest.raises(CallFailed, match="lost or late"):
        TensorPost(deadline_s=2.0 if number == signal.SIGSTOP else DEADLINE_S).get(handle)
    assert len(taken) >= 1


def test_a_receiver_that_dies_half_way_holds_up_nobody(doomed: Holder, post: TensorPost) -> None:
    """It is stopped while data is on its way to it; another one gets the value meanwhile; then it dies."""
    handle = post.put(np.arange(30_000_000, dtype=np.float32), once=True)
    doomed.pipe.send(("get", handle))
    assert soon(lambda: threads() > 1)
    doomed.signal(signal.SIGSTOP)
    assert len(TensorPost(deadline_s=DEADLINE_S).get(post.put(np.arange(5.0)))) == 5
    assert len(post) == 2  # it was not fetched yet
    doomed.signal(signal.SIGKILL)
    assert soon(lambda: threads() == 1)


def threads() -> int:
    """Return how many threads serve here."""
    return sum(thread.name == "tensor-post" for thread in threading.enumerate())


def test_nothing_is_left_after_the_end(holder: Holder, post: TensorPost) -> None:
    handle = holder.ask("put", 10)
    post.get(handle)
    holder.ask("close")
    assert holder.ask("count") == 0
    assert "tensor-post" not in holder.ask("threads")
    with pytest.raises(CallFailed):
        post.get(handle)


def test_where_nccl_fails_gloo_goes_on(post: TensorPost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends take themselves for ones with NCCL: the first try shows that it does not work."""
    import torch.distributed as dist

    from bidirl.executor.backends import pair, wire

    if dist.is_nccl_available():
        pytest.skip("here NCCL works")
    handle = post.put(np.arange(10))
    tried: list[str] = []
    receive = wire.receive

    def noting(address: Any, *, deadline_s: float, carrier: str = "gloo") -> Any:
        tried.append(carrier)
        return receive(address, deadline_s=deadline_s, carrier=pair.Carrier(carrier))

    monkeypatch.setattr(pair, "best_carrier", lambda: pair.Carrier.NCCL)
    monkeypatch.setattr(wire, "receive", noting)
    other = TensorPost(deadline_s=DEADLINE_S)
    assert len(other.get(handle)) == 10
    assert len(other.get(handle)) == 10
    assert tried == ["nccl", "gloo", "gloo"]


def test_a_holder_without_nccl_says_so(
    holder: Holder, post: TensorPost, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bidirl.executor.backends import pair

    monkeypatch.setattr(pair, "best_carrier", lambda: pair.Carrier.NCCL)
    assert len(post.get(holder.ask("put", 10))) == 10


def test_a_handle_is_a_plain_value() -> None:
    import pickle

    handle = Handle("10.0.0.1", 1, "a", 2)
    assert pickle.loads(pickle.dumps(handle)) == handle
