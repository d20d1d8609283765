"""Submissions that get no answer, with stand-ins for Slurm's programs: no job is lost, and none is submitted twice."""

import os
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.core.errors import SlurmError
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.launch.slurm import commands
from shoal.launch.slurm.commands import MARK, is_unknown, submit
from shoal.launch.slurm.sbatch import Submission
from shoal.launch.slurm.site import Site
from shoal.spec.cluster import Cluster, Node
from tests.support.files import job_file

SUBMITS = 'for word in "$@"; do case $word in --comment=*) echo "12|${word#--comment=}" >>"$JOBS";; esac; done'
TIMES_OUT = 'echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2; exit 1'
ANSWERS = 'cat "$JOBS"'
IS_AWAY = "echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1"


class Programs:
    """Stand-ins in a folder of PATH; what sbatch submits is in `jobs`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.jobs = folder, folder / "jobs"
        self.jobs.touch()
        self.have("scontrol", "exit 1")

    def have(self, name: str, body: str) -> None:
        (self.folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (self.folder / name).chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    (tmp_path / "bin").mkdir()
    found = Programs(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{found.folder}:{os.environ['PATH']}")
    monkeypatch.setenv("JOBS", str(found.jobs))
    monkeypatch.setattr(commands, "_AGAIN_S", 0.01)
    return found


@pytest.fixture
def submission(tmp_path: Path) -> Submission:
    return Submission(name="n", command=("true",), folder=tmp_path / "s", time_s=60)


def test_a_job_of_which_nobody_can_tell_is_looked_for_before_it_is_submitted_again(
    programs: Programs, submission: Submission
) -> None:
    programs.have("sbatch", f"{SUBMITS}; {TIMES_OUT}")
    programs.have("squeue", IS_AWAY)
    with pytest.raises(SlurmError, match="Nor does squeue say whether the job was submitted"):
        submit(submission, Site())
    assert is_unknown(submission.folder)
    with pytest.raises(SlurmError, match="Unable to contact"):
        submit(submission, Site())
    programs.have("squeue", ANSWERS)
    assert submit(submission, Site()) == "12"
    assert len(programs.jobs.read_text().splitlines()) == 1


def test_a_job_that_comes_to_be_after_sbatch_was_given_up_is_waited_for(
    programs: Programs, submission: Submission
) -> None:
    programs.have("sbatch", f"{SUBMITS.replace('$JOBS', '$JOBS-later')}; {TIMES_OUT}")
    programs.have("squeue", f'{ANSWERS}; mv "$JOBS-late" "$JOBS"; mv "$JOBS-later" "$JOBS-late"; true')
    assert submit(submission, Site()) == "12"


def test_what_was_refused_is_not_waited_for_when_it_is_submitted_again(
    programs: Programs, submission: Submission
) -> None:
    programs.have("sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    programs.have("squeue", ANSWERS)
    with pytest.raises(SlurmError, match="invalid partition"):
        submit(submission, Site())
    assert not (submission.folder / MARK).exists()


def test_what_was_not_submitted_is_under_the_mark_of_then(
    programs: Programs, submission: Submission, monkeypatch: pytest.MonkeyPatch
) -> None:
    submission.folder.mkdir()
    (submission.folder / MARK).write_text("shoal-then")
    os.utime(submission.folder / MARK, (1, 1))
    programs.have("sbatch", f"{SUBMITS}; echo 12")
    programs.have("squeue", ANSWERS)
    assert submit(submission, Site()) == "12"
    assert programs.jobs.read_text() == "12|shoal-then\n"


def test_the_run_of_a_job_of_which_nobody_can_tell_stays(
    programs: Programs, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(tmp_path))  # nothing is known of another test's cluster
    programs.have("sbatch", f"{SUBMITS}; {TIMES_OUT}")
    programs.have("squeue", IS_AWAY)
    write_toml(tmp_path / "c.toml", Cluster(nodes=(Node(host="h", cores=2, memory_bytes=10**9, device="a processor"),)))
    asked = ["--slurm", "--workers", "1", "--runs", str(tmp_path), "--name", "r", "--cluster", str(tmp_path / "c.toml")]
    assert main(["train", str(job_file(tmp_path)), *asked]) == 69
    assert f"shoal attach {tmp_path / 'r'}" in capfd.readouterr().err
    assert is_unknown(RunFolder.open(tmp_path / "r").slurm)
