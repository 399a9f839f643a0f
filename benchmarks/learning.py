"""Learn the packaged tasks in one process: rollout by a small torch sampler, then the executor's trainer.

Run with the engine environment: ``.venv-engine/bin/python benchmarks/learning.py [TASK ...]``. It prints the
mean reward by tenth of the run. On-policy, so every ratio is 1 and the mismatch of the log-probabilities is
that of two ways to compute the same numbers (with and without a KV cache).
"""

import importlib.util
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bidirl.executor.backends.torch.advantages import global_counts, group_advantages
from bidirl.executor.backends.torch.merge import Gathered, MergeKind, arrange
from bidirl.executor.backends.torch.settings import TrainerConfig
from bidirl.executor.backends.torch.tasks import Task, make_task
from bidirl.executor.backends.torch.tiny import build_tiny
from bidirl.executor.roles import Draft, Row
from bidirl.models.architecture import ArchitectureNumbers
from bidirl.planner.events import SegmentKind

__all__ = ["CASES", "Case", "learn", "sample"]


@dataclass(frozen=True)
class Case:
    """A task with the sizes at which it is learned."""

    task: str
    vocab_size: int
    prompts_per_step: int
    samples_per_prompt: int
    max_response_tokens: int
    num_steps: int
    prompt_tokens: int = 4
    chunk_rows: int = 32
    hidden_size: int = 64
    learning_rate: float = 3e-3
    mini_batches: int = 1


CASES = {
    "constant": Case("constant", 64, 8, 8, 16, 40),
    "copy": Case("copy", 32, 32, 8, 8, 120),
    "arithmetic": Case("arithmetic", 16, 32, 8, 3, 300),
}


def shape_of(case: Case) -> ArchitectureNumbers:
    return ArchitectureNumbers(
        num_layers=2,
        hidden_size=case.hidden_size,
        num_attention_heads=2,
        num_kv_heads=1,
        head_dim=32,
        intermediate_size=2 * case.hidden_size,
        vocab_size=case.vocab_size,
        tie_word_embeddings=True,
    )


def sample(model: Any, drafts: list[Draft], stop_token: int | None, generator: Any) -> None:
    """Fill drafts with prompts of one length: tokens and log-probabilities, sampled at temperature 1."""
    import torch

    num = max(draft.max_tokens for draft in drafts)
    ids = torch.from_numpy(np.stack([draft.prompt for draft in drafts]).astype(np.int64))
    cache, tokens, logprobs = None, [], []
    with torch.no_grad():
        for _ in range(num):
            out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            found = torch.log_softmax(out.logits[:, -1].float(), -1)
            ids = torch.multinomial(found.exp(), 1, generator=generator)
            tokens.append(ids.squeeze(1))
            logprobs.append(found.gather(1, ids).squeeze(1))
    all_tokens = torch.stack(tokens, 1).to(torch.int32).numpy()
    all_logprobs = torch.stack(logprobs, 1).numpy()
    for draft, row, values in zip(drafts, all_tokens, all_logprobs, strict=True):
        stops = np.flatnonzero(row[: draft.max_tokens] == stop_token) if stop_token is not None else []
        end = int(stops[0]) + 1 if len(stops) else draft.max_tokens
        draft.tokens, draft.logprobs = row[:end], values[:end]
        draft.truncated = stop_token is not None and not len(stops)


def rows_of(
    task: Task, case: Case, step: int, seed: int, model: Any, generator: Any, scale: Any
) -> list[Row]:
    drafts = []
    for group in range(step * case.prompts_per_step, (step + 1) * case.prompts_per_step):
        prompt = task.prompt_of(seed, group)
        drafts += [
            Draft(group, index, prompt, seed, case.max_response_tokens)
            for index in range(case.samples_per_prompt)
        ]
    sample(model, drafts, task.stop_token, generator)
    n = case.samples_per_prompt
    rows = []
    for at in range(0, len(drafts), n):
        group_drafts = drafts[at : at + n]
        rewards = [task.reward(draft.prompt, draft.tokens) for draft in group_drafts]
        advantages = group_advantages(rewards, scale)
        rows += [
            Row(draft, reward, float(advantage))
            for draft, reward, advantage in zip(group_drafts, rewards, advantages, strict=True)
        ]
    return rows


def learn(case: Case, config: TrainerConfig, *, seed: int = 0) -> Iterator[tuple[float, dict[str, float]]]:
    """Yield the mean reward and the statistics of each step."""
    import torch

    from bidirl.executor.backends.torch.trainer import TorchTrainer

    task = make_task(case.task, vocab_size=case.vocab_size, prompt_tokens=case.prompt_tokens)
    generator = torch.Generator().manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        max_tokens = case.prompt_tokens + case.max_response_tokens
        build_tiny(shape_of(case), Path(folder), seed=seed, max_tokens=max_tokens)
        trainer = TorchTrainer(Path(folder), config)
    for step in range(case.num_steps):
        rows = rows_of(task, case, step, seed, trainer.states.model, generator, config.loss.advantage_scale)
        size = len(rows) // case.mini_batches
        for at in range(0, len(rows), size):
            batch = rows[at : at + size]
            num_tokens, num_sequences = global_counts(batch)
            held = Gathered(MergeKind.ORDERED)
            chunks = range(-(-size // case.chunk_rows))
            for chunk in chunks:
                part = batch[chunk * case.chunk_rows : (chunk + 1) * case.chunk_rows]
                held.add(
                    trainer.run(
                        SegmentKind.UPDATE, chunk, part, num_tokens=num_tokens, num_sequences=num_sequences
                    )
                )
            trainer.apply(arrange(MergeKind.ORDERED, held.gradients, (), chunks))
        yield float(np.mean([row.reward for row in rows])), held.stats
    trainer.close()


def main(names: list[str]) -> None:
    if importlib.util.find_spec("torch") is None:
        print("learning: torch is not installed here; run it with .venv-engine/bin/python")
        return
    for name in names or list(CASES):
        case = CASES[name]
        since = time.perf_counter()
        curve, mismatch = [], 0.0
        for reward, stats in learn(case, TrainerConfig(learning_rate=case.learning_rate)):
            curve.append(reward)
            mismatch = max(mismatch, stats["mismatch_max"])
        tenths = " ".join(f"{part.mean():.2f}" for part in np.array_split(np.array(curve), 10))
        seconds = time.perf_counter() - since
        print(f"{name}: {tenths}  ({case.num_steps} steps, {seconds:.0f} s, mismatch <= {mismatch:.1e})")


if __name__ == "__main__":
    main(sys.argv[1:])
