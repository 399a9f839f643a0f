"""Write the example job of the public re-implementation: the believed set as a job file and its models."""

import sys
from pathlib import Path

from bidirl.sim.reality.rfc import believed
from bidirl.sim.reality.rfc_job import GROUPS_PER_REPLICA, PROMPT_TOKENS, rfc_models

__all__ = ["example_toml", "write_example"]

MODELS_FILE = "rfc_4r12t.models.json"
TOML = """\
# The public re-implementation of BiDiRL: 16 devices, 4R:12T, 60 prompts, 2K responses.
# Source: verl-project/verl-recipe issue #129. It prints tokens/s and nothing of hardware, lengths or seconds:
# the set below is the one we believe of the many that fit ({regime}; docs/validation.md says why).
# Written by `python -m bidirl.sim.reality.rfc_example examples`.
[cluster]
gpu = "A6000"  # a stand-in, not stated; the times come from the models file
num_nodes = 2
gpus_per_node = 8

[model]
name = "Qwen3-VL-4B"  # a stand-in, not stated

[workload]
prompts_per_step = 60
samples_per_prompt = 8  # assumed, the paper's
max_response_tokens = 2048
lengths = {{ mean = {mean:g}, sigma = {sigma:g} }}  # free
prompt_tokens = {prompt}  # assumed, images included
image_tokens = 0
num_steps = 30
old_logprob = "on"  # assumed: the trainer's times absorb which stages there are
reference = "off"

[partition]
rollout_gpus = 4
train_gpus = 12
rollout_tp = 1
train_tp = 1

[policy]
name = "bidirl"
staleness = 1.0
admission = "{admission}"
concurrency_groups_per_replica = {slots}

[models]
file = "{models}"
"""


def example_toml() -> str:
    """Return the job file of the believed set."""
    best = believed()
    return TOML.format(
        regime=best.found.regime,
        mean=best.found.chosen.response_tokens,
        sigma=best.found.chosen.sigma,
        prompt=PROMPT_TOKENS,
        admission=best.admission,
        slots=GROUPS_PER_REPLICA,
        models=MODELS_FILE,
    )


def write_example(folder: Path) -> None:
    """Write ``rfc_4r12t.toml`` and its models into a folder."""
    (folder / "rfc_4r12t.toml").write_text(example_toml(), encoding="utf-8")
    rfc_models(believed().found.chosen).save(folder / MODELS_FILE)


if __name__ == "__main__":
    write_example(Path(sys.argv[1]))
