"""The cost of reading a log grows with its size, not faster."""

import math
import time

import pytest

from bidirl.traces.logs import LogParser

NOISE = (
    b"(vLLMHttpServer pid=5000) INFO [async_llm.py:260] Added request 0123456789abcdef to replica 3\n" * 200
)


def cpu_s(num_steps: int) -> float:
    parser = LogParser()
    started = time.process_time()
    for step in range(num_steps):
        parser.feed(NOISE + b"step:%d - timing_s/gen:10.5 - timing_s/step:30.5\n" % step)
    parser.close()
    seconds = time.process_time() - started
    assert len(parser.steps()[0]) == num_steps
    return seconds


@pytest.mark.bench
def test_cost_is_linear_in_the_size() -> None:
    small, large = (min(cpu_s(num) for _ in range(3)) for num in (150, 1200))
    assert math.log(large / small) / math.log(8) < 1.25
