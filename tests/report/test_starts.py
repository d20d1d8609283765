"""A run that was gone on with: its faults stay, and each start is a row of its own."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.report.live.follow import Follower
from shoal.report.logs import starts
from shoal.report.logs.facts import Fault
from shoal.report.page.write import write_page
from shoal.report.summary import summarize
from tests.report.live_runs import START_S, STEP_S, Growing

STOPPED = {"type": "Stopped", "message": "stopped by SIGTERM after step 23, with a checkpoint. Go on with: shoal train"}


@pytest.fixture
def growing(tmp_path: Path) -> Growing:
    """A run whose first start came to step 23."""
    run = Growing(tmp_path)
    run.start()
    run.steps(1, 23)
    return run


def go_on(run: Growing, *, after: int, at: float, to: int) -> float:
    """Start the run again when a step `at` was due, and train to another; return when that is."""
    run.put_aside(after)
    for rank in range(run.workers):
        run.write(rank, "start", at, pid=2, host="node-9")
        for number in range(after + 1, to + 1):
            run.step(rank, number, time=START_S + STEP_S * (at + number - after))
    return at + to - after


def of_starts(run: Growing) -> list[Fault]:
    return [fault for fault in summarize(run.folder).faults if fault.kind == "start"]


def test_a_run_that_was_started_once_has_no_row(growing: Growing) -> None:
    assert of_starts(growing) == []


def test_a_start_says_why_the_one_before_ended_where_it_went_on_and_what_that_cost(growing: Growing) -> None:
    for rank in range(2):
        growing.write(rank, "error", 23, **STOPPED)
    growing.put_aside(20)
    for rank in range(2):
        growing.write(rank, "start", 60, pid=2, host="node-9")
        growing.step(rank, 21, time=START_S + STEP_S * 63)
    (start,) = of_starts(growing)
    assert start.sentence == (
        "Started again, and gone on after step 20; before, it came to step 23: "
        "stopped by SIGTERM after step 23, with a checkpoint."
    )
    assert (start.step, start.lost_steps) == (20, 3)
    assert start.recovery_s == pytest.approx(40 * STEP_S)  # from the last words to the next step
    assert "stopped by SIGTERM after step 23" in write_page(growing.folder).read_text()


def test_the_cause_is_no_echo_of_another_workers(growing: Growing) -> None:
    growing.write(0, "error", 23, type="PeerLost", message="another worker is gone")
    growing.write(1, "error", 23.5, type="ValueError", message="no such sample. And more\nof it", traceback="")
    go_on(growing, after=10, at=30, to=11)
    (start,) = of_starts(growing)
    assert start.sentence.endswith("before, it came to step 23: ValueError: no such sample.")


def test_a_run_that_was_cut_off_without_a_checkpoint_begins_anew(growing: Growing) -> None:
    go_on(growing, after=0, at=30, to=2)
    (start,) = of_starts(growing)
    assert start.sentence == (
        "Started again, and begun from the first step; before, it came to step 23: "
        "it was cut off, and no worker said why."
    )
    assert start.lost_steps == 23


def test_five_pre_emptions_are_five_rows_in_their_order(growing: Growing) -> None:
    at = 23.0
    for last in (23, 33, 43, 53, 63):
        for rank in range(2):
            growing.write(rank, "error", at, **STOPPED)
        at = go_on(growing, after=last - 3, at=at + 5, to=last + 10)
    found = of_starts(growing)
    assert [start.step for start in found] == [20, 30, 40, 50, 60]
    assert [start.lost_steps for start in found] == [3] * 5
    assert "5 events" in write_page(growing.folder).read_text()


def test_a_start_that_began_no_worker_but_put_logs_aside_is_no_start(growing: Growing) -> None:
    growing.put_aside(20)
    go_on(growing, after=20, at=40, to=22)
    assert [(start.step, start.lost_steps) for start in of_starts(growing)] == [(20, 3)]


def test_more_workers_than_before_make_one_start_together(growing: Growing) -> None:
    growing.workers = 4
    go_on(growing, after=20, at=40, to=22)
    assert [(start.step, start.lost_steps) for start in of_starts(growing)] == [(20, 3)]


def test_where_a_log_goes_on_is_found_in_one_of_any_length(growing: Growing, monkeypatch: pytest.MonkeyPatch) -> None:
    growing.steps(24, 2000)
    go_on(growing, after=1500, at=2010, to=1900)
    expected = of_starts(growing)
    monkeypatch.setattr(starts, "_NEAR_BYTES", 2000)
    assert of_starts(growing) == expected
    assert [(start.step, start.lost_steps) for start in expected] == [(1500, 500)]


def note_jobs(run: Growing, *lines: dict[str, Any]) -> None:
    run.folder.slurm.mkdir()
    (run.folder.slurm / "starts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"job": "1')


def test_the_starts_of_a_slurm_job_are_named_also_those_in_vain(growing: Growing) -> None:
    go_on(growing, after=20, at=90, to=22)
    times = [START_S + STEP_S * step for step in (-1, 50, 80)]
    note_jobs(growing, *({"job": "12", "time": time, "step": 20 * (i > 0)} for i, time in enumerate(times)))
    assert [(start.time_s, start.sentence.split(";")[0]) for start in of_starts(growing)] == [
        (times[1], "Started by job 12, and no worker came up."),
        (START_S + STEP_S * 90, "Started again by job 12, and gone on after step 20"),
    ]


def test_what_makes_no_sense_there_is_left_out(growing: Growing) -> None:
    go_on(growing, after=20, at=90, to=22)
    note_jobs(growing, {"job": 1}, {"time": "x", "step": 1}, {"time": 1.0, "step": None})
    (growing.folder.events / "attempt-x").mkdir()
    (growing.folder.events / "attempt-7").write_text("no folder")
    (growing.folder.events / "attempt-1" / "rank-1.jsonl").write_bytes(
        b"\xff\n[]\n" + b'{"kind": 7}\n{"kind": "step"}\n'
    )
    assert [start.step for start in of_starts(growing)] == [20]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("hang", {"sentence": "Worker 1 is silent.", "blamed": [1], "still_s": 9.0}),
        ("loss", {"dead": [1], "workers": 1, "step": 21, "recovery_s": 2.0}),
        ("joined", {"joined": [1], "workers": 2, "step": 22, "recovery_s": 2.0}),
        ("caught_up", {"step": 22, "missed": 2, "bytes": 1, "seconds": 0.1}),
    ],
)
def test_faults_stay_when_a_run_is_gone_on_with(growing: Growing, kind: str, fields: dict[str, Any]) -> None:
    growing.write(0, kind, 22.5, **fields)
    before = summarize(growing.folder).faults
    for at in (40, 50):
        go_on(growing, after=20, at=at, to=23)
    faults = [fault for fault in summarize(growing.folder).faults if fault.kind != "start"]
    assert faults == list(before)
    assert len(faults) == 1


def test_shares_stay_up_to_the_step_that_the_run_goes_on_after(growing: Growing) -> None:
    for step in (5, 22):
        growing.write(0, "shares", step, step=step, shares=[0.5, 0.5], predicted_gain=1.1)
    go_on(growing, after=20, at=40, to=23)
    assert [shares.step for shares in summarize(growing.folder).shares] == [5]


def test_the_live_view_neither_tells_twice_what_was_put_aside_nor_takes_it_for_now(growing: Growing) -> None:
    growing.write(0, "eval", 20, step=20, metrics={"loss": 0.5})
    growing.write(0, "loss", 22, dead=[1], workers=1, step=21)
    growing.write(0, "hang", 23.5, sentence="Worker 1 is silent.", blamed=[1], still_s=9.0)
    follower = Follower(growing.folder)
    assert follower.look().hang == "Worker 1 is silent."
    growing.put_aside(20)
    for rank in range(2):
        growing.write(rank, "start", 40, pid=2, host="node-9")
    for looking in (follower, Follower(growing.folder)):
        state = looking.look()
        assert (state.hang, [worker.state for worker in state.workers]) == ("", ["starting", "starting"])
    assert [event["kind"] for event in follower.news] == ["start", "start"]
