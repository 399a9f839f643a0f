"""What the engine tests share: a tiny model with lively logits, drafts, and the transformers side."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from bidirl.executor.backends.torch.tiny import build_tiny
from bidirl.executor.backends.vllm.args import EngineSettings
from bidirl.executor.backends.vllm.noise import sample_seed
from bidirl.executor.roles import Draft
from bidirl.models.architecture import ArchitectureNumbers

VOCAB = 256
PROMPT_TOKENS = 40
"""More than one block of 32: siblings share a block."""
MAX_TOKENS = 24
SHAPE = ArchitectureNumbers(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=2,
    num_kv_heads=1,
    head_dim=32,
    vocab_size=VOCAB,
    intermediate_size=128,
    tie_word_embeddings=True,
)


def tiny_folder(where: Path) -> Path:
    return build_tiny(SHAPE, where, seed=1, max_tokens=256)


def settings(folder: Path, **changes: Any) -> EngineSettings:
    return EngineSettings(str(folder), 128, **({"max_num_seqs": 32, "kv_tokens": 4096} | changes))


def weights(folder: Path, version: int) -> dict[str, Any]:
    """Return weights of a version, far enough from the others' that stale state shows; torch tensors."""
    import torch
    from safetensors.torch import load_file

    maker = torch.Generator().manual_seed(1000 + version)
    tensors = load_file(str(folder / "model.safetensors"))
    return {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=maker) for name, tensor in tensors.items()
    }


def children() -> list[str]:
    """Return the processes that this one has started and that still are; Python's own helper aside."""
    names = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    lines = {name: Path(f"/proc/{name}/cmdline").read_text() for name in names}
    return [name for name, line in lines.items() if "resource_tracker" not in line]


def drafts(
    num_groups: int, num_samples: int = 2, *, max_tokens: int = MAX_TOKENS, entropy: int = 7
) -> list[Draft]:
    maker = np.random.default_rng(3)
    prompts = maker.integers(3, VOCAB, (num_groups, PROMPT_TOKENS), dtype=np.int32)
    return [
        Draft(group, index, prompts[group], sample_seed(entropy, group, index), max_tokens)
        for group in range(num_groups)
        for index in range(num_samples)
    ]


def finish(engine: Any) -> dict[tuple[int, int], Draft]:
    ended = {}
    while engine.num_unfinished:
        for draft in engine.step():
            ended[draft.group, draft.index] = draft
    return ended


def run(engine: Any, work: list[Draft]) -> dict[tuple[int, int], Draft]:
    engine.submit(work)
    return finish(engine)


def same(first: dict[tuple[int, int], Draft], second: dict[tuple[int, int], Draft]) -> bool:
    """Say whether both hold the same samples, tokens and log-probabilities, to the last bit."""
    return first.keys() == second.keys() and all(
        np.array_equal(first[place].tokens, second[place].tokens)
        and np.array_equal(first[place].logprobs, second[place].logprobs)
        for place in first
    )


def torch_logprobs(folder: Path, tensors: dict[str, Any], draft: Draft) -> Any:
    """Return transformers' log-probabilities of a response's tokens under given weights."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    text = torch.tensor([[*draft.prompt.tolist(), *draft.tokens.tolist()]])
    with torch.no_grad():
        table = model(text).logits[0].log_softmax(-1)
    at = torch.arange(len(draft.prompt) - 1, text.shape[1] - 1)
    return table[at, text[0, at + 1]].numpy()


def largest_gap(folder: Path, tensors: dict[str, Any], ended: dict[tuple[int, int], Draft]) -> float:
    """Return max |log-probability of the engine - of transformers| over samples."""
    gaps = [np.abs(draft.logprobs - torch_logprobs(folder, tensors, draft)) for draft in ended.values()]
    return float(np.max(gaps))
