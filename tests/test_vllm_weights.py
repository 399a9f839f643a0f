"""Weights between processes over gloo: exact, checked, with deadlines."""

import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest

from bidirl.errors import RunFault

pytestmark = pytest.mark.engine


def tensors(size: int = 1000) -> dict[str, Any]:
    import torch

    maker = torch.Generator().manual_seed(size)
    return {
        "a.weight": torch.randn(size, 3, generator=maker),
        "b.scalar": torch.tensor(2.5, dtype=torch.float64),
        "c.half": torch.randn(7, generator=maker).to(torch.bfloat16),
        "d.empty": torch.empty(0, 4),
        "e.turned": torch.randn(5, 6, generator=maker).T,
        "f.ids": torch.arange(3),
    }


def exchange(version: int, sent: dict[str, Any]) -> tuple[Any, Any]:
    from bidirl.executor.backends.vllm.weights import Sender, receive

    sender = Sender(deadline_s=20)
    address = sender.address("test")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(receive, address, deadline_s=20)
        confirmed = sender.send(address, version, iter(sent.items()))
        received = answer.result(30)
    sender.close()
    return confirmed, received


def test_what_arrives_is_what_was_sent() -> None:
    import torch

    from bidirl.executor.backends.vllm.weights import digest

    sent = tensors()
    confirmed, received = exchange(3, sent)
    assert received.version == 3
    assert [name for name, _ in received.tensors] == list(sent)
    for name, tensor in received.tensors:
        assert tensor.dtype == sent[name].dtype
        assert torch.equal(tensor, sent[name])
    assert confirmed.digest == received.digest == digest(iter(sent.items())) == digest(iter(received.tensors))
    assert confirmed.num_tensors == len(sent)
    assert confirmed.num_bytes == sum(tensor.numel() * tensor.element_size() for tensor in sent.values())


def test_many_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    from bidirl.executor.backends.vllm import weights

    monkeypatch.setattr(weights, "BUCKET_BYTES", 100)
    _, received = exchange(1, tensors())
    assert received.digest == weights.digest(iter(tensors().items()))


@pytest.mark.parametrize("change", ["name", "shape", "type", "value", "order"])
def test_the_digest_sees_every_change(change: str) -> None:
    import torch

    from bidirl.executor.backends.vllm.weights import digest

    first = [("a", torch.zeros(2, 3)), ("b", torch.ones(2))]
    second = {
        "name": [("A", torch.zeros(2, 3)), first[1]],
        "shape": [("a", torch.zeros(3, 2)), first[1]],
        "type": [("a", torch.zeros(2, 3, dtype=torch.int32)), first[1]],
        "value": [("a", torch.zeros(2, 3)), ("b", torch.tensor([1.0, 1.0 + 2**-23]))],
        "order": first[::-1],
    }[change]
    assert digest(iter(first)) != digest(iter(second))


def test_a_damaged_transfer_is_refused_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: the receiver's bytes differ from what the sender hashed."""
    from bidirl.executor.backends.vllm import weights

    real = weights._Pair.take

    def damaging(self: Any) -> tuple[dict[str, Any], Any]:
        header, payload = real(self)
        if payload.numel():
            payload[0] ^= 1
        return header, payload

    monkeypatch.setattr(weights._Pair, "take", damaging)
    sender = weights.Sender(deadline_s=20)
    address = sender.address("test")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(weights.receive, address, deadline_s=20)
        with pytest.raises(RunFault, match="refused"):
            sender.send(address, 1, iter(tensors().items()))
        with pytest.raises(RunFault, match="digest"):
            answer.result(30)


def test_a_receiver_that_never_comes_is_given_up() -> None:
    from bidirl.executor.backends.vllm.weights import Sender

    sender = Sender(deadline_s=1)
    with pytest.raises(RunFault, match="try again"):
        sender.send(sender.address("nobody"), 1, iter(tensors().items()))


def test_a_sender_that_is_gone_is_reported() -> None:
    from bidirl.executor.backends.vllm.weights import Sender, receive

    sender = Sender(deadline_s=1)
    address = sender.address("gone")
    with pytest.raises(RunFault, match="try again"):
        receive(address, deadline_s=1)


def receiver(pipe: Connection, behaviour: str) -> None:
    """Run as a process of its own: take weights well, or die when the first bytes have come."""
    from bidirl.executor.backends.vllm import weights

    pipe.send("ready")
    address = weights.Address(*pipe.recv())
    if behaviour != "takes":
        pair = weights._Pair(address, weights.RECEIVER, "127.0.0.1", 20)
        pair.take()
        if behaviour == "dies":
            os._exit(1)
        time.sleep(60)
    received = weights.receive(address, deadline_s=20)
    pipe.send((received.version, received.digest))


def test_a_lost_receiver_fails_its_own_transfer_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three processes: one takes the weights, one dies half-way, one stops answering."""
    from bidirl.executor.backends.vllm import weights

    context = multiprocessing.get_context("spawn")
    behaviours = ("takes", "dies", "hangs")
    pipes, processes = [], []
    for behaviour in behaviours:
        ours, theirs = context.Pipe()
        process = context.Process(target=receiver, args=(theirs, behaviour), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    monkeypatch.setattr(weights, "BUCKET_BYTES", 1 << 20)
    sent = tensors(1_000_000)
    assert [pipe.recv() for pipe in pipes] == ["ready"] * 3
    sender = weights.Sender(deadline_s=4)
    addresses = [sender.address(behaviour) for behaviour in behaviours]
    for pipe, address in zip(pipes, addresses, strict=True):
        pipe.send((address.host, address.port, address.key))
    try:
        outcomes = sender.send_all(addresses, 4, iter(sent.items()))
        assert pipes[0].recv() == (4, weights.digest(iter(sent.items())))
    finally:
        for process in processes:
            process.kill()
            process.join()
        sender.close()
    assert isinstance(outcomes[0], weights.Sent)
    assert isinstance(outcomes[1], RunFault)
    assert isinstance(outcomes[2], RunFault)
    assert threading.active_count() < 30


def test_names_and_shapes_are_those_of_the_checkpoint() -> None:
    import torch

    from bidirl.executor.backends.vllm.transfer import checked

    expected = {"a": (2,), "b": (3, 1)}
    good = [("b", torch.zeros(3, 1)), ("a", torch.zeros(2))]
    assert checked(good, expected) == good
    assert checked([("x", torch.zeros(1))], {})
    tied = [*good, ("lm_head.weight", torch.zeros(1))]
    assert checked(tied, expected) == tied
    for wrong, said in [
        (good[:1], "missing"),
        ([*good, good[0]], "twice"),
        ([*good, ("c", torch.zeros(1))], "not in"),
        ([good[0], ("a", torch.zeros(3))], "shape"),
    ]:
        with pytest.raises(RunFault, match=said):
            checked(wrong, expected)
