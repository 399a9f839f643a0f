"""Prove from the files of a run that nothing was lost and nothing trained twice."""

import csv
from collections import Counter
from pathlib import Path
from typing import Any

from bidirl.planner.events import from_json, to_json
from bidirl.planner.plan_json import plan_from_json
from bidirl.planner.scheduler import Scheduler
from bidirl.traces.journal import JournalReader, line_of

__all__ = ["prove_ledger"]


def prove_ledger(folder: Path) -> dict[str, Any]:
    """Check journal and samples.csv of a finished run against each other; return what was counted.

    The journal, cut and continued as it may be, is one run: fed to a fresh scheduler it gives the same
    actions. By group id, what that scheduler trained is what samples.csv says, each group once.
    """
    journal = JournalReader(folder / "journal.jsonl")
    plan = plan_from_json(journal.plan)
    scheduler = Scheduler(plan)
    trained: dict[int, int] = {}
    issued: set[int] = set()
    dropped: dict[int, str] = {}
    last_s = 0.0
    for entry in journal.entries():
        assert entry.time_s >= last_s, f"line {entry.line}: time runs backwards"
        last_s = entry.time_s
        step = scheduler.train.step
        actions = [to_json(action) for action in scheduler.handle(from_json(entry.event), entry.time_s)]
        assert line_of(actions) == line_of(entry.actions), f"line {entry.line}: other actions"
        for action in actions:
            if action["kind_of"] == "StartSamples":
                issued.add(action["group"])
            elif action["kind_of"] == "DropGroup":
                assert dropped.setdefault(action["group"], action["cause"]) == action["cause"]
            if entry.event["kind_of"] == "Filtered" and not scheduler.rollout.pinned:
                dropped[entry.event["group"]] = "filtered"
        if scheduler.train.step > step:
            for group in scheduler.train.last_batch:
                assert group.id not in trained, f"group {group.id} was trained twice"
                trained[group.id] = step
    assert journal.cut_line is None
    assert scheduler.done
    num_per_step = Counter(trained.values())
    assert num_per_step == dict.fromkeys(range(plan.num_steps), plan.groups_per_step)
    assert issued == set(range(len(issued))), "ids are issued in order, without gaps"

    with (folder / "samples.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    keys = [(int(row["group"]), int(row["index"])) for row in rows]
    assert keys == [(group, index) for group in sorted(issued) for index in range(plan.samples_per_group)]
    for (number, _), row in zip(keys, rows, strict=True):
        assert int(row["step"] or -1) == trained.get(number, -1), row
        if number in trained:
            assert row["finish_s"], row
            assert not row["dropped"] or row["dropped"] == "filtered", row
        else:
            assert row["dropped"] == dropped.get(number, ""), row
    unfinished = issued - trained.keys() - dropped.keys()
    assert len(issued) == len(trained) + len(dropped.keys() - trained.keys()) + len(unfinished)
    with (folder / "steps.csv").open(encoding="utf-8", newline="") as file:
        assert len(list(csv.DictReader(file))) == plan.num_steps
    return {
        "issued": len(issued),
        "trained": len(trained),
        "dropped": len(dropped),
        "unfinished": len(unfinished),
    }
