"""Wide expert parallelism in engines, context parallelism in trainers: layouts, memory, time, plans."""

from itertools import pairwise
from math import inf

import pytest

from bidirl.models.architecture import from_catalogue
from bidirl.models.catalogue import gpu
from bidirl.models.estimate import Source
from bidirl.models.memory import train_memory
from bidirl.models.memory_roles import megatron_memory
from bidirl.models.roofline import ALL_REDUCE_S, ExpertIteration
from bidirl.planner.build import build_workload
from bidirl.planner.gates import Predictor, batch_work
from bidirl.planner.search.candidates import Search
from bidirl.planner.search.layouts import RolloutLayout, Style, TrainLayout, rollout_layouts, train_layouts
from bidirl.planner.search.plans import plan_of, question_of
from bidirl.planner.search.rollout_pool import RolloutPool
from bidirl.planner.search.train_pool import TrainPool
from tests.search_cases import question, small_job

MOE = from_catalogue("Qwen3-30B-A3B")
EXPERTS = ('cluster.gpu="H100"', 'model.name="Qwen3-30B-A3B"')


def test_experts_are_spread_evenly_over_more_gpus_than_a_layer() -> None:
    found = rollout_layouts(MOE, 8, 64)
    wide = [each for each in found if each.ep > 1]
    assert RolloutLayout(1, 1, 8) in wide
    assert RolloutLayout(4, 1, 16) in wide
    for each in wide:
        assert MOE.num_experts % each.ep == 0
        assert each.ep % each.tp == 0
        assert each.ep > each.tp
        assert each.gpus == each.ep == each.tp * each.groups
    assert all(each.ep == 1 for each in rollout_layouts(from_catalogue("Qwen3-8B"), 8, 64))


def test_a_wide_engine_holds_each_expert_once_and_the_rest_in_each_group() -> None:
    pool = RolloutPool(question(*EXPERTS), RolloutLayout(1, 1, 8))
    dense = MOE.num_params - MOE.routed_params
    assert pool.part.num_params == pytest.approx(dense + MOE.routed_params / 8, abs=1)
    alone = RolloutPool(question(*EXPERTS), RolloutLayout(1))
    assert pool.limits.kv_tokens > 8 * alone.limits.kv_tokens  # what the experts leave free is cache
    assert pool.limits.max_num_seqs == 8 * alone.limits.max_num_seqs


def test_the_all_to_all_of_a_wide_engine_in_closed_form() -> None:
    asked = question(*EXPERTS)
    wide, plain = (RolloutPool(asked, layout) for layout in (RolloutLayout(2, 1, 8), RolloutLayout(2)))
    one, other = wide.iteration, plain.iteration
    assert isinstance(one, ExpertIteration)
    assert isinstance(other, ExpertIteration)
    moved = 48 * 4 * 8 * 2048 * 7 / 8  # layers, there and back in BF16, k, hidden, leaving the GPU
    rate = asked.links(8, of_rollout=True).group_bytes_per_s(8)
    extra = one.affine.beta_tok_pre_s - other.affine.beta_tok_pre_s / 4
    assert extra == pytest.approx(moved / rate / 8)
    assert one.affine.tau_dec_s - other.affine.tau_dec_s == pytest.approx(2 * 48 * ALL_REDUCE_S)
    assert one.experts_s == pytest.approx(other.experts_s / 4)
    estimate = wide.sources["iteration.all_to_all_s_per_token"]
    assert estimate.low < estimate.value < estimate.high
    assert estimate.source is Source.ROOFLINE


def test_experts_beyond_one_gpu_fit_a_wide_engine() -> None:
    """Qwen3-30B-A3B needs two A6000 by tensor parallelism; attention groups of one GPU share eight."""
    asked = question('model.name="Qwen3-30B-A3B"')
    assert RolloutPool(asked, RolloutLayout(1)).refused is not None
    assert RolloutPool(asked, RolloutLayout(1, 1, 8)).refused is None


@pytest.mark.parametrize("cp", [2, 4])
def test_context_parallel_memory_is_that_of_a_part_of_each_sequence(cp: int) -> None:
    h100 = gpu("H100")
    whole, part = train_memory(h100, MOE, 1, 16, 8192 // cp), train_memory(h100, MOE, 1, 16, 8192, cp)
    assert part.items == whole.items
    layout = {"tp": 2, "pp": 1, "ep": 4, "num_gpus": 16}
    one = megatron_memory(h100, MOE, micro_tokens=8192 // cp, **layout)
    other = megatron_memory(h100, MOE, micro_tokens=8192, cp=cp, **layout)
    assert one.items == other.items
    logits = next(item for item in other.items if item.name == "logits")
    assert logits.num_bytes == 8192 / cp * MOE.vocab_size * 4 / 2


def test_ulysses_leaves_each_gpu_whole_heads_and_experts_whole_groups() -> None:
    for model in (MOE, from_catalogue("Qwen3-8B"), from_catalogue("Qwen3-VL-4B")):
        heads, kv = model.num_attention_heads, model.num_kv_heads
        for each in train_layouts(model, 8, 64):
            assert each.unit_gpus % each.gpus == 0 or each.unit_gpus % (each.ep * each.pp) == 0
            assert each.gpus == each.tp * each.pp * each.cp
            if each.style is Style.FSDP:
                assert heads // each.tp % each.cp == 0
                assert kv % each.cp == 0 or each.cp % kv == 0


LONG = ("workload.max_response_tokens=65536", "workload.lengths={mean=20000.0, max=65536}")


def test_a_sequence_too_long_for_one_gpu_fits_a_context_parallel_trainer() -> None:
    asked = question("cluster.num_nodes=4", 'model.name="Qwen3-8B"', *LONG)
    assert not TrainPool(asked, TrainLayout(Style.FSDP, 1)).micro_tokens.any()
    assert TrainPool(asked, TrainLayout(Style.FSDP, 1, cp=8)).micro_tokens.any()


@pytest.mark.parametrize("style", list(Style))
def test_context_parallelism_shortens_the_longest_sample_and_costs_exchange(style: Style) -> None:
    """With few, long samples a step is its longest one; with many the same GPUs gain nothing."""
    few = question('cluster.gpu="H100"', "cluster.num_nodes=4", *LONG, "workload.prompts_per_step=4")
    many = question('cluster.gpu="H100"', "cluster.num_nodes=4", "workload.prompts_per_step=512")
    layouts = [TrainLayout(style, 1, cp=cp) for cp in (1, 2, 4)]
    long = [TrainPool(few, layout).seconds_on(16) for layout in layouts]
    assert all(one > other for one, other in pairwise(long) if one < inf)
    short = [TrainPool(many, layout).seconds_on(16) for layout in layouts]
    assert all(one <= other for one, other in pairwise(short))
    pool = TrainPool(few, layouts[-1])
    pool.seconds_on(16)
    assert pool.sources["trainer.context_s_per_token"].high > pool.sources["trainer.context_s_per_token"].low


@pytest.mark.parametrize(
    ("rollout", "train"),
    [
        (RolloutLayout(1, 1, 8), TrainLayout(Style.MEGATRON, 2, 1, 4, 2)),
        (RolloutLayout(2), TrainLayout(Style.FSDP, 1, cp=4)),
    ],
)
def test_plans_of_these_layouts_have_the_prices_of_the_search(
    rollout: RolloutLayout, train: TrainLayout
) -> None:
    job = small_job(*EXPERTS, "cluster.num_nodes=4", "workload.prompts_per_step=64")
    search = Search(question_of(job, build_workload(job, 0)))
    split = next(each for each in search.splits() if each.rollout_gpus == 16)
    candidate = next(
        each
        for each in search.alternatives(split, inf, 100_000)
        if (each.rollout, each.train) == (rollout, train)
    )
    plan = plan_of(job, search, candidate)
    predictor = Predictor(plan)
    assert plan.rollout_replicas == 16 // rollout.gpus
    assert predictor.rollout_s(64, plan.rollout_replicas, 0) == pytest.approx(candidate.rollout_s)
    assert predictor.train_s(batch_work(plan), plan.train_replicas) == pytest.approx(candidate.train_s)
