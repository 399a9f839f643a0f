"""Made-up logs in the documented formats of each framework, with what must be read from them.

Numbers are ours; each maker returns lines and the expected columns of each step.
"""

# ruff: noqa: E501  # lines of logs are as long as they are

import random
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["MAKERS", "Made"]


@dataclass
class Made:
    """Lines of a log and its expected rows by step."""

    lines: list[str]
    rows: dict[int, dict[str, float]] = field(default_factory=dict)


def _values(rng: random.Random) -> dict[str, float]:
    return {
        "gen": round(rng.uniform(50, 300), 6),
        "old": round(rng.uniform(5, 30), 6),
        "ref": round(rng.uniform(5, 30), 6),
        "update": round(rng.uniform(40, 200), 6),
        "sync": round(rng.uniform(1, 9), 6),
        "testing": round(rng.uniform(60, 80), 6),
        "mean": round(rng.uniform(500, 1500), 6),
        "prompt": round(rng.uniform(80, 160), 6),
    }


def _verl(rng: random.Random, num: int, *, prefix: str, wrap_numbers: bool, variant: str) -> Made:
    made = Made([])
    for step in range(1, num + 1):
        v = _values(rng)
        # The largest GPU-second sums are exact: the step is what its parts add up to.
        step_s = round(v["gen"] + v["old"] + v["ref"] + v["update"] + v["sync"] + 0.5, 6)
        pairs = {
            "actor/entropy": 0.3,
            "actor/kl_loss": 0.0008863,
            "critic/score/mean": 0.25,
            "response_length/mean": v["mean"],
            "response_length/max": 2048.0,
            "response_length/min": 31.0,
            "response_length/clip_ratio": 0.125,
            "prompt_length/mean": v["prompt"],
            f"{prefix}gen": v["gen"],
            f"{prefix}old_log_prob": v["old"],
            f"{prefix}ref": v["ref"],
            f"{prefix}adv": 0.25,
            f"{prefix}update_actor": v["update"],
        }
        row = {
            "old_logprob_s": v["old"],
            "reference_s": v["ref"],
            "update_s": v["update"],
            "response_mean_tokens": v["mean"],
            "response_max_tokens": 2048.0,
            "truncated_share": 0.125,
            "prompt_mean_tokens": v["prompt"],
            "step_s": step_s,
        }
        if variant == "fully_async":
            pairs |= {
                f"{prefix}timing_s/param_sync": v["sync"],
                "fully_async/trainer/idle_ratio": 0.1,
                "fully_async/count/current_param_version": step,
            }
            row |= {"wait_s": v["gen"], "weight_sync_s": v["sync"]}
        else:
            pairs[f"{prefix}update_weights"] = v["sync"]
            row |= {"generation_s": v["gen"], "weight_sync_s": v["sync"]}
        is_tested = step % 2 == 0 and variant == "colocated"
        pairs[f"{prefix}step"] = step_s + (v["testing"] if is_tested else 0.0)
        if is_tested:
            pairs[f"{prefix}testing"] = v["testing"]
        pairs["perf/max_memory_reserved_gb"] = 75.5
        pairs["perf/total_num_tokens"] = 1_250_000 + step
        rate = (1_250_000 + step) / (pairs[f"{prefix}step"] * 8)
        pairs["perf/throughput"] = rate
        row |= {"total_tokens": 1_250_000.0 + step, "tokens_per_s_per_gpu": rate}
        texts = [
            f"{key}:np.float64({value})" if wrap_numbers and key.startswith("timing_s") else f"{key}:{value}"
            for key, value in pairs.items()
        ]
        made.lines.append(f"(TaskRunner pid=4242) step:{step} - " + " - ".join(texts))
        made.lines.append(
            f"(TaskRunner pid=4242) Training Progress:  1%|          | {step}/435 [10:00<1:00:00]"
        )
        made.rows[step] = row
    return made


def verl_new(rng: random.Random, num: int) -> Made:
    """Colocated, keys of today, numbers of numpy 2."""
    return _verl(rng, num, prefix="timing_s/", wrap_numbers=True, variant="colocated")


def verl_plain(rng: random.Random, num: int) -> Made:
    """Colocated, keys of 2025."""
    return _verl(rng, num, prefix="timing_s/", wrap_numbers=False, variant="colocated")


def verl_oldest(rng: random.Random, num: int) -> Made:
    """Colocated, keys of 2024."""
    return _verl(rng, num, prefix="timing/", wrap_numbers=False, variant="colocated")


def verl_fully_async(rng: random.Random, num: int) -> Made:
    """Fully asynchronous: gen is the wait, the prefix of the sync is doubled."""
    return _verl(rng, num, prefix="timing_s/", wrap_numbers=False, variant="fully_async")


def verl_one_step_off(rng: random.Random, num: int) -> Made:
    """One step off: the wait for the previous generation is a timer of its own."""
    made = Made([])
    for step in range(1, num + 1):
        v = _values(rng)
        step_s = round(30.5 + v["old"] + v["update"] + v["sync"], 6)
        made.lines.append(
            f"step:{step} - timing_s/wait_prev_gen:30.5 - timing_s/gen:{v['gen']} - timing_s/old_log_prob:{v['old']} - "
            f"timing_s/update_actor:{v['update']} - timing_s/sync_rollout_weights:{v['sync']} - timing_s/step:{step_s} - "
            f"response_length/mean:{v['mean']} - perf/throughput:400.5"
        )
        made.rows[step] = {
            "wait_s": 30.5,
            "generation_s": v["gen"],
            "old_logprob_s": v["old"],
            "update_s": v["update"],
            "weight_sync_s": v["sync"],
            "step_s": step_s,
            "response_mean_tokens": v["mean"],
        }
    return made


def verl_v1(rng: random.Random, num: int) -> Made:
    """V1 separate async with role switches."""
    made = Made([])
    for step in range(1, num + 1):
        v = _values(rng)
        step_s = round(20.25 + 12.5 + v["old"] + v["update"] + v["sync"], 6)
        made.lines.append(
            f"step:{step} - timing_s/gen:20.25 - timing_s/switch_to_trainer:3.25 - timing_s/switch_to_rollout:9.25 - "
            f"separate_async/decision/remaining:12 - timing_s/old_log_prob:{v['old']} - "
            f"training/off_policy/trajectory_staleness/mean:0.75 - training/off_policy/trajectory_staleness/max:2.0 - "
            f"timing_s/update_actor:{v['update']} - timing_s/update_weights:{v['sync']} - timing_s/step:{step_s}"
        )
        made.rows[step] = {
            "wait_s": 20.25,
            "switch_s": 12.5,
            "old_logprob_s": v["old"],
            "update_s": v["update"],
            "weight_sync_s": v["sync"],
            "step_s": step_s,
            "lag_mean": 0.75,
            "lag_max": 2.0,
        }
    return made


def slime(rng: random.Random, num: int) -> Made:
    """The rollout manager's lines and the trainer's, colocated."""
    made = Made([])
    for step in range(num):
        v = _values(rng)
        nested = {"sleep": 5.25, "update_weights": v["sync"], "wake_up": 2.5, "data_preprocess": 0.0625}
        wait = v["gen"] + sum(nested.values())
        train = v["old"] + v["update"] + 0.5
        made.lines += [
            (
                f"[2025-11-02 10:00:0{step % 10}] rollout.py:412 - rollout {step}: {{'rollout/response_len/mean': {v['mean']}, "
                "'rollout/response_len/max': 4096, 'rollout/response_len/min': 17, 'rollout/truncated_ratio': 0.25}"
            ),
            (
                f"[2025-11-02 10:00:0{step % 10}] rollout.py:433 - perf {step}: {{'perf/rollout_time': {v['gen'] - 1}, "
                "'perf/longest_sample_tokens_per_sec': 44.5, 'perf/tokens_per_gpu_per_sec': np.float64(812.5)}"
            ),
            f"(MegatronTrainRayActor pid=77) perf {step}: {{"
            + "".join(f"'perf/{name}_time': {seconds}, " for name, seconds in nested.items())
            + f"'perf/train_wait_time': {wait}, 'perf/log_probs_time': {v['old']}, "
            f"'perf/actor_train_time': {v['update']}, 'perf/train_time': {train}, "
            f"'perf/actor_train_tok_per_s': 7498.5, 'perf/step_time': {wait + train}, "
            f"'perf/wait_time_ratio': {wait / (wait + train)}}}",
            f"(MegatronTrainRayActor pid=77) step {4 * step + 3}: {{'train/loss': 0.01, 'train/grad_norm': 0.2}}",
        ]
        made.rows[step] = {
            "generation_s": v["gen"] - 1,
            "wait_s": v["gen"],
            "old_logprob_s": v["old"],
            "update_s": v["update"],
            "weight_sync_s": v["sync"],
            "switch_s": 7.75,
            "step_s": wait + train,
            "response_mean_tokens": v["mean"],
            "response_max_tokens": 4096,
            "truncated_share": 0.25,
        }
    return made


def nemo_rl_async(rng: random.Random, num: int) -> Made:
    """Blocks of an asynchronous run, with the inverted idle ratio and thread sums."""
    made = Made([])
    for step in range(1, num + 1):
        parts = {
            "exposed_generation": round(rng.uniform(20, 300), 2),
            "policy_training": round(rng.uniform(20, 70), 2),
            "policy_and_reference_logprobs": round(rng.uniform(4, 19), 2),
            "weight_sync": round(rng.uniform(1, 9), 2),
        }
        total = round(sum(parts.values()) + 0.5, 2)
        made.lines += [
            "",
            f"========================= Step {step}/500 =========================",
            "▶ Sampling from buffer...",
            "📊 Training Results:",
            "  • Loss: 0.1032",
            "  • Avg Reward: 0.3486",
            "  • Buffer Size: 64",
            "  • Avg Trajectory Age: 1.25 steps",
            "",
            "⏱️  Timing:",
            f"  • Total step time: {total:.2f}s",
            *(f"  • {key}: {value:.2f}s ({100 * value / total:.1f}%)" for key, value in parts.items()),
            "  • idle/buffer_full_backoff: 9999.00s (900.0%)",
            "🔍 Performance Metrics:",
            "  • Training Worker Idle Time Ratio: 0.00%",
            "  • Mean Total Tokens per Sample: 5713.25",
            "  • Throughputs (per GPU):",
            "    - E2E (Samples/sec/gpu): 0.06",
            "    - E2E (Tokens/sec/gpu): 100.50",
            "  • Throughputs (per Group):",
            "    - E2E (Tokens/sec): 12864.00",
        ]
        made.rows[step] = {
            "wait_s": parts["exposed_generation"],
            "update_s": parts["policy_training"],
            "old_logprob_s": parts["policy_and_reference_logprobs"],
            "weight_sync_s": parts["weight_sync"],
            "step_s": total,
            "lag_mean": 1.25,
            "tokens_per_s_per_gpu": 100.5,
        }
    return made


def nemo_rl_sync(rng: random.Random, num: int) -> Made:
    """Blocks of a colocated run, with validation blocks and checkpoints between."""
    made = Made([])
    for step in range(1, num + 1):
        generation, training = round(rng.uniform(20, 90), 2), round(rng.uniform(20, 70), 2)
        total = round(generation + training + 6.5 + 2.2 + 3.1 + 0.4, 2)
        made.lines += [
            f"========================= Step {step}/200 =========================",
            "📊 Training Results:",
            "  • Loss: 0.0000",
            "  • Mean Generation Length: 201.25",
            "⏱️  Timing:",
            f"  • Total step time: {total:.2f}s",
            f"  • policy_training: {training:.2f}s (30.7%)",
            "  • checkpointing: 6.50s (18.2%)",
            f"  • generation: {generation:.2f}s (13.9%)",
            "  • policy_and_reference_logprobs: 3.10s (8.8%)",
            "  • prepare_for_generation/total: 2.20s (6.2%)",
            "📊 Validation Results:",
            "  • Accuracy: 0.5000",
            "  • Total validation time: 33.00s",
        ]
        made.rows[step] = {
            "generation_s": generation,
            "update_s": training,
            "old_logprob_s": 3.1,
            "weight_sync_s": 2.2,
            "step_s": total - 6.5,
            "response_mean_tokens": 201.25,
        }
    return made


def prime_rl(rng: random.Random, num: int) -> Made:
    """Lines of the orchestrator and of the trainer in one file, format of 2025."""
    made = Made([])
    for step in range(num):
        time_s, train_s = round(rng.uniform(60, 99), 2), round(rng.uniform(60, 99), 2)
        made.lines += [
            f"02:3{step % 10}:00    INFO Orchestrator resumed: checkpoint {step} ready (after 3.25s)",
            (
                f"02:3{step % 10}:26 SUCCESS Step {step} | Time: {time_s:.2f}s | Reward: 0.3887 | Throughput: 2408.9 tokens/s"
                " | Seq. Length: 345.6 tokens/sample | Async Level: 1 | Max. Off-Policy Level: 2"
            ),
            (
                f"02:3{step % 10}:40 SUCCESS Step {step} | Time: {train_s:.2f}s | Loss: 0.0010 | Entropy: 0.31 | "
                "Mismatch KL: 0.0010 | Grad. Norm: 0.1000 | LR: 1.00e-06 | Throughput: 9000 tokens/s | MFU: 22.1% | "
                "Peak Mem.: 40.1/80.0 GiB (50.1%)"
            ),
        ]
        made.rows[step] = {
            "step_s": train_s,
            "orchestrator_s": time_s,
            "lag_max": 2.0,
            "sample_mean_tokens": 345.6,
            "tokens_per_s": 2408.9,
            "rollout_wait_s": 3.25,
        }
    return made


def prime_rl_new(rng: random.Random, num: int) -> Made:
    """Lines of the orchestrator, format of 2026."""
    made = Made([])
    for step in range(num):
        time_s = round(rng.uniform(60, 99), 2)
        made.lines.append(
            f"12:00:0{step % 10} SUCCESS Step {step} | {time_s:.2f}s | Reward 0.4011 | Trainable 96/128 (75.0%) | "
            "Turns 3.1 | Branches 1.0 | Max Off-Policy 3 | Error 0.0% | Cancelled 1.5% | Truncation 12.5%"
        )
        made.rows[step] = {"step_s": time_s, "lag_max": 3.0, "truncated_share": 0.125}
    return made


def vllm(rng: random.Random, num: int) -> Made:
    """The engine's periodic line: rows without steps."""
    made = Made([])
    for _ in range(num):
        made.lines.append(
            "(EngineCore pid=9) INFO 11-02 10:00:00 [loggers.py:123] Engine 000: Avg prompt throughput: 120.5 tokens/s, "
            f"Avg generation throughput: {rng.uniform(1000, 9000):.1f} tokens/s, Running: 64 reqs, Waiting: 3 reqs, "
            "GPU KV cache usage: 41.5%, Prefix cache hit rate: 12.5%"
        )
    return made


MAKERS: dict[str, Callable[[random.Random, int], Made]] = {
    "verl_new": verl_new,
    "verl_plain": verl_plain,
    "verl_oldest": verl_oldest,
    "verl_fully_async": verl_fully_async,
    "verl_one_step_off": verl_one_step_off,
    "verl_v1": verl_v1,
    "slime": slime,
    "nemo_rl_async": nemo_rl_async,
    "nemo_rl_sync": nemo_rl_sync,
    "prime_rl": prime_rl,
    "prime_rl_new": prime_rl_new,
}
