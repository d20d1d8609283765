"""How the workers of one start of a job have ended, and whether its next start goes on with the run."""

from dataclasses import dataclass
from typing import cast

from shoal.core.errors import PeerLost, ShoalError, Stopped, WorkerFailed
from shoal.core.run_folder import RunFolder
from shoal.launch.cause import cause_of, last_words
from shoal.launch.local import Worker
from shoal.launch.slurm.sbatch import CANCELLED
from shoal.launch.starting import Process


@dataclass(frozen=True)
class Ending:
    """How the workers of one start have ended."""

    status: str
    """done, stopped or failed."""
    error: ShoalError | None
    can_go_on: bool

    @property
    def exit_code(self) -> int:
        """That of the job: 75 only if it is to be requeued, or was cancelled in order."""
        if self.error is None:
            return 0
        if self.can_go_on or isinstance(self.error, Stopped):
            return Stopped("").exit_code
        return self.error.exit_code or 1


def judge(
    folder: RunFolder,
    *,
    workers: int,
    code: int,
    has_begun: bool,
    is_finished: bool = False,
    starts_again: bool = True,
) -> Ending:
    """Return how the workers have ended, by their last words and by srun's exit code.

    `is_finished`: they have said that they have come to the end of the run, with or without some that were lost.
    """
    words = last_words(folder, range(workers))
    if is_finished or (code == 0 and all(last.has_ended for last in words.values())):
        return Ending("done", None, can_go_on=False)
    seen = [Worker(rank, cast(Process, None), exit_code=abs(code)) for rank in range(workers)]  # elsewhere
    error = cause_of(words, seen) or WorkerFailed(f"srun ended with exit code {code} before the end of the run.")
    is_cancelled = (folder.slurm / CANCELLED).exists()
    has_spoken = any(event["type"] != "PeerLost" for last in words.values() for event in last.errors)
    is_lost = starts_again and has_begun and (isinstance(error, PeerLost) or not has_spoken)
    if isinstance(error, Stopped):
        return Ending("stopped", error, can_go_on=not is_cancelled)
    return Ending("stopped" if is_lost else "failed", error, can_go_on=is_lost and not is_cancelled)
