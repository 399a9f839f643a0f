"""Measure the devices at hand by a short designed experiment, and make stage models of what was found.

Engine: cells of (sequences, prompt tokens), trainer: cells of (samples, tokens); a D-optimal few of a grid
are measured and fitted, a few others are measured only to be predicted. Then syncs and role changes, as the
control plane sees them.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bidirl.errors import InputError
from bidirl.executor.backends.assemble import Kind, assembly
from bidirl.executor.backends.stub import StubConfig
from bidirl.executor.backends.vllm.meter import Iteration
from bidirl.executor.profile_design import d_optimal, spaced
from bidirl.executor.profile_session import Session, session
from bidirl.executor.run import real_plan
from bidirl.executor.validate_fit import Fit, Level, calibrated, iteration_s, pull_work
from bidirl.executor.validate_observe import Timing
from bidirl.models.iteration import AffineIteration
from bidirl.models.stages import StageModels
from bidirl.planner.build import build_workload
from bidirl.planner.events import Direction, SegmentKind
from bidirl.planner.job import Job
from bidirl.planner.plan import Plan
from bidirl.planner.policy import Lending

__all__ = ["Cell", "Profile", "engine_cells", "profile", "trainer_cells"]

ITERATIONS = 12
"""Iterations of an engine cell: one with prefill, the rest decodes."""
GRID = 6
"""Points of each axis of the grid of candidates."""
ENGINE_CELLS, TRAINER_CELLS, CHECK_CELLS = 8, 5, 3
"""Cells that are fitted: five coefficients (engine) and two (trainer) with three to spare; and cells that
are only predicted."""
REPEATS = 3
"""Times that each cell, sync and role change is measured, after one that is not counted."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the experiment."""

    stage: str
    num_samples: int
    tokens: int
    """Prompt tokens (engine), or tokens of a sample (trainer)."""
    is_fitted: bool
    measured_s: float = 0.0
    """Median of an engine's iterations, or of the pulls."""
    predicted_s: float = 0.0

    @property
    def error(self) -> float:
        """Return ``|predicted / measured - 1|``."""
        return abs(self.predicted_s / self.measured_s - 1.0)


@dataclass(frozen=True, slots=True)
class Profile:
    """What was found."""

    models: StageModels
    fits: dict[str, Fit]
    cells: tuple[Cell, ...]
    num_costs: dict[str, int]
    """Measured syncs, switches, merges: number of each."""
    device: str

    def check_errors(self) -> dict[str, float]:
        """Return the largest error over the cells that were not fitted, by stage."""
        found: dict[str, float] = {}
        for cell in self.cells:
            if not cell.is_fitted:
                found[cell.stage] = max(found.get(cell.stage, 0.0), cell.error)
        return found

    def to_json(self) -> dict[str, Any]:
        """Return what lies beside models.json."""
        return {
            "schema": "bidirl-profile",
            "version": 1,
            "device": self.device,
            "check_errors": self.check_errors(),
            "num_costs": self.num_costs,
            "fits": {name: fit.to_json() for name, fit in self.fits.items()},
            "cells": [{**asdict(cell), "error": cell.error} for cell in self.cells],
        }


def _choose(
    stage: str, candidates: list[tuple[int, int]], design: Sequence[tuple[float, ...]], num: int, seed: int
) -> list[Cell]:
    """Return the cells to fit, chosen by what they tell, and others to check, chosen by lot."""
    rows = np.array(design)
    tau = rows[:, 0].max()
    believed = tau + sum(rows[:, at] / rows[:, at].max() for at in range(1, rows.shape[1])) * tau
    chosen = d_optimal(rows, believed, min(num, len(candidates)))
    rest = [at for at in range(len(candidates)) if at not in chosen]
    checks = np.random.default_rng(seed).permutation(rest)[:CHECK_CELLS].tolist()
    return [Cell(stage, candidates[at][0], candidates[at][1], at in chosen) for at in (*chosen, *checks)]


def engine_cells(plan: Plan, longest_tokens: int, seed: int) -> list[Cell]:
    """Return cells of (sequences, prompt tokens) that fit the engine, those that tell most marked.

    The design is that of a decode, ``tau + beta * b + hist * C``; each cell shows a prefill as well.

    Raises:
        InputError: no sample of ``longest_tokens`` leaves room for a cell's iterations.
    """
    limits = plan.models.limits
    room = longest_tokens - ITERATIONS
    if room < 1:
        raise InputError(
            f"longest sample of {longest_tokens} tokens: a cell needs {ITERATIONS + 1}; raise "
            "workload.max_response_tokens"
        )
    capacity = limits.num_blocks * limits.block_size
    candidates = [
        (num, prompt)
        for num in spaced(1, limits.max_num_seqs, GRID)
        for prompt in spaced(min(4, room), room, GRID)
        if num * (prompt + ITERATIONS + limits.block_size) <= capacity
    ]
    design = [(1.0, num, num * (prompt + ITERATIONS / 2)) for num, prompt in candidates]
    return _choose("engine", candidates, design, ENGINE_CELLS, seed)


def trainer_cells(plan: Plan, longest_tokens: int, seed: int) -> list[Cell]:
    """Return cells of (samples, tokens of each) up to a whole mini-batch, those that tell most marked."""
    most = plan.groups_per_step // plan.mini_batches * plan.samples_per_group
    candidates = [
        (num, tokens)
        for num in spaced(max(1, most // 16), most, GRID)
        for tokens in spaced(max(2, longest_tokens // 4), longest_tokens, GRID)
    ]
    work = plan.models.trainer.sample_work
    design = [(1.0, num * float(work(float(tokens)))) for num, tokens in candidates]
    return _choose("update", candidates, design, TRAINER_CELLS, seed)


def profile(
    job: Job, seed: int, kind: Kind, *, ray: str | None = None, stub: StubConfig | None = None
) -> Profile:
    """Measure the devices of a job and return its stage models.

    Raises:
        InputError: the job asks for what a real run cannot do, or something is not installed.
        RunFault: a worker was lost.
    """
    workload = build_workload(job, seed)
    plan = real_plan(job, seed)
    prompt = int(workload.block(0).prompt_tokens.max())
    longest = prompt + job.workload.max_response_tokens
    cells = engine_cells(plan, longest, seed), trainer_cells(plan, longest, seed)
    vocab_size = job.model.resolve(job.base_dir).vocab_size
    with assembly(job, plan, workload, seed, kind, ray=ray, stub=stub) as made:

        async def main() -> _Measured:
            async with session(plan, made, vocab_size, seed) as opened:
                return await _measure(opened, *cells)

        found = asyncio.run(main())
        device = made.device
    rows = [row for cell, parts in found.engine if cell.is_fitted for part in parts for row in part]
    pulls = [pull for cell, pulls in found.trainer if cell.is_fitted for pull in pulls]
    models, fits = calibrated(
        plan.models,
        rows,
        [*pulls, *found.costs],
        origin=f"profile of {device}",
        level=Level.TYPICAL,
    )
    stages = [timing.stage for timing in found.costs]
    return Profile(
        models,
        fits,
        tuple(_predicted(models, found)),
        {stage: stages.count(stage) for stage in dict.fromkeys(stages)},
        device,
    )


@dataclass(frozen=True, slots=True)
class _Measured:
    engine: list[tuple[Cell, list[tuple[Iteration, ...]]]]
    """Per cell: the iterations of each repeat and worker."""
    trainer: list[tuple[Cell, list[Timing]]]
    costs: list[Timing]


async def _measure(opened: Session, engine: list[Cell], trainer: list[Cell]) -> _Measured:
    plan = opened.plan
    await opened.generate(engine[0].num_samples, engine[0].tokens, ITERATIONS)
    generated = []
    for cell in engine:
        parts: list[tuple[Iteration, ...]] = []
        for _ in range(REPEATS):
            parts += await opened.generate(cell.num_samples, cell.tokens, ITERATIONS)
        generated.append((cell, parts))
    kinds = [*plan.segments, SegmentKind.UPDATE]
    for kind in kinds:
        await opened.pull(kind, trainer[0].num_samples, trainer[0].tokens)
    opened.timings.clear()
    pulled: list[tuple[Cell, list[Timing]]] = []
    for cell in trainer:
        pulls = []
        for kind in kinds:
            pulls += [await opened.pull(kind, cell.num_samples, cell.tokens) for _ in range(REPEATS)]
        pulled.append((cell, pulls))
    lends = {
        Direction.ROLLOUT_ON_TRAIN: plan.policy.lending in (Lending.BOTH, Lending.ROLLOUT_ON_TRAIN),
        Direction.TRAIN_ON_ROLLOUT: plan.policy.lending in (Lending.BOTH, Lending.TRAIN_ON_ROLLOUT),
    }
    costs = [timing for timing in opened.timings if timing.stage == "optimizer"]
    for repeat in range(REPEATS + 1):
        opened.timings.clear()
        await opened.sync()
        for direction, is_lent in lends.items():
            if is_lent:
                await opened.lend(direction)
        if repeat:
            costs += opened.timings
    return _Measured(generated, pulled, costs)


def _predicted(models: StageModels, found: _Measured) -> list[Cell]:
    iteration = models.iteration
    assert isinstance(iteration, AffineIteration)
    cells = []
    for cell, parts in found.engine:
        measured = float(np.median([np.median([row.seconds for row in part]) for part in parts]))
        predicted = float(
            np.median([np.median([iteration_s(iteration, row) for row in part]) for part in parts])
        )
        cells.append(Cell(cell.stage, cell.num_samples, cell.tokens, cell.is_fitted, measured, predicted))
    for cell, pulls in found.trainer:
        updates = [pull for pull in pulls if pull.stage == "update"]
        measured = float(np.median([pull.seconds for pull in updates]))
        predicted = models.trainer.update.compute_s(pull_work(updates[0]))
        cells.append(Cell(cell.stage, cell.num_samples, cell.tokens, cell.is_fitted, measured, predicted))
    return cells
