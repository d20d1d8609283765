"""What a failed task leaves: its exception, and the traceback of the worker as text."""

import pickle
import traceback
from dataclasses import dataclass
from types import TracebackType

from shoal.core.errors import WorkerFailed


class WorkerTraceback(Exception):
    """The traceback in the worker: the cause of the exception that is raised here."""

    def __str__(self) -> str:
        return f"\n\nin the worker:\n{self.args[0]}"


@dataclass(frozen=True)
class Failure:
    """A task that raised, or whose worker died."""

    said: str
    traceback: str = ""
    pickled: bytes = b""
    is_death: bool = False

    def as_exception(self) -> BaseException:
        """Return what the task raised, with the worker's traceback as its cause."""
        error: BaseException = WorkerFailed(self.said, details=self.traceback)
        if self.pickled:
            try:
                found = pickle.loads(self.pickled)  # noqa: S301  # from our own worker or folder
                error = found if isinstance(found, BaseException) else error
            except Exception:  # it cannot be built from its own arguments
                error = WorkerFailed(self.said, details=self.traceback)
        if self.traceback:
            error.__cause__ = WorkerTraceback(self.traceback)
        return error


def describe(error: BaseException, *, skip_frames: int = 0) -> Failure:
    """Return the failure that `error` is; `skip_frames` of its traceback are ours."""
    trace: TracebackType | None = error.__traceback__
    for _ in range(skip_frames):
        trace = trace.tb_next if trace is not None and trace.tb_next is not None else trace
    text = "".join(traceback.format_exception(type(error), error, trace))
    said = f"{type(error).__name__}: {error}"
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)  # noqa: S301  # just written: many exceptions can be pickled, and not read again
    except Exception:
        pickled = b""
    return Failure(said=said, traceback=text, pickled=pickled)
