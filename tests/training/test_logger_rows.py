"""The rows of a run, read off the logs of workers that are lost and replaced."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.core.run_folder import RunFolder
from shoal.training.loggers.rows import Rows
from tests.support.runs import make_run


def write(folder: RunFolder, rank: int, *events: dict[str, Any]) -> None:
    with folder.events_of(rank).open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def steps(first: int, last: int) -> list[dict[str, Any]]:
    numbers = range(first, last + 1)
    return [{"kind": "step", "time": 2000.0 + n, "step": n, "loss": 1 / n, "step_s": 0.5} for n in numbers]


def evaluated(step: int) -> dict[str, Any]:
    return {"kind": "eval", "time": 2000.5 + step, "step": step, "metrics": {"accuracy": 0.5}}


START = {"kind": "start", "time": 2020.0, "pid": 2, "host": "tide-4"}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run of 2 workers without a step."""
    return make_run(tmp_path, steps=0, workers=2, status=None)


def test_when_worker_0_is_lost_another_tells_of_the_steps(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=4, workers=2, status=None)
    rows = Rows(folder, unit="tokens")
    assert [row.step for row in rows.poll()] == [1, 2, 3, 4]
    with folder.events_of(1).open("a") as file:
        for step in (4, 5, 6):  # step 4 is done again
            line = {"kind": "step", "time": 2000.0 + step, "step": step, "loss": 1 / step, "step_s": 0.5}
            file.write(json.dumps(line) + "\n")
    looks = [[row.step for row in rows.poll()] for _ in range(4)]
    assert looks == [[], [], [5, 6], []]
    folder.begin_attempt(step=5, workers=1)
    assert rows.poll() == [], "a new log that has nothing new"


def test_steps_that_worker_0_lacks_come_from_the_others_when_a_run_is_delivered_afterwards(folder: RunFolder) -> None:
    write(folder, 0, *steps(1, 10), START, *steps(21, 30))
    write(folder, 1, *steps(1, 15), evaluated(15), *steps(16, 30))
    rows = Rows(folder, unit="tokens").poll(is_over=True)
    assert [row.step for row in rows] == list(range(1, 31))
    assert [row.values["loss"] for row in rows] == [1 / step for step in range(1, 31)]
    assert [(row.step, row.values["eval/accuracy"]) for row in rows if "eval/accuracy" in row.values] == [(15, 0.5)]


@pytest.mark.parametrize("looks_until_it_is_replaced", [1, 2, 3, 5])
def test_steps_that_worker_0_lacks_come_from_the_others_while_a_run_goes(
    folder: RunFolder, looks_until_it_is_replaced: int
) -> None:
    rows = Rows(folder, unit="tokens")
    write(folder, 0, *steps(1, 10))
    write(folder, 1, *steps(1, 11))
    found = rows.poll()
    write(folder, 1, *steps(12, 15), evaluated(15), *steps(16, 18))
    for _ in range(looks_until_it_is_replaced):
        found += rows.poll()
    write(folder, 0, START)
    write(folder, 1, *steps(19, 20))
    found += rows.poll()
    for rank in (1, 0):
        write(folder, rank, *steps(21, 30))
    found += rows.poll()
    assert [row.step for row in found] == list(range(1, 31))
    assert [row.step for row in found if "eval/accuracy" in row.values] == [15]
    assert rows.poll(is_over=True) == []


def test_steps_that_were_done_again_after_a_loss_are_told_once(folder: RunFolder) -> None:
    write(folder, 0, *steps(1, 10), START, *steps(13, 20))
    write(folder, 1, *steps(1, 10), *steps(9, 14), *steps(13, 20))
    rows = Rows(folder, unit="tokens")
    assert [row.step for row in rows.poll(is_over=True)] == list(range(1, 21))
    assert rows.poll(is_over=True) == []
