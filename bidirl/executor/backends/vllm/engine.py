"""vLLM in this process, driven step by step: the rollout role on CPU, and on one GPU.

The caller's thread is the engine's only thread, so whatever happens between two ``step`` calls happens at an
iteration boundary: nothing has to be stopped or waited for.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bidirl.executor.backends.vllm.args import EngineSettings, engine_arguments, prepare_environment
from bidirl.executor.backends.vllm.device import capabilities_of
from bidirl.executor.backends.vllm.flights import Flights
from bidirl.executor.backends.vllm.holding import HoldingEngine
from bidirl.executor.backends.vllm.requests import delta, prompt_of, sampling_of
from bidirl.executor.roles import Draft, NamedTensors

__all__ = ["VllmEngine", "as_tensor"]


class VllmEngine(HoldingEngine):
    """The ``Engine`` protocol on an in-process vLLM; one per process.

    vLLM's in-process worker starts torch's default process group: a trainer that wants one for itself (FSDP)
    belongs in another process.
    """

    def __init__(
        self, settings: EngineSettings, *, version: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        prepare_environment(device=settings.device)
        import torch
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from bidirl.executor.backends.vllm import transfer

        transfer.register()
        super().__init__(settings, version, clock)
        self._scheduled: dict[str, int] = {}
        self._set_num_threads = torch.set_num_threads
        self._llm: Any = LLMEngine.from_engine_args(EngineArgs(**engine_arguments(settings)))
        self._capabilities = capabilities_of(settings, self._llm.vllm_config)
        self._core: Any = self._llm.engine_core.engine_core
        worker = self._llm.model_executor.driver_worker
        self._worker: Any = getattr(worker, "worker", worker)
        self._watch(self._core.scheduler)
        self._llm.set_weight_version(str(version))

    def step(self) -> list[Draft]:
        """Run one iteration; return the samples that ended in it."""
        ended, self._ended = self._ended, []
        if not self._flights:
            return ended
        self._check_ready()
        start = time.perf_counter()
        outputs = self._llm.step()
        seconds = time.perf_counter() - start
        deltas = [(output, *delta(output)) for output in outputs]
        self.meter.record(
            self._scheduled, self._flights, sum(len(tokens) for _, tokens, _ in deltas), seconds
        )
        for output, tokens, logprobs in deltas:
            flight = self._flights.get(output.request_id)
            if flight is None:
                continue
            flight.extend(tokens, logprobs, self._version)
            if output.finished:
                ended.append(self._finished(self._flights.take(output.request_id)))
        return ended

    def preempt(self, groups: Sequence[int]) -> list[Draft]:
        """Take the samples of some groups off, with the tokens that they have; ended ones are not touched."""
        requests = self._flights.of(groups)
        self._llm.abort_request(requests)
        return [self._flights.take(request).landed() for request in requests]

    def progress(self) -> list[tuple[int, int, int]]:
        """Return (group, index, response tokens) of every unfinished sample."""
        return self._flights.progress()

    def load(self, version: int, tensors: NamedTensors) -> float:
        """Replace the weights, forget cached prefixes, stamp the version last; return the seconds taken.

        Samples that are held go on: those that have tokens of this engine on the keys and values that they
        have (take them off and submit them again to rebuild these), the others from their start.

        Raises:
            RunFault: the tensors are not the model's; nothing was changed. Or loading failed half-way; then
                every later step fails too, until a load succeeds.
        """
        start = time.perf_counter()
        staged = [(name, as_tensor(tensor)) for name, tensor in tensors]
        self._update(version, lambda: self._worker.weight_transfer_engine.stage(staged))
        return time.perf_counter() - start

    def close(self) -> None:
        """Stop it and free what it holds; again is harmless."""
        if self._llm is None:
            return
        import torch

        self._llm.engine_core.shutdown()
        torch.set_num_threads = self._set_num_threads  # vLLM's CPU worker had made it do nothing
        self._llm = self._core = self._worker = None
        self._flights, self._ended = Flights(), []
        gc.collect()

    # ------------------------------------------------------------------ inside

    def _launch(self, fresh: Sequence[tuple[str, Draft]]) -> None:
        for request, draft in fresh:
            self._llm.add_request(request, prompt_of(draft, self._salt()), sampling_of(draft, self.settings))

    def _sleep(self, level: int) -> None:
        self._llm.sleep(level)

    def _wake(self, what: str) -> None:
        self._llm.wake_up([what])

    def _update(self, version: int, stage: Callable[[], object]) -> None:
        """Stage weights, load them, forget what was computed with the old ones, stamp the version."""
        self._worker.start_weight_update()
        try:
            stage()
            self._broken = f"loading version {version} stopped half-way"
            self._worker.finish_weight_update()
        except BaseException:
            self._worker._weight_update_active = False
            raise
        self._version = version
        self._forget_prefixes()
        self._llm.set_weight_version(str(version))
        self._broken = ""
        self._rebuild_cache()

    def _forget_prefixes(self) -> None:
        """Empty the prefix cache; where samples hold blocks, vLLM keeps it, and the salt keeps them apart."""
        fresh = [request for request, flight in self._flights.items() if not flight.tokens]
        self._llm.abort_request(fresh)
        self._llm.reset_prefix_cache()
        again = {self._flights.requeue(request) for request in fresh}
        self._launch([(name, flight.draft) for name, flight in self._flights.items() if name in again])

    def _salt(self) -> int:
        return self._version

    def _watch(self, scheduler: Any) -> None:
        """Note how many tokens each iteration gives to each request."""
        schedule = scheduler.schedule

        def noting(*arguments: Any, **named: Any) -> Any:
            output = schedule(*arguments, **named)
            # vLLM appends a random part to a request's name.
            self._scheduled = {
                name.rpartition("-")[0]: tokens for name, tokens in output.num_scheduled_tokens.items()
            }
            return output

        scheduler.schedule = noting


def as_tensor(value: Any) -> Any:
    """Return a torch tensor; NumPy arrays, which may be read-only views of shared memory, are copied."""
    if not isinstance(value, np.ndarray):
        return value.detach()
    import torch

    return torch.tensor(value)
