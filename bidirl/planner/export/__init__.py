"""Config lines for the frameworks that users run: ``bidirl-plan export PLAN --framework F``.

Only options that exist in the framework are written (``options.py`` names version and file of each), the
staleness bound is converted by its own convention (``staleness.py``), and what a plan asks for but the
framework lacks is said in comment lines (``behaviour.py``).
"""

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path

from bidirl.errors import InputError, InvariantBroken
from bidirl.planner.export.areal import areal
from bidirl.planner.export.nemo_rl import nemo_rl
from bidirl.planner.export.openrlhf import openrlhf
from bidirl.planner.export.options import VERSIONS, unknown_options
from bidirl.planner.export.plan_file import ExportPlan, read_plan
from bidirl.planner.export.prime_rl import prime_rl
from bidirl.planner.export.recipe import Recipe, render
from bidirl.planner.export.roll import roll
from bidirl.planner.export.skyrl import skyrl
from bidirl.planner.export.slime import slime
from bidirl.planner.export.verl import dynamic_schedule, fully_async, separate_async, sync
from bidirl.planner.policy import Lending

__all__ = ["FRAMEWORKS", "export_command", "export_text", "recipe_for"]

FRAMEWORKS: Mapping[str, Callable[[ExportPlan], Recipe]] = {
    "areal": areal,
    "nemo_rl": nemo_rl,
    "openrlhf": openrlhf,
    "prime_rl": prime_rl,
    "roll": roll,
    "skyrl": skyrl,
    "slime": slime,
    "verl_dynamic_schedule": dynamic_schedule,
    "verl_fully_async": fully_async,
    "verl_sync": sync,
    "verl_v1_separate_async": separate_async,
}
"""What ``--framework`` takes, beside ``verl``, which picks the trainer of verl that suits the plan."""
VERL = "verl"


def recipe_for(plan: ExportPlan, framework: str) -> Recipe:
    """Return the options of one framework for a plan.

    Raises:
        InputError: no framework has this name, or it cannot run the plan at all.
    """
    name = framework.strip().lower().replace("-", "_")
    if name == VERL:
        name = _verl_trainer(plan)
    if name not in FRAMEWORKS:
        near = get_close_matches(name, (VERL, *FRAMEWORKS), n=1)
        remedy = f"did you mean {near[0]}?" if near else "choose one of them"
        raise InputError(
            f"--framework {framework}: unknown, they are {', '.join((VERL, *FRAMEWORKS))}; {remedy}"
        )
    recipe = FRAMEWORKS[name](plan)
    if unknown := unknown_options(name, set(recipe.settings)):
        raise InvariantBroken(f"{name} writes {', '.join(unknown)}, which its table of options does not have")
    return recipe


def export_text(plan: ExportPlan, framework: str) -> str:
    """Return the text to paste for one framework: comments, then options in its own syntax.

    Raises:
        InputError: as ``recipe_for``.
    """
    recipe = recipe_for(plan, framework)
    return render(recipe, _head(plan, recipe))


def export_command(plan: Path, framework: str, out: Path | None) -> str:
    """Return the text to paste for the plan in a file, and write it to ``out`` if that is given.

    Raises:
        InputError: the file is no plan, the framework cannot run it, or ``out`` cannot be written.
    """
    text = export_text(read_plan(plan), framework)
    if out is not None:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(f"{out}: {error.strerror}: give a file that can be written") from None
    return text


def _verl_trainer(plan: ExportPlan) -> str:
    if plan.colocated:
        return "verl_sync"
    lends = plan.policy.lending in (Lending.ROLLOUT_ON_TRAIN, Lending.BOTH)
    return "verl_dynamic_schedule" if lends else "verl_fully_async"


def _head(plan: ExportPlan, recipe: Recipe) -> Iterator[str]:
    version = VERSIONS[recipe.framework]
    yield f"bidirl-plan export --framework {recipe.framework}; options looked up in {version}."
    train = (
        f"{plan.train_style} tp {plan.train.tp} pp {plan.train.pp} ep {plan.train.ep}"
        f"{f' cp {plan.train.cp}' if plan.train.cp > 1 else ''}, {plan.train_dp} data-parallel"
    )
    rollout = (
        f"tp {plan.rollout.tp} pp {plan.rollout.pp} ep {plan.rollout.ep}, {plan.rollout_replicas} engines"
    )
    cluster = f"{plan.num_nodes} x {plan.gpus_per_node} GPUs"
    if plan.colocated:
        yield f"Plan: {plan.train_gpus} of {cluster} taking turns; rollout {rollout}; training {train}."
    else:
        yield (
            f"Plan on {cluster}: {plan.rollout_gpus} generate ({rollout}), {plan.train_gpus} train ({train})."
        )
    if plan.rollout_gpu:
        yield (
            f"Not expressed: the GPU types of the pools. Generation is planned on {plan.rollout_gpu}, "
            f"training on {plan.train_gpu}: start each role on nodes of its type (Ray: node labels or custom "
            "resources; Slurm: constraints)."
        )
    yield (
        f"Plan: {plan.prompts_per_step} prompts x {plan.samples_per_prompt} samples a step in "
        f"{plan.mini_batches} update(s), staleness {plan.staleness}, policy {plan.policy.name}."
    )
    model = f"model ({plan.model_name})" if plan.model_name else "model"
    yield f"Add the options that a plan does not choose: {model}, data, rewards, optimizer, logging."
