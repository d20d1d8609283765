"""`shoal.map` with real processes: order, failures, and a folder that is gone on with after anything was killed."""

import concurrent.futures
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from shoal.core.errors import ConfigError, WorkerFailed
from shoal.tasks.journal import Journals, done_tasks
from shoal.tasks.progress import time_left_s
from tests.support.waiting import wait_until
from tests.tasks import work

ROOT = Path(__file__).parents[2]


def counted(folder: Path, count: int) -> list[tuple[str, int]]:
    """Return items for `work.note`, which counts in `folder` how often each task ran."""
    folder.mkdir(exist_ok=True)
    return [(str(folder), number) for number in range(count)]


def test_results_are_in_order() -> None:
    assert shoal.map(work.double, range(500)) == list(range(0, 1000, 2))
    assert shoal.map(work.double, iter("ab"), workers=1) == ["aa", "bb"]
    assert shoal.map(work.double, []) == []


def test_a_failure_is_raised_and_says_which_task(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="three") as raised:
        shoal.map(work.fail_at_three, range(10))
    assert raised.value.__notes__ == ["This was task 3 of 10."]
    assert "in the worker" in str(raised.value.__cause__)


def test_failures_can_be_returned() -> None:
    results = shoal.map(work.fail_at_three, range(5), on_error="return")
    assert results[:3] == [0, 1, 2]
    assert isinstance(results[3], ValueError)
    with pytest.raises(ConfigError, match="on_error='ignore'"):
        shoal.map(work.double, [1], on_error="ignore")


def test_lambdas_go_through_cloudpickle() -> None:
    pytest.importorskip("cloudpickle")
    more = 5
    assert shoal.map(lambda item: item + more, range(3)) == [5, 6, 7]


def test_an_executor_of_the_user_is_used() -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        assert shoal.map(lambda item: (item, os.getpid()), range(3), executor=executor) == [
            (number, os.getpid()) for number in range(3)
        ]
        with pytest.raises(ValueError, match="three"):
            shoal.map(work.fail_at_three, range(5), executor=executor)
        with pytest.raises(ConfigError, match="leave out folder="):
            shoal.map(work.double, [1], executor=executor, folder="x")


def test_an_executor_of_the_user_tries_again(tmp_path: Path) -> None:
    items = [(str(tmp_path), number) for number in range(6)]
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        assert shoal.map(work.fail_once, items, executor=executor, retries=1) == list(range(6))


def test_what_is_done_in_a_folder_is_not_done_again(tmp_path: Path) -> None:
    items = counted(tmp_path / "ran", 40)
    for _ in range(2):
        assert shoal.map(work.note, items, folder=tmp_path / "kept") == [10 * number for number in range(40)]
    assert {path.read_text() for path in (tmp_path / "ran").iterdir()} == {"ran\n"}
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o700


def test_only_failed_tasks_are_tried_again(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    ran.mkdir()
    items = [(str(ran), number) for number in range(6)]
    with pytest.raises(OSError, match="not yet") as raised:
        shoal.map(work.fail_once, items, folder=tmp_path / "kept")
    assert "3 failed; the results of the others are in" in raised.value.__notes__[0]
    done = done_tasks(tmp_path / "kept" / "done")
    assert done == {0, 2, 4}
    assert shoal.map(work.fail_once, items, folder=tmp_path / "kept") == list(range(6))
    assert len(list(Journals(tmp_path / "kept" / "done").news())) == 3 + 3 + 3


def test_a_worker_killed_at_a_task_of_a_folder_is_named_and_the_others_are_done_once(tmp_path: Path) -> None:
    items = [(str(tmp_path), number) for number in range(30)]
    assert shoal.map(work.die_once, items, folder=tmp_path / "kept") == list(range(30))
    ran = {number: (tmp_path / str(number)).read_text().count("ran") for number in range(30)}
    assert ran.pop(3) == 2
    assert set(ran.values()) == {1}
    with pytest.raises(WorkerFailed, match="was killed by SIGKILL at task 3"):
        shoal.map(work.die_at_three, range(10), folder=tmp_path / "dying")
    assert done_tasks(tmp_path / "dying" / "done") == set(range(10)) - {3}


def test_after_everything_was_killed_the_same_call_goes_on(tmp_path: Path) -> None:
    counted(tmp_path / "ran", 0)
    script = tmp_path / "script.py"
    script.write_text(
        "import shoal\nfrom tests.tasks import work\n\nif __name__ == '__main__':\n"
        f"    items = [({str(tmp_path / 'ran')!r}, number) for number in range(200)]\n"
        f"    assert shoal.map(work.note, items, folder={str(tmp_path / 'kept')!r}, workers=2) "
        "== [10 * number for number in range(200)]\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, str(script)], env=env)
    wait_until(lambda: len(list((tmp_path / "ran").iterdir())) > 30)
    process.send_signal(signal.SIGKILL)
    process.wait(20)
    before = done_tasks(tmp_path / "kept" / "done")
    assert 0 < len(before) < 200
    subprocess.run([sys.executable, str(script)], env=env, check=True, timeout=60)
    ran = {number: (tmp_path / "ran" / str(number)).read_text().count("ran") for number in range(200)}
    assert {ran[number] for number in before} == {1}
    # Of the others, those two that workers were at when they were killed had begun before.
    assert sum(count - 1 for count in ran.values()) <= 2
    found = [record.index for record in Journals(tmp_path / "kept" / "done").news()]
    assert sorted(found) == list(range(200))


def test_a_folder_of_other_tasks_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    shoal.map(work.double, [1, 2], folder=folder)
    with pytest.raises(ConfigError, match=r"holds the results of tests.tasks.work:double, not of tests.tasks.work:"):
        shoal.map(work.fail_at_three, [1, 2], folder=folder)
    with pytest.raises(ConfigError, match="begun with 2 items, and now there are 3"):
        shoal.map(work.double, [1, 2, 3], folder=folder)
    with pytest.raises(ConfigError, match="begun with other items"):
        shoal.map(work.double, [1, 3], folder=folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ConfigError, match="holds something else"):
        shoal.map(work.double, [1], folder=tmp_path / "other")


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    shoal.map(work.double, [1], folder=folder)
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by others, and what lies there is unpickled"):
        shoal.map(work.double, [1], folder=folder)


def test_no_more_read_at_once_than_asked(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    for limit in (1, 2):
        kept = tmp_path / f"kept-{limit}"
        seen = shoal.map(work.most_at_once, [str(marks)] * 20, folder=kept, workers=4, reads_at_once=limit)
        assert max(seen) <= limit
    seen = shoal.map(work.most_at_once, [str(marks)] * 20, folder=tmp_path / "auto", workers=4, reads_at_once="auto")
    assert max(seen) <= 4
    with pytest.raises(ConfigError, match="reads_at_once=0"):
        shoal.map(work.double, [1], folder=tmp_path / "none", reads_at_once=0)
    with pytest.raises(ConfigError, match="reads_at_once= needs folder="):
        shoal.map(work.double, [1], reads_at_once=1)


def test_time_left_is_by_the_pace_so_far() -> None:
    assert time_left_s(10, 30, 5.0) == 15.0
    assert time_left_s(0, 30, 5.0) is None
