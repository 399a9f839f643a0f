"""vLLM as a process of its own: the rollout role with tensor parallelism, or beside an FSDP trainer.

The engine runs on by itself; ``step`` collects what has come since the last call. A loop thread talks to it;
the ``Engine`` protocol is called from the worker's one thread, as everywhere.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from bidirl.errors import RunFault, first_line
from bidirl.executor.backends.vllm.args import EngineSettings, engine_arguments, prepare_environment
from bidirl.executor.backends.vllm.device import capabilities_of
from bidirl.executor.backends.vllm.engine import as_tensor
from bidirl.executor.backends.vllm.flights import Flights
from bidirl.executor.backends.vllm.holding import HoldingEngine
from bidirl.executor.backends.vllm.requests import delta, prompt_of, sampling_of
from bidirl.executor.roles import Draft, NamedTensors

__all__ = ["AsyncVllmEngine"]

T = TypeVar("T")

PATIENCE_S = 0.02
"""Longest that ``step`` waits for news: a few decode iterations of a large model."""
START_S = 600.0
"""Patience with the start, which loads the weights of large models."""
CALL_S = 120.0
"""Patience with any other call."""


class AsyncVllmEngine(HoldingEngine):
    """The ``Engine`` protocol on vLLM's ``AsyncLLM``.

    Its ``meter`` counts tokens only: iterations happen in the other process. On CUDA it is written to vLLM's
    documented interface and has not been run there.
    """

    def __init__(
        self, settings: EngineSettings, *, version: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        prepare_environment(device=settings.device, num_ranks=settings.tp)
        super().__init__(settings, version, clock)
        self._news: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._streams: dict[str, asyncio.Task[None]] = {}
        """Touched in the loop's thread only."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-loop", daemon=True)
        self._thread.start()
        try:
            self._llm: Any = self._call(self._open(), START_S)
        except BaseException:
            self._stop_loop()
            raise
        self._capabilities = capabilities_of(settings, self._llm.vllm_config)

    def step(self) -> list[Draft]:
        """Wait shortly for news; return the samples that ended."""
        if self._flights:
            self._check_ready()
        if self._flights and not self._ended:
            try:
                self._note(*self._news.get(timeout=PATIENCE_S))
            except queue.Empty:
                return []
        self._drain()
        ended, self._ended = self._ended, []
        return ended

    def preempt(self, groups: Sequence[int]) -> list[Draft]:
        """Take the samples of some groups off; what ended meanwhile comes with the next step."""
        requests = self._flights.of(groups)
        self._end(requests)
        self._drain()
        return [self._flights.take(name).landed() for name in requests if self._flights.get(name)]

    def progress(self) -> list[tuple[int, int, int]]:
        """Return (group, index, response tokens) of every unfinished sample."""
        self._drain()
        return self._flights.progress()

    def load(self, version: int, tensors: NamedTensors) -> float:
        """Replace the weights by a transfer from this process to the engine's; see ``VllmEngine.load``."""
        from bidirl.executor.backends.wire import Sender

        start = time.perf_counter()
        held = [(name, as_tensor(tensor)) for name, tensor in tensors]
        sender = Sender(deadline_s=CALL_S)
        addresses = [sender.address(f"rank {rank}") for rank in range(self.settings.tp)]
        sent: Future[Any] = Future()

        def send() -> None:
            sent.set_result(sender.send_all(addresses, version, iter(held)))

        threading.Thread(target=send, daemon=True).start()
        try:
            self._update(version, addresses, CALL_S)
        finally:
            sent.result(CALL_S)
            sender.close()
        return time.perf_counter() - start

    def close(self) -> None:
        """Stop the engine's processes and the loop; again is harmless."""
        if self._llm is None:
            return
        try:
            self._call(self._shut())
        finally:
            self._llm = None
            self._stop_loop()
            self._flights, self._ended = Flights(), []
            gc.collect()
            multiprocessing.active_children()  # reaps the engine's process, which vLLM only terminates

    # ------------------------------------------------------------------ inside

    async def _open(self) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from bidirl.executor.backends.vllm import transfer

        transfer.register()
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(self.settings)))
        await llm.update_weight_version(str(self._version))
        return llm

    def _sleep(self, level: int) -> None:
        self._call(self._llm.sleep(level=level))

    def _wake(self, what: str) -> None:
        self._call(self._llm.wake_up(tags=[what]))

    def _launch(self, fresh: Sequence[tuple[str, Draft]]) -> None:
        work = [
            (request, prompt_of(draft, self._version), sampling_of(draft, self.settings))
            for request, draft in fresh
        ]

        async def begin() -> None:
            for item in work:
                self._streams[item[0]] = asyncio.create_task(self._stream(*item))

        self._call(begin())

    async def _stream(self, request: str, prompt: Any, sampling: Any) -> None:
        """Hand on what the engine says of one request; an error is news too."""
        try:
            async for output in self._llm.generate(prompt, sampling, request):
                self._news.put((request, output))
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001, RUF100 - it is raised in the caller's thread
            self._news.put((request, error))
        finally:
            self._streams.pop(request, None)

    def _note(self, request: str, output: Any) -> None:
        flight = self._flights.get(request)
        if flight is None:
            return
        if isinstance(output, Exception):
            reason = first_line(output)
            self._broken = f"its process failed ({reason})"
            raise RunFault(f"the engine's process failed ({reason}): restart the replica") from output
        tokens, logprobs = delta(output)
        flight.extend(tokens, logprobs, self._version)
        self.meter.decode_tokens += len(tokens)
        if output.finished and output.outputs[0].finish_reason != "abort":
            self._ended.append(self._finished(self._flights.take(request)))

    def _drain(self) -> None:
        while True:
            try:
                self._note(*self._news.get_nowait())
            except queue.Empty:
                return

    def _end(self, requests: Sequence[str]) -> None:
        """Stop requests; what they have not said by now is lost, and generated again when they go on."""
        if requests:
            self._call(self._cancel(requests))

    async def _shut(self) -> None:
        for stream in self._streams.values():
            stream.cancel()
        await asyncio.gather(*self._streams.values(), return_exceptions=True)
        self._llm.shutdown()
        self._llm.shutdown = _nothing  # vLLM calls it again, and fails, when the interpreter ends
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _cancel(self, requests: Sequence[str]) -> None:
        streams = [stream for name in requests if (stream := self._streams.get(name))]
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await self._llm.abort(list(requests))  # one may have been cancelled before vLLM knew whose it is

    def _update(self, version: int, addresses: Sequence[Any], deadline_s: float) -> None:
        """Pause between iterations, take and load the weights, forget prefixes, stamp the version, go on."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        infos = [{**address.plain(), "version": version, "deadline_s": deadline_s} for address in addresses]

        async def take() -> None:
            await self._llm.start_weight_update()
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info=infos))

        async def apply() -> None:
            await self._llm.finish_weight_update(weight_version=str(version))
            await self._llm.reset_prefix_cache()

        self._call(self._llm.pause_generation(mode="keep", clear_cache=False))
        try:
            self._drain()  # what came before is of the old version
            try:
                self._call(take(), deadline_s + CALL_S)
            except Exception as error:
                reason = first_line(error)
                raise RunFault(
                    f"weights of version {version} did not arrive ({reason}): try again"
                ) from error
            self._broken = f"loading version {version} stopped half-way"
            self._call(apply())
            self._version = version
            self._requeue_fresh()
            self._broken = ""
            self._rebuild_cache()
        finally:
            self._call(self._llm.resume_generation())

    def _requeue_fresh(self) -> None:
        """Start samples without tokens anew, so that no prefix of the old weights reaches them."""
        fresh = [name for name, flight in self._flights.items() if not flight.tokens]
        self._end(fresh)
        self._drain()
        again = [self._flights.requeue(name) for name in fresh if self._flights.get(name)]
        drafts = {request: flight.draft for request, flight in self._flights.items()}
        self._launch([(name, drafts[name]) for name in again])

    def _call(self, work: Coroutine[Any, Any, T] | Awaitable[T], patience_s: float = CALL_S) -> T:
        """Run something in the loop's thread and wait for it."""

        async def wrapped() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(wrapped(), self._loop).result(patience_s)

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_S)
        self._loop.close()


def _nothing() -> None:
    """Do nothing."""
