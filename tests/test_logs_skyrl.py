"""SkyRL: nested timers, dicts over many lines, staleness above its bound, what runs outside a step."""

from bidirl.traces.step_log import Mode
from tests.test_logs_mutations import parsed

HEAD = "2026-03-08 10:00:00.123 | INFO | skyrl.train"


def timer(name: str, seconds: float) -> str:
    return f"{HEAD}.utils:__exit__:24 - Finished: '{name}', time cost: {seconds:.2f}s"


STARTED = f"{HEAD}.utils:__enter__:20 - Started: 'step'"


def test_staleness_above_its_bound_is_read_and_counted() -> None:
    (log,) = parsed(
        "trainer/global_step = 20\ntiming/step = 200.5\ntiming/wait_for_generation_buffer = 187.25\n"
        "async/staleness_max = 3\nasync/staleness_violation_count = 2\n"
    )
    assert log.column("lag_max")[0] == 3
    assert log.column("staleness_violations")[0] == 2
    assert any("rule of capacity" in note for note in log.notes)


def test_nested_timers_are_counted_once() -> None:
    (log,) = parsed(
        "Step 5: \n{'timing/fwd_logprobs_values_reward': '10.0000',\n 'timing/policy_train': '28.0000',\n"
        " 'timing/train_critic_and_policy': '30.0000',\n 'timing/run_training': '41.0000',\n"
        " 'timing/compute_advantages_and_returns': '1.0000',\n 'timing/sync_weights': '4.0000',\n"
        " 'timing/wait_for_generation_buffer': '55.0000',\n 'timing/step': '100.0000'}\n"
    )
    assert list(log.column("step")) == [5]
    assert log.column("update_s")[0] == 30.0
    assert abs(log.facts["unexplained_share"]) < 1e-6


def test_evaluation_runs_outside_and_checkpoints_inside_the_step_in_turns() -> None:
    text = "\n".join(
        f"trainer/global_step = {step}\ntiming/generate = 50.0\ntiming/policy_train = 30.0\n"
        f"timing/sync_weights = 5.0\ntiming/save_checkpoints = 20.0\ntiming/eval = 99.0\ntiming/step = 106.0"
        for step in (1, 2)
    )
    (log,) = parsed(text)
    assert log.mode is Mode.COLOCATED
    assert log.column("step_s")[0] == 86.0
    assert log.column("testing_s")[0] == 99.0


def test_an_unfinished_step_is_no_row() -> None:
    lines = [STARTED, timer("generate", 50), timer("policy_train", 20)]
    assert parsed("\n".join(lines)) == []
    whole = [*lines, timer("sync_weights", 5), timer("step", 76)]
    (log,) = parsed("\n".join([*lines, *whole]))
    assert len(log) == 1
    assert log.column("generation_s")[0] == 50


def test_timers_after_a_step_belong_to_it() -> None:
    step = [STARTED, timer("generate", 50), timer("policy_train", 20), timer("step", 76)]
    (log,) = parsed("\n".join([*step, timer("eval", 33), *step]))
    assert log.column("testing_s")[0] == 33
    assert log.column("step_s")[0] == 76
    assert len(log) == 2


def test_generation_in_several_calls_is_summed() -> None:
    lines = [
        STARTED,
        timer("generate", 50),
        timer("generate", 20),
        timer("policy_train", 20),
        timer("step", 96),
    ]
    (log,) = parsed("\n".join(lines))
    assert log.column("generation_s")[0] == 70


def test_steps_are_told_apart_without_their_beginnings() -> None:
    step = [timer("generate", 50), timer("policy_train", 20)]
    (log,) = parsed("\n".join([*step, timer("step", 76), *step, timer("step", 77), *step, timer("step", 78)]))
    assert list(log.column("step_s")) == [76, 77, 78]
