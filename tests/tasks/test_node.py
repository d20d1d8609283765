"""The side of a map that runs in a job, without Slurm: how often it looks for more, and when it takes no more."""

import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.tasks import claims, node
from shoal.tasks.batch import Batch
from shoal.tasks.call import refer
from shoal.tasks.claims import Bunch
from shoal.tasks.executor import Started
from shoal.tasks.folder import TaskFolder
from shoal.tasks.journal import Journal, Journals, Record, done_tasks
from shoal.tasks.kept import holder_here, note_deaths
from shoal.tasks.node import Held, Node
from shoal.tasks.outcome import Failure
from tests.support.waiting import wait_until
from tests.tasks import work


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    return tmp_path / "gate"


@pytest.fixture
def folder(tmp_path: Path, gate: Path) -> TaskFolder:
    """Tasks that are done when there is something at `gate`."""
    return TaskFolder.begin(tmp_path / "kept", refer(work.wait_at), [str(gate)] * 2)


def counted(function: Callable[..., object]) -> tuple[list[None], Callable[..., object]]:
    """Return a function that does the same, and a list that gets longer with each call."""
    calls: list[None] = []

    def wrapped(*arguments: object, **options: object) -> object:
        calls.append(None)
        return function(*arguments, **options)

    return calls, wrapped


def test_a_job_at_its_last_task_seldom_looks_for_more(
    folder: TaskFolder, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, take = counted(claims.take)
    waits, wait = counted(Started.wait)
    monkeypatch.setattr(node, "take", take)
    monkeypatch.setattr(Started, "wait", wait)
    claims.offer(folder, 0, [0])
    job = Node(folder, width=1, retries=0, reads_at_once=None)
    thread = threading.Thread(target=job.run)
    thread.start()
    wait_until(lambda: len(waits) > 60, seconds=60)
    assert len(looks) < len(waits) / 4
    claims.offer(folder, 1, [1])  # as when another job gives back what it cannot do
    wait_until(lambda: claims.count_open(folder) == 0)
    gate.touch()
    thread.join(60)
    assert done_tasks(folder.done) == {0, 1}


def test_a_job_takes_no_more_when_the_longest_task_so_far_would_not_fit(
    folder: TaskFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("shoal.tasks.node.time.time", lambda: now_s)
    monkeypatch.setenv("SHOAL_WALL_END", str(now_s + 60.0))
    claims.offer(folder, 0, [0, 1])
    job = Node(folder, width=1, retries=0, reads_at_once=None)
    try:
        assert not job._is_time()
        started = Started(3)
        started.batch = Batch([0, 1, 2], started.take)
        job._held.append(Held(Bunch(folder.path, [0, 1, 2]), started, 0.0))
        for seconds in (40.0, 0.1, 0.1):  # the last are short, and those after them may not be
            started.batch.done(started.batch.take(1), [None], {}, seconds)
        assert job._is_time()
        job._held.clear()  # a bunch that is done, and forgotten
        assert job._is_time()
        now_s -= 10.0
        assert not job._is_time()
    finally:
        job._pool.kill()


def test_failures_that_a_worker_has_noted_are_not_noted_again_and_other_jobs_journals_are_not_read(
    folder: TaskFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for job in ("12_1", "12_10"):
        journal = Journal(folder.done, holder_here(job))
        journal.append(Record(0, has_failed=True, seconds=0.1, data=pickle.dumps(Failure("of a worker"))))
        journal.close()
    opened, read = counted(Path.open)
    monkeypatch.setattr(Path, "open", read)
    note_deaths(folder, {}, "12_1")
    assert opened == []
    note_deaths(folder, {0: Failure("of a worker"), 1: Failure("before its first task")}, "12_1")
    assert len(opened) == 1
    monkeypatch.undo()
    assert sorted(record.index for record in Journals(folder.done).news()) == [0, 0, 1]
