"""Models of a file: which layouts a search reaches with them, and what it makes of another layout."""

from dataclasses import replace
from pathlib import Path

import pytest

from bidirl.models.estimate import Source
from bidirl.models.iteration import AffineIteration
from bidirl.models.profiled import ProfiledIteration
from bidirl.models.stages import StageModels
from bidirl.planner.build import build_plan, build_workload
from bidirl.planner.gates import Predictor, batch_work
from bidirl.planner.job import Job
from bidirl.planner.search.candidates import Search
from bidirl.planner.search.layouts import RolloutLayout, Style, TrainLayout
from bidirl.planner.search.measured import layouts_note, moved_iteration, moved_limits, moved_trainer
from bidirl.planner.search.plans import plan_of, question_of
from bidirl.planner.search.question import Question
from tests.search_cases import small_job

SPLIT = ("partition.rollout_gpus=8", "workload.prompts_per_step=64")


def priors(*overrides: str) -> StageModels:
    job = small_job(*SPLIT, *overrides)
    return build_plan(job, build_workload(job, 0)).models


def filed(folder: Path, models: StageModels, *overrides: str) -> tuple[Job, Question]:
    """Return the job with a models file, and its question."""
    path = folder / "models.json"
    models.save(path)
    job = small_job(*SPLIT, f'models.file="{path}"', *overrides)
    return job, question_of(job, build_workload(job, 0))


def slowed(models: StageModels, factor: float) -> StageModels:
    iteration = models.iteration
    assert isinstance(iteration, AffineIteration)
    numbers = (getattr(iteration, name) * factor for name in AffineIteration.__slots__)
    return replace(models, iteration=AffineIteration(*numbers))


def test_a_prior_taken_to_another_layout_is_the_prior_of_that_layout(tmp_path: Path) -> None:
    _, question = filed(tmp_path, priors())
    assert question.measured is not None
    other = priors("partition.rollout_tp=2", "partition.train_tp=2")
    found = moved_iteration(question, question.measured, 2)
    assert isinstance(found, AffineIteration)
    assert isinstance(other.iteration, AffineIteration)
    for name in AffineIteration.__slots__:
        assert getattr(found, name) == pytest.approx(getattr(other.iteration, name)), name
    assert moved_limits(question, question.measured, 2).kv_tokens == pytest.approx(
        other.limits.kv_tokens, rel=1e-4
    )
    trainer = moved_trainer(question, question.measured, 2)
    assert trainer.update.alpha_s == pytest.approx(other.trainer.update.alpha_s)
    assert trainer.update_bytes == pytest.approx(other.trainer.update_bytes)


def test_what_was_measured_keeps_its_weight(tmp_path: Path) -> None:
    models = slowed(priors(), 3.0)
    _, question = filed(tmp_path, models)
    assert question.measured is not None
    assert moved_iteration(question, question.measured, 1) == models.iteration
    found = moved_iteration(question, question.measured, 4)
    plain = priors("partition.rollout_tp=4").iteration
    assert found.decode(64)[0] == pytest.approx(3.0 * plain.decode(64)[0])


def test_the_measured_layout_is_that_of_the_partition(tmp_path: Path) -> None:
    tensor = ("partition.rollout_tp=2", "partition.train_tp=2")
    job, question = filed(tmp_path, priors(*tensor), *tensor)
    assert question.measured_tp == (2, 2)
    search = Search(question)
    assert RolloutLayout(2) in [pool.layout for pool in search.rollouts]
    assert all(pool.layout.style is Style.FSDP for pool in search.trains)
    assert "rollout tp2, fsdp tp2; other tensor sizes are scaled" in layouts_note(question)
    assert job.partition is not None
    named = search.named(job.partition)
    assert named is not None
    plan = plan_of(job, search, named)
    assert plan.models == build_plan(job, build_workload(job, 0)).models


def test_a_plan_in_another_layout_has_the_price_of_the_search(tmp_path: Path) -> None:
    job, question = filed(tmp_path, slowed(priors(), 2.0))
    search = Search(question)
    split = next(each for each in search.splits() if each.rollout_gpus == 8)
    wanted = (RolloutLayout(4), TrainLayout(Style.FSDP, 2))
    candidate = next(
        each for each in search.alternatives(split, 1e9, 1000) if (each.rollout, each.train) == wanted
    )
    plan = plan_of(job, search, candidate)
    predictor = Predictor(plan)
    assert plan.rollout_replicas == 2
    assert predictor.rollout_s(64, 2, 0) == pytest.approx(candidate.rollout_s)
    assert predictor.train_s(batch_work(plan), plan.train_replicas) == pytest.approx(candidate.train_s)
    sources = plan.models.sources
    assert sources["iteration.tau_dec_s"].source.rank >= Source.TRANSFERRED.rank


def test_profile_tables_keep_their_layout(tmp_path: Path) -> None:
    _, question = filed(tmp_path, priors())
    assert question.measured is not None
    tables = ProfiledIteration.__new__(ProfiledIteration)  # only its kind is looked at
    kept = replace(question, measured=replace(question.measured, iteration=tables))
    assert "only pool sizes are searched: its profile tables" in layouts_note(kept)
    assert layouts_note(replace(question, measured=None)) == ""


def test_without_a_roofline_only_pool_sizes_vary(tmp_path: Path) -> None:
    """A board of which only the memory is known."""
    models = priors()
    _, question = filed(tmp_path, models, 'cluster.gpu={name="thing", memory_gib=48}')
    search = Search(question)
    assert [pool.layout for pool in search.rollouts] == [RolloutLayout(1)]
    assert [pool.layout for pool in search.trains] == [TrainLayout(Style.FSDP, 1)]
    assert "no roofline to scale them by (gpu 'thing' has no" in layouts_note(question)
