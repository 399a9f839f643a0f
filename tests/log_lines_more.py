"""Made-up logs of AReaL, ROLL, SkyRL, OpenRLHF, TRL, RLinf and tinker-cookbook, in their documented formats.

Numbers are ours; each maker returns lines and what must be read from them. Where a log has no steps, rows are
numbered by their order from 0.
"""

# ruff: noqa: E501  # lines of logs are as long as they are

import json
import random
from collections.abc import Callable

from tests.log_lines import Made

__all__ = ["MORE", "NO_STEPS", "fancy_grid", "made_text"]


def fancy_grid(pairs: dict[str, float]) -> list[str]:
    """Return a table of four pairs a row, in column-major order, as tabulate draws it."""
    items = [(key, f"{value:.4e}") for key, value in pairs.items()]
    num_rows = -(-len(items) // 4)
    rows = [items[row::num_rows] for row in range(num_rows)]
    width = max(len(key) for key, _ in items)
    texts = ["│ " + " │ ".join(f"{key:<{width}} │ {value:>11}" for key, value in row) + " │" for row in rows]
    line = "─" * 20
    return [
        f"╒{line}╤{line}╕",
        *(each for text in texts for each in (text, f"├{line}┼{line}┤")),
        f"╘{line}╧{line}╛",
    ]


def _four(value: float) -> float:
    """Return a value with the digits that ``.4e`` prints."""
    return float(f"{value:.4e}")


def areal(rng: random.Random, num: int) -> Made:
    """Two blocks of statistics a step; the second one repeats keys of the first with other values."""
    made = Made([])
    for step in range(1, num + 1):
        wait, train, logp, sync = (_four(rng.uniform(5, 90)) for _ in range(4))
        mean = _four(rng.uniform(900, 3000))
        lag = _four(rng.uniform(0.5, 2.0))
        first = {
            "timeperf/rollout": wait,
            "timeperf/recompute_logp": logp,
            "timeperf/ref_logp": 6.25,
            "timeperf/compute_advantage": 0.125,
            "timeperf/train_step": train,
            "timeperf/update_weights": sync,
            "timeperf/save": 2.5,
            "timeperf/checkpoint_for_recover": 1.5,
            "timeperf/eval": 40.0 if step % 3 == 0 else 0.0,
            "timeperf/clear_batches": 0.25,
            "ppo_actor/seq_len/avg": mean + 200,
            "ppo_actor/seq_len/max": 9000.0,
            "ppo_actor/prompt_len/avg": 200.0,
            "ppo_actor/no_eos_ratios/avg": 0.125,
            "ppo_actor/n_seqs": 512.0,
            "ppo_actor/update/version_stats/sample_staleness_theta_avg": lag,
            "ppo_actor/update/version_stats/sample_staleness_theta_max": 3.0,
            "ppo_actor/update/version_stats/sample_staleness_proximal_avg": lag - 1,
            "ppo_actor/update/entropy/avg": float("nan"),
            "rollout/reward": 0.25,
        }
        second = {
            "ppo_actor/update/version_stats/sample_staleness_theta_avg": lag + 1,
            "ppo_actor/update/version_stats/sample_staleness_theta_max": 4.0,
            "ppo_actor/update/lr": 1e-5,
            "ppo_actor/update/grad_norm": 0.5,
        }
        stamp = f"\x1b[37m20251102-10:00:{step:02d}.123 StatsLogger INFO:"
        made.lines += [
            f"{stamp} Epoch 1/10 Step {step}/290 Train step {step}/2900 done.\x1b[0m",
            f"{stamp} Stats (1/2):\x1b[0m",
            f"{stamp} \x1b[0m",
            *fancy_grid(first),
            f"{stamp} Stats (2/2):\x1b[0m",
            f"{stamp} \x1b[0m",
            *fancy_grid(second),
        ]
        made.rows[step] = {
            "wait_s": wait,
            "old_logprob_s": logp,
            "reference_s": 6.25,
            "update_s": train,
            "weight_sync_s": sync,
            "step_s": wait + logp + 6.25 + 0.125 + train + sync + 0.25,
            "lag_mean": lag,
            "lag_max": 3.0,
            "truncated_share": 0.125,
            "prompt_mean_tokens": 200.0,
            "checkpoint_s": 4.0,
        }
    return made


def roll(rng: random.Random, num: int) -> Made:
    """RLVR, asynchronous: the total of a step is that of the step before it."""
    made, before = Made([]), 0.0
    for step in range(num):
        gen, old, ref, train, sync = (round(rng.uniform(5, 90), 4) for _ in range(5))
        total = round(gen + old + ref + train + sync + 1.5 + 0.4, 4)
        metrics = {
            "time/step_total": before,
            "time/step_stop_server": 1.5,
            "time/step_model_update": sync,
            "time/step_generate": gen,
            "time/ref_log_probs_values": ref,
            "time/old_log_probs": old,
            "time/step_train": train,
            "token/response_length/mean": 1234.5,
            "token/response_length/max": 8192.0,
            "token/response_length/min": 12.0,
            "token/prompt_length/mean": 100.25,
            "token/total_length/mean": 1334.75,
            "system/global_step": step,
            "system/batch_size": 512,
            "system/tps_gpu": 700.5,
            "scheduler/off_policy_ratio": 0.25,
            "math_rule/scheduler/time/generate/mean": 55.5,
            "critic/score/mean": 0.5,
        }
        made.lines += [
            f"[2025-11-02 10:00:00] [rlvr_pipeline.py (200)] [INFO] pipeline step {step} start...",
            "[2025-11-02 10:00:00] [tracking.py (55)] [INFO] metrics_tag: "
            + json.dumps({"step": step, "metrics": metrics}),
            f"[2025-11-02 10:00:00] [rlvr_pipeline.py (400)] [INFO] {json.dumps(metrics)}",
            f"[2025-11-02 10:00:00] [rlvr_pipeline.py (401)] [INFO] pipeline step {step} finished",
        ]
        made.rows[step] = {
            "wait_s": gen,
            "old_logprob_s": old,
            "reference_s": ref,
            "update_s": train,
            "weight_sync_s": sync,
            "switch_s": 1.5,
            "response_mean_tokens": 1234.5,
            "response_max_tokens": 8192.0,
            "prompt_mean_tokens": 100.25,
            "total_tokens": round(1334.75 * 512),
            "tokens_per_s_per_gpu": 700.5,
        }
        if step < num - 1:
            made.rows[step]["step_s"] = total
        before = total
    return made


def roll_agentic(rng: random.Random, num: int) -> Made:
    """The agentic pipeline: a line without the step, then the same with it and with its own total."""
    made = Made([])
    for step in range(num):
        gen, old, ref, train, sync = (round(rng.uniform(5, 90), 4) for _ in range(5))
        metrics = {
            "time/step_model_update": sync,
            "time/step_rollout": gen,
            "time/step_ref_log_probs_values_reward": ref,
            "time/step_old_log_probs_values": old,
            "time/step_adv": 0.25,
            "time/step_train": train,
            "tokens/response_length/mean": 900.5,
            "env/traj_env_time/mean": 3.5,
        }
        total = round(gen + old + ref + train + sync + 0.5, 4)
        whole = metrics | {"time/step_log": 0.01, "time/step_total": total}
        made.lines += [
            f"[INFO] {json.dumps(metrics)}",
            f"[INFO] metrics_tag: {json.dumps({'step': step, 'metrics': whole})}",
        ]
        made.rows[step] = {
            "generation_s": gen,
            "old_logprob_s": old,
            "reference_s": ref,
            "update_s": train,
            "weight_sync_s": sync,
            "step_s": total,
            "response_mean_tokens": 900.5,
        }
    return made


def _pformat(values: dict[str, float]) -> list[str]:
    lines = [f" '{key}': '{value:.4f}'," for key, value in values.items()]
    lines[0] = "{" + lines[0][1:]
    lines[-1] = lines[-1][:-1] + "}"
    return lines


def skyrl(rng: random.Random, num: int) -> Made:
    """Fully asynchronous on the console: timers, then two dicts a step with numbers as text."""
    made = Made([])
    for step in range(1, num + 1):
        wait, fwd, train, sync = (round(rng.uniform(5, 90), 4) for _ in range(4))
        run = fwd + train + 0.25
        total = round(wait + run + sync + 0.5, 4)
        timings = {
            "timing/wait_for_generation_buffer": wait,
            "timing/convert_to_training_input": 0.125,
            "timing/fwd_logprobs_values_reward": fwd,
            "timing/compute_advantages_and_returns": 0.0625,
            "timing/policy_train": train - 0.5,
            "timing/train_critic_and_policy": train,
            "timing/run_training": run,
            "timing/sync_weights": sync,
            "timing/step": total,
        }
        stamp = "2026-03-08 10:00:00.123 | INFO     | skyrl.train"
        made.lines += [
            f"{stamp}.utils.utils:__enter__:20 - Started: 'step'",
            *(
                f"{stamp}.utils.utils:__exit__:24 - Finished: '{key[7:]}', time cost: {value:.2f}s"
                for key, value in timings.items()
            ),
            f"{stamp}.fully_async_trainer:train:300 - {{'policy_loss': 0.1, 'grad_norm': 0.5}}",
            f"{stamp}.utils.tracking:log:190 - Step {step}: ",
            *_pformat(
                {
                    "async/staleness_max": 2,
                    "async/staleness_mean": 0.75,
                    "async/staleness_violation_count": 1,
                    "generate/avg_num_tokens": 812.5,
                    "generate/max_num_tokens": 4096,
                    "reward/avg_pass_at_2": 0.5,
                    "trainer/epoch": 0,
                    "trainer/global_step": step,
                }
            ),
            f"{stamp}.utils.tracking:log:190 - Step {step}: ",
            *_pformat(timings),
        ]
        made.rows[step] = {
            "wait_s": wait,
            "old_logprob_s": fwd,
            "update_s": train,
            "weight_sync_s": sync,
            "step_s": total,
            "lag_mean": 0.75,
            "lag_max": 2.0,
            "staleness_violations": 1.0,
            "response_mean_tokens": 812.5,
        }
    return made


def skyrl_pairs(rng: random.Random, num: int) -> Made:
    """Lines ``key = value`` behind the line of their step, in turns; checkpoints run inside the step."""
    made = Made([])
    for step in range(1, num + 1):
        gen, fwd, train, sync = (round(rng.uniform(5, 90), 4) for _ in range(4))
        saving = 30.0 if step % 2 == 0 else 0.0
        total = round(gen + fwd + train + sync + 0.5, 4)
        made.lines += [
            f"trainer/global_step = {step}",
            f"timing/generate = {gen}",
            f"timing/fwd_logprobs_values_reward = {fwd}",
            f"timing/policy_train = {train}",
            f"timing/sync_weights = {sync}",
            *([f"timing/save_checkpoints = {saving}"] if saving else []),
            f"timing/step = {round(total + saving, 4)}",
            "generate/avg_num_tokens = 700.5",
            f"policy/final_loss = {rng.uniform(-1, 1):.4f}",
        ]
        made.rows[step] = {
            "generation_s": gen,
            "old_logprob_s": fwd,
            "update_s": train,
            "weight_sync_s": sync,
            "step_s": total,
            "response_mean_tokens": 700.5,
        }
    return made


def skyrl_timers(rng: random.Random, num: int) -> Made:
    """Only the timers' lines, as when the metrics go to W&B: rows without steps."""
    made = Made([])
    for row in range(num):
        wait, train, sync = (round(rng.uniform(5, 90), 2) for _ in range(3))
        total = round(wait + train + sync + 0.25, 2)
        made.lines += [
            "(skyrl_entrypoint pid=11) 10:00:00 | INFO | Started: 'step'",
            *(
                f"(skyrl_entrypoint pid=11) 10:00:{row:02d} | INFO | Finished: '{name}', time cost: {value:.2f}s"
                for name, value in {
                    "wait_for_generation_buffer": wait,
                    "policy_train": train - 1,
                    "train_critic_and_policy": train,
                    "run_training": train,
                    "sync_weights": sync,
                    "step": total,
                }.items()
            ),
        ]
        made.rows[row] = {"wait_s": wait, "update_s": train, "weight_sync_s": sync, "step_s": total}
    return made


def openrlhf_sync(rng: random.Random, num: int) -> Made:
    """In turns: the step is the sum of its phases."""
    made = Made([])
    for step in range(1, num + 1):
        gen, exp, train, sync = (round(rng.uniform(5, 90), 6) for _ in range(4))
        status = {
            "policy_loss": -0.01,
            "kl": 0.002,
            "response_length": 512.25,
            "total_length": 640.75,
            "timing/make_experience": exp,
            "timing/ppo_train": train,
            "timing/broadcast": sync,
            "rollout/reward_mean": 0.5,
            "rollout/response_length_mean": 512.25,
            "rollout/truncated_rate": 0.0625,
            "rollout/num_samples": 128.0,
            "timing/generation": gen,
            "timing/step_total": gen + exp + train + sync,
        }
        made.lines += [
            f"(PPOTrainer pid=7) 11-02 10:00:00 INFO ppo_trainer.py:160] Sample: ['a: {{x}}', {step}]",
            f"(PPOTrainer pid=7) 11-02 10:00:00 INFO ppo_trainer.py:340] ✨ Global step {step}: {status}",
        ]
        made.rows[step] = {
            "generation_s": gen,
            "old_logprob_s": exp,
            "update_s": train,
            "weight_sync_s": sync,
            "step_s": gen + exp + train + sync,
            "response_mean_tokens": 512.25,
            "prompt_mean_tokens": 128.5,
            "truncated_share": 0.0625,
            "total_tokens": 640.75 * 128,
        }
    return made


def openrlhf_async(rng: random.Random, num: int) -> Made:
    """Asynchronous: the step is wall time, generation overlaps it, the wait is what is left."""
    made = Made([])
    for step in range(1, num + 1):
        exp, train, sync, wait = (round(rng.uniform(5, 90), 6) for _ in range(4))
        gen = round(wait + rng.uniform(20, 60), 6)
        status = {
            "policy_loss": -0.01,
            "response_length": 512.25,
            "timing/make_experience": exp,
            "timing/ppo_train": train,
            "timing/broadcast": sync,
            "timing/generation": gen,
            "timing/step_total": exp + train + sync + wait,
        }
        made.lines.append(f"11-02 10:00:00 INFO ppo_trainer_async.py:140] Global step {step}: {status}")
        made.rows[step] = {
            "wait_s": wait,
            "generation_s": gen,
            "old_logprob_s": exp,
            "update_s": train,
            "weight_sync_s": sync,
            "step_s": exp + train + sync + wait,
        }
    return made


def _quoted(values: dict[str, float]) -> str:
    return str({key: f"{value:.4g}" for key, value in values.items()})


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def trl_grpo(rng: random.Random, num: int) -> Made:
    """GRPO: numbers as text, no steps, the summary at the end."""
    made = Made([])
    for row in range(num):
        step_s, mean = _short(rng.uniform(5, 90)), _short(rng.uniform(100, 900))
        made.lines += [
            f" {row}%|▎         | {row}/1562 [18:48<164:33:29, 37.5s/it]",
            _quoted(
                {
                    "loss": 0.01,
                    "num_tokens": 1000.0 * (row + 1),
                    "completions/mean_length": mean,
                    "completions/min_length": 5,
                    "completions/max_length": 999,
                    "completions/clipped_ratio": 0.125,
                    "reward": 0.5,
                    "step_time": step_s,
                    "epoch": 0.01 * (row + 1),
                }
            ),
        ]
        made.rows[row] = {
            "step_s": step_s,
            "response_mean_tokens": mean,
            "response_max_tokens": 999.0,
            "response_min_tokens": 5.0,
            "truncated_share": 0.125,
        }
    made.lines.append("{'train_runtime': '558.5', 'train_samples_per_second': '0.716', 'epoch': '1'}")
    return made


def trl_async(rng: random.Random, num: int) -> Made:
    """AsyncGRPO of early 2026."""
    made = Made([])
    for row in range(num):
        wait, sync, mean = (_short(rng.uniform(1, 90)) for _ in range(3))
        made.lines.append(
            _quoted(
                {
                    "reward": 0.45,
                    "ratio": 0.9,
                    "completions/mean_length": mean,
                    "generation_tok_per_s": 348.2,
                    "training_tok/s": 326.8,
                    "weight_sync_time_s": sync,
                    "queue_wait_time_s": wait,
                    "scoring_time_ms": 250.0,
                }
            )
        )
        made.rows[row] = {
            "wait_s": wait,
            "weight_sync_s": sync,
            "response_mean_tokens": mean,
            "generation_tokens_per_s": 348.2,
            "scoring_s": 0.25,
        }
    return made


def trl_async_new(rng: random.Random, num: int) -> Made:
    """AsyncGRPO with ``perf/*`` and ``batch/*``."""
    made = Made([])
    for row in range(num):
        wait, sync, compute = (_short(rng.uniform(1, 90)) for _ in range(3))
        step_s = _short(wait + sync + compute + 1.5)
        made.lines.append(
            _quoted(
                {
                    "loss": 0.1,
                    "perf/fwd_bwd_s": compute,
                    "perf/fwd_s": compute / 3,
                    "perf/optimizer_s": 0.25,
                    "perf/step_s": step_s,
                    "perf/rollout_wait_s": wait,
                    "perf/weight_sync_s": sync,
                    "batch/forwarded_tokens_per_step": 12000 + row,
                    "batch/samples_per_step": 64,
                    "completions/mean_length": 149.5,
                }
            )
        )
        made.rows[row] = {
            "wait_s": wait,
            "weight_sync_s": sync,
            "update_s": compute + 0.25,
            "step_s": step_s,
            "total_tokens": _short(12000 + row),
            "response_mean_tokens": 149.5,
        }
    return made


def deepspeed(rng: random.Random, num: int) -> Made:
    """DeepSpeed's timers in milliseconds."""
    made, head = Made([]), "[2025-09-15 14:48:06,446] [INFO] [logging.py:107:log_dist] [Rank 0] time (ms)"
    for row in range(num):
        fwd, bwd = round(rng.uniform(9000, 90000), 2), round(rng.uniform(9000, 90000), 2)
        made.lines += [
            f"{head} | optimizer_allgather: 32.02 | optimizer_gradients: 14.23 | optimizer_step: 45.45",
            f"{head} | fwd_microstep: {fwd + 1:.2f} | bwd_microstep: {bwd + 1:.2f} | step_microstep: 105.41",
            f"{head} | fwd: {fwd:.2f} | bwd: {bwd:.2f} | bwd_inner: 1.00 | bwd_allreduce: 286.16 | step: 105.50",
        ]
        made.rows[row] = {
            "forward_s": fwd / 1e3,
            "backward_s": bwd / 1e3,
            "update_s": (fwd + bwd + 105.5) / 1e3,
            "allreduce_s": 0.28616,
        }
    return made


def rlinf_async(rng: random.Random, num: int) -> Made:
    """The box of the asynchronous runner; roles beside phases."""
    made = Made([])
    for step in range(1, num + 1):
        wait, logp, train, sync = (round(rng.uniform(1, 20), 3) for _ in range(4))
        total = round(wait + logp + train + sync + 0.5, 3)
        times = {
            "actor/run_training": train,
            "actor_training": train,
            "cal_adv_and_returns": 0.25,
            "env/interact": 99.5,
            "recompute_logprobs": logp,
            "recv_rollout_trajectories": wait,
            "rollout/generate": 77.25,
            "step": total,
            "update_rollout_weights": sync,
        }
        made.lines += [f"╭{'─' * 118}╮", _titled("Metric Table")]
        made.lines.append(f"│ Global Step: {step:4d}/1000 │ Progress: {'█' * 20}{'░' * 20} │   2.0% │")
        made.lines.append("│ Elapsed: 01:00 │ ETA: 10:00 │ Step Time: 12.345s │")
        made.lines += [*_section("Time", times), *_section("Environment", {"success_once": 0.5, "step": 7.5})]
        made.lines += [*_section("Training/Actor", {"actor/loss": 0.125}), f"╰{'─' * 118}╯"]
        made.rows[step] = {
            "wait_s": wait,
            "old_logprob_s": logp,
            "update_s": train,
            "weight_sync_s": sync,
            "step_s": total,
        }
    return made


def _titled(title: str) -> str:
    left = (118 - len(title) - 2) // 2
    return f"├{'─' * left} {title} {'─' * (118 - len(title) - 2 - left)}┤"


def _section(title: str, values: dict[str, float]) -> list[str]:
    cells = [f"{key}={value:.3f}" for key, value in sorted(values.items())]
    cells += [""] * (-len(cells) % 3)
    rows = [
        "│" + "│".join(f"{cell:<38}" for cell in cells[at : at + 3]) + "│" for at in range(0, len(cells), 3)
    ]
    return [_titled(title), f"│{' ' * 118}│", *rows, f"│{' ' * 118}│"]


def rlinf_json(rng: random.Random, num: int) -> Made:
    """The runner in turns, as JSON lines of a tracker."""
    made = Made([])
    for step in range(1, num + 1):
        gen, train, sync = (round(rng.uniform(1, 20), 3) for _ in range(3))
        total = round(gen + train + sync + 0.5, 3)
        values = {
            "_step": step,
            "time/step": total,
            "time/sync_weights": sync,
            "time/generate_rollouts": gen,
            "time/cal_adv_and_returns": 0.25,
            "time/actor_training": train,
            "time/rollout/generate": 88.5,
            "time/env/interact": 99.5,
            "rollout/rewards": 0.5,
        }
        made.lines.append(json.dumps(values))
        made.rows[step] = {"generation_s": gen, "update_s": train, "weight_sync_s": sync, "step_s": total}
    return made


def tinker_json(rng: random.Random, num: int) -> Made:
    """``metrics.jsonl`` of a run in turns, with evaluations inside the iteration."""
    made = Made([])
    for step in range(num):
        gen, train, sync = (round(rng.uniform(5, 90), 6) for _ in range(3))
        evals = 60.5 if step % 3 == 0 else None
        total = round(gen + train + sync + 0.75, 6)
        values = {
            "step": step,
            "progress/batch": step,
            "progress/done_frac": step / 100,
            "env/all/total_ac_tokens": 51200,
            "env/all/total_episodes": 64,
            "env/all/reward/total": 0.5,
            "sampling_client/step_mean": step,
            "sampling_client/step_min": step,
            "time/assemble_training_data": 0.5,
            "time/sampling": gen,
            "time/do_group_rollout_and_filter_constant_reward:total": 999.5,
            "time/train": train,
            "time/save_checkpoint_and_get_sampling_client": sync,
            "time/total": round(total + (evals or 0), 6),
        }
        if evals:
            values["time/run_evals"] = evals
        made.lines.append(json.dumps(values))
        made.rows[step] = {
            "generation_s": gen,
            "update_s": train,
            "weight_sync_s": sync,
            "step_s": total,
            "response_mean_tokens": 800.0,
            "lag_mean": 0.0,
            "lag_max": 0.0,
        }
    return made


def tinker_table(rng: random.Random, num: int) -> Made:
    """The console's table of an asynchronous run."""
    made = Made([])
    for step in range(5, num + 5):
        train, sync, total = (round(rng.uniform(5, 90), 6) for _ in range(3))
        values = {
            "progress/batch": step,
            "sampling_client/step_max": step,
            "sampling_client/step_mean": step - 0.75,
            "sampling_client/step_min": step - 2,
            "time/assemble_training_data": 0.5,
            "time/sampling_time_max": 300.5,
            "time/sampling_time_mean": 120.25,
            "time/save_checkpoint_and_get_sampling_client": sync,
            "time/total": total + train + sync,
            "time/train": train,
        }
        rows = [
            f"│ {key:<45} │ {f'{value:.6f}' if isinstance(value, float) else value!s:<12} │"
            for key, value in values.items()
        ]
        made.lines += [
            "tinker_cookbook.utils.ml_log:210 [INFO] ",
            f"{'Step ' + str(step):^62}",
            f"┏{'━' * 47}┳{'━' * 14}┓",
            f"┃ {'Metric':<45} ┃ {'Value':<12} ┃",
            f"┡{'━' * 47}╇{'━' * 14}┩",
            *rows,
            f"└{'─' * 47}┴{'─' * 14}┘",
        ]
        made.rows[step] = {
            "update_s": train,
            "weight_sync_s": sync,
            "step_s": round(total + train + sync, 6),
            "lag_mean": 0.75,
            "lag_max": 2.0,
            "group_max_s": 300.5,
        }
    return made


MORE: dict[str, Callable[[random.Random, int], Made]] = {
    "areal": areal,
    "roll": roll,
    "roll_agentic": roll_agentic,
    "skyrl": skyrl,
    "skyrl_pairs": skyrl_pairs,
    "skyrl_timers": skyrl_timers,
    "openrlhf_sync": openrlhf_sync,
    "openrlhf_async": openrlhf_async,
    "trl_grpo": trl_grpo,
    "trl_async": trl_async,
    "trl_async_new": trl_async_new,
    "trl_deepspeed": deepspeed,
    "rlinf_async": rlinf_async,
    "rlinf_json": rlinf_json,
    "tinker_json": tinker_json,
    "tinker_table": tinker_table,
}

NO_STEPS = ("skyrl_timers", "trl_grpo", "trl_async", "trl_async_new", "trl_deepspeed")
"""Logs that do not say which step a row is."""


def made_text(name: str, rng: random.Random, num: int) -> str:
    """Return a made log as one text."""
    return "\n".join(MORE[name](rng, num).lines)
