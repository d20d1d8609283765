"""A map in jobs of a real Slurm: few jobs; and a killed submitter, node and controller: each result is there once."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.core.errors import WorkerFailed
from shoal.launch.slurm.commands import notify
from shoal.tasks.bunch import Room
from shoal.tasks.journal import Journals, done_tasks
from shoal.tasks.map import map as shoal_map
from shoal.tasks.submitting import SlurmOptions
from tests.support.slurm import SlurmCluster
from tests.support.waiting import wait_until
from tests.tasks import work

ROOT = Path(__file__).parents[2]

FILE = """
import os, time
from pathlib import Path

def note(number):
    with open(Path({ran!r}) / str(number), "a") as file:
        file.write("ran\\n")
    time.sleep({task_s})
    return number * 10
"""


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


class Mapping:
    """`shoal map` of 200 tasks that count how often each ran, as a process that can be killed."""

    def __init__(self, folder: Path, *, task_s: float = 0.25) -> None:
        folder.mkdir()
        self.ran, self.out = folder / "ran", folder / "out"
        self.ran.mkdir()
        (folder / "f.py").write_text(FILE.format(ran=str(self.ran), task_s=task_s))
        self.command = [sys.executable, "-m", "shoal", "map", str(folder / "f.py") + ":note", "range:0:200"]
        self.command += ["--slurm", "--workers", "4", "--out", str(self.out)]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(self.command)

    def wait_for(self, count: int) -> None:
        wait_until(lambda: self.done() >= count, seconds=40)

    def done(self) -> int:
        return len(done_tasks(self.out / "done")) if (self.out / "done").is_dir() else 0

    def holders(self) -> list[str]:
        """Return the jobs that are at work."""
        return sorted({path.name.split("@")[1] for path in self.out.glob("taken/*@*")})

    def end(self) -> None:
        assert self.process is not None
        assert self.process.wait(60) == 0

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(10)

    def check(self, *, interrupted: int) -> None:
        """Every result is there once, and at most `interrupted` tasks, which had no result, were begun twice."""
        lines = [json.loads(line) for line in (self.out / "results.jsonl").read_text().splitlines()]
        assert lines == [{"item": number, "result": 10 * number} for number in range(200)]
        found = [record.index for record in Journals(self.out / "done").news() if not record.has_failed]
        assert sorted(found) == list(range(200))
        runs = {number: len((self.ran / str(number)).read_text().splitlines()) for number in range(200)}
        again = {number: count - 1 for number, count in runs.items() if count > 1}
        assert sum(again.values()) <= interrupted, again


@pytest.fixture
def mapping(tmp_path: Path) -> Iterator[Mapping]:
    mapping = Mapping(tmp_path / "a 'map' é")
    yield mapping
    if mapping.process is not None and mapping.process.poll() is None:
        mapping.kill()


def test_200_tasks_are_a_few_jobs(slurm: SlurmCluster, tmp_path: Path) -> None:
    options = SlurmOptions(task=Room(cores=1, memory_bytes=50e6), time_s=120)
    results = shoal_map(work.double, range(200), folder=tmp_path / "kept", slurm=options, workers=2)
    assert results == list(range(0, 400, 2))
    jobs = list((tmp_path / "kept" / "jobs").glob("submission-*/output-*"))
    assert 1 <= len(jobs) <= 2  # on a busy machine the first tasks take so long that one job is not enough
    assert shoal_map(work.double, range(200), folder=tmp_path / "kept", slurm=options) == results


def test_failures_have_their_traceback_and_a_dying_task_is_named(slurm: SlurmCluster, tmp_path: Path) -> None:
    options = SlurmOptions(task_time_s=0.01)
    results = shoal_map(
        work.fail_at_three, range(10), folder=tmp_path / "a", slurm=options, workers=2, on_error="return"
    )
    assert isinstance(results[3], ValueError)
    assert 'raise ValueError("three")' in str(results[3].__cause__)
    assert [result for number, result in enumerate(results) if number != 3] == [0, 1, 2, *range(4, 10)]
    with pytest.raises(WorkerFailed, match="was killed by SIGKILL at task"):
        shoal_map(work.die_at_three, range(10), folder=tmp_path / "b", slurm=options, workers=2)


def test_a_killed_submitter_a_killed_node_and_a_restarted_controller(slurm: SlurmCluster, mapping: Mapping) -> None:
    mapping.start()
    wait_until(lambda: len(mapping.holders()) == 2)
    mapping.kill()
    slurm.wait_for_note_of_jobs()
    slurm.kill_controller()
    mapping.wait_for(mapping.done() + 8)  # the jobs go on without both
    slurm.start_controller()
    mapping.start()
    mapping.wait_for(mapping.done() + 8)
    nodes = dict(line.split() for line in slurm.run("squeue", "-h", "-r", "-t", "R", "-o", "%i %N").splitlines())
    victim = nodes[mapping.holders()[0]]
    slurm.kill_node(victim)
    try:
        mapping.end()
    finally:
        slurm.revive_node(victim)
    # 2 tasks were under way on the node; a submitter that is killed interrupts none.
    mapping.check(interrupted=2)


def test_a_job_that_nears_its_time_limit_stops_in_order_and_the_rest_runs_in_the_next(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    mapping = Mapping(tmp_path / "soon", task_s=0.1)
    mapping.start()
    mapping.wait_for(30)
    told = mapping.holders()
    for job in told:
        notify(job)  # as Slurm does before the end of the time
    mapping.end()
    mapping.check(interrupted=0)
    assert told
    assert {path.name.split("-")[0] for path in (mapping.out / "done").iterdir()} > set(told)


def test_arrays_over_the_limit_are_split(slurm: SlurmCluster, tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text("array_limit = 3\n")
    options = SlurmOptions(site=site, tasks_per_job=4, time_s=60)
    assert shoal_map(work.double, range(20), folder=tmp_path / "kept", slurm=options) == list(range(0, 40, 2))
    scripts = sorted((tmp_path / "kept" / "jobs").glob("submission-*/job.sh"))
    arrays = [line for script in scripts for line in script.read_text().splitlines() if "--array" in line]
    assert [line.split("=")[1] for line in arrays] == ["0-2", "0-1"]


def test_a_task_that_kills_every_job_it_is_in_is_given_up_and_named(slurm: SlurmCluster, tmp_path: Path) -> None:
    options = SlurmOptions(tasks_per_job=3, time_s=60)
    with pytest.raises(WorkerFailed, match=r"jobs ended without one more result; .* the first is task 3"):
        shoal_map(work.kill_job, range(5), folder=tmp_path / "kept", slurm=options)
    assert done_tasks(tmp_path / "kept" / "done") >= {0, 1, 2, 4}
