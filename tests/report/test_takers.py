"""Events that make no sense are counted as damage, one by one, and never stop a report."""

import json
from typing import Any

import pytest

from shoal.core.run_folder import RunFolder
from shoal.report.page.write import write_page
from shoal.report.summary import summarize

GOOD: dict[str, dict[str, Any]] = {
    "eval": {"step": 3, "metrics": {"loss": 1.0}},
    "comm": {
        "steps": 10,
        "calls": [{"op": "a", "algorithm": "b", "link": "c", "bytes": 8, "count": 1, "seconds": 0.1}],
    },
    "data": {"step": 10, "steps": 10, "samples": 4, "bytes": 4, "wait_s": 0.1, "fill_s": 0.1, "threads": 1, "depth": 1},
    "memory": {"step": 3, "at_s": [0.0], "bytes": [5], "labels": ["x"]},
    "trace": {"step": 3, "file": "traces/rank-0-step-3.json", "why": "asked"},
    "shares": {"step": 3, "shares": [0.5, 0.5], "predicted_gain": 1.1},
    "checkpoint": {"step": 3, "stall_s": 0.1, "write_s": 0.2, "bytes": 5},
    "hang": {"sentence": "Worker 1 is silent.", "blamed": [1], "still_s": 30.0},
    "loss": {"dead": [1], "workers": 1, "step": 3, "recovery_s": 2.0},
    "joined": {"joined": [1], "workers": 2, "step": 3, "recovery_s": 2.0},
    "caught_up": {"step": 3, "missed": 2, "bytes": 10, "seconds": 0.1},
    "staging": {"field": "data", "source": "a", "path": "b", "why": "c", "is_staged": True},
}
# What each kind cannot do without: a value of the wrong kind in its place is damage.
NEEDED = {
    "eval": "metrics",
    "comm": "calls",
    "data": "steps",
    "memory": "at_s",
    "trace": "file",
    "shares": "shares",
    "checkpoint": "stall_s",
    "hang": "sentence",
    "loss": "dead",
    "joined": "joined",
    "caught_up": "missed",
    "staging": "why",
}


def append(run: RunFolder, kind: str, fields: dict[str, Any]) -> None:
    with run.events_of(0).open("a") as file:
        file.write(json.dumps({"kind": kind, "time": 1011.0, **fields}) + "\n")


@pytest.mark.parametrize("kind", GOOD)
def test_an_event_as_workers_write_it_is_taken(run: RunFolder, kind: str) -> None:
    append(run, kind, GOOD[kind])
    assert summarize(run).missing == ()
    assert write_page(run).exists()


@pytest.mark.parametrize("value", [None, "x", True, 1e400, [None], {"a": []}, -(10**30)])
@pytest.mark.parametrize("kind", GOOD)
def test_one_with_something_else_in_it_is_damage_or_harmless(run: RunFolder, kind: str, value: Any) -> None:
    for name in GOOD[kind]:
        append(run, kind, GOOD[kind] | {name: value})
    assert write_page(run).exists()


@pytest.mark.parametrize("kind", NEEDED)
def test_one_that_lacks_what_it_is_about_is_said(run: RunFolder, kind: str) -> None:
    append(run, kind, GOOD[kind] | {NEEDED[kind]: None})
    assert summarize(run).missing == ("The log of worker 0 has 1 damaged line, left out.",)


def test_a_line_of_a_hundred_thousand_brackets_is_one_damaged_line(run: RunFolder) -> None:
    with run.events_of(0).open("a") as file:
        file.write("[" * 100_000 + "\n")
    assert summarize(run).missing == ("The log of worker 0 has 1 damaged line, left out.",)


def test_calls_of_one_kind_are_added_up_over_events_and_workers(run: RunFolder) -> None:
    call = {"op": "all-reduce", "algorithm": "ring", "link": "host", "bytes": 1000, "count": 5, "seconds": 0.5}
    for rank in (0, 0, 1):
        with run.events_of(rank).open("a") as file:
            file.write(json.dumps({"kind": "comm", "time": 1011.0, "step": 6, "steps": 6, "calls": [call]}) + "\n")
    summary = summarize(run)
    (found,) = summary.calls
    assert (found.count, found.seconds, summary.calls_steps) == (15, 1.5, 18)


def test_loading_is_added_up_and_a_batch_is_what_one_thread_takes_for_it(run: RunFolder) -> None:
    for _ in range(2):
        append(run, "data", GOOD["data"] | {"fill_s": 0.4, "threads": 3})
    (loading,) = summarize(run).loading
    assert (loading.rank, loading.steps, loading.threads) == (0, 20, 3)
    assert loading.batch_s == pytest.approx(0.04)


def test_a_worker_that_starts_again_has_left_its_failure_behind(run: RunFolder) -> None:
    append(run, "error", {"type": "ValueError", "message": "no"})
    assert summarize(run).per_worker[0].error == "ValueError: no"
    append(run, "start", {"pid": 2})
    assert summarize(run).per_worker[0].error is None
