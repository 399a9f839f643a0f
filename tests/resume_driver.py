"""``bidirl-run`` on numpy stand-ins, for tests that kill it: in threads, or under Ray with ``--ray local``.

What the run has learned goes to the file named in ``BIDIRL_LEARNED``: digests of weights and samples. Writing
a checkpoint takes ``BIDIRL_CHECKPOINT_S`` more seconds, so that it can be interrupted.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

from bidirl.executor import run
from bidirl.executor.backends.assemble import Kind
from bidirl.executor.checkpoint import Keeper
from bidirl.executor.cli import app
from bidirl.executor.run import RealRun
from bidirl.planner.job import Job
from bidirl.shell import guarded
from tests.real_jobs import SLOW

__all__ = ["main"]


def _on_stand_ins(run_real: Any, job: Job, seed: int, _: Kind, **more: Any) -> RealRun:
    found: RealRun = run_real(job, seed, Kind.STUB, **{**more, "stub": SLOW, "digest": True})
    learned = {
        "weights": {str(version): digest for version, digest in found.weight_digests.items()},
        "samples": {f"{group}/{index}": kept[0] for (group, index), kept in found.sample_digests.items()},
    }
    Path(os.environ["BIDIRL_LEARNED"]).write_text(json.dumps(learned), encoding="utf-8")
    return found


def main() -> int:
    """Run the command line with stand-ins in the place of vLLM and torch."""
    run_real, finish = run.run_real, Keeper._finish
    changed: dict[str, Any] = {"run_real": partial(_on_stand_ins, run_real)}
    vars(run).update(changed)

    def slowly(self: Keeper, part: Path, step: int, frozen: bytes) -> None:
        sleep(float(os.environ.get("BIDIRL_CHECKPOINT_S", "0")))
        finish(self, part, step, frozen)

    Keeper._finish = slowly  # type: ignore[method-assign]
    return guarded(app, sys.argv[1:], "bidirl-run")


if __name__ == "__main__":
    sys.exit(main())
