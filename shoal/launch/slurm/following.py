"""A job of the cluster, seen from the login node: what Slurm says about it, in sentences, asked seldom.

A controller serves everybody, and slows down for all when it is asked too often: a job is asked about every `ASK_S`,
every `ASK_LATER_S` once it has been waiting or running for a while. A controller that gives no answer is asked again.
"""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.core.errors import ConfigError, SlurmError
from shoal.core.lines import LineReader
from shoal.core.run_folder import RunFolder
from shoal.core.toml import read_toml, write_toml
from shoal.launch.slurm.commands import JobState, find_again, states

JOB_TOML = "job.toml"
ASK_S, ASK_LATER_S, LATER_S = 1.0, 10.0, 60.0
_REASONS = {
    "AssocGrpCPUMinutesLimit": "the account has used up its processor time",
    "AssocGrpGRES": "the account has as many GPUs as it may",
    "AssocMaxJobsLimit": "the account has as many jobs as it may",
    "BadConstraints": "no node has what it asks for",
    "BeginTime": "it begins in a moment",
    "Dependency": "another job must end first",
    "JobHeldUser": "it is held; scontrol release lets it go",
    "JobHeldAdmin": "an administrator holds it",
    "PartitionDown": "the partition is down",
    "PartitionNodeLimit": "it asks for more nodes than the partition has",
    "PartitionTimeLimit": "it asks for more time than the partition gives",
    "Priority": "others are before it",
    "QOSMaxJobsPerUserLimit": "you have as many jobs as you may",
    "Reservation": "its reservation has not begun",
    "Resources": "no nodes are free",
}


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """What the run folder keeps about the job that trains it: slurm/job.toml."""

    job: str
    """Its number; empty while it is being submitted."""
    nodes: int
    workers_per_node: int
    time_s: int
    notice_s: int

    def write(self, folder: RunFolder) -> None:
        """Write it into the run folder."""
        write_toml(folder.slurm / JOB_TOML, self)


def read_submitted(folder: RunFolder) -> Submitted:
    """Return the job that trains the run in `folder`, also if whoever submitted it was killed before noting that."""
    path = folder.slurm / JOB_TOML
    if not path.is_file():
        raise ConfigError(f"{folder.path} is no run on a cluster: it has no slurm/{JOB_TOML}. See: shoal report RUN")
    submitted = read_toml(Submitted, path)
    if submitted.job:
        return submitted
    job = find_again(folder.slurm)
    if job is None:
        raise ConfigError(
            f"the job of {folder.path} was not submitted. Submit it: shoal train FILE --slurm --resume {folder.path}"
        )
    found = dataclasses.replace(submitted, job=job)
    found.write(folder)
    return found


def output_of(folder: RunFolder, job: str) -> Path:
    """Return where the output of the run's job goes."""
    return folder.slurm / f"output-{job}.txt"


def sentence(state: JobState) -> str:
    """Return what Slurm says about a job, for people."""
    if state.state == "PENDING":
        code = state.reason.partition(",")[0]
        why = f": {state.reason}" if state.reason else ""
        return f"job {state.job} waits in the queue{why}" + (f" ({_REASONS[code]})" if code in _REASONS else "")
    where = f" on {state.nodes}" if state.nodes else ""
    if state.state == "RUNNING":
        return f"job {state.job} runs{where}"
    if state.state == "GONE":
        return f"Slurm does not know job {state.job} any more"
    why = f" ({state.reason})" if state.reason and state.reason != state.state else ""
    return f"job {state.job} is {state.state}{where}{why}"


class Following:
    """Asks Slurm now and then about a job, and says what is new."""

    def __init__(self, job: str, say: Callable[[str], object]) -> None:
        self._job, self._say = job, say
        self._state: JobState | None = None
        self._said = ""
        self._changed_s = time.monotonic()
        self._next_s = 0.0

    def look(self, *, at_once: bool = False) -> JobState | None:
        """Return the job's state as it was last told; None before Slurm has told any."""
        now_s = time.monotonic()
        if now_s >= self._next_s or at_once:
            self._ask()
            is_later = time.monotonic() - self._changed_s > LATER_S
            self._next_s = time.monotonic() + (ASK_LATER_S if is_later else ASK_S)
        return self._state

    def _ask(self) -> None:
        try:
            state = states([self._job])[self._job]
        except SlurmError as error:
            self._tell(f"{error} Asking again; the job goes on by itself.")
            return
        if state != self._state:
            self._changed_s = time.monotonic()
        self._state = state
        self._tell(sentence(state))

    def _tell(self, what: str) -> None:
        if what != self._said:
            self._said = what
            self._say(what)


class OutputReader:
    """Reads a growing text file: each call of `poll` returns the whole lines since the last."""

    def __init__(self, path: Path) -> None:
        self._lines = LineReader(path)

    def skip(self) -> None:
        """Leave out what is there already."""
        self._lines.skip()

    def poll(self) -> list[str]:
        """Return the new lines."""
        return [line.decode(errors="replace") for line in self._lines.poll()]
