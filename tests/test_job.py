import json
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidirl.errors import InputError
from bidirl.planner.job import Job, load_job, resolved_json
from bidirl.planner.overrides import parse_override, split_vary
from bidirl.planner.policy import PRESETS, InFlight, Lending, Placement, preset, unsupported
from bidirl.planner.toml_lines import key_lines

JOB = """\
[cluster]
gpu = "A6000"
num_nodes = 2
gpus_per_node = 8

[model]
name = "Qwen3-VL-4B"

[workload]
prompts_per_step = 64
samples_per_prompt = 8
max_response_tokens = 2048
lengths = "geo3k"
num_steps = 40

[partition]
rollout_gpus = 4

[policy]
name = "bidirl"
staleness = 0.1
"""

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.toml"))


def write(tmp_path: Path, text: str = JOB, name: str = "job.toml") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        load_job(path, overrides)
    assert type(caught.value) is InputError
    return str(caught.value)


def reload(job: Job, tmp_path: Path) -> Job:
    return load_job(write(tmp_path, json.dumps(resolved_json(job)), "resolved.json"))


def test_job_is_resolved(tmp_path: Path) -> None:
    job = load_job(write(tmp_path))
    assert job.partition is not None
    assert (job.partition.rollout_gpus, job.partition.train_gpus) == (4, 12)
    assert job.policy.staleness == Decimal("0.1")
    assert job.policy.lending is Lending.BOTH
    assert job.engine.max_num_seqs == 256
    assert job.notices == ()
    assert job.base_dir == tmp_path


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_load_and_come_back(path: Path, tmp_path: Path) -> None:
    job = load_job(path)
    assert job.notices == ()
    assert reload(job, tmp_path) == job


@pytest.mark.parametrize(
    "overrides",
    [
        ["policy.staleness=0.3"],
        ["policy.name=no_borrow", "policy.in_flight=continue_stale"],
        ["policy.name=colocated_sync"],
        ["workload.lengths={p50 = 300, p95 = 1500}", "workload.drift=[1, 1.5]"],
        ["workload.drift={to = 1.5, over_steps = 20}", "workload.reward_s=3"],
        ["cluster.gpu={name = 'A6000', memory_gib = 40}", "models.switch={grad_s = 1}"],
        ["engine.kv_tokens=50000", "models.sync_s=0.5", "partition.train_tp=2"],
    ],
)
def test_resolved_json_comes_back_equal(overrides: list[str], tmp_path: Path) -> None:
    job = load_job(write(tmp_path), overrides)
    again = reload(job, tmp_path)
    assert again == job
    assert resolved_json(again) == resolved_json(job)


# Each row: overrides or a replacement in the text of JOB, and what the one line must hold.
MALFORMED: list[tuple[str, str, str]] = [
    # text to replace, replacement, expected fragment
    ("num_nodes = 2", "num_nodes = true", ":3: cluster.num_nodes = true: must be a"),
    ("num_nodes = 2", 'num_nodes = "2"', ':3: cluster.num_nodes = "2": must be a'),
    ("num_nodes = 2", "num_nodes = 2.0", ":3: cluster.num_nodes = 2.0: must be an integer"),
    ("num_nodes = 2", "num_nodes = 0", ":3: cluster.num_nodes = 0: must be at least 1; raise it"),
    ("num_nodes = 2", "num_nodes = nan", ":3: cluster.num_nodes = nan: must be an integer"),
    ("num_nodes = 2\n", "", ":1: cluster.num_nodes is missing"),
    ("num_nodes", "num_node", ":3: cluster.num_node = 2: unknown key; did you mean num_nodes?"),
    ("num_nodes = 2", "num_nodes = 2026-01-01", ":3: cluster.num_nodes = 2026-01-01: is a date or time"),
    ('gpu = "A6000"', 'gpu = "A7000"', "RTX A6000"),
    ('gpu = "A6000"', "gpu = 3", ":2: cluster.gpu = 3: "),
    (
        'gpu = "A6000"',
        "gpu = { memory = 3 }",
        ":2: cluster.gpu.memory = 3: unknown key; did you mean memory_gib?",
    ),
    ('"Qwen3-VL-4B"', '"Qwen3-VL-5B"', "Qwen3-VL-"),
    ('name = "Qwen3-VL-4B"', "name = 4", ":7: model.name = 4: must be a text; put it in quotes"),
    ('name = "Qwen3-VL-4B"', 'config = "none.json"', ':7: model.config = "none.json": no such file'),
    ("[workload]", "[workloads]", ":9: [workloads]: unknown section; did you mean [workload]?"),
    ("[model]\n", "", ":6: cluster.name"),
    ("max_response_tokens", "max_respons_tokens", "did you mean max_response_tokens?"),
    ("= 2048", "= 0", ":12: workload.max_response_tokens = 0: must be at least 1; raise it"),
    ("= 2048", "= -5", ":12: workload.max_response_tokens = -5: must be at least 1; raise it"),
    ("= 2048", "= 1e3", ":12: workload.max_response_tokens = 1E+3: must be an integer"),
    ("num_steps = 40", "num_steps = [40]", ":14: workload.num_steps = [40]: must be an integer"),
    ("num_steps = 40", "num_steps = 40\nmini_batches = 7", ":15: workload: mini_batches=7 does not divide"),
    ("num_steps = 40", "num_steps = 40\nfilter_rate = inf", ":15: workload.filter_rate = inf: must be "),
    (
        "num_steps = 40",
        "num_steps = 40\nfilter_rate = 1e999999999999999999999",
        "filter_rate = inf: must",
    ),
    ("num_steps = 40", "num_steps = 40\nfilter_rate = 1", ":15: workload.filter_rate = 1: must be below 1"),
    (
        "num_steps = 40",
        "num_steps = 40\nfilter_rate = true",
        ":15: workload.filter_rate = true: must be a number",
    ),
    (
        "num_steps = 40",
        'num_steps = 40\nreference = "maybe"',
        ':15: workload.reference = "maybe": must be one of',
    ),
    ("num_steps = 40", "num_steps = 40\n[workload.turns]\nmean = 2", "workload.turns.max is missing"),
    ('"geo3k"', '"geo3"', "geo3k"),
    ('"geo3k"', '"lengths.csv"', ':13: workload.lengths = "lengths.csv": no such file'),
    ('"geo3k"', "{ p50 = 1000, p59 = 3 }", "workload.lengths.p59 = 3: unknown key; did you mean p"),
    ('"geo3k"', '{ p50 = "x" }', ':13: workload.lengths.p50 = "x": must be a number'),
    (
        "rollout_gpus = 4",
        "rollout_gpus = 17",
        ":17: partition.rollout_gpus = 17: exceeds the cluster's 16 GPUs",
    ),
    ("rollout_gpus = 4", "rollout_gpus = 16", ":17: partition.rollout_gpus = 16: leaves none of the 16 GPUs"),
    ("rollout_gpus = 4", "train_gpus = 16", ":17: partition.train_gpus = 16: leaves none of the 16 GPUs"),
    (
        "rollout_gpus = 4",
        "rollout_gpus = 6\ntrain_gpus = 12",
        ":18: partition.train_gpus = 12: with rollout_gpus",
    ),
    (
        "rollout_gpus = 4",
        "rollout_gpus = 4\nrollout_tp = 8",
        "partition.rollout_gpus = 4: is not a multiple of",
    ),
    (
        "rollout_gpus = 4",
        "rollout_gpus = 4\nrollout_tp = 3",
        ":18: partition.rollout_tp = 3: does not divide the 8",
    ),
    (
        "rollout_gpus = 4",
        "rollout_gpus = 4\ntrain_tp = 16",
        ":18: partition.train_tp = 16: does not divide the 8",
    ),
    (
        "rollout_gpus = 4",
        "rollout_gpus = 6\ntrain_tp = 4",
        "partition.train_gpus = 10: is not a multiple of train_tp",
    ),
    ("rollout_gpus = 4", "rollout_tp = 1", ":16: partition: gives neither rollout_gpus nor train_gpus"),
    (
        "rollout_gpus = 4",
        'placement = "collocated"',
        ':17: partition.placement = "collocated": must be one of',
    ),
    (
        "rollout_gpus = 4",
        'placement = "colocated"',
        ':17: partition.placement = "colocated": policy bidirl lends',
    ),
    ("staleness = 0.1", "staleness = -0.5", ":21: policy.staleness = -0.5: must be at least 0; raise it"),
    ("staleness = 0.1", "staleness = nan", ":21: policy.staleness = nan: must be finite"),
    ("staleness = 0.1", "staleness = inf", ":21: policy.staleness = inf: must be finite"),
    ("staleness = 0.1", 'staleness = "1"', ':21: policy.staleness = "1": must be a number'),
    ("staleness = 0.1", "staleness = true", ":21: policy.staleness = true: must be a number"),
    ("staleness = 0.1", "staleness = 1e9", ":21: policy.staleness = 1E+9: must be at most 1000; lower it"),
    (
        "staleness = 0.1",
        "staleness = 0.12345678901",
        ":21: policy.staleness = 0.12345678901: has more than 9",
    ),
    ("staleness = 0.1", "stalenes = 1", ":21: policy.stalenes = 1: unknown key; did you mean staleness?"),
    ('name = "bidirl"', 'name = "bidir"', ':20: policy.name = "bidir": no preset has this name'),
    ('name = "bidirl"', "name = 3", ":20: policy.name = 3: must be a text"),
    ("staleness = 0.1", 'lending = "all"', ':21: policy.lending = "all": must be one of none, '),
    (
        "staleness = 0.1",
        'expiry = "wait"',
        "expiry = wait waits for old groups, batch_order = ready_first would not take them",
    ),
    ("staleness = 0.1", "chunk_groups = 65", ":21: policy.chunk_groups = 65: exceeds the 64 groups"),
    ("staleness = 0.1", 'version_mode = "pinned"', ":21: policy: version_mode = pinned fixes the batches"),
    (
        "staleness = 0.1",
        "[engine]\nmax_num_seqs = 1e2",
        ":22: engine.max_num_seqs = 1E+2: must be an integer",
    ),
    (
        "staleness = 0.1",
        "[engine]\nkv_tokens = 2048",
        ":22: engine.kv_tokens = 2048: cannot hold one response",
    ),
    ("staleness = 0.1", "[engine]\nkv_tokens = 8", ":22: engine: kv_tokens = 8 hold no block of 16 tokens"),
    (
        "staleness = 0.1",
        "[engine]\nmax_num_batched_tokens = 9",
        ":22: engine: max_num_batched_tokens = 9 is below",
    ),
    (
        "staleness = 0.1",
        "[engine]\nprefix_caching = 1",
        ":22: engine.prefix_caching = 1: must be true or false",
    ),
    ("staleness = 0.1", "[models]\nfile = 'm.json'", ':22: models.file = "m.json": no such file'),
    (
        "staleness = 0.1",
        "[models.switch]\ngrad = 1",
        ":22: models.switch.grad = 1: unknown key; did you mean grad_s?",
    ),
    ("staleness = 0.1", "[models]\nswitch = 1", ":22: models.switch = 1: must be a table"),
    ("staleness = 0.1", "[models]\nsync_s = -1", ":22: models.sync_s = -1: must be at least 0"),
    ("[policy]", "[[policy]]", 'policy = [{name = "bidirl", staleness = 0.1}]: must be a table'),
    ("[cluster]", "seed = 3\n[cluster]", ":1: seed = 3: unknown key outside the sections"),
    ("num_nodes = 2", "num_nodes = 2\nnum_nodes = 3", ":4: not valid TOML: cannot overwrite a value"),
    ("num_nodes = 2", "num_nodes = ", ":3: not valid TOML: invalid value"),
    ("num_nodes = 2", "num_nodes = [1", "not valid TOML"),
    ("num_nodes = 2", "num_nodes = " + "[" * 5000 + "]" * 5000, "too large to be read"),
    ("num_nodes = 2", "num_nodes = " + "9" * 5000, "too large to be read"),
]


@pytest.mark.parametrize(("old", "new", "expected"), MALFORMED)
def test_malformed_job_gets_one_line(old: str, new: str, expected: str, tmp_path: Path) -> None:
    assert old in JOB
    message = refusal(write(tmp_path, JOB.replace(old, new, 1)))
    assert expected in message
    for line in message.splitlines():
        assert line.startswith(str(tmp_path / "job.toml"))
        assert "pydantic" not in line
        assert "Input should" not in line
        assert len(line) < 400


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["cluster.num_nodes=two"], "--set cluster.num_nodes=two: must be a"),
        (["cluster.num_node=2"], "--set cluster.num_node=2: unknown key; did you mean num_nodes?"),
        (
            ["clusters.num_nodes=2"],
            "--set clusters.num_nodes=2: [clusters]: unknown section; did you mean [cluster]?",
        ),
        (["model.name=Qwen9"], "--set model.name=Qwen9: "),
        (["cluster.gpu=A7000"], "--set cluster.gpu=A7000: "),
        (["policy=3"], "--set policy=3: must be a table"),
        (["seed=3"], "--set seed=3: unknown key outside the sections"),
        (["policy.staleness='1'"], "--set policy.staleness='1': must be a number"),
        (["policy.staleness=nan"], "--set policy.staleness=nan: must be finite"),
        (["workload.mini_batches=7"], "--set workload.mini_batches=7: mini_batches=7 does not divide"),
        (
            ["workload.lengths.p50=7"],
            '--set workload.lengths.p50=7: workload.lengths = "geo3k" is not a table',
        ),
        (
            ["cluster.num_nodes=1", "partition.rollout_gpus=8"],
            "--set partition.rollout_gpus=8: leaves none of the 8",
        ),
        (
            ["cluster.gpus_per_node=2"],
            "--set cluster.gpus_per_node=2: partition.rollout_gpus = 4: leaves none of",
        ),
        (["policy.chunk_groups=70"], "--set policy.chunk_groups=70: exceeds the 64 groups"),
        (
            ["workload.max_response_tokens=9000", "engine.kv_tokens=8192"],
            "--set engine.kv_tokens=8192: cannot hold",
        ),
        (["partition.placement=colocated"], "--set partition.placement=colocated: policy bidirl lends"),
        (
            ["models.file=nowhere.json"],
            "--set models.file=nowhere.json: no such file; give a path from the current",
        ),
        (
            ["engine={max_num_seqs=0}"],
            "--set engine={max_num_seqs=0}: engine.max_num_seqs = 0: must be at least 1",
        ),
        (["cluster.num_nodes"], "--set cluster.num_nodes: not of the form section.key=value"),
        (["=3"], "--set =3: not of the form section.key=value"),
        (["a..b=3"], "--set a..b=3: not of the form section.key=value"),
    ],
)
def test_error_in_a_set_value_names_the_set(overrides: list[str], expected: str, tmp_path: Path) -> None:
    message = refusal(write(tmp_path), *overrides)
    assert message.startswith(expected)
    assert "\n" not in message


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    text = JOB.replace("num_nodes = 2", "num_nodes = 0").replace("num_steps = 40", "num_stepz = 40")
    message = refusal(write(tmp_path, text), "policy.staleness=-1")
    lines = message.splitlines()
    assert len(lines) == 4
    assert [line.split(": ")[1].split(" ")[0] for line in lines] == [
        "cluster.num_nodes",
        "workload.num_steps",
        "workload.num_stepz",
        "must",
    ]


def test_missing_sections_are_named(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, ""))
    assert [line.split("[")[1].split("]")[0] for line in message.splitlines()] == [
        "cluster",
        "model",
        "workload",
    ]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("job.toml", b"\xff\xfe", "is not UTF-8 text"),
        ("resolved.json", b"{", ":1: not valid JSON"),
        ("resolved.json", b"[]", "holds no table of sections"),
        ("resolved.json", b'{"cluster": 3}', "cluster = 3: must be a table"),
    ],
)
def test_unreadable_content(name: str, content: bytes, expected: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert expected in refusal(path)


def test_unreadable_paths(tmp_path: Path) -> None:
    assert "no such file or directory" in refusal(tmp_path / "none.toml")
    assert "is a directory" in refusal(tmp_path)


def test_set_creates_a_missing_section_and_the_last_one_wins(tmp_path: Path) -> None:
    job = load_job(
        write(tmp_path), ["engine.max_num_seqs=8", "engine={max_num_seqs=16}", "engine.block_size=32"]
    )
    assert (job.engine.max_num_seqs, job.engine.block_size) == (16, 32)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("a.b=3", (("a", "b"), 3)),
        ("a.b=0.1", (("a", "b"), Decimal("0.1"))),
        ("a.b=geo3k", (("a", "b"), "geo3k")),
        ("a.b='3'", (("a", "b"), "3")),
        ("a.b=[1, 2]", (("a", "b"), [1, 2])),
        ("a.b={c = 1}", (("a", "b"), {"c": 1})),
        ("a.b=x=y", (("a", "b"), "x=y")),
        ("a.b=", (("a", "b"), "")),
        ("a.b=1\nc=2", (("a", "b"), "1\nc=2")),
        ('"a.b".c=true', (("a.b", "c"), True)),
    ],
)
def test_override_is_toml_or_a_string(text: str, parsed: tuple[tuple[str, ...], object]) -> None:
    assert parse_override(text) == parsed


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a.b=1,2,3", ["1", "2", "3"]),
        ("a.b = 1 , 2", ["1", "2"]),
        ("a.b=geo3k", ["geo3k"]),
        ("a.b={p50 = 1, p95 = 2},geo3k", ["{p50 = 1, p95 = 2}", "geo3k"]),
        ("a.b=[1,2],[3,[4,5]]", ["[1,2]", "[3,[4,5]]"]),
        ('a.b="x,y",\'z,"\'', ['"x,y"', "'z,\"'"]),
        ('a.b="x\\",y",z', ['"x\\",y"', "z"]),
        ("a.b=0.5,0.50", ["0.5", "0.50"]),
    ],
)
def test_vary_splits_at_top_level_commas(text: str, values: list[str]) -> None:
    assert split_vary(text) == ("a.b", values)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b", "not of the form"),
        ("a.b=", "an empty value"),
        ("a.b=1,,2", "an empty value"),
        ("a.b=1,2,", "an empty value"),
        ("a.b=1,1", "1 is given twice"),
        ("a.b=[1,2", "']' is missing at the end"),
        ("a.b=1],2", "']' closes nothing"),
        ("a.b='x", '"\'" is missing at the end'),
    ],
)
def test_malformed_vary(text: str, expected: str) -> None:
    with pytest.raises(InputError, match="--vary") as caught:
        split_vary(text)
    assert expected in str(caught.value)


@given(st.lists(st.integers(-9, 999), min_size=1, max_size=6, unique=True))
def test_vary_gives_back_what_was_joined(numbers: list[int]) -> None:
    written = [str(number) for number in numbers]
    assert split_vary(f"a.b={','.join(written)}") == ("a.b", written)


@given(
    st.integers(0, 5),
    st.lists(
        st.sampled_from(["# c [x]", "", 's = """\n[no] = 1\n"""', "t = '# ]'", "u = [ 1,\n { v = 2 } ]"]),
        max_size=5,
    ),
)
def test_a_key_is_found_on_its_line(num_blank: int, before: list[str]) -> None:
    lines = [
        f"{line.replace(' = ', f'{at} = ', 1)}" if "=" in line else line for at, line in enumerate(before)
    ]
    text = "[a]\n" + "\n".join(lines) + "\n" * (num_blank + 1) + '[b."c.d"]\nkey.sub = 1\n'
    place = text[: text.index("key.sub")].count("\n") + 1
    assert key_lines(text)["b", "c.d", "key", "sub"] == place


def test_lines_inside_arrays_of_tables() -> None:
    lines = key_lines("[[a]]\nb = 1\n[a.c]\nd = 1\n[[a]]\nb = {e = [1,\n2]}\n")
    assert lines["a", 0, "c", "d"] == 4
    assert lines["a", 1, "b", "e", 1] == 7


def test_presets_hold_the_papers_arms() -> None:
    assert {"colocated_sync", "no_borrow", "opportunistic", "bidirl"} <= set(PRESETS)
    for name in PRESETS:
        policy = preset(name)
        assert policy.name == name
        assert unsupported(policy) == []
    assert preset("bidirl", staleness=Decimal("0.5"), in_flight="restart").in_flight is InFlight.RESTART


@pytest.mark.parametrize(
    ("name", "choices"), [("bidir", {}), ("bidirl", {"lending": "all"}), ("bidirl", {"chunks": 3})]
)
def test_wrong_preset_is_refused(name: str, choices: dict[str, object]) -> None:
    with pytest.raises(InputError):
        preset(name, **choices)


def test_single_choices_override_the_preset(tmp_path: Path) -> None:
    job = load_job(write(tmp_path), ["policy.lending=none"])
    assert job.policy.lending is Lending.NONE
    assert job.policy.gate is preset("bidirl").gate


def test_colocated_sync_sets_other_values_aside_with_notices(tmp_path: Path) -> None:
    job = load_job(write(tmp_path), ["policy.name=colocated_sync"])
    assert job.partition is not None
    assert job.partition.placement is Placement.COLOCATED
    assert (job.partition.rollout_gpus, job.partition.train_gpus) == (16, 0)
    assert job.policy.staleness == 0
    assert [notice.split(" ")[0] for notice in job.notices] == ["policy.staleness", "partition.rollout_gpus"]
    assert reload(job, tmp_path).notices == ()


def test_colocated_placement_without_a_policy_means_colocated_sync(tmp_path: Path) -> None:
    text = JOB.split("[partition]", maxsplit=1)[0] + '[partition]\nplacement = "colocated"\n'
    job = load_job(write(tmp_path, text))
    assert job.policy == preset("colocated_sync")
    assert job.notices == ()


def test_without_a_partition_the_planner_chooses(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, JOB.replace("[partition]\nrollout_gpus = 4\n", "")))
    assert job.partition is None
    assert "partition" not in resolved_json(job)
    assert reload(job, tmp_path) == job


def test_unused_gpus_and_single_samples_get_a_notice(tmp_path: Path) -> None:
    job = load_job(write(tmp_path), ["partition.train_gpus=8", "workload.samples_per_prompt=1"])
    assert any("4 of the cluster's 16 GPUs" in notice for notice in job.notices)
    assert any("samples_per_prompt = 1" in notice for notice in job.notices)


def test_files_are_found_from_the_jobs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lengths.txt").write_text("10\n20\n30\n", encoding="utf-8")
    path = write(tmp_path, JOB.replace('"geo3k"', '"lengths.txt"'))
    monkeypatch.chdir(tmp_path.parent)
    job = load_job(path.relative_to(tmp_path.parent))
    assert resolved_json(job)["workload"]["lengths"] == {"file": str(tmp_path / "lengths.txt")}
    below = tmp_path / "out"
    below.mkdir()
    assert reload(job, below) == job


def test_provenance_of_a_resolved_job_is_skipped(tmp_path: Path) -> None:
    data = resolved_json(load_job(write(tmp_path))) | {"provenance": {"version": "0"}}
    assert load_job(write(tmp_path, json.dumps(data), "resolved.json")) == load_job(tmp_path / "job.toml")


KEYS = [
    *("cluster.gpu", "cluster.num_nodes", "cluster.gpus_per_node", "cluster.host_memory_gib"),
    *("model.name", "model.architecture", "workload.lengths", "workload.num_steps", "workload.drift"),
    *("workload.turns", "workload.reward_s", "workload.mini_batches", "workload.prompt_tokens", "partition"),
    *("partition.placement", "partition.rollout_gpus", "partition.train_gpus", "partition.train_tp"),
    *("policy", "policy.name", "policy.staleness", "policy.lending", "policy.expiry", "policy.chunk_groups"),
    *("engine.kv_tokens", "engine.prefix_caching", "models.file", "models.switch", "models.switch.grad_s"),
    *("clusterr.x", "x", "workload.lengths.p50", "policy.name.x"),
]
VALUES = [
    *("0", "1", "4", "-1", "16", "1.0", "0.1", "1e400", "nan", "-inf", "true", "'2'", "''", "[]", "[1, 2.5]"),
    *(
        "{}",
        "{ p50 = 10 }",
        "{ mean = 1, p95 = 2 }",
        "{ to = 2, over_steps = 3 }",
        "{ name = 3 }",
        "1979-05-27",
    ),
    *("07:32:00", "geo3k", "colocated", "both", "bidirl", "no_borrow", "colocated_sync", "[[{ a = nan }]]"),
    "99999999999999999999",
]


@given(st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(VALUES)), min_size=1, max_size=4))
def test_any_value_is_taken_or_refused_by_line(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(JOB, encoding="utf-8")
    job, message = None, ""
    try:
        job = load_job(path, [f"{key}={value}" for key, value in pairs])
    except InputError as error:
        message = str(error)
    assert all(line.startswith((str(path), "--set")) for line in message.splitlines())
    assert (job is None) == bool(message)
    if job is not None:
        path.with_suffix(".json").write_text(
            json.dumps(resolved_json(job), allow_nan=False), encoding="utf-8"
        )
        assert load_job(path.with_suffix(".json")) == job
