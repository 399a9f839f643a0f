"""Write the example jobs of verl's tables: job files, and the fitted models that they name."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from bidirl.models.estimate import Estimate, Source
from bidirl.models.stages import StageModels
from bidirl.sim.reality.verl import ARMS, arm_system
from bidirl.sim.reality.verl_fit import System, plan_of
from bidirl.sim.reality.verl_more import MOE, MOE_LEVEL

__all__ = ["EXAMPLES", "example_models", "example_toml", "write_examples"]

EXAMPLES: Mapping[str, tuple[str, System]] = MappingProxyType(
    {
        "verl_7b_h20": (
            "verl's fully asynchronous run of Qwen2.5-Math-7B on 64 + 64 H20 (E1 to E3), staleness 0.5.",
            arm_system(ARMS["E3 64:64 s=0.5"]),
        ),
        "verl_30b_a3b_h20": (
            "verl's fully asynchronous run of Qwen3-30B-A3B on 96 + 32 H20 (E5), staleness 0.5.",
            replace(MOE, level=MOE_LEVEL),
        ),
    }
)
TOML = """\
# {title}
# A step is one parameter version of 512 prompts. The times come from the models file, whose old_logprob is
# the assembly of a batch (these runs skip the pass itself). Fits and errors: docs/validation.md.
# Source: verl-project/verl docs/advance/fully_async.md and run scripts; lengths are fitted or assumed.
# Written by `python -m bidirl.sim.reality.verl_example examples`.
[cluster]
gpu = "{device}"
num_nodes = 16
gpus_per_node = 8

[model]
name = "{model}"

[workload]
prompts_per_step = {prompts}
samples_per_prompt = {samples}
max_response_tokens = {cap}
lengths = {{ {lengths} }}
drift = [{level:g}]  # of this run against the fitted one
prompt_tokens = {prompt}
image_tokens = 0
num_steps = 12
mini_batches = {fits}  # local fits of a version, streamed
old_logprob = "on"
reference = "{reference}"

[partition]
rollout_gpus = {rollout}
train_gpus = {train}
rollout_tp = {rollout_tp}
train_tp = {train_tp}

[policy]
name = "verl_fully_async"
staleness = {staleness}
chunk_groups = {pull}  # prompts of one optimizer step
max_chunks_per_pull = 1

[models]
file = "{name}.models.json"
"""


def example_toml(name: str) -> str:
    """Return the job file of an example."""
    title, system = EXAMPLES[name]
    law = {key: getattr(system.lengths, key) for key in ("mean", "p50", "p95", "truncated")}
    return TOML.format(
        title=title,
        device=system.device,
        model=system.model,
        prompts=system.prompts,
        samples=system.samples,
        cap=system.max_response_tokens,
        lengths=", ".join(f"{key} = {value:g}" for key, value in law.items() if value is not None),
        level=system.level,
        prompt=system.prompt_tokens,
        fits=system.fits_per_version,
        reference="on" if system.reference_s else "off",
        rollout=system.rollout_gpus,
        train=system.train_gpus,
        rollout_tp=system.rollout_tp,
        train_tp=system.train_replica_gpus,
        staleness=system.staleness,
        pull=system.mini_batch_prompts,
        name=name,
    )


def example_models(name: str) -> StageModels:
    """Return the stage models of an example, with their sources."""
    system = EXAMPLES[name][1]
    models = plan_of(system)[0].models
    note = "verl docs/advance/fully_async.md; see docs/validation.md"
    sources = {
        "trainer.update.alpha_s": Estimate.exact(models.trainer.update.alpha_s, Source.FITTED, note),
        "trainer.old_logprob.tau_s": Estimate.exact(
            models.trainer.old_logprob.tau_s, Source.ASSUMED, "assembly of a padded batch at 1 GB/s"
        ),
        "sync.fixed_s": Estimate.exact(models.sync.fixed_s, Source.FITTED, f"{note}: step less its parts"),
    }
    return replace(models, sources=sources, provenance={"kind": "fitted", "source": note})


def write_examples(folder: Path) -> None:
    """Write all job files and their models into ``folder``."""
    for name in EXAMPLES:
        folder.joinpath(f"{name}.toml").write_text(example_toml(name), encoding="utf-8")
        example_models(name).save(folder / f"{name}.models.json")


if __name__ == "__main__":
    write_examples(Path(sys.argv[1] if len(sys.argv) > 1 else "examples"))
