"""The jobs of a folder: which were submitted, and what Slurm says of them, asked in the background."""

import dataclasses
import json
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.core.errors import SlurmError
from shoal.core.files import write_whole
from shoal.launch.slurm.commands import MARK, NUMBER, JobState, find_again, states
from shoal.launch.slurm.nodes import nodes_for
from shoal.tasks.bunch import Room
from shoal.tasks.claims import taken
from shoal.tasks.folder import TaskFolder
from shoal.tasks.node import PLANNING

SOONEST_S, LATEST_S = 1.0, 10.0
"""How often Slurm is asked: often at first, then rarely; a controller serves many."""
ENDED = "ended"
"""Lies in the folder's jobs/ when none of them has anything left to do."""
_SUFFIX = ".job"
_SHOWN = 3000


@dataclass(frozen=True)
class Answer:
    """What Slurm says about `jobs`."""

    jobs: tuple[str, ...]
    states: Mapping[str, JobState]

    @property
    def live(self) -> list[str]:
        """The jobs, or elements of arrays, that run or will."""
        return [name for name, state in self.states.items() if not state.is_over]

    def is_over(self, job: str) -> bool:
        """Return whether a job that was asked about has ended; Slurm forgets those after some minutes."""
        return job.partition("_")[0] in self.jobs and job not in self.live


class JobWatch:
    """The jobs of a folder."""

    def __init__(self, folder: TaskFolder) -> None:
        self._folder = folder
        written = {path.name.removesuffix(_SUFFIX) for path in folder.jobs.glob(f"*{_SUFFIX}")}
        found = {holder.job.partition("_")[0] for _, holder in taken(folder)}
        self.jobs = sorted(written | found, key=lambda job: (len(job), job))
        # This side was killed after it had asked for a job, and before its number was written down.
        self._unknown = [mark.parent for mark in folder.jobs.glob(f"submission-*/{MARK}")]
        self._unknown = [path for path in self._unknown if not (path / NUMBER).is_file()]
        self._found: list[str] = []
        self._answer: Answer | None = None
        self._last: Answer | None = None
        self._thread: threading.Thread | None = None
        self._begun_s, self._asked_s = time.monotonic(), -LATEST_S

    def add(self, job: str) -> None:
        """Remember a job that was submitted."""
        self.jobs.append(job)
        write_whole(self._folder.jobs / f"{job}{_SUFFIX}", "")
        self._begun_s, self._asked_s = time.monotonic(), time.monotonic()
        self._answer = None

    def look(self) -> Answer | None:
        """Return what Slurm says, if there is news; never waits for it."""
        while self._found:
            if (job := self._found.pop()) not in self.jobs:
                self.add(job)
        if not self.jobs and not self._unknown:
            return Answer((), {})
        now_s = time.monotonic()
        every_s = min(LATEST_S, max(SOONEST_S, (now_s - self._begun_s) / 20))
        if (self._thread is None or not self._thread.is_alive()) and now_s - self._asked_s > every_s:
            self._asked_s = now_s
            self._thread = threading.Thread(target=self._ask, args=(tuple(self.jobs),), daemon=True)
            self._thread.start()
        answer, self._answer = self._answer, None
        if answer is None or self._found or answer.jobs != tuple(self.jobs):  # older than a job that was added since
            return None
        self._last = answer
        return answer

    def said(self) -> str:
        """Return what is said of the jobs beside the progress."""
        if self._last is None or not self._last.live:
            return ""
        counts = Counter(self._last.states[name].state.lower() for name in self._last.live)
        return "; jobs: " + ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))

    def ends(self) -> str:
        """Return how jobs ended."""
        counts = Counter(state.state for state in self._last.states.values()) if self._last else {}
        return f"The jobs: {', '.join(f'{count} {state}' for state, count in counts.items())}." if counts else ""

    def live(self) -> list[str]:
        """Return the jobs, or elements of arrays, that run or will; SlurmError where Slurm does not say."""
        if (self._folder.jobs / ENDED).exists():
            return []
        found = [find_again(path) for path in self._unknown]
        jobs = sorted({*self.jobs, *(job for job in found if job is not None)})
        return Answer(tuple(jobs), states(jobs)).live if jobs else []

    def end(self) -> None:
        """Note that nothing more is to be done by jobs."""
        write_whole(self._folder.jobs / ENDED, "")

    def next_folder(self) -> Path:
        """Return a folder for the script and output of a submission."""
        (self._folder.jobs / ENDED).unlink(missing_ok=True)
        number = sum(1 for _ in self._folder.jobs.glob("submission-*")) + 1
        return self._folder.jobs / f"submission-{number}"

    def last_output(self) -> str:
        """Return the end of what the latest job printed."""
        outputs = sorted(self._folder.jobs.glob("submission-*/output-*"), key=lambda path: path.stat().st_mtime)
        return outputs[-1].read_text(errors="replace")[-_SHOWN:] if outputs else ""

    def _ask(self, jobs: tuple[str, ...]) -> None:
        try:
            while self._unknown:
                job = find_again(self._unknown[-1])
                self._found += [job] if job is not None else []
                self._unknown.pop()
            self._answer = Answer(jobs, states(jobs))
        except SlurmError:  # the controller is down: it will be asked again
            return


def write_sample(folder: TaskFolder, tasks: Sequence[int]) -> None:
    """Note which tasks are being measured: more bunches come when they are done."""
    write_whole(folder.jobs / PLANNING, json.dumps(list(tasks)))


def read_sample(folder: TaskFolder) -> list[int]:
    """Return the tasks that an earlier start was measuring when it was killed."""
    try:
        found: list[int] = json.loads((folder.jobs / PLANNING).read_bytes())
    except FileNotFoundError:
        return []
    return found


def smallest_node(partition: str | None, said_to_have: Room) -> Room:
    """Return what the smallest node has that a job may get, as sinfo says; what it is said to have, where it does not.

    Slurm does not know the memory of GPUs: that is the caller's. A node that is down may be up when the job begins.
    """
    try:
        kinds = nodes_for(partition, is_any=True)
    except SlurmError:
        return said_to_have
    return dataclasses.replace(
        said_to_have,
        cores=min(kind.cores for kind in kinds),
        memory_bytes=min(kind.memory_bytes for kind in kinds),
    )
