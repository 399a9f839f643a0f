"""Print how far the roofline priors are from public measurements; the tables of docs/models.md.

Reads the profiles from the folder in BIDIRL_DATA (default ../shared/data) and prints markdown.
"""

import os
from pathlib import Path

import numpy as np
import pandas as pd

from bidirl.models import catalogue
from bidirl.models.architecture import from_catalogue
from bidirl.models.memory import EngineOptions, kv_estimate
from bidirl.models.roofline import Links, rollout_prior, trainer_prior

MODELS = {
    "meta-llama/Llama-3.1-70B": "Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B-Instruct": "Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "Llama-3.1-8B",
    "Qwen/Qwen3-32B": "Qwen3-32B",
    "Qwen/Qwen3-235B-A22B-FP8": "Qwen3-235B-A22B",
    "deepseek-ai/DeepSeek-R1": "DeepSeek-V3",
    "deepseek-ai/DeepSeek-V3": "DeepSeek-V3",
}
SYSTEMS = {"h100_sxm": "H100 SXM", "h200_sxm": "H200", "b200_sxm": "B200"}
BOARDS = {"H100 HBM3": "H100 SXM", "H200": "H200", "B200": "B200"}


def serving_ratios(data: Path) -> pd.DataFrame:
    """Return predicted / measured time per output token of the serving points the catalogue covers.

    Aggregated serving, BF16 or FP8, one engine of at most 8 GPUs, batch within the KV memory. The decoding
    batch follows from the measured concurrency by Little's law; each step pays its share of prefills.
    """
    points = pd.read_csv(data / "profiles" / "aic_silicon_serving_points.csv")
    points = points[
        (points["mode"] == "agg")
        & points.model_path.isin(MODELS)
        & points.system.isin(SYSTEMS)
        & points.precision.fillna("bf16").isin(["bf16", "fp8"])
        & (points.attention_dp_size.fillna(1) <= 1)
        & (points.tp_size <= 8)
    ]
    rows = []
    for point in points.itertuples():
        shape, device = from_catalogue(MODELS[point.model_path]), catalogue.gpu(SYSTEMS[point.system])
        tp, dtype = int(point.tp_size), 1.0 if point.precision == "fp8" else 2.0
        links = Links(device.peer_bytes_per_s(8), 1e12, 8)
        resident = point.batch_size * (point.isl + point.osl) * shape.kv_bytes_per_token()
        free = 0.9 * device.need("memory_bytes") * tp - shape.weight_bytes(dtype) - 2e9 * tp
        if resident > free:
            continue
        model, _ = rollout_prior(device, shape, tp, links, dtype)
        decode_s = point.osl * point.silicon_tpot_ms / 1e3
        seqs = point.batch_size * decode_s / (decode_s + point.silicon_ttft_ms / 1e3)
        base_s, context_s = model.decode(max(1, round(seqs)))
        step_s = base_s + context_s * seqs * (point.isl + point.osl / 2)
        pairs = point.isl * (point.isl + 1) / 2
        one = model.mixed(point.isl, pairs, 0, 0, 1) - model.mixed(0, 0.0, 0, 0, 1)
        step_s += seqs / point.osl * one
        kind = "experts" if shape.num_experts else ("dense BF16" if dtype > 1 else "dense FP8")
        rows.append(
            (kind, device.name, shape.name, point.backend, tp, step_s / (point.silicon_tpot_ms / 1e3))
        )
    return pd.DataFrame(rows, columns=["kind", "gpu", "model", "backend", "tp", "ratio"])


def _summary(frame: pd.DataFrame, by: list[str]) -> str:
    lines = [f"| {' | '.join(by)} | points | median ratio | median error | p90 error |"]
    lines.append("|" + "---|" * (len(by) + 4))
    for key, group in frame.groupby(by):
        names = key if isinstance(key, tuple) else (key,)
        error = np.exp(np.abs(np.log(group.ratio))) - 1.0
        lines.append(
            f"| {' | '.join(map(str, names))} | {len(group)} | {group.ratio.median():.2f} "
            f"| {error.median():.0%} | {error.quantile(0.9):.0%} |"
        )
    return "\n".join(lines)


def trainer_ratios(data: Path) -> pd.DataFrame:
    """Return predicted / measured micro-batch time of prime-rl's full-weight rows (no adapters)."""
    rows = []
    bench = pd.read_csv(data / "published" / "prime_rl_trainer_bench.csv")
    for row in bench[~bench.type.str.contains("LoRA")].itertuples():
        device = catalogue.gpu(BOARDS[row.gpu])
        links = Links(device.peer_bytes_per_s(8), 1e12, 8)
        trainer, _ = trainer_prior(device, from_catalogue(row.model), 1, row.num_gpus, links)
        work = trainer.sample_work(float(row.seq_len))
        seconds = trainer.pull_s("update", work * row.num_gpus, work, row.num_gpus) - trainer.update.tau_s
        rows.append((row.type, row.gpu, row.model, row.seq_len, row.micro_batch_time_s, seconds))
    frame = pd.DataFrame(rows, columns=["type", "gpu", "model", "seq_len", "measured_s", "predicted_s"])
    return frame.assign(ratio=frame.predicted_s / frame.measured_s)


def main() -> None:
    """Print all tables."""
    data = Path(os.environ.get("BIDIRL_DATA", Path(__file__).parents[2] / "shared" / "data"))
    serving = serving_ratios(data)
    print(f"{len(serving)} serving points\n")
    print(_summary(serving.assign(all="all"), ["all"]), "\n")
    print(_summary(serving, ["kind"]), "\n")
    print(_summary(serving, ["gpu", "model", "backend"]), "\n")
    print(trainer_ratios(data).round(2).to_string())
    engine = EngineOptions(max_num_batched_tokens=2048)
    print("\nRTX 4090", kv_estimate(catalogue.gpu("RTX 4090"), from_catalogue("Llama-3.1-8B"), 1, engine))


if __name__ == "__main__":
    main()
