"""The executor with real worker processes: results, order, exceptions, deaths, cancelling; its end is apart."""

import concurrent.futures
import os
import pickle
import subprocess
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import ConfigError, WorkerFailed
from shoal.tasks.batch import Batch, chunk_tasks
from shoal.tasks.executor import Executor, Started
from shoal.tasks.outcome import Failure
from tests.support.waiting import wait_until
from tests.tasks import work


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with Executor(2) as pool:
        yield pool


def test_results_come_in_the_order_of_the_items(executor: Executor) -> None:
    assert list(executor.map(work.double, range(1000))) == list(range(0, 2000, 2))
    assert list(executor.map(pow, [2, 3, 4], [5, 2, 1])) == [32, 9, 4]
    assert list(executor.map(work.double, [])) == []


def test_futures_are_those_of_concurrent_futures(executor: Executor) -> None:
    futures = {executor.submit(work.double, number): number for number in range(200)}
    for future in concurrent.futures.as_completed(futures, timeout=30):
        assert future.result() == 2 * futures[future]
    assert executor.submit(int, "ff", base=16).result(timeout=30) == 255


def test_workers_stay(executor: Executor) -> None:
    first = set(executor.map(work.process, range(20)))
    assert set(executor.map(work.process, range(20))) <= first | set(executor.map(work.process, range(20)))
    assert len(first) <= 2
    assert os.getpid() not in first


def test_an_exception_has_the_workers_traceback(executor: Executor) -> None:
    future = executor.submit(work.fail_at_three, 3)
    with pytest.raises(ValueError, match="three") as raised:
        future.result(timeout=30)
    text = "".join(traceback.format_exception(raised.value))
    assert "in the worker:" in text
    assert 'raise ValueError("three")' in text


def test_a_failed_task_spoils_no_other(executor: Executor) -> None:
    futures = [executor.submit(work.fail_at_three, number) for number in range(50)]
    done, _ = concurrent.futures.wait(futures, timeout=30)
    assert len(done) == 50
    assert [future.result() for number, future in enumerate(futures) if number != 3] == [0, 1, 2, *range(4, 50)]
    with pytest.raises(SystemExit):
        executor.submit(work.exit_at_three, 3).result(timeout=30)


def test_exceptions_that_cannot_be_pickled_are_told(executor: Executor) -> None:
    with pytest.raises(WorkerFailed, match="Picky: 1 and 1"):
        executor.submit(work.raise_picky, 1).result(timeout=30)


def test_results_and_items_that_cannot_be_pickled_fail_alone(executor: Executor) -> None:
    started = executor.start(work.cannot_be_pickled, list(range(5)))
    assert started.batch.ended.wait(30)
    assert (set(started.failures), started.values[4]) == ({2}, 4)
    started = executor.start(work.double, [1, lambda: 2, 3])
    assert started.batch.ended.wait(30)
    assert (set(started.failures), started.values[0], started.values[2]) == ({1}, 2, 6)
    assert isinstance(started.failures[1].as_exception(), (pickle.PicklingError, AttributeError))


def test_a_worker_that_dies_fails_only_its_task_which_is_tried_again_and_named(executor: Executor) -> None:
    started = executor.start(work.die_at_three, list(range(100)))
    assert started.batch.ended.wait(60)
    assert list(started.failures) == [3]
    assert "was killed by SIGKILL at task 3: 3" in started.failures[3].said
    assert [value for number, value in enumerate(started.values) if number != 3] == [0, 1, 2, *range(4, 100)]


def test_a_task_whose_worker_died_once_has_its_result(executor: Executor, tmp_path: Path) -> None:
    items = [(str(tmp_path), number) for number in range(20)]
    assert list(executor.map(work.die_once, items)) == list(range(20))
    assert (tmp_path / "3").read_text().count("ran") == 2


def test_failed_tasks_are_tried_again_as_often_as_asked(tmp_path: Path) -> None:
    with Executor(2, retries=1) as pool:
        items = [(str(tmp_path), number) for number in range(10)]
        assert list(pool.map(work.fail_once, items)) == list(range(10))


def test_pending_futures_can_be_cancelled(tmp_path: Path) -> None:
    pool = Executor(1)
    first = pool.submit(work.wait_for, str(tmp_path / "gate"), 60)
    wait_until(first.running)
    futures = [pool.submit(work.note, (str(tmp_path), number)) for number in range(300)]
    assert futures[-1].cancel()
    shutting = threading.Thread(target=pool.shutdown, kwargs={"cancel_futures": True})
    shutting.start()
    wait_until(lambda: all(future.cancelled() for future in futures))
    (tmp_path / "gate").touch()
    assert first.result(timeout=30) == 60
    _, pending = concurrent.futures.wait(futures, timeout=30)
    assert not pending
    shutting.join(30)
    assert [path.name for path in tmp_path.iterdir()] == ["gate"]
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(work.double, 1)


def test_a_map_under_way_can_be_cancelled_as_well(tmp_path: Path) -> None:
    pool = Executor(1)
    items = [str(tmp_path / "gate")] * 300
    started = pool.start(work.wait_at, items)
    wait_until(lambda: started.batch.left() < 300)
    shutting = threading.Thread(target=pool.shutdown, kwargs={"cancel_futures": True})
    shutting.start()
    wait_until(lambda: started.batch.left() == 0)
    (tmp_path / "gate").touch()
    shutting.join(30)
    assert started.done < 300


def test_what_is_done_and_taken_is_not_kept_while_more_is_submitted() -> None:
    with Executor(2) as pool:
        under_way: deque[concurrent.futures.Future[Any]] = deque()
        made = []
        for number in range(4000):
            if number >= 400:
                assert under_way.popleft().result(timeout=30) == number - 400
            future = pool.submit(work.rest_a_moment, number)  # so that there is always one that waits
            under_way.append(future)
            made.append(weakref.ref(future))
        del future
        assert sum(each() is not None for each in made) < 2500
        assert [each.result(timeout=30) for each in under_way] == list(range(3600, 4000))


def test_results_are_looked_for_when_none_is_being_written() -> None:
    started = Started(3)
    found_free: list[bool] = []

    def is_free() -> bool:
        is_ours = started._news.acquire(blocking=False)
        if is_ours:
            started._news.release()
        return is_ours

    class Watched(dict[int, Failure]):
        def __iter__(self) -> Iterator[int]:
            with concurrent.futures.ThreadPoolExecutor(1) as other:
                found_free.append(other.submit(is_free).result())
            return super().__iter__()

    started.failures = Watched()
    started.batch = Batch([0, 1, 2], started.take)
    started.take(range(3), [0, 1, None], {2: Failure("it broke")})
    results = started.in_order()
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(WorkerFailed, match="it broke"):
        next(results)
    assert found_free == [False]


def test_chunks_follow_what_tasks_take() -> None:
    assert chunk_tasks(10_000, total=10_000, workers=2, task_s=None) == 1
    assert chunk_tasks(10_000, total=10_000, workers=2, task_s=1e-7) == 5000
    assert chunk_tasks(5000, total=10_000, workers=2, task_s=1e-7) == 5000
    assert chunk_tasks(10_000, total=10_000, workers=2, task_s=1e-3) == 20
    assert chunk_tasks(20, total=10_000, workers=2, task_s=1e-3) == 5
    assert chunk_tasks(10_000, total=10_000, workers=2, task_s=1.0) == 1


def test_where_no_worker_can_be_started_every_task_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    pool = Executor(2)
    futures = [pool.submit(work.double, number) for number in range(3)]
    for future in futures:
        with pytest.raises(FileNotFoundError, match="/nowhere/python"):
            future.result(timeout=30)
    with pytest.raises(FileNotFoundError, match="/nowhere/python"):
        pool.submit(work.double, 4).result(timeout=30)
    with pytest.raises(FileNotFoundError, match="/nowhere/python"):
        list(pool.map(work.double, range(10), timeout=30))
    pool.shutdown()


def test_where_some_workers_cannot_be_started_the_others_run_all_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    popen = subprocess.Popen

    def first_alone(*arguments: Any, **options: Any) -> Any:
        if started:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(popen(*arguments, **options))
        return started[-1]

    started: list[Any] = []
    monkeypatch.setattr("shoal.tasks.crew.subprocess.Popen", first_alone)
    with Executor(4, say=said.append) as pool:
        assert list(pool.map(work.double, range(100))) == list(range(0, 200, 2))
        assert len(set(pool.map(work.process, range(10)))) == 1
    assert "no more workers can be started: [Errno 11]" in said[0]
    assert "The tasks run on 1." in said[0]


def test_whatever_befalls_the_pool_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: Any) -> None:
        raise RuntimeError("a mistake of ours")

    with Executor(2) as pool:
        assert pool.submit(work.double, 1).result(timeout=30) == 2
        monkeypatch.setattr(pool._pool, "_hear", breaks)
        futures = [pool.submit(work.double, number) for number in range(50)]
        for future in futures:
            with pytest.raises(RuntimeError, match="a mistake of ours"):
                future.result(timeout=30)


def test_no_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match="workers=0: give at least 1"):
        Executor(0)


def test_what_tasks_print_is_seen(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # with it, parts of lines of two workers mix
    with Executor(2) as pool:
        list(pool.map(work.say, range(50)))
    assert sorted(capfd.readouterr().out.splitlines()) == sorted(f"task {number}" for number in range(50))
