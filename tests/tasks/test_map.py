"""`shoal.map` with real processes: order, failures, and a folder that is gone on with after anything was killed."""

import concurrent.futures
import os
import signal
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

import shoal
from shoal.core.errors import ConfigError, WorkerFailed
from shoal.data.stage.locks import FileLock
from shoal.tasks.journal import Journals, done_tasks
from shoal.tasks.progress import time_left_s
from shoal.tasks.queued import ENDED
from shoal.tasks.reads import _bytes_read
from shoal.tasks.submitting import SlurmOptions
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


def test_the_folders_of_a_map_are_its_owners_alone_whatever_the_umask_and_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "it's kept"
    folder.mkdir(mode=0o755)  # by hand
    umask = os.umask(0o002)
    try:
        shoal.map(work.most_at_once, [str(tmp_path)], folder=folder, reads_at_once=1)
    finally:
        os.umask(umask)
    inside = [path for path in folder.iterdir() if path.is_dir()]
    assert {path.name for path in inside} == {"done", "open", "taken", "jobs", "code", "reads"}
    assert {path.stat().st_mode & 0o777 for path in inside} == {0o700}
    (folder / "done").chmod(0o770)
    with pytest.raises(ConfigError, match="done can be written by others") as raised:
        shoal.map(work.most_at_once, [str(tmp_path)], folder=folder, reads_at_once=1)
    subprocess.run(["bash", "-c", str(raised.value).partition("or: ")[2]], check=True, timeout=10)
    assert (folder / "done").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_another_process_is_at_work_on_is_refused(tmp_path: Path) -> None:
    gate, folder = tmp_path / "gate", tmp_path / "kept"
    items = [str(gate)]
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        first = thread.submit(shoal.map, work.wait_at, items, folder=folder)
        wait_until(lambda: (folder / "work.lock").exists() or first.done())
        wait_until(lambda: not is_free(folder / "work.lock") or first.done())
        for slurm in (False, SlurmOptions()):
            with pytest.raises(ConfigError, match="another process is at work on"):
                shoal.map(work.wait_at, items, folder=folder, slurm=slurm)
        gate.touch()
        assert first.result(timeout=60) == [None]
    assert shoal.map(work.wait_at, items, folder=folder) == [None]


def is_free(path: Path) -> bool:
    with FileLock(path) as lock:
        return lock.take()


@pytest.mark.parametrize(
    ("squeue", "said"),
    [
        ("echo '12_0|RUNNING|node1|None'", r"1 job of Slurm is at work on .*: scancel 12_0"),
        ("exit 1", "whether they still are cannot be told: squeue failed"),
    ],
)
def test_tasks_that_jobs_of_a_stand_in_for_slurm_are_at_are_not_run_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, squeue: str, said: str
) -> None:
    folder = tmp_path / "kept"
    shoal.map(work.double, [1], folder=folder)
    (folder / "jobs" / "12.job").touch()
    (tmp_path / "squeue").write_text(f"#!/bin/sh\n{squeue}\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ConfigError, match=said):
        shoal.map(work.double, [1], folder=folder)
    (folder / "jobs" / ENDED).touch()
    assert shoal.map(work.double, [1], folder=folder) == [2]


def test_a_number_of_retries_below_0_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="retries=-1: give 0, or how often"):
        shoal.map(work.double, [1], folder=tmp_path / "kept", retries=-1)
    assert not (tmp_path / "kept").exists()


def test_no_more_read_at_once_than_asked(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    for limit in (1, 2):
        kept = tmp_path / f"kept-{limit}"
        seen = shoal.map(work.most_at_once, [str(marks)] * 20, folder=kept, workers=4, reads_at_once=limit)
        assert max(seen) <= limit
    with pytest.raises(ConfigError, match="reads_at_once=0"):
        shoal.map(work.double, [1], folder=tmp_path / "none", reads_at_once=0)
    with pytest.raises(ConfigError, match="reads_at_once= needs folder="):
        shoal.map(work.double, [1], reads_at_once=1)


@pytest.mark.parametrize("is_saturated", [True, False])
def test_as_many_read_at_once_as_add_to_the_rate_of_all(tmp_path: Path, is_saturated: bool) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    (tmp_path / "source").write_bytes(bytes(100_000))
    items = [(str(marks), None)] * 4 + [(str(marks), is_saturated)] * 24
    seen = shoal.map(work.read_from, items, folder=tmp_path / "kept", workers=4, reads_at_once="auto")
    assert (fmean(seen[4:]) < 2.5) == is_saturated, seen


def test_reading_is_measured_by_what_was_asked_for_or_fetched(tmp_path: Path) -> None:
    counters = tmp_path / "io"
    counters.write_text("rchar: 1200\nwchar: 5\nsyscr: 3\nread_bytes: 4096\ncancelled_write_bytes: 0\n")
    assert _bytes_read(counters) == (1200, 4096)
    counters.write_text("rchar: 12")
    assert _bytes_read(counters) == (0, 0)
    before = _bytes_read()
    counters.write_bytes(bytes(100_000))
    counters.read_bytes()
    assert _bytes_read()[0] - before[0] >= 100_000


def test_time_left_is_by_the_pace_so_far() -> None:
    assert time_left_s(10, 30, 5.0) == 15.0
    assert time_left_s(0, 30, 5.0) is None
