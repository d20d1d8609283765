"""Every call of Slurm's programs: each with a timeout, and with what it said where it failed."""

import dataclasses
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.core.errors import SlurmError
from shoal.core.files import write_whole
from shoal.launch.slurm.sbatch import CANCELLED, SCRIPT, Submission, sbatch_text
from shoal.launch.slurm.site import Site

TIMEOUT_S = 30.0
"""Longer than a busy controller takes; its clients wait for minutes for one that is dead."""
GONE = "GONE"
"""The state of a job that Slurm does not know any more."""
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
GOING = ("RUNNING", "CONFIGURING", "COMPLETING", "STAGE_OUT", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING")
MARK, NUMBER = "mark", "number"
"""Files in the folder of a submission: the comment by which its job is found, written before, and the job's number."""
SETTLE_S = 60.0
"""Longer than sbatch goes on without an answer."""
_AGAIN_S = 1.0
_AT_ONCE = 200
"""How many jobs one call is about: a command line has an end."""


class NoAnswer(SlurmError):
    """A program of Slurm was given up: whether it has done what it was asked is not known."""


@dataclass(frozen=True)
class JobState:
    """What Slurm says about a job, or about one element of an array."""

    job: str
    state: str
    """PENDING, RUNNING, COMPLETED, FAILED, TIMEOUT, CANCELLED, NODE_FAIL, PREEMPTED, ..., or GONE."""
    reason: str
    """Why it waits, or why it ended."""
    nodes: str

    @property
    def is_over(self) -> bool:
        """Whether it neither runs nor will."""
        return self.state not in WAITING and self.state not in GOING


def is_there() -> bool:
    """Return whether this machine has Slurm's programs."""
    return shutil.which("sbatch") is not None


def submit(submission: Submission, site: Site) -> str:
    """Write the script of `submission` into its folder, submit it, and return the job's number.

    If this process is killed on the way, or Slurm does not say whether there is a job, `is_unknown` tells from the
    folder, and `find_again` which it is. So does this: called again, it submits only what was not submitted before.
    """
    if not is_there():
        raise SlurmError("there is no sbatch on this machine. Run this on a login node of the cluster.")
    folder = submission.folder.resolve()
    submission = dataclasses.replace(submission, folder=folder, directory=submission.directory or Path.cwd())
    folder.mkdir(parents=True, exist_ok=True)
    if is_unknown(folder) and (before := find_again(folder)) is not None:
        return before
    (folder / CANCELLED).unlink(missing_ok=True)
    write_whole(folder / SCRIPT, sbatch_text(submission, site))
    mark = (folder / MARK).read_text() if is_unknown(folder) else f"shoal-{secrets.token_hex(8)}"
    (folder / NUMBER).unlink(missing_ok=True)
    write_whole(folder / MARK, mark)
    try:
        said = call(["sbatch", "--parsable", f"--comment={mark}", SCRIPT], cwd=folder)
        job = said.strip().splitlines()[-1].partition(";")[0]
    except SlurmError as error:
        job = _submitted_after_all(folder, mark, error)
    write_whole(folder / NUMBER, job)
    return job


def is_unknown(folder: Path) -> bool:
    """Return whether a job was submitted from `folder` of which only Slurm knows whether it is there."""
    return (folder / MARK).is_file() and not (folder / NUMBER).is_file()


def _submitted_after_all(folder: Path, mark: str, error: SlurmError) -> str:
    """Return the job that a call of sbatch has made which then failed with `error`; raise that where there is none."""
    is_silent = isinstance(error, NoAnswer) or "timed out" in str(error)  # then it may come to be yet
    try:
        job = find_again(folder) if is_silent else _marked(mark)
    except SlurmError:
        raise SlurmError(f"{error} Nor does squeue say whether the job was submitted.") from None
    if job is None:
        (folder / MARK).unlink()
        raise error
    return job


def find_again(folder: Path, *, settle_s: float = SETTLE_S) -> str | None:
    """Return the job that was last submitted from `folder`; None where there was none, or it was not submitted.

    A process that was killed may have left sbatch behind: a mark that is younger than `settle_s` is waited for.
    """
    if (folder / NUMBER).is_file():
        return (folder / NUMBER).read_text()
    if not is_unknown(folder):
        return None
    mark, marked_s = (folder / MARK).read_text(), (folder / MARK).stat().st_mtime
    while (job := _marked(mark) or _printed(folder, marked_s)) is None and time.time() < marked_s + settle_s:
        time.sleep(_AGAIN_S)
    if job is not None:
        write_whole(folder / NUMBER, job)
    return job


def _marked(mark: str) -> str | None:
    """Return the job that has `mark` as its comment."""
    rows = call(["squeue", "--noheader", "--states=all", "--format=%F|%k"]).splitlines()
    return next((row.partition("|")[0] for row in rows if row.partition("|")[2].strip() == mark), None)


def _printed(folder: Path, since_s: float) -> str | None:
    """Return the job whose output lies in `folder`: Slurm forgets a job some minutes after its end."""
    found = [path for path in folder.glob("output-*.txt") if path.stat().st_mtime >= since_s]
    return found[0].stem.removeprefix("output-").partition("_")[0] if found else None


def states(jobs: Sequence[str]) -> dict[str, JobState]:
    """Return what Slurm says about `jobs`; of an array, about each of its elements, as "12_3".

    A job that Slurm has forgotten is GONE.
    """
    found: dict[str, JobState] = {}
    for some in _portions(jobs):
        found |= _queued(some)
    missing = [job for job in jobs if not _is_in(job, found)]
    for some in _portions(missing):
        found |= _accounted(some)
    return found | {job: JobState(job, GONE, "", "") for job in missing if not _is_in(job, found)}


def _is_in(job: str, found: dict[str, JobState]) -> bool:
    return job in found or any(name.startswith(f"{job}_") for name in found)


def _queued(jobs: Sequence[str]) -> dict[str, JobState]:
    options = ["--noheader", "--array", "--states=all", f"--jobs={','.join(jobs)}", "--format=%i|%T|%N|%r"]
    try:
        said = call(["squeue", *options])
    except SlurmError as error:
        if "Invalid job id" in str(error):
            return {}
        raise
    rows = [line.split("|", 3) for line in said.splitlines() if line.count("|") >= 3]
    return {job: JobState(job, state, "" if reason == "None" else reason, nodes) for job, state, nodes, reason in rows}


def _accounted(jobs: Sequence[str]) -> dict[str, JobState]:
    """Return what the accounting says; nothing where the cluster has none."""
    if shutil.which("sacct") is None:
        return {}
    options = ["--noheader", "--allocations", "--parsable2", "--array", f"--jobs={','.join(jobs)}"]
    try:
        said = call(["sacct", *options, "--format=JobID,State,NodeList,Reason"])
    except SlurmError:
        return {}
    rows = [line.split("|", 3) for line in said.splitlines() if line.count("|") >= 3]
    # "CANCELLED by 1000" is a state there.
    return {job: JobState(job, state.split()[0], reason, nodes) for job, state, nodes, reason in rows if state}


def cancel(jobs: Sequence[str]) -> None:
    """End `jobs`; those that have ended already are passed over."""
    for some in _portions(jobs):
        call(["scancel", *some], tolerates="Invalid job id")


def notify(job: str) -> None:
    """Send a running job the notice that it also gets before its time is over."""
    call(["scancel", "--batch", "--signal=USR1", job], tolerates="Invalid job id")


def call(command: Sequence[str], *, cwd: Path | None = None, tolerates: str = "", timeout_s: float = TIMEOUT_S) -> str:
    """Return what one of Slurm's programs printed; SlurmError with its complaint, unless that says `tolerates`."""
    try:
        done = subprocess.run(
            list(command), cwd=cwd, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except FileNotFoundError:
        raise SlurmError(f"there is no {command[0]} on this machine. Run this on a login node.") from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(
            f"{command[0]} gave no answer within {timeout_s:g} s: is the controller up? See: sinfo"
        ) from None
    if done.returncode != 0 and not (tolerates and tolerates in done.stderr):
        said = re.sub(rf"^{re.escape(command[0])}: (error: )?", "", done.stderr.strip(), flags=re.MULTILINE)
        raise SlurmError(f"{command[0]} failed ({done.returncode}): {said or 'without a word'}")
    return done.stdout


def _portions(jobs: Sequence[str]) -> Iterator[Sequence[str]]:
    for first in range(0, len(jobs), _AT_ONCE):
        yield jobs[first : first + _AT_ONCE]
