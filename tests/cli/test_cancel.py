"""`shoal cancel`, with stand-ins for Slurm's answers and for the clock."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.core.errors import SlurmError
from shoal.launch.slurm import commands, following
from shoal.launch.slurm.commands import JobState
from shoal.launch.slurm.following import Submitted
from tests.support.runs import make_run


class Job:
    """A job that ends `ends_s` after it was told to, and a controller that does not answer every third question."""

    def __init__(self, ends_s: float) -> None:
        self.now_s, self.asked, self.did, self._ends_s = 1000.0, 0, "", 1000.0 + ends_s

    def states(self, jobs: Sequence[str]) -> dict[str, JobState]:
        self.asked += 1
        if self.asked % 3 == 0:
            raise SlurmError("squeue gave no answer")
        state = "RUNNING" if self.now_s < self._ends_s else "COMPLETED"
        return {job: JobState(job, state, "", "node1") for job in jobs}

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    found = Job(ends_s=20.0)
    monkeypatch.setattr(commands, "states", found.states)
    monkeypatch.setattr(following, "states", found.states)
    monkeypatch.setattr(commands, "notify", lambda job: setattr(found, "did", f"told {job}"))
    monkeypatch.setattr(commands, "cancel", lambda jobs: setattr(found, "did", f"{found.did}, ended {jobs[0]}"))
    monkeypatch.setattr("shoal.cli.cancel.time.sleep", found.sleep)
    monkeypatch.setattr("shoal.cli.cancel.time.monotonic", lambda: found.now_s)
    return found


def test_slurm_is_asked_once_a_second_and_again_where_it_does_not_answer(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, status=None)
    run.slurm.mkdir()
    Submitted(job="12", nodes=1, workers_per_node=1, time_s=600, notice_s=60).write(run)
    assert main(["cancel", str(run.path)]) == 0
    assert job.did == "told 12, ended 12"
    assert job.asked <= 25
    assert "Job 12 is cancelled" in capsys.readouterr().out
