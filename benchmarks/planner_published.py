"""Published splits against the planner: order, bottleneck, step; writes docs/planner_published.md.

Each case is calibrated on its colocated row alone (one factor for generation, one for training), where the
source times its stages; the split's own row is never used. Run: python benchmarks/planner_published.py
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from bidirl.models.iteration import AffineIteration
from bidirl.models.roofline import ExpertIteration
from bidirl.models.stages import StageModels
from bidirl.models.trainer import SegmentCost
from bidirl.planner.build import build_plan, build_workload
from bidirl.planner.cli import simulated
from bidirl.planner.gates import Predictor, batch_work
from bidirl.planner.job import Job, load_job
from bidirl.planner.policy import Granularity, Lending, Placement, preset
from bidirl.planner.search.algorithm1 import algorithm1
from bidirl.planner.sections import Partition, SwitchOverrides

ROOT = Path(__file__).parents[1]
STEPS = 7
"""Simulated steps: the start-up, four measured ones, and the end."""


@dataclass(frozen=True)
class Row:
    case: str
    split: str
    measured_s: float | None
    predicted_s: float | None
    said: str
    """What the source shows to limit the run."""
    found: str
    """What the planner names."""
    note: str = ""


def job_of(**sections: dict[str, object]) -> Job:
    """Return a job from settings over the H100 example."""
    settings = []
    for section, keys in sections.items():
        for key, value in keys.items():
            settings.append(f"{section}.{key}={value}")
    return load_job(ROOT / "examples" / "paper_h100.toml", ["partition.rollout_gpus=1", *settings])


def scaled(models: StageModels, rollout: float, train: float) -> StageModels:
    """Return the models with all times of a role multiplied by its factor."""

    def affine(it: AffineIteration) -> AffineIteration:
        return AffineIteration(
            it.tau_pre_s * rollout,
            it.tau_dec_s * rollout,
            it.beta_tok_pre_s * rollout,
            it.beta_tok_dec_s * rollout,
            it.beta_hist_pre_s * rollout,
            it.beta_hist_dec_s * rollout,
        )

    def cost(segment: SegmentCost) -> SegmentCost:
        return SegmentCost(segment.tau_s * train, segment.alpha_s * train, segment.power)

    iteration = models.iteration
    if isinstance(iteration, ExpertIteration):
        iteration = ExpertIteration(affine(iteration.affine), iteration.experts_s * rollout, iteration.share)
    else:
        assert isinstance(iteration, AffineIteration)
        iteration = affine(iteration)
    t = models.trainer
    trainer = replace(
        t,
        old_logprob=cost(t.old_logprob),
        reference=cost(t.reference),
        update=cost(t.update),
        alpha_comm_s=t.alpha_comm_s * train,
        beta_comm_s_per_byte=t.beta_comm_s_per_byte * train,
        beta_inter_s_per_byte=t.beta_inter_s_per_byte * train,
    )
    return replace(models, iteration=iteration, trainer=trainer)


def stage_seconds(job: Job, partition: Partition) -> tuple[float, float]:
    """Return the prior's ``(M_r, M_t)`` of a partition."""
    plan = build_plan(
        replace(job, partition=partition, policy=_policy(job, partition)), build_workload(job, 0)
    )
    predictor = Predictor(plan)
    rollout_s = predictor.rollout_s(plan.groups_per_step, plan.rollout_replicas, 0)
    return rollout_s, predictor.train_s(batch_work(plan), plan.train_replicas)


def _policy(job: Job, partition: Partition):  # type: ignore[no-untyped-def]
    return preset("colocated_sync") if partition.placement is Placement.COLOCATED else job.policy


def simulate(
    job: Job,
    partition: Partition,
    factors: tuple[float, float],
    lending: Lending = Lending.NONE,
    granularity: Granularity = Granularity.STREAMED,
) -> tuple[float, str]:
    """Return the simulated step and what limits it; two pools take mini-batches as ``granularity`` says."""
    policy = _policy(job, partition)
    if lending is not Lending.NONE:
        policy = preset("rollout_on_train", staleness=policy.staleness)
    if job.workload.mini_batches > 1 and partition.placement is Placement.DISAGGREGATED:
        policy = policy.model_copy(update={"granularity": granularity})
    mine = replace(job, partition=partition, policy=policy)
    mine = replace(mine, workload=mine.workload.model_copy(update={"num_steps": STEPS}))
    plan = build_plan(mine, build_workload(mine, 0))
    plan = replace(plan, models=scaled(plan.models, *factors))
    found = simulated(mine, plan, 0)
    return found.step_s, found.limit.removeprefix("limited by ").partition(" (")[0]


def calibrated(job: Job, gpus: int, tp: int, gen_s: float, train_s: float) -> tuple[float, float]:
    """Return the factors that make the prior's colocated stages those of the source."""
    prior = stage_seconds(job, Partition(Placement.COLOCATED, gpus, 0, tp, 1))
    return gen_s / prior[0], train_s / prior[1]


def split(rollout: int, train: int, tp: int) -> Partition:
    return Partition(Placement.DISAGGREGATED, rollout, train, tp, 1)


def without_old(job: Job) -> Job:
    """Return the job of an asynchronous arm: its rows have no old-logprob stage."""
    return replace(job, workload=job.workload.model_copy(update={"old_logprob": "off"}))


H20 = {"gpu": '"H20"', "gpus_per_node": 8, "inter_node_gbit_per_s": 3200}
ENGINE = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192}
MATH_MEAN = "{mean=1000.0, max=%d}"
"""Qwen2.5-Math-7B on DAPO-Math-17k: average response 1,000 tokens (verl-recipe async_flow docs @48ea0a79).
For Qwen3-30B-A3B-Base no source prints it; at the same mean the priors give the colocated training time."""
TRAINER = "trainer"
VERL = "verl docs/advance/fully_async.md @1dda039b"
ONE_HALF = "half the GPUs trained in 1.0 to 1.2x the time of all: lengths differ between the arms"


def verl_7b() -> list[Row]:
    """Equal splits of 32, 64 and 128 H20 against colocated."""
    rows = []
    table = (
        (32, 790.10, 357.41, 107.71 + 269.80, 294.77),
        (64, 365.28, 150.72, 70.26 + 133.41, 189.26),
        (128, 356.30, 177.85, 53.92 + 113.81, 150.63),
    )
    for gpus, step_s, gen_s, train_s, async_s in table:
        job = job_of(
            cluster={**H20, "num_nodes": gpus // 8},
            model={"name": '"Qwen2.5-Math-7B"'},
            workload={
                "prompts_per_step": 512,
                "samples_per_prompt": 16,
                "max_response_tokens": 28672,
                "lengths": MATH_MEAN % 28672,
                "mini_batches": 16,
                "reference": '"off"',
            },
            engine=ENGINE,
            policy={"name": '"verl_fully_async"', "staleness": 0.5},
        )
        factors = calibrated(job, gpus, 1, gen_s, train_s)
        found, limit = simulate(without_old(job), split(gpus // 2, gpus // 2, 1), factors)
        case = f"verl 7B, {gpus} H20"
        rows.append(Row(case, "colocated", step_s, gen_s + train_s, "", "", "calibration row"))
        name = f"{gpus // 2}R:{gpus // 2}T"
        rows.append(Row(case, name, async_s, found, TRAINER, limit, ONE_HALF))
    return rows


def verl_30b() -> list[Row]:
    """96:32 of 128 H20 and splits that the source did not run (needs C01)."""
    job = job_of(
        cluster={**H20, "num_nodes": 16},
        model={"name": '"Qwen3-30B-A3B"'},
        workload={
            "prompts_per_step": 512,
            "samples_per_prompt": 16,
            "max_response_tokens": 8192,
            "lengths": MATH_MEAN % 8192,
            "mini_batches": 4,
        },
        engine=ENGINE,
        policy={"name": '"verl_fully_async"', "staleness": 0.5},
    )
    factors = calibrated(job, 128, 2, 348.05, 28.73 + 20.86 + 86.27)
    case = "verl 30B-A3B, 128 H20"
    rows = [Row(case, "colocated", 497.89, 348.05 + 135.86, "", "", "calibration row")]
    for rollout, measured in ((96, 282.75), (80, None), (64, None)):
        found, limit = simulate(without_old(job), split(rollout, 128 - rollout, 2), factors)
        said = TRAINER if measured else ""
        note = f"{VERL}; wait 7.8 % of the step" if measured else "not run by the source"
        rows.append(Row(case, f"{rollout}R:{128 - rollout}T", measured, found, said, limit, note))
    return rows


def verl_one_step_off() -> list[Row]:
    """4:12 of 16 H20 with a whole batch ahead."""
    job = job_of(
        cluster={**H20, "num_nodes": 2},
        model={"name": '"Qwen2.5-Math-7B"'},
        workload={
            "prompts_per_step": 128,
            "samples_per_prompt": 16,
            "max_response_tokens": 20480,
            "lengths": MATH_MEAN % 20480,
            "reference": '"off"',
        },
        engine=ENGINE,
        policy={"name": '"no_borrow"', "staleness": 1.0},
    )
    factors = calibrated(job, 16, 1, 321.0, 88.0 + 286.0)
    found, limit = simulate(job, split(4, 12, 1), factors)
    source = "verl docs/advance/one_step_off.md @1dda039b; batch not stated (128 assumed)"
    case = "verl 7B one-step-off, 16 H20"
    return [
        Row(case, "colocated", 749.0, 695.0, "", "", "calibration row; 54 s of the step are in no stage"),
        Row(case, "4R:12T", 520.0, found, "balanced (458 and 445 s)", limit, source),
    ]


def nemo_rl() -> list[Row]:
    """On-policy against one step off on equal halves; nothing calibrated: only whole steps are timed."""
    rows = []
    table = (
        ("Llama-3.1-8B", 2, 1, 1019 - 100, 4096, 92.8, 64.8, 8),
        ("Qwen3-30B-A3B", 4, 2, 3196 - 100, 4096, 198.0, 154.0, 16),
    )
    for model, nodes, tp, mean, cap, sync_s, off_s, half in table:
        job = job_of(
            cluster={"num_nodes": nodes},
            model={"name": f'"{model}"'},
            workload={
                "prompts_per_step": 64,
                "samples_per_prompt": 32,
                "max_response_tokens": cap,
                "lengths": f"{{mean={mean}.0, max={cap}}}",
                "prompt_tokens": 100,
            },
            engine=ENGINE,
            policy={"name": '"no_borrow"', "staleness": 1.0, "in_flight": '"drain"'},
        )
        colocated, _ = simulate(job, Partition(Placement.COLOCATED, 2 * half, 0, tp, 1), (1.0, 1.0))
        found, limit = simulate(job, split(half, half, tp), (1.0, 1.0))
        case = f"NeMo-RL {model}, {2 * half} H100"
        source = "NeMo-RL performance-summary v0.5; priors only; prompt of 100 tokens assumed"
        rows.append(Row(case, "colocated", sync_s, colocated, "", "", source))
        rows.append(Row(case, f"{half}R:{half}T", off_s, found, "not printed", limit, source))
    return rows


def no_gain() -> list[Row]:
    """needs C26: training is the step, so a split gains nothing; from the colocated row in closed form."""
    gen_s, update_s = 52.939, 430.263
    found = max(gen_s, update_s) + gen_s  # the source's wait: generation of a mini-batch is not hidden
    return [
        Row("verl 7B validation, 16 H20", "colocated", 484.6, gen_s + update_s, "", "", "calibration row"),
        Row(
            "verl 7B validation, 16 H20",
            "8R:8T",
            489.95,
            found,
            TRAINER,
            TRAINER,
            "needs C26: the update of 8 GPUs is as long as that of 16; taken over",
        ),
    ]


def verl_omni() -> list[Row]:
    """needs C03: videos, so rates in place of token models; from the 2+1 arm without lending alone."""
    videos, train_s, into, out = 128, 248.0, 9.1, 3.3
    rate = videos / 377.9
    rollout_s: Callable[[int], float] = lambda replicas: videos / (rate * replicas)  # noqa: E731
    found = algorithm1([(1, 2), (2, 2)], 1, 1, videos, rollout_s, lambda _replicas: train_s)
    assert found is not None
    lent_s = (videos - rate * (train_s + into + out)) / (3 * rate) + train_s + into + out
    case = "verl-omni, 2 hybrid + n"
    source = "verl-omni#575; rate 0.339 videos/s from the first row"
    none = [(1, 377.9, rollout_s(1)), (2, 250.4, max(rollout_s(2), train_s))]
    return [
        Row(case, "2+1", none[0][1], none[0][2], "rollout", "rollout", "calibration row"),
        Row(case, "2+1, lending", 307.8, lent_s, "rollout", "rollout", source + "; aborts not counted"),
        Row(
            case,
            "2+2",
            none[1][1],
            none[1][2],
            "trainer (waits 0.1 s)",
            "rollout" if found.rollout_replicas == 1 else "trainer",
            f"{source}; per GPU 0.113 / 0.138 / 0.128: lending is the GPU-hour plan",
        ),
    ]


def marin() -> list[Row]:
    """needs C06: what the source says bounds the gain of a second rollout node."""
    note = (
        "marin#8936; stages are not timed. Weight sync is 56 % of the time and does not shrink, so twice the "
        "rollout gains at most 22 %; to pay in GPU-hours (48 / 40) it needs 16.7 %: cannot tell, time one "
        "generation. Measured: less time with 16, fewer GPU-hours with 8"
    )
    return [
        Row("marin 32 learners", "8R", 1.0, 1.0, "sync and learner", "sync", "reference"),
        Row("marin 32 learners", "16R", 0.942, None, "sync and learner", "sync", note),
    ]


def verl_v1_lending() -> list[Row]:
    """16T + 8R on H100 without and with lending the trainers to rollout; nothing calibrated.

    V1 lends once a step, after its sync, and not while it waits for a mini-batch (verl
    docs/advance/v1_async_trainer.md, "Step Switching"): in our terms full batches. Streamed mini-batches
    would let our scheduler take a lease at each wait.
    """
    job = job_of(
        cluster={"num_nodes": 3},
        model={"name": '"Qwen3.5-35B-A3B"'},
        workload={
            "prompts_per_step": 64,
            "samples_per_prompt": 8,
            "max_response_tokens": 32768,
            "lengths": "{mean=13400.0, max=32768}",
            "mini_batches": 4,
            "reference": '"off"',
        },
        engine=ENGINE,
        policy={"name": '"no_borrow"', "staleness": 1.0},
    )
    rows = []
    source = "verl docs/advance/v1_async_trainer.md @1dda039b; priors only"
    quick = SwitchOverrides(rollout_on_train_in_s=5.0, rollout_on_train_out_s=5.0)
    known = replace(job, models=job.models.model_copy(update={"switch": quick}))
    lend, once, often = Lending.ROLLOUT_ON_TRAIN, Granularity.FULL, Granularity.STREAMED
    case, quick_case = "verl V1 35B-A3B, 24 H100", "verl V1 35B-A3B, 24 H100, 10 s switches"
    for name, each, lending, granularity, hours, note in (
        (case, job, Lending.NONE, often, 13.15, source),
        (case, job, lend, once, 11.79, f"{source}; switches of 60 s extrapolated from 4B"),
        (quick_case, known, Lending.NONE, often, 13.15, source),
        (quick_case, known, lend, once, 11.79, f"{source}; switches of 10 s, verl's default"),
        (f"{quick_case}, at each wait", known, lend, often, None, "not run by the source"),
    ):
        found, limit = simulate(each, split(8, 16, 2), (1.0, 1.0), lending, granularity)
        arm = "8R:16T" + ("" if lending is Lending.NONE else ", lending")
        measured = None if hours is None else hours * 36
        said = "" if hours is None else "not printed"
        rows.append(Row(name, arm, measured, found, said, limit, note))
    return rows


def kept_back() -> list[Row]:
    """Print predictions where the measurement is kept back."""
    job = job_of(
        cluster={**H20, "num_nodes": 4},
        model={"name": '"Qwen3.5-35B-A3B"'},
        workload={
            "prompts_per_step": 64,
            "samples_per_prompt": 8,  # 12,053 tokens/s x 547 s / 12,720 tokens = 518 samples
            "max_response_tokens": 32768,
            "lengths": "{mean=12720.0, max=32768}",
            "mini_batches": 4,
            "reference": '"off"',
        },
        engine=ENGINE,
        policy={"name": '"no_borrow"', "staleness": 1.0},
    )
    prior = stage_seconds(job, Partition(Placement.COLOCATED, 32, 0, 2, 1))
    factor = 22.79 * 3600 / 150 / sum(prior)
    rows = []
    for title, factors in (("priors", (1.0, 1.0)), ("sync row", (factor, factor))):
        case = f"Qwen3.5-35B-A3B, 32 H20 ({title})"
        for rollout, lending in (
            (16, Lending.NONE),
            (24, Lending.NONE),
            (16, Lending.ROLLOUT_ON_TRAIN),
        ):
            found, limit = simulate(job, split(rollout, 32 - rollout, 2), factors, lending)
            name = f"{32 - rollout}T+{rollout}R" + ("" if lending is Lending.NONE else ", one-way lending")
            rows.append(
                Row(
                    case,
                    name,
                    None,
                    found,
                    "",
                    limit,
                    "DAPO-Math-17k, 32K, 64 prompts; n = 8 by the printed tokens/s",
                )
            )
    return rows


def lines(rows: list[Row]) -> list[str]:
    found = [
        "| case | split | measured s | predicted s | error | limit in the source | limit predicted | note |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        measured = "" if row.measured_s is None else f"{row.measured_s:.4g}"
        predicted = "" if row.predicted_s is None else f"{row.predicted_s:.4g}"
        known = row.measured_s is not None and row.predicted_s is not None
        error = f"{row.predicted_s / row.measured_s - 1:+.0%}" if known else ""  # type: ignore[operator]
        cells = (row.case, row.split, measured, predicted, error, row.said, row.found, row.note)
        found.append(f"| {' | '.join(cells)} |")
    return found


def orders(rows: list[Row]) -> list[str]:
    """Return, per case, whether the measured order of its splits is the predicted one."""
    found = []
    for case in dict.fromkeys(row.case for row in rows):
        mine = [row for row in rows if row.case == case and row.measured_s and row.predicted_s]
        if len(mine) > 1:
            by_measured = [row.split for row in sorted(mine, key=lambda row: row.measured_s or 0.0)]
            by_predicted = [row.split for row in sorted(mine, key=lambda row: row.predicted_s or 0.0)]
            agrees = "predicted" if by_measured == by_predicted else f"predicted {' < '.join(by_predicted)}"
            found.append(f"- {case}: {' < '.join(by_measured)}; {agrees}")
    return found


TEXT = """# Published splits against the planner

Made by `benchmarks/planner_published.py`. Each case is calibrated on its colocated row alone (one factor on
all generation times, one on all training times), where the source times the stages; NeMo-RL's rows are
priors. No row of a split was used. Layouts, where a source does not state them: engines of one GPU (7B, 8B)
or two (30B, 35B), fully sharded training. Lengths follow the printed mean (for verl's math runs 1,000
tokens, from another public run of the same model and data; for Qwen3-30B-A3B it is assumed). One seed,
{steps} steps.

Read the order and the limit, not the seconds: the verl tables change the response length between arms, and
there half the GPUs train a step in 1.0 to 1.2 times the seconds of all of them, which no model that
conserves work can give. So the asynchronous rows are predicted too slow, all to the same side.

verl's V1 trainer lends its training GPUs once a step, after the sync, and takes them back when a share of
the batch is there. Its rows are simulated so, with full batches. With streamed mini-batches our scheduler
takes a lease at every wait, four a step here, and at 10 s a lease no gain is left (row "at each wait"):
that order was a policy which the source does not run, not a stage time. Two things keep the predicted gain
(4 % with 10 s switches; a loss of 4 % with the 60 s extrapolated from a 4B model) below the measured 10 %:
the cost of a switch of this model is not published; and at a staleness of one batch 1,024 samples are in
flight, so three times the engines leave each 85 sequences in place of 256, and an iteration then takes 0.64
of the time, not a third. Nothing was fitted to this case.

{table}

## Order of the alternatives (shortest step first)

{orders}

## Measurements kept back

Predictions only. `priors`: nothing fitted. `sync row`: both stages scaled by one factor, so that the
colocated step is the 547 s of verl's V1 `sync` row (22.79 h for 150 steps; its hardware is not printed).

{kept}
"""


def main() -> None:
    rows = []
    for make in (verl_7b, verl_30b, verl_one_step_off, verl_v1_lending, nemo_rl, no_gain, verl_omni, marin):
        start = perf_counter()
        rows += make()
        print(f"{make.__name__}: {perf_counter() - start:.0f} s")
    kept = kept_back()
    text = TEXT.format(
        steps=STEPS, table="\n".join(lines(rows)), orders="\n".join(orders(rows)), kept="\n".join(lines(kept))
    )
    (ROOT / "docs" / "planner_published.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
