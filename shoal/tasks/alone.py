"""Who may work on the folder of a map: one process, be it that it runs the tasks here or has jobs run them."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.core.errors import ConfigError, SlurmError
from shoal.data.stage.locks import FileLock
from shoal.tasks.folder import TaskFolder
from shoal.tasks.queued import JobWatch

_LOCK = "work.lock"


@contextmanager
def alone(folder: TaskFolder) -> Iterator[None]:
    """Have the folder for oneself for the length of a `with` block; ConfigError where another process has it."""
    with FileLock(folder.path / _LOCK) as lock:
        if not lock.take():
            raise ConfigError(f"another process is at work on {folder.path}. Wait for it, or give another folder.")
        yield


def refuse_live_jobs(folder: TaskFolder) -> None:
    """Raise ConfigError if jobs of a cluster may still be at work on the folder: they would do the same tasks."""
    try:
        live = JobWatch(folder).live()
    except SlurmError as error:
        left = shlex.join(["rm", "-r", str(folder.jobs), str(folder.taken)])
        raise ConfigError(
            f"jobs of Slurm were at work on {folder.path}, and whether they still are cannot be told: {error} If none "
            f"is: {left}"
        ) from None
    if live:
        raise ConfigError(
            f"{len(live)} job{'s' * (len(live) > 1)} of Slurm {'are' if len(live) > 1 else 'is'} at work on "
            f"{folder.path}. Go on with them by --slurm (slurm=True), or end them: scancel {' '.join(live[:20])}"
        )
