"""The configurations of the evaluation that cannot run, each with its reason."""

from collections.abc import Iterator
from math import ceil

from bidirl.errors import InputError
from bidirl.models.memory import fitting_micro_tokens, kv_estimate, train_memory
from bidirl.models.roofline import MICRO_TOKENS
from bidirl.planner.build import build_workload
from bidirl.sim.reality.paper_cells import ASYNC_BASELINES, SEED, Setting, splits, unsupported_reason
from bidirl.sim.reality.reviewer_section import Section

__all__ = ["excluded", "memory_reason"]

GRID = tuple(
    Setting(gpu=gpu, model=model, num_gpus=gpus, prompts=64 * (1 if gpu == "A6000" else 2))
    for gpu in ("A6000", "H100")
    for model in ("Qwen3-VL-2B", "Qwen3-VL-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B")
    for gpus in (8, 16, 32)
)
"""The paper's models and two larger ones on its two clusters."""
GIB = 2.0**30


def memory_reason(setting: Setting, rollout_gpus: int) -> str:
    """Return why the memory of one role does not hold (one GPU a replica); empty where both fit."""
    job = setting.job("bidirl", rollout_gpus, 1)
    device, model = job.cluster.rollout_device, job.model.resolve()
    prior = build_workload(job, SEED).prior(0)
    longest = ceil(prior.prompt_mean_tokens) + prior.max_tokens
    try:
        tokens = kv_estimate(device, model, 1, job.engine).value
    except InputError as error:
        return str(error)
    if tokens < longest:
        return f"engine: {tokens:.0f} KV tokens hold no sample of {longest}"
    train_gpus = setting.num_gpus - rollout_gpus
    micro = fitting_micro_tokens(device, model, 1, train_gpus, at_least=longest, at_most=MICRO_TOKENS)
    if micro is None:
        return train_memory(device, model, 1, train_gpus, longest).verdict()
    return ""


def _out_of_memory() -> Iterator[tuple[str, str, str]]:
    """Yield a row per (GPU, model, size): the splits that do not fit, the reason of the nearest miss."""
    for setting in GRID:
        reasons = {split: memory_reason(setting, split) for split in splits(setting)}
        misses = {split: reason for split, reason in reasons.items() if reason}
        if misses:
            names = ", ".join(f"{split}R:{setting.num_gpus - split}T" for split in misses)
            which = "all splits" if len(misses) == len(reasons) else names
            label = f"{setting.gpu} x{setting.num_gpus} {setting.model}, {which}"
            yield label, "out of memory", next(iter(misses.values()))


def _unsupported() -> Iterator[tuple[str, str, str]]:
    """Yield what a baseline does not support, once for each reason."""
    seen = set()
    for staleness in ("0.5", "1"):
        for prompts in (32, 60, 64, 128, 256):
            setting = Setting(prompts=prompts, staleness=staleness)
            for policy in ASYNC_BASELINES:
                for split in splits(setting):
                    reason = unsupported_reason(policy, setting, split)
                    if reason and reason not in seen:
                        seen.add(reason)
                        where = (
                            "any split" if "integer" in reason else f"{split}R:{setting.num_gpus - split}T"
                        )
                        yield f"{policy}, {where}", "unsupported", reason


def excluded(scale: float, measured: int) -> Section:
    """List every configuration of the grid that cannot run, with its reason; ``scale`` changes nothing."""
    del scale, measured
    rows = (*_unsupported(), *_out_of_memory())
    num_memory = sum(kind == "out of memory" for _, kind, _ in rows)
    return Section(
        "Excluded configurations",
        "the paper's models and two larger ones, 8, 16 and 32 GPUs, quarters of the cluster, 2K, one GPU a "
        "replica, nothing offloaded",
        ("configuration", "kind", "reason"),
        rows,
        f"{num_memory} of {len(GRID)} combinations of cluster and model have splits that do not fit. A "
        "failed run (a crash) cannot be foreseen by a model, so the paper's failed cells have no row here.",
    )
