"""The executor of a real Slurm: futures as they come, exceptions, cancelling, and few jobs."""

import concurrent.futures
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.core.errors import ConfigError, WorkerFailed
from shoal.launch.slurm.commands import call
from shoal.tasks import slurm_executor
from shoal.tasks.slurm_executor import SlurmExecutor
from shoal.tasks.submitting import SlurmOptions
from tests.support.slurm import SlurmCluster
from tests.support.waiting import wait_until
from tests.tasks import work

ROOT = Path(__file__).parents[2]
OPTIONS = SlurmOptions(time_s=120, task_time_s=0.05)


@pytest.fixture
def executor(slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmExecutor]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pool = SlurmExecutor(tmp_path / "tasks", OPTIONS, workers=2)
    yield pool
    pool.kill()


def test_what_is_submitted_together_is_one_map_and_comes_as_it_is_done(executor: SlurmExecutor, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    last = executor.submit(work.wait_for, str(gate), timeout_s=60)
    futures = {executor.submit(work.wait_for, str(tmp_path), timeout_s=number): number for number in range(5)}
    for future in concurrent.futures.as_completed(futures, timeout=60):
        assert future.result() == futures[future]
    assert not last.done()
    gate.touch()
    assert last.result(timeout=30) == 60
    assert [path.name for path in (tmp_path / "tasks").iterdir()] == ["1"]
    assert len(list((tmp_path / "tasks" / "1" / "jobs").glob("submission-*"))) == 1


def test_while_many_maps_are_under_way_what_is_submitted_gathers(
    executor: SlurmExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_executor, "MOST_MAPS", 1)
    gate, folder = tmp_path / "gate", tmp_path / "tasks"
    first = executor.submit(work.wait_for, str(gate), timeout_s=60)
    wait_until(first.running)
    others = [executor.submit(work.double, 1)]
    time.sleep(3 * slurm_executor.GATHER_S)  # by then it would have gone alone
    others += [executor.submit(work.double, number) for number in (2, 3)]
    assert [path.name for path in folder.iterdir()] == ["1"]
    gate.touch()
    assert [future.result(timeout=60) for future in others] == [2, 4, 6]
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]


def test_exceptions_come_with_their_traceback_and_what_has_not_begun_can_be_cancelled(executor: SlurmExecutor) -> None:
    futures = [executor.submit(work.fail_at_three, number) for number in range(5)]
    assert futures[4].cancel()
    with pytest.raises(ValueError, match="three") as raised:
        futures[3].result(timeout=60)
    assert 'raise ValueError("three")' in str(raised.value.__cause__)
    assert [future.result(timeout=30) for future in futures[:3]] == [0, 1, 2]
    executor.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(work.double, 1)


def test_what_is_killed_leaves_no_job_and_says_so(executor: SlurmExecutor, tmp_path: Path) -> None:
    future = executor.submit(work.wait_for, str(tmp_path / "never"), timeout_s=60)
    wait_until(future.running)
    executor.kill()
    with pytest.raises(WorkerFailed, match="the jobs were ended before"):
        future.result(timeout=1)
    assert not call(["squeue", "--noheader", "--states=PENDING,RUNNING"])


def test_whatever_befalls_a_map_is_the_futures_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object, **__: object) -> None:
        raise TypeError("a mistake of ours")

    monkeypatch.setattr(slurm_executor, "map_on_slurm", breaks)
    with SlurmExecutor(tmp_path / "tasks", OPTIONS) as pool:
        future = pool.submit(work.double, 1)
        with pytest.raises(TypeError, match="a mistake of ours"):
            future.result(timeout=30)


def test_options_that_make_no_sense_are_the_futures_exception(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.fspath(ROOT))
    with SlurmExecutor(tmp_path / "tasks", SlurmOptions(site=tmp_path / "none.toml")) as pool:
        future = pool.submit(work.double, 1)
        with pytest.raises(ConfigError, match=r"none\.toml"):
            future.result(timeout=30)
