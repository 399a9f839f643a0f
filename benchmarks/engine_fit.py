"""Derive the engine models of two public vLLM runs from their profiles, and draw them against the runs.

``python -m benchmarks.engine_fit models``   writes bidirl/models/data/engine_*.json
``python -m benchmarks.engine_fit figures``  writes docs/engine_*.png and prints the errors

The public data are read from ``$BIDIRL_DATA`` (default: ``../shared/data`` beside the repository).
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bidirl.models.profiled import ProfiledIteration, iteration_from_json, iteration_to_json, vllm_graph_sizes
from bidirl.models.replica import EngineLimits
from bidirl.sim.engine import EngineTimes, errors_against, simulate_requests
from bidirl.sim.request_file import Requests, read_requests

if TYPE_CHECKING:
    import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
LAYERS = 32
"""Decoder layers of Llama-3.1-8B. Source: its config.json, num_hidden_layers."""
PER_LAYER = {
    "layernorm": 2,
    "qkv_proj": 1,
    "rotary_emb": 1,
    "o_proj": 1,
    "gate_up_proj": 1,
    "act_fn": 1,
    "down_proj": 1,
}
"""Operators of one decoder layer and how often each runs: one norm before attention, one before the MLP."""
PER_MODEL = ("embedding", "final_layernorm")
MAX_CONTEXT = 4096
"""Decode attention is taken as affine in the context up to here: chat and RL responses."""
MIN_CONTEXT = 128
"""Below it the kernel's fixed cost hides the slope."""
MIXED_CHUNKS = (256, 512, 1024, 2048)
"""Prefill chunks over which the cost of decoding beside prefill is averaged: usual shares of a budget."""
MIXED_MAX_HISTORY = 1024
"""... and the cached tokens before them."""
DENSE_POINTS = (
    1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024,
    1280, 1536, 1792, 2048,
)  # fmt: skip
RUNS = {
    "rtx4090": ("vllm_run_rtx4090_llama-31-8b", "llmservingsim_rtx4090_llama31_8b"),
    "rtxpro6000": ("vllm_run_rtxpro6000_llama-31-8b", "llmservingsim_rtxpro6000_llama31_8b"),
}
NUM_FITTED = 150
"""Requests of the RTX PRO 6000 run that its dense part is fitted on: the first half by arrival."""


def data_folder() -> Path:
    """Return the folder of the public data."""
    return Path(os.environ.get("BIDIRL_DATA", ROOT.parent / "shared" / "data")).resolve()


def model_path(run: str) -> Path:
    """Return where the package keeps the model of a run."""
    return ROOT / "bidirl" / "models" / "data" / f"engine_{run}_llama31_8b.json"


def read_run(run: str) -> Requests:
    """Read the measured requests of a run."""
    return read_requests(data_folder() / "profiles" / f"{RUNS[run][0]}_requests.csv")


def profile(run: str, part: str) -> "pd.DataFrame":
    """Read one table of a profile: microseconds of ONE layer."""
    import pandas as pd

    return pd.read_csv(data_folder() / "profiles" / f"{RUNS[run][1]}_{part}.csv")


def affine(x: Any, y: Any) -> tuple[float, float]:
    """Fit ``y = a + b x`` with ``a >= 0`` by least squares of the relative errors."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    a, b = np.linalg.lstsq(np.stack([1 / y, x / y], 1), np.ones(len(y)), rcond=None)[0]
    if a < 0:
        return 0.0, float((x / y).sum() / ((x / y) ** 2).sum())
    return float(a), float(b)


def seconds(values_us: Any, layers: int = 1) -> tuple[float, ...]:
    """Return microseconds of one layer as seconds of ``layers``, to five digits."""
    return tuple(float(f"{v * layers * 1e-6:.5g}") for v in values_us)


def attention_tables(attention: "pd.DataFrame") -> dict[str, Any]:
    """Return the attention tables of a ProfiledIteration."""
    context = attention.kv_decode.between(MIN_CONTEXT, MAX_CONTEXT)
    pure = attention[(attention.prefill_chunk == 0) & context]
    prefill = attention[(attention.n_decode == 0) & (attention.kv_prefill <= MAX_CONTEXT)]
    alone = {
        (c, k): t for c, k, t in zip(prefill.prefill_chunk, prefill.kv_prefill, prefill.time_us, strict=True)
    }
    beside = attention[
        attention.prefill_chunk.isin(MIXED_CHUNKS)
        & (attention.kv_prefill <= MIXED_MAX_HISTORY)
        & (attention.n_decode > 0)
        & context
    ]
    extra = beside.time_us - [
        alone[c, k] for c, k in zip(beside.prefill_chunk, beside.kv_prefill, strict=True)
    ]
    beside = beside.assign(extra_us=extra)
    nums = sorted(int(n) for n in set(pure.n_decode))
    decode, mixed = [], []
    for num in nums:
        rows = pure[pure.n_decode == num]
        decode.append(affine(rows.kv_decode * num, rows.time_us))
        means = beside[beside.n_decode == num].groupby("kv_decode").extra_us.mean()
        means = means[means > 0]
        # The profile has no mixed rows of 256 sequences: there decoding is priced as if alone.
        mixed.append(affine(means.index.to_numpy() * num, means.to_numpy()) if len(means) > 1 else decode[-1])
    chunks = sorted(int(c) for c in set(prefill.prefill_chunk) - {0})
    visible = []
    for chunk in chunks:
        rows = prefill[prefill.prefill_chunk == chunk]
        visible.append(affine(rows.kv_prefill + (chunk + 1) / 2, rows.time_us))
    return {
        "decode_seqs": tuple(nums),
        "decode_base_s": seconds([a for a, _ in decode], LAYERS),
        "decode_context_token_s": seconds([b for _, b in decode], LAYERS),
        "mixed_base_s": seconds([a for a, _ in mixed], LAYERS),
        "mixed_context_token_s": seconds([b for _, b in mixed], LAYERS),
        "prefill_tokens": tuple(chunks),
        "prefill_base_s": seconds([a for a, _ in visible], LAYERS),
        "prefill_visible_token_s": seconds([b for _, b in visible], LAYERS),
    }


def rtx4090() -> dict[str, Any]:
    """Return the model file of Llama-3.1-8B on one RTX 4090: every number from the profile."""
    table = profile("rtx4090", "dense").pivot(index="tokens", columns="layer", values="time_us")
    dense: Any = LAYERS * sum(table[name] * times for name, times in PER_LAYER.items())
    dense = dense + sum(table[name] for name in PER_MODEL)
    heads = (
        profile("rtx4090", "per_sequence")
        .pivot(index="sequences", columns="layer", values="time_us")
        .sum(axis=1)
    )
    iteration = ProfiledIteration(
        dense_tokens=DENSE_POINTS,
        dense_s=seconds(dense.loc[list(DENSE_POINTS)]),
        output_seqs=tuple(int(n) for n in heads.index),
        output_s=seconds(heads),
        graph_sizes=vllm_graph_sizes(256),
        **attention_tables(profile("rtx4090", "attention")),
    )
    return {
        "source": "measured: LLMServingSim layerwise profile of vLLM 0.19, Llama-3.1-8B bf16, one RTX 4090 "
        "(one layer x 32; embedding, final norm, head and sampler once). No constant comes from a run.",
        "limits": {"kv_tokens": 41408, "block_size": 16, "max_num_seqs": 256, "max_num_batched_tokens": 2048},
        "iteration": iteration_to_json(iteration),
    }


def roofline_dense(base_s: float, token_s: float, bound_token_s: float) -> dict[str, Any]:
    """Return dense tables ``max(base + token * N, bound * N)``; the head is inside the base."""
    points = (1, 64, 128, 192, 256, 320, 384, 448, 512, 768, 1024, 2048)
    return {
        "dense_tokens": points,
        "dense_s": tuple(float(f"{max(base_s + token_s * n, bound_token_s * n):.5g}") for n in points),
        "output_seqs": (1,),
        "output_s": (0.0,),
    }


def rtxpro6000() -> dict[str, Any]:
    """Return the model file of Llama-3.1-8B on one RTX PRO 6000: attention profiled, the rest fitted."""
    from scipy.optimize import minimize

    requests = read_run("rtxpro6000")
    measured = requests.measured
    assert measured is not None
    limits = EngineLimits(kv_tokens=540_000, max_num_seqs=128, max_num_batched_tokens=2048)
    attention = attention_tables(profile("rtxpro6000", "attention"))

    def build(x: Any) -> ProfiledIteration:
        dense = roofline_dense(*np.exp(x))
        return ProfiledIteration(**dense, graph_sizes=vllm_graph_sizes(128), **attention)

    fitted = np.arange(NUM_FITTED)
    output = np.array(requests.output_tokens)[fitted] - 1
    arrival = np.array(requests.arrival_s)[fitted]

    def loss(x: Any) -> float:
        times = simulate_requests(requests, build(x), limits)
        real = np.array(measured.first_token_s)[fitted], np.array(measured.last_token_s)[fitted]
        ours = np.array(times.first_token_s)[fitted], np.array(times.last_token_s)[fitted]
        latency = (ours[1] - arrival) / (real[1] - arrival) - 1
        per_token = ((ours[1] - ours[0]) / output) / ((real[1] - real[0]) / output) - 1
        return float((latency**2).mean() + (per_token**2).mean())

    start = np.log([10e-3, 20e-6, 50e-6])
    best = minimize(loss, start, method="Nelder-Mead", options={"maxiter": 120, "xatol": 1e-3, "fatol": 1e-7})
    base_s, token_s, bound_s = (float(f"{v:.4g}") for v in np.exp(best.x))
    iteration = build(np.log([base_s, token_s, bound_s]))
    return {
        "source": "attention measured: LLMServingSim layerwise profile of vLLM 0.19, Llama-3.1-8B bf16, one "
        f"RTX PRO 6000. Dense part fitted (3 parameters) on the first {NUM_FITTED} requests of the public "
        "run: base "
        f"{base_s} s, {token_s} s per token, at least {bound_s} s per token. kv_tokens assumed: the run "
        "never fills it, so it cannot be fitted.",
        "limits": {
            "kv_tokens": 540000,
            "block_size": 16,
            "max_num_seqs": 128,
            "max_num_batched_tokens": 2048,
        },
        "iteration": iteration_to_json(iteration),
    }


def simulate(run: str, **limits: Any) -> tuple[Requests, EngineTimes]:
    """Simulate a run with the packaged model, some limits changed."""
    data = json.loads(model_path(run).read_text(encoding="utf-8"))
    requests = read_run(run)
    limit = replace(EngineLimits(**data["limits"]), **limits)
    return requests, simulate_requests(requests, iteration_from_json(data["iteration"]), limit)


def draw(run: str, title: str) -> None:
    """Draw running and waiting requests, measured and simulated, once a second."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    import pandas as pd

    requests, times = simulate(run)
    series = pd.read_csv(data_folder() / "profiles" / f"{RUNS[run][0]}_timeseries.csv")
    ticks = series.t.to_list()
    ours = {"running": times.running_at(ticks), "waiting": times.waiting_at(requests.arrival_s, ticks)}
    figure, axes = plt.subplots(2, 1, figsize=(9, 6), sharex=True, layout="constrained")
    for axis, name in zip(axes, ours, strict=True):
        axis.plot(ticks, series[name], color="0.55", lw=3, label="measured (vLLM 0.19)")
        axis.plot(ticks, ours[name], color="C3", lw=1.2, label="simulated")
        axis.set_ylabel(f"{name} requests")
        axis.set_ylim(bottom=0)
    axes[0].legend(frameon=False)
    axes[0].set_title(title)
    axes[1].set_xlabel("seconds")
    figure.savefig(ROOT / "docs" / f"engine_{run}.png", dpi=110)
    plt.close(figure)


def report(run: str, rows: list[int] | None = None, **limits: Any) -> None:
    """Print the errors of a run."""
    requests, times = simulate(run, **limits)
    assert requests.measured is not None
    part = "all" if rows is None else f"requests {rows[0]} to {rows[-1]}"
    print(
        f"{run} {limits or ''} {part}: {times.num_preemptions} preemptions, "
        f"{times.recomputed_tokens} recomputed"
    )
    for e in errors_against(requests.measured, requests, times, rows):
        spread = " ".join(f"p{p} {100 * v:+.2f}" for p, v in e.percentile_errors.items())
        each = "" if e.request_error is None else f" each {100 * e.request_error:.2f}"
        print(
            f"  {e.name:9} {e.measured_s:9.4g} {e.simulated_s:9.4g} s "
            f"{100 * e.mean_error:+.2f} % {spread}{each}"
        )


def main(what: str) -> None:
    """Write the models or the figures."""
    if what == "models":
        for run, make in {"rtx4090": rtx4090, "rtxpro6000": rtxpro6000}.items():
            model_path(run).write_text(json.dumps(make(), indent=1) + "\n", encoding="utf-8")
        return
    report("rtx4090")
    report("rtx4090", prefix_caching=False)
    report("rtxpro6000", list(range(NUM_FITTED)))
    report("rtxpro6000", list(range(NUM_FITTED, 300)))
    draw("rtx4090", "Llama-3.1-8B, one RTX 4090, 300 requests; coefficients from the profile alone")
    draw("rtxpro6000", "Llama-3.1-8B, one RTX PRO 6000, 300 requests; dense part fitted on the first 150")


if __name__ == "__main__":
    main(*sys.argv[1:])
