"""A task of a folder, as a worker of the pool runs it: the item from the folder, the result into the journal."""

import atexit
import os
import pickle
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from shoal.tasks.call import load, use_copy
from shoal.tasks.folder import TaskFolder
from shoal.tasks.journal import Journal, Journals, Record
from shoal.tasks.outcome import Failure, describe
from shoal.tasks.reads import announce


class KeptTask:
    """The function of a folder; called with an index, it leaves the result in the folder and returns nothing."""

    def __init__(self, path: str, job: str, reads_at_once: int | str | None, code: str = "") -> None:
        folder = TaskFolder.existing(Path(path))
        reference, path_of_python = folder.call()
        sys.path.extend(entry for entry in path_of_python if entry not in sys.path)
        if code:
            use_copy(Path(code))
        self._function = load(reference)
        self._items = folder.items()
        self._journal = Journal(folder.done, holder_here(job))
        announce(folder.path, reads_at_once)
        atexit.register(self._journal.close)

    def __call__(self, index: int) -> None:
        """Run the task, and write down what came of it; whatever it raises is raised."""
        begun_s = time.perf_counter()
        try:
            data = pickle.dumps(self._function(self._items[index]), pickle.HIGHEST_PROTOCOL)
        except (Exception, SystemExit) as error:
            failure = pickle.dumps(describe(error, skip_frames=1))
            self._journal.append(Record(index, True, time.perf_counter() - begun_s, failure))
            raise
        self._journal.append(Record(index, False, time.perf_counter() - begun_s, data))


def holder_here(job: str = "") -> str:
    """Return a name for the journals of this process: the job, where there is one, then host and process."""
    host = socket.gethostname().split(".")[0]
    return f"{_of(job)}{host}-{os.getpid()}"


def _of(job: str) -> str:
    """Return how the names of the journals of a job begin."""
    return f"{job or 'local'}-"


def note_deaths(folder: TaskFolder, failures: Mapping[int, Failure], job: str = "") -> None:
    """Write down the failures that no worker of `job` could: it died, or did not get as far as the task.

    Only where there are failures is anything read, and only what this job has written: journals hold all results.
    """
    if not failures:
        return
    journal = Journal(folder.done, holder_here(job))
    known = {record.index for record in Journals(folder.done, of=_of(job)).news() if record.has_failed}
    for index, failure in failures.items():
        if failure.is_death or index not in known:
            journal.append(Record(index, True, 0.0, pickle.dumps(failure)))
    journal.close()
