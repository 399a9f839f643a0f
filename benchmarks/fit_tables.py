"""Read the public tables that benchmarks/fit_points.py fits: one spelling per fact, one row per measurement.

The folder is BIDIRL_DATA, by default ../shared/data. Run as a script this file does nothing.
"""

import os
import re
from pathlib import Path
from typing import Any

import pandas as pd

from bidirl.errors import InputError
from bidirl.models import catalogue
from bidirl.models.architecture import Architecture, from_catalogue
from bidirl.models.fit.microbatch import MicroBatch, MicroBatchRow
from bidirl.models.fit.serving import ServingPoint, ServingPrior, serving_prior
from bidirl.models.fit.switch import SwitchRow
from bidirl.models.fit.sync import SyncRow
from bidirl.models.roofline import Links

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("BIDIRL_DATA", ROOT.parent / "shared" / "data"))
MIN_CONDITIONS = 6


def _shape(name: str, layers: int, hidden: int, heads: tuple[int, int, int], **more: Any) -> Architecture:
    numbers = {"vocab_size": 200_000, "tie_word_embeddings": False} | more
    return Architecture(name, layers, hidden, *heads, **numbers)


SHAPES = {
    "Llama-3.1-70B": from_catalogue("Llama-3.1-70B"),
    "Llama-3.1-8B": from_catalogue("Llama-3.1-8B"),
    "Qwen3-32B": from_catalogue("Qwen3-32B"),
    "Qwen3-235B-A22B": from_catalogue("Qwen3-235B-A22B"),
    "DeepSeek-V3": from_catalogue("DeepSeek-V3"),
    "gpt-oss-120b": _shape(
        "gpt-oss-120b",
        36,
        2880,
        (64, 8, 64),
        num_params=117 * 10**9,
        active_params=5 * 10**9,
        num_experts=128,
        experts_per_token=4,
        num_attention_layers=18,
    ),
    "MiniMax-M2.5": _shape(
        "MiniMax-M2.5",
        62,
        3072,
        (48, 8, 128),
        num_params=230 * 10**9,
        active_params=10 * 10**9,
        num_experts=256,
        experts_per_token=8,
    ),
    "Qwen3.5-397B-A17B": _shape(
        "Qwen3.5-397B-A17B",
        60,
        4096,
        (32, 2, 256),
        num_params=397 * 10**9,
        active_params=17 * 10**9,
        num_experts=512,
        experts_per_token=10,
        num_attention_layers=15,
    ),
    "Kimi-K2.5": _shape(
        "Kimi-K2.5",
        61,
        7168,
        (64, 64, 128),
        num_params=1026 * 10**9,
        active_params=32 * 10**9,
        num_experts=384,
        experts_per_token=8,
        kv_values_per_layer=576,
    ),
    "GLM-5": _shape(
        "GLM-5",
        78,
        6144,
        (64, 64, 64),
        num_params=744 * 10**9,
        active_params=40 * 10**9,
        num_experts=256,
        experts_per_token=8,
        kv_values_per_layer=576,
    ),
}
"""Shapes for priors; rounded where the catalogue has no row. Sources: ai-dynamo/aiconfigurator
src/aiconfigurator/model_configs (Qwen3.5-397B-A17B @87fe4b0c, Kimi-K2.5 @821eb9a6, GLM-5 @691ec908);
huggingface/transformers docs/source/en/model_doc/minimax_m2.md (230B, 10B active) and GptOssConfig defaults;
parameter counts from the model's name or the product of its experts' shapes."""
NAMES = (
    ("Llama-3.1-70B", "Llama-3.1-70B"),
    ("Llama-3.1-8B", "Llama-3.1-8B"),
    ("Qwen3-32B", "Qwen3-32B"),
    ("Qwen3-235B-A22B", "Qwen3-235B-A22B"),
    ("DeepSeek", "DeepSeek-V3"),
    ("gpt-oss", "gpt-oss-120b"),
    ("MiniMax", "MiniMax-M2.5"),
    ("Qwen3.5", "Qwen3.5-397B-A17B"),
    ("Kimi", "Kimi-K2.5"),
    ("GLM", "GLM-5"),
)
BOARDS = {
    "h100_sxm": "H100 SXM",
    "h200_sxm": "H200",
    "b200_sxm": "B200",
    "b300_sxm": "B200",
    "gb200": "GB200 (per GPU)",
    "gb300": "GB200 (per GPU)",
}
"""Boards of the priors; the catalogue has no B300, which the prior takes for a B200."""
DTYPE_BYTES = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.56, "int4": 0.56}
"""Bytes of a weight; block scales of 4-bit formats included."""
KEY = ["gpu", "model", "gpus", "precision", "backend", "version", "dp", "moe_tp", "moe_ep"]
DISAGG_KEY = [
    "gpu",
    "model",
    "precision",
    "backend",
    "version",
    "prefill_tp_size",
    "decode_tp_size",
    "prefill_num_workers",
    "decode_num_workers",
]


def serving_rows(path: Path) -> pd.DataFrame:
    """Read serving points with one spelling per fact.

    The same measurement appears in several of the source's files: of rows that agree in board, software,
    model, mode, lengths, concurrency and both times (three digits) one is kept. Rows whose tp is moe_tp *
    moe_ep with both equal name one set of GPUs twice (a twin row of another file shows it): tp is moe_tp.
    """
    rows = pd.read_csv(path)
    source = rows.source
    pick = source.str.extract
    dp = rows.attention_dp_size.fillna(1).clip(lower=1)
    moe_tp, moe_ep, tp = rows.moe_tp_size.fillna(0), rows.moe_ep_size.fillna(0), rows.tp_size.fillna(0)
    twice = (tp == moe_tp * moe_ep) & (moe_tp == moe_ep) & (moe_tp > 1)
    return rows.assign(
        gpu=rows.system,
        model=[next(short for part, short in NAMES if part in name) for name in rows.model_path],
        gpus=tp.where(~twice, moe_tp),
        precision=rows.precision.fillna("bf16"),
        version=rows.backend_version.fillna("-"),
        dp=dp,
        moe_tp=moe_tp.where(~twice, 1.0),
        moe_ep=moe_ep,
        seqs=pick(r"silicon_concurrency=(\d+)")[0].astype(float).fillna(rows.batch_size * dp),
        campaign=pick(r"measured=(\d{4}-\d\d-\d\d)")[0].fillna("-"),
        tpot_3=rows.silicon_tpot_ms.map("{:.3g}".format),
        ttft_3=rows.silicon_ttft_ms.map("{:.3g}".format),
    )


def distinct(rows: pd.DataFrame) -> pd.DataFrame:
    """Drop repeats of one measurement listed in several files."""
    same = ["gpu", "backend", "model", "mode", "isl", "osl", "seqs", "tpot_3", "ttft_3"]
    return rows[~rows.duplicated(same)]


def points_of(rows: pd.DataFrame) -> list[ServingPoint]:
    """Return the points of a group."""
    return [
        ServingPoint(float(r.seqs), float(r.isl), float(r.osl), r.silicon_tpot_ms / 1e3, r.campaign)
        for r in rows.itertuples()
    ]


def prior_of(rows: pd.DataFrame) -> ServingPrior:
    """Return the roofline prior of a group."""
    first = rows.iloc[0]
    device = catalogue.gpu(BOARDS[first.gpu])
    links = Links(device.peer_bytes_per_s(8), 1e12, 72 if first.gpu.startswith("gb") else 8)
    gpus = int(first.gpus) if first["mode"] == "agg" else max(1, int(first.decode_tp_size or 1))
    return serving_prior(device, SHAPES[first.model], gpus, links, DTYPE_BYTES[first.precision])


def groups_of(rows: pd.DataFrame, mode: str, num: int) -> list[tuple[str, pd.DataFrame]]:
    """Return the groups of ``mode`` with at least ``num`` conditions."""
    keys = KEY if mode == "agg" else DISAGG_KEY
    found = []
    for key, group in rows[rows["mode"] == mode].groupby(keys, dropna=False):
        if len(group[["isl", "osl", "seqs"]].drop_duplicates()) >= num:
            found.append(
                (" ".join(f"{part:g}" if isinstance(part, float) else str(part) for part in key), group)
            )
    return found


INTELLECT = _shape(
    "INTELLECT-3",
    46,
    4096,
    (96, 8, 128),
    vocab_size=151_552,
    num_params=106 * 10**9,
    active_params=12 * 10**9,
    num_experts=128,
    experts_per_token=8,
)
"""GLM-4.5-Air's shape. Source: vllm-project/vime scripts/models/glm4.5-106B-A12B.sh @b332ffc2;
huggingface/transformers docs/source/en/model_doc/glm4_moe.md (106B, 12B active)."""
TRAINER_BOARDS = {"H100 HBM3": "H100 SXM", "H200": "H200", "B200": "B200"}
WEIGHTS: dict[str, Any] = {"RL Full": "all_host_optimizer", "SFT Full": "all"}


def trainer_rows(path: Path) -> list[MicroBatchRow]:
    """Read prime-rl's trainer table."""
    rows = []
    for row in pd.read_csv(path).itertuples():
        model = INTELLECT if row.model == "INTELLECT-3" else from_catalogue(row.model)
        device = catalogue.gpu(TRAINER_BOARDS[row.gpu])
        kept: Any = row.activation_ckpt.lower()
        weights = WEIGHTS.get(row.type, "adapter")
        run = MicroBatch(device, model, row.num_gpus, row.seq_len, weights, kept)
        rows.append(MicroBatchRow(run, row.micro_batch_time_s))
    return rows


SIZES: dict[str, tuple[float, int]] = {
    "7B": (15.2e9, 311),
    "32B": (65.5e9, 707),
    "70B": (141e9, 723),
    "30B-A3B": (61.1e9, 18867),
    "235B-A22B": (470e9, 36945),
    "GLM-4.5-Air": (212e9, 18000),
    "Qwen3-235B bf16": (470e9, 36945),
    "DeepSeek-V3.1": (671e9, 45000),
    "Kimi-K2": (1026e9, 70000),
}
"""Weight bytes and tensors where the table abbreviates the model (Qwen2.5 dense, Qwen3 experts). The large
ones are the models' names times the bytes of their format; tensors by ``Architecture.num_tensors``'s rule."""


def sync_rows(path: Path) -> dict[str, list[SyncRow]]:
    """Return the syncs of the public table by system and method; rows without a known model are left out.

    The link is one network adapter (25 GB/s beside A100, 50 GB/s beside H100, H800 and H20); checkpoint-
    engine sends with the eight adapters of a node at once. LlamaRL's rows are left out: all GPUs send at
    once, and how many there are is not recorded. Setups whose weights are sharded over 16 ranks and
    gathered tensor by tensor (the note says so) are a method of their own.
    """
    found: dict[str, list[SyncRow]] = {}
    for number, row in enumerate(pd.read_csv(path).astype(object).fillna("").itertuples(), start=1):
        if row.system == "LlamaRL":
            continue
        size = next((SIZES[key] for key in SIZES if str(row.model).startswith(key)), None)
        if size is None:
            try:
                shape = from_catalogue(str(row.model))
            except InputError:
                continue
            size = (shape.weight_bytes(), shape.num_tensors)
        link, receivers = (25e9 if "A100" in str(row.hardware) else 50e9), 1
        if row.system == "checkpoint-engine":
            link, receivers = 8 * link, int(re.findall(r"^\d+", str(row.hardware))[0])
        times = {"": row.time_s, " baseline": row.baseline_s, " optimized": row.optimized_s}
        method = (
            str(row.method).split(" vs ")[0].split("(")[0].strip()
            if row.system == "checkpoint-engine"
            else ""
        )
        for kind, seconds in times.items():
            if seconds != "":
                name = f"{number} {row.model}"
                shards = " sharded" if re.search("dp_shard|fsdp_size|FSDP1", str(row.note)) else ""
                key = f"{row.system} {method}{kind}{shards}".replace("  ", " ").strip()
                found.setdefault(key, []).append(SyncRow(name, *size, link, float(seconds), receivers))
    return found


def switch_rows() -> list[SwitchRow]:
    """Return the switches of known size: those of bidirl/models/data/switch_costs.csv."""
    rows = []
    for row in pd.read_csv(ROOT / "bidirl" / "models" / "data" / "switch_costs.csv").itertuples():
        operation = row.operation if row.system == "BiDiRL" else f"{row.operation}_{row.level:.0f}_s"
        rows.append(SwitchRow(f"{row.model} {operation}", operation, row.weight_gb * 1e9, row.time_s))
    return rows
