import json
from pathlib import Path

import pytest

from shoal.report.live.follow import Follower
from shoal.report.live.state import LiveState, WorkerState
from tests.report.live_runs import Growing


@pytest.fixture
def growing(tmp_path: Path) -> Growing:
    return Growing(tmp_path)


def states(state: LiveState) -> list[str]:
    return [worker.state for worker in state.workers]


def words(state: LiveState) -> list[str]:
    return [worker.words for worker in state.workers]


def test_a_run_that_has_written_nothing_is_starting(growing: Growing) -> None:
    follower = Follower(growing.folder)
    state = follower.look()
    assert (state.step, state.steps, state.unit, state.status) == (0, 100, "tokens", "unfinished")
    assert (state.loss, state.units_per_s, state.left_s, state.split) == (None, None, None, {})
    assert words(state) == ["not started yet", "not started yet"]
    growing.start()
    assert words(follower.look()) == ["starting", "starting"]


def test_a_folder_without_plan_and_job_is_followed_as_far_as_it_goes(growing: Growing) -> None:
    growing.folder.plan_toml.unlink()
    growing.folder.job_toml.write_text("steps = [")
    growing.start()
    growing.steps(1, 3)
    state = Follower(growing.folder).look()
    assert (state.step, state.steps, state.unit, len(state.workers)) == (3, None, "samples", 2)
    assert state.left_s is None


def test_loss_rate_and_time_left_come_from_the_steps(growing: Growing) -> None:
    growing.start()
    growing.steps(1, 20)
    state = Follower(growing.folder).look()
    assert (state.step, state.loss) == (20, 0.2)
    assert state.units_per_s == pytest.approx(80 / 0.1)
    assert state.step_s == pytest.approx(0.1)
    assert state.left_s == pytest.approx(80 * 0.1)


def test_the_rate_is_right_where_steps_between_two_looks_are_passed_over(tmp_path: Path) -> None:
    growing = Growing(tmp_path, steps=10_000)
    growing.start()
    follower = Follower(growing.folder)
    for last in (100, 200, 300):
        growing.steps(last - 99, last)
        state = follower.look()
    assert state.step == 300
    assert state.units_per_s == pytest.approx(80 / 0.1)


def test_the_split_tells_waiting_for_others_from_communication(growing: Growing) -> None:
    growing.start()
    growing.steps(1, 20)
    state = Follower(growing.folder).look()
    # Worker 0 is busy 20 ms longer: of the 30 ms that worker 1 waits, 20 are for worker 0, and 10 for the link.
    first, second = state.workers
    assert first.split["communication"] == pytest.approx(0.1)
    assert second.split["waiting"] == pytest.approx(0.2)
    assert second.split["communication"] == pytest.approx(0.1)
    assert state.split["waiting"] == pytest.approx(0.1)
    assert sum(state.split.values()) == pytest.approx(1)


def test_a_step_that_only_some_have_written_yet_is_left_out_of_the_split(growing: Growing) -> None:
    growing.start()
    growing.steps(1, 10)
    growing.step(0, 11, comm_s=5.0)
    assert Follower(growing.folder).look().split["communication"] == pytest.approx(0.1)


def test_events_of_an_older_version_without_checkpoint_s_are_read(growing: Growing) -> None:
    growing.start()
    growing.steps(1, 5)
    lines = [json.loads(line) for line in growing.folder.events_of(0).read_text().splitlines()]
    for line in lines:
        line.pop("checkpoint_s", None)
        line.pop("batch_weight", None)
    growing.folder.events_of(0).write_text("".join(json.dumps(line) + "\n" for line in lines))
    state = Follower(growing.folder).look()
    assert state.split["checkpoint"] == 0
    assert state.workers[0].share is None


def test_shares_hosts_and_memory_stand_beside_each_worker(growing: Growing) -> None:
    growing.start()
    growing.step(0, 1, weight=60.0)
    growing.step(1, 1, weight=20.0)
    growing.write(0, "data", 1, step=1, peak_bytes=40_000_000)
    growing.write(0, "data", 1, step=1, peak_bytes=45_000_000)
    growing.write(1, "end", 1, step=1, peak_bytes=70_000_000)
    state = Follower(growing.folder).look()
    assert [worker.share for worker in state.workers] == [0.75, 0.25]
    assert [worker.peak_bytes for worker in state.workers] == [45_000_000, 70_000_000]
    assert [worker.predicted_bytes for worker in state.workers] == [50_000_000] * 2
    assert [worker.host for worker in state.workers] == ["node-0", "node-0"]
    assert state.fullest == state.workers[1]


def test_a_worker_well_behind_is_late_and_one_that_was_only_read_earlier_is_not(tmp_path: Path) -> None:
    growing = Growing(tmp_path, workers=3)
    growing.start()
    growing.steps(1, 50)
    growing.steps(51, 58, range(2))
    state = Follower(growing.folder).look()
    assert states(state) == ["running", "running", "running"], "less than a second behind is no more than logs may be"
    growing.steps(59, 80, range(2))
    state = Follower(growing.folder).look()
    assert states(state) == ["running", "running", "late"]
    assert words(state)[2] == "late: step 50, 30 behind"
    growing.steps(81, 400, range(2))
    assert words(Follower(growing.folder).look())[2] == "silent for 35 s, step 50"


def test_a_lost_worker_is_lost_until_it_or_another_takes_its_place(tmp_path: Path) -> None:
    growing = Growing(tmp_path, workers=3)
    growing.start()
    growing.steps(1, 10)
    growing.step(2, 11)
    growing.steps(9, 12, range(2))  # the others have gone back to a snapshot after step 8
    growing.write(0, "loss", 12, dead=[2], workers=2, step=8, recovery_s=0.4)
    follower = Follower(growing.folder)
    state = follower.look()
    assert states(state) == ["running", "running", "lost"]
    assert [worker.share is None for worker in state.workers] == [False, False, True]
    assert state.step == 12
    growing.write(2, "start", 13, pid=2, host="node-7")
    growing.write(0, "joined", 14, joined=[2], workers=3, step=13)
    growing.steps(13, 14)
    state = follower.look()
    assert states(state) == ["running"] * 3
    assert state.workers[2].host == "node-7"


def test_workers_that_are_added_are_shown_and_one_that_was_ended_as_asked_is_no_trouble(growing: Growing) -> None:
    growing.start()
    growing.steps(1, 10)
    growing.write(2, "start", 10, pid=3, host="node-0")
    growing.write(0, "joined", 11, joined=[2], workers=3, step=10)
    growing.step(2, 11)
    growing.steps(11, 11)
    follower = Follower(growing.folder)
    assert states(follower.look()) == ["running"] * 3
    growing.write(0, "loss", 12, dead=[1, 2], ended=[2], workers=1, step=11)
    growing.step(0, 13)
    state = follower.look()
    assert states(state) == ["running", "lost", "stopped"]
    assert words(state)[2] == "ended at step 11, as asked"
    assert [worker.share is None for worker in state.workers] == [False, True, True]


def test_a_replaced_worker_is_not_lost_where_its_start_was_written_before_the_loss(growing: Growing) -> None:
    growing.start()
    growing.steps(1, 10)
    growing.write(1, "start", 11, pid=2, host="node-0")
    growing.write(0, "loss", 12, dead=[1], workers=2, step=10)
    follower = Follower(growing.folder)
    assert states(follower.look()) == ["running", "lost"]
    growing.steps(13, 13)
    assert states(follower.look()) == ["running", "running"]


def test_a_hang_names_who_holds_the_others_up_until_something_goes_on(growing: Growing) -> None:
    growing.start()
    growing.steps(1, 10)
    growing.write(0, "hang", 90, sentence="worker 1 is in data.py:8 (8.0 s).", blamed=[1], still_s=8.0)
    follower = Follower(growing.folder)
    state = follower.look()
    assert states(state) == ["waiting", "blamed"]
    assert state.hang == "worker 1 is in data.py:8 (8.0 s)."
    growing.step(0, 100)
    state = follower.look()
    assert (state.hang, state.workers[0].state) == ("", "running")


def test_errors_ends_and_the_result_are_states_of_their_own(tmp_path: Path) -> None:
    growing = Growing(tmp_path, workers=4)
    growing.start()
    growing.steps(1, 5)
    growing.write(0, "end", 5, step=5, peak_bytes=1)
    growing.write(1, "error", 5, type="ValueError", message="\x1b[31mbad\nsample", traceback="")
    growing.write(2, "error", 5, type="Stopped", message="asked to", traceback="")
    growing.folder.write_result("failed", "worker 1: ValueError")
    state = Follower(growing.folder).look()
    assert states(state) == ["done", "failed", "stopped", "stopped"]
    assert "\x1b" not in words(state)[1]
    assert (state.status, state.message, state.is_over) == ("failed", "worker 1: ValueError", True)
    assert (state.left_s, state.silent_s) == (None, None)


def test_a_run_that_is_gone_on_with_is_read_anew(growing: Growing) -> None:
    growing.start()
    growing.steps(1, 30)
    growing.write(0, "error", 30, type="ValueError", message="bad", traceback="")
    follower = Follower(growing.folder)
    assert follower.look().step == 30
    growing.put_aside(20)
    growing.start()
    assert states(follower.look()) == ["starting", "starting"]
    growing.steps(21, 22)
    state = follower.look()
    assert (state.step, states(state)) == (22, ["running", "running"])
    assert state.losses[-1] == (22, 4 / 22)
    assert [step for step, _ in state.losses] == list(range(1, 23))


def test_damaged_half_written_and_foreign_lines_are_passed_over(growing: Growing) -> None:
    growing.start()
    growing.steps(1, 3)
    with growing.folder.events_of(0).open("ab") as file:
        file.write(b'{"kind": "step", "step": "4"}\n{"kind": "step"\n\xff\n[]\n{"kind": 7}\n{"kind": "of tomorrow"}\n')
        file.write(b'{"kind": "step", "step": true, "step_s": 1, "time": 1}\n{"kind": "loss", "dead": "all"}\n')
        file.write(b'{"kind": "step", "time": 1e400, "step": 9, "step_s": 0.1}\n{"kind": "step", "step": 5')
    state = Follower(growing.folder).look()
    assert (state.step, states(state)) == (3, ["running", "running"])
    assert json.dumps(state.as_json(), allow_nan=False)


def test_a_log_that_is_a_folder_or_may_not_be_read_is_one_that_says_nothing(growing: Growing) -> None:
    growing.start()
    growing.steps(1, 3)
    growing.folder.events_of(1).unlink()
    growing.folder.events_of(1).mkdir()
    assert states(Follower(growing.folder).look()) == ["running", "starting"]


def test_losses_that_are_not_finite_are_said(growing: Growing) -> None:
    growing.start()
    growing.step(0, 1, loss=None)
    state = Follower(growing.folder).look()
    assert (state.loss, state.is_lost_loss) == (None, True)


def test_evaluations_are_told_even_where_many_steps_lie_around_them(growing: Growing) -> None:
    growing.start()
    growing.steps(1, 100)
    growing.write(0, "eval", 100, step=100, metrics={"loss": 0.5})
    growing.steps(101, 200)
    follower = Follower(growing.folder)
    follower.look()
    told = [event for event in follower.news if event["kind"] == "eval"]
    assert [(event["step"], event["worker"]) for event in told] == [(100, 0)]


def test_silence_is_said_after_ten_seconds_and_ten_steps(growing: Growing, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.time", lambda: 1_700_000_000.0)
    growing.start()
    follower = Follower(growing.folder)
    assert follower.look().silent_s is None
    now[0] += 20
    assert follower.look().silent_s == pytest.approx(20)
    growing.steps(1, 2)
    assert follower.look().silent_s is None


def test_a_run_that_was_cut_off_long_ago_is_silent_at_the_first_look(growing: Growing) -> None:
    growing.start()
    growing.steps(1, 5)
    silent_s = Follower(growing.folder).look().silent_s
    assert silent_s is not None
    assert silent_s > 1e6  # its events are of 2023


def test_the_state_as_json_has_what_the_page_needs(growing: Growing) -> None:
    growing.start()
    growing.steps(1, 3)
    plain = Follower(growing.folder).look().as_json()
    assert set(plain) == {*LiveState.__dataclass_fields__, "is_over", "counts"}
    assert set(plain["workers"][0]) == set(WorkerState.__dataclass_fields__)
    assert plain["counts"] == {"running": 2}
