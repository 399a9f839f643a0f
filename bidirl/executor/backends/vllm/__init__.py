"""The rollout role on real vLLM, in process (CPU and CI) or as a process of its own (CUDA).

Nothing here is imported at start: ``torch`` and ``vllm`` are loaded by the modules that need them.
"""

__all__: list[str] = []
