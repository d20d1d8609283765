"""Every error shoal raises on purpose, and the exit code each one ends the command with.

ShoalError            2   something asked for cannot be: what was asked, what is true, what to write instead
├── ConfigError       2   a file, a flag or a Job field that cannot be read or makes no sense
├── JobError          2   the job file raises, has no job, or its functions return what cannot be trained on
├── PlanError         2   a plan that this job or this machine cannot run
├── DataError         2   a sample that cannot be loaded
├── NonFiniteLoss     2   a loss that is NaN or infinite
├── CheckpointError  74   a checkpoint that cannot be written or read: a full disk, damage
├── SlurmError       69   Slurm refused what it was asked, gave no answer, or is not there
├── WorkerFailed      1   a worker raised something that is none of the above, or was killed
├── PeerLost          3   the other side of a collective is gone; somebody else's failure, seen from here
└── Stopped          75   the run ended early on request (130 when the request was Ctrl-C)
"""


class ShoalError(Exception):
    """A mistake that a person can mend; the message says how."""

    exit_code = 2


class ConfigError(ShoalError):
    """A file, a flag or a Job field that cannot be read or makes no sense."""


class JobError(ShoalError):
    """The job file raises, has no job, or its functions return what cannot be trained on."""


class PlanError(ShoalError):
    """A plan that this job or this machine cannot run."""


class DataError(ShoalError):
    """A sample that cannot be loaded."""


class NonFiniteLoss(ShoalError):
    """A loss that is NaN or infinite."""


class CheckpointError(ShoalError):
    """A checkpoint that cannot be written, or is damaged; one of another job is a ConfigError."""

    exit_code = 74  # EX_IOERR: neither the job nor the plan is wrong


class SlurmError(ShoalError):
    """Slurm refused what it was asked, gave no answer, or is not there; the message has what it said."""

    exit_code = 69  # EX_UNAVAILABLE


class WorkerFailed(ShoalError):
    """A worker raised something unforeseen, or was killed; `details` holds its traceback."""

    exit_code = 1

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class PeerLost(ShoalError):
    """The other side of a collective is gone: the cause is another worker's failure."""

    exit_code = 3  # its own: launchers then wait for the worker that is the cause


class Stopped(ShoalError):
    """The run ended early because somebody asked for it."""

    def __init__(self, message: str, exit_code: int = 75) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def did_you_mean(word: str, known: list[str]) -> str:
    """Return " Did you mean 'x'?" for the known word nearest to `word`, or the list of known words."""
    import difflib  # only when something is already wrong: keeps start-up instant

    near = difflib.get_close_matches(word, known, n=1)
    if near:
        return f" Did you mean {near[0]!r}?"
    return f" Known: {', '.join(sorted(known))}." if known else ""
