"""How an executor ends: by a shutdown, killed, or with its parent; and that no worker is left and nobody waits."""

import concurrent.futures
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.core.errors import WorkerFailed
from shoal.tasks.executor import Executor
from tests.support.waiting import wait_until
from tests.tasks import work


def test_no_worker_is_left_behind() -> None:
    pool = Executor(2)
    pids = set(pool.map(work.process, range(20)))
    pool.shutdown()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


@pytest.mark.parametrize("waits", [True, False])
def test_an_executor_can_be_shut_down_more_than_once(waits: bool) -> None:
    with Executor(2) as pool:
        future = pool.submit(work.double, 1)
        pool.shutdown(wait=waits)
        pool.shutdown()
        assert future.result(timeout=0) == 2
    assert not pool._pool._thread.is_alive()


def test_an_executor_that_is_killed_in_its_block_leaves_that_at_once(tmp_path: Path) -> None:
    with Executor(1) as pool:
        first = pool.submit(work.wait_at, str(tmp_path / "gate"))
        others = [pool.submit(work.double, number) for number in range(100)]
        pool.map(work.double, range(100))
        wait_until(first.running)
        pool.kill()
        pool.kill()
    with pytest.raises(WorkerFailed, match="ended before this task was done"):
        first.result(timeout=0)
    assert all(future.cancelled() for future in others)


def test_who_waits_for_the_results_of_a_map_hears_that_its_workers_were_ended(tmp_path: Path) -> None:
    pool = Executor(1)
    results = pool.map(work.wait_for, [str(tmp_path / "gate")], [600])
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(next, results)
        wait_until(waiting.running)
        pool.kill()
        with pytest.raises(WorkerFailed, match="ended before this task was done"):
            waiting.result(timeout=60)


def test_who_does_not_wait_for_a_shutdown_is_not_held_up_by_what_runs(tmp_path: Path) -> None:
    pool = Executor(1)
    first = pool.submit(work.wait_for, str(tmp_path / "gate"), 60)
    wait_until(first.running)
    others = [pool.submit(work.double, number) for number in range(100)]
    pool.shutdown(wait=False, cancel_futures=True)
    assert first.running()
    assert all(future.cancelled() for future in others)
    (tmp_path / "gate").touch()
    assert first.result(timeout=30) == 60
    pool.shutdown()


def test_workers_die_with_a_killed_parent() -> None:
    code = (
        "import os, signal, sys\nfrom shoal.tasks.executor import Executor\nfrom tests.tasks import work\n"
        "print(*set(Executor(2).map(work.process, range(20))), flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    pids = [int(word) for word in said.stdout.split()]
    assert pids
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
