"""Inference engines: vLLM's periodic line, one row each. Sleep and wake lines become facts of a run.

Source: vllm-project/vllm (``vllm/v1/metrics/loggers.py``, ``vllm/executor/executor_base.py``).
"""

from bidirl.traces.logs.table import Dialect, Scaled
from bidirl.traces.step_log import Mode

__all__ = ["DIALECTS"]

DIALECTS = (
    Dialect(
        framework="vllm",
        variant="",
        mode=Mode.UNKNOWN,
        step_unit="one interval of the engine's log (10 s by default), not a training step",
        evidence=("engine/generation_tokens_per_s", "engine/prompt_tokens_per_s"),
        columns={
            "prompt_tokens_per_s": "engine/prompt_tokens_per_s",
            "generation_tokens_per_s": "engine/generation_tokens_per_s",
            "num_running": "engine/num_running",
            "num_waiting": "engine/num_waiting",
            "kv_used_share": Scaled("engine/kv_percent", 0.01),
            "prefix_hit_share": Scaled("engine/prefix_hit_percent", 0.01),
            "engine": "engine/index",
        },
        notes=("engine lines hold no training steps: give the trainer's log for those",),
    ),
)
