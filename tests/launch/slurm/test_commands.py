"""Slurm's programs, called for real."""

import os
from pathlib import Path

import pytest

from shoal.core.errors import SlurmError
from shoal.launch.slurm.commands import (
    GONE,
    MARK,
    NUMBER,
    JobState,
    call,
    cancel,
    find_again,
    is_unknown,
    states,
    submit,
)
from shoal.launch.slurm.following import Following, sentence
from shoal.launch.slurm.sbatch import Submission
from shoal.launch.slurm.site import Site, read_site
from tests.support.slurm import SlurmCluster
from tests.support.waiting import wait_until

HOSTILE = ["it's", 'a "b"', "é ü", "per%j", "back\\slash", "#1 $HOME `x`", "-dash"]


def asked(folder: Path, *command: str, **fields: object) -> Submission:
    return Submission(name="t", command=command, folder=folder, time_s=60, **fields)  # type: ignore[arg-type]


def test_a_job_runs_where_it_was_submitted_whatever_its_names(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = {}
    for name in HOSTILE:
        here = tmp_path / name
        here.mkdir()
        monkeypatch.chdir(here)
        submission = Submission(name=name, command=("sh", "-c", 'pwd; echo "$0"', name), folder=here / "s", time_s=60)
        jobs[name] = submit(submission, Site())
    wait_until(lambda: all(state.is_over for state in states(list(jobs.values())).values()), seconds=50)
    for name, job in jobs.items():
        assert states([job])[job].state == "COMPLETED"
        assert (tmp_path / name / "s" / f"output-{job}.txt").read_text() == f"{tmp_path / name}\n{name}\n"
        assert slurm.run("squeue", "--states=all", "-h", f"--jobs={job}", "--format=%j") == f"{name}\n"


def test_the_elements_of_an_array_have_states_of_their_own(slurm: SlurmCluster, tmp_path: Path) -> None:
    fails_once = 'test "$SLURM_ARRAY_TASK_ID" != 1'
    job = submit(asked(tmp_path, "sh", "-c", fails_once, array=3), Site())
    wait_until(lambda: all(state.is_over for state in states([job]).values()), seconds=50)
    found = states([job, "999999"])
    assert {name: state.state for name, state in found.items()} == {
        f"{job}_0": "COMPLETED",
        f"{job}_1": "FAILED",
        f"{job}_2": "COMPLETED",
        "999999": GONE,
    }


def test_a_job_that_waits_says_why_and_can_be_cancelled(slurm: SlurmCluster, tmp_path: Path) -> None:
    said: list[str] = []
    job = submit(asked(tmp_path, "true", extra=("--hold",)), Site())
    Following(job, said.append).look()
    assert "waits in the queue: JobHeldUser" in said[0]
    cancel([job, "999999"])
    wait_until(lambda: states([job])[job].state == "CANCELLED")


def test_what_slurm_refuses_is_said_in_its_words(slurm: SlurmCluster, tmp_path: Path) -> None:
    with pytest.raises(SlurmError, match=r"(?i)invalid partition name"):
        submit(asked(tmp_path, "true", partition="nowhere"), Site())


def test_a_job_whose_submission_got_no_answer_is_not_submitted_again(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = call(["sbatch", "--parsable", "--hold", "--comment=shoal-mark", "--wrap=true"], cwd=tmp_path).strip()
    (tmp_path / MARK).write_text("shoal-mark")
    assert is_unknown(tmp_path)
    assert submit(asked(tmp_path, "true"), Site()) == job
    assert not is_unknown(tmp_path)
    assert len(slurm.run("squeue", "-h").splitlines()) == 1


def test_a_program_that_gives_no_answer_is_not_waited_for(slurm: SlurmCluster) -> None:
    with pytest.raises(SlurmError, match="no answer"):
        call(["sleep", "60"], timeout_s=0.2)


def test_the_limit_of_arrays_is_the_controllers(slurm: SlurmCluster) -> None:
    assert read_site().array_limit == 1001


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (JobState("1", "PENDING", "Priority", ""), "waits in the queue: Priority (others are before it)"),
        (JobState("1", "PENDING", "ReqNodeNotAvail, UnavailableNodes:n1", ""), "UnavailableNodes:n1"),
        (JobState("1", "RUNNING", "", "n[1-2]"), "runs on n[1-2]"),
        (JobState("1", "NODE_FAIL", "NodeDown", "n1"), "is NODE_FAIL on n1 (NodeDown)"),
        (JobState("1", GONE, "", ""), "does not know"),
    ],
)
def test_states_are_said_in_sentences(state: JobState, said: str) -> None:
    assert said in sentence(state)


def test_a_job_whose_number_was_not_written_down_is_found_again(slurm: SlurmCluster, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    job = submit(asked(folder, "true", extra=("--hold",)), Site())
    submit(asked(tmp_path / "b", "true", extra=("--hold",)), Site())
    assert (folder / NUMBER).read_text() == job
    (folder / NUMBER).unlink()  # as if this process had been killed just before
    assert find_again(folder) == job
    assert (folder / NUMBER).read_text() == job


def test_a_job_that_slurm_has_forgotten_is_found_by_its_output(slurm: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "output-7.txt").write_text("of an earlier job")
    os.utime(tmp_path / "output-7.txt", (1, 1))
    (tmp_path / MARK).write_text("shoal-forgotten")
    assert find_again(tmp_path, settle_s=0) is None
    (tmp_path / "output-12_3.txt").write_text("")
    assert find_again(tmp_path) == "12"


def test_what_was_never_submitted_is_not_found(slurm: SlurmCluster, tmp_path: Path) -> None:
    assert find_again(tmp_path) is None
    (tmp_path / MARK).write_text("shoal-never")
    assert find_again(tmp_path, settle_s=1.5) is None
