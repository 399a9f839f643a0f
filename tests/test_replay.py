"""Journal, plan JSON and replay: what was written reads back equal, and a changed journal is found out."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.errors import InputError
from bidirl.planner.build import build_plan, build_workload
from bidirl.planner.events import ACTIONS, EVENTS, from_json, to_json
from bidirl.planner.job import load_job
from bidirl.planner.plan_json import plan_from_json, plan_to_json
from bidirl.planner.policy import PRESETS
from bidirl.planner.replay import replay
from bidirl.sim.run import build, run_to_folder
from bidirl.traces.journal import JournalReader, JournalWriter

SMALL = """\
[cluster]
gpu = "A6000"
num_nodes = 1
gpus_per_node = 8

[model]
name = "Qwen3-VL-4B"

[workload]
prompts_per_step = 16
samples_per_prompt = 4
max_response_tokens = 1024
lengths = { p50 = 300, p95 = 900 }
num_steps = 5
mini_batches = 2
filter_rate = 0.1
drift = { to = 1.5, over_steps = 4 }

[partition]
rollout_gpus = 2

[policy]
name = "bidirl"
staleness = 0.1

[models.switch]
rollout_on_train_in_s = 0.3
rollout_on_train_out_s = 0.3
train_on_rollout_in_s = 0.3
train_on_rollout_out_s = 0.3
grad_s = 0.1
broadcast_s = 0.1
"""


def small_job(folder: Path) -> Path:
    path = folder / "small.toml"
    path.write_text(SMALL, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run_to_folder(load_job(small_job(folder)), 0, folder / "out")
    return folder / "out" / "journal.jsonl"


def changed(journal: Path, to: Path, change: Callable[[int, dict[str, Any]], None]) -> Path:
    """Copy a journal with ``change(number, line data)`` applied to each event line."""
    lines = journal.read_text(encoding="utf-8").splitlines()
    out = [lines[0]]
    for number, line in enumerate(lines[1:], start=2):
        data = json.loads(line)
        change(number, data)
        out.append(json.dumps(data))
    to.write_text("\n".join(out) + "\n", encoding="utf-8")
    return to


@pytest.mark.parametrize("policy", sorted(PRESETS))
def test_plan_reads_back_equal(policy: str, tmp_path: Path) -> None:
    job = load_job(small_job(tmp_path), [f"policy.name={policy}"])
    plan = build_plan(job, build_workload(job, 0))
    back = plan_from_json(json.loads(json.dumps(plan_to_json(plan))))
    assert back == plan
    assert type(back.policy.staleness) is type(plan.policy.staleness)


@given(
    st.lists(st.floats(allow_nan=False), min_size=1, max_size=5), st.sampled_from(sorted(ACTIONS | EVENTS))
)
def test_events_and_actions_read_back_equal(numbers: list[float], name: str) -> None:
    kind = (ACTIONS | EVENTS)[name]
    values = []
    for place, spec in enumerate(dataclasses.fields(kind)):
        number = numbers[place % len(numbers)]
        kind_of = str(getattr(spec.type, "__name__", spec.type))
        values.append(
            {"float": number, "Direction": "train_on_rollout", "SegmentKind": "update"}.get(kind_of, 7)
            if "tuple" not in str(spec.type)
            else ((1, 2, 3), (4, 5, 6))
        )
    item = from_json(
        json.loads(json.dumps({"kind_of": name} | dict(zip(field_names(kind), values, strict=True))))
    )
    assert from_json(json.loads(json.dumps(to_json(item)))) == item


def field_names(kind: type) -> list[str]:
    return [spec.name for spec in dataclasses.fields(kind)]


def test_the_same_events_give_the_same_actions(journal: Path) -> None:
    found = replay(journal, build())
    assert found.difference is None
    assert found.is_complete
    assert found.cut_line is None
    assert found.num_events == len(journal.read_text(encoding="utf-8").splitlines()) - 1
    assert found.num_actions > found.num_events / 2
    assert found.to_json()["agrees"] is True


def test_a_journal_has_leases_in_both_directions(journal: Path) -> None:
    """Otherwise the test above would show little."""
    text = journal.read_text(encoding="utf-8")
    assert '"direction":"rollout_on_train"' in text
    assert '"direction":"train_on_rollout"' in text
    assert '"kind_of":"Preempt"' in text
    assert '"kind_of":"Merge"' in text


def test_a_changed_action_is_found(journal: Path, tmp_path: Path) -> None:
    def change(number: int, data: dict[str, Any]) -> None:
        if number == 40:
            data["actions"] = [{"kind_of": "EndLease", "serial": 1, "lease": 9}]

    found = replay(changed(journal, tmp_path / "j.jsonl", change), build())
    assert found.difference is not None
    assert (found.difference.line, found.difference.index, found.num_events) == (40, 0, 38)
    assert found.difference.expected == {"kind_of": "EndLease", "serial": 1, "lease": 9}
    assert found.to_json()["difference"]["event"]["kind_of"] in EVENTS


def test_a_left_out_event_is_found(journal: Path, tmp_path: Path) -> None:
    lines = journal.read_text(encoding="utf-8").splitlines()
    short = tmp_path / "j.jsonl"
    short.write_text("\n".join(lines[:20] + lines[25:]) + "\n", encoding="utf-8")
    assert replay(short, build()).difference is not None


def test_an_event_that_cannot_be_is_a_difference_not_a_crash(journal: Path, tmp_path: Path) -> None:
    def change(number: int, data: dict[str, Any]) -> None:
        if number == 10:
            data["event"] = {"kind_of": "Rewarded", "group": 10**9, "cause": 1}

    found = replay(changed(journal, tmp_path / "j.jsonl", change), build())
    assert found.difference is not None
    assert found.difference.line == 10


def test_last_digits_may_differ_between_builds_only(journal: Path, tmp_path: Path) -> None:
    def change(_: int, data: dict[str, Any]) -> None:
        for action in data["actions"]:
            if action["kind_of"] == "StartChunks":
                action["work"] *= 1 + 1e-13

    same = changed(journal, tmp_path / "j.jsonl", change)
    assert replay(same, build()).difference is not None
    other = replay(same, build() | {"numpy": "0"})
    assert other.difference is None
    assert other.num_close > 0


def test_an_unfinished_last_line_is_left_out(journal: Path, tmp_path: Path) -> None:
    text = journal.read_text(encoding="utf-8")
    cut = tmp_path / "j.jsonl"
    cut.write_text(text[: len(text) // 2], encoding="utf-8")
    found = replay(cut, build())
    assert found.difference is None
    assert not found.is_complete
    assert found.cut_line == found.num_events + 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ":1: is not the header of a journal"),
        ("{}\n", ":1: is not the header of a journal"),
        ('{"schema": "bidirl-journal", "version": 2}\n', "version = 2"),
        ('{"schema": "bidirl-journal", "version": 1, "provenance": {}}\n', "plan is missing"),
        (
            '{"schema": "bidirl-journal", "version": 1, "provenance": {}, "plan": {}}\n',
            "plan.num_steps is missing",
        ),
    ],
)
def test_what_is_no_journal_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message) as caught:
        replay(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "line", ['{"t": 1}', "[]", '{"t": "1", "event": {"kind_of": "RunStarted"}, "actions": []}', "{"]
)
def test_a_broken_line_in_the_middle_is_refused(line: str, journal: Path, tmp_path: Path) -> None:
    lines = journal.read_text(encoding="utf-8").splitlines()
    path = tmp_path / "j.jsonl"
    path.write_text("\n".join([*lines[:3], line, *lines[3:]]) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"j\.jsonl:4: is not an event"):
        replay(path)


def test_an_unknown_kind_of_event_is_refused(journal: Path, tmp_path: Path) -> None:
    lines = journal.read_text(encoding="utf-8").splitlines()
    path = tmp_path / "j.jsonl"
    path.write_text(lines[0] + '\n{"t": 0, "event": {"kind_of": "Nope"}, "actions": []}\n', encoding="utf-8")
    with pytest.raises(InputError, match="event Nope is not of this release"):
        replay(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_steps", True),
        ("num_steps", 2.0),
        ("policy", {"name": 3}),
        ("priors", []),
        ("notes", "x"),
        ("models", 1),
    ],
)
def test_a_wrong_plan_is_named(key: str, value: object, tmp_path: Path) -> None:
    job = load_job(small_job(tmp_path))
    data = plan_to_json(build_plan(job, build_workload(job, 0)))
    with pytest.raises(InputError, match=key) as caught:
        plan_from_json(data | {key: value})
    assert "\n" not in str(caught.value)


def test_writer_and_reader_agree(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with JournalWriter(path, provenance={"seed": 1}, plan={"a": 0.1}) as writer:
        writer.write(0.1 + 0.2, {"kind_of": "X"}, [{"kind_of": "Y", "s": "\u2028\n"}])
    reader = JournalReader(path)
    [entry] = reader.entries()
    assert (reader.provenance, reader.plan) == ({"seed": 1}, {"a": 0.1})
    assert (entry.line, entry.time_s, entry.actions[0]["s"]) == (2, 0.1 + 0.2, "\u2028\n")
