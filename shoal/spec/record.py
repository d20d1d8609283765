"""What a run folder keeps about its job and its circumstances: job.toml and run.toml."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from shoal.core.errors import ConfigError, did_you_mean

LOGGERS = ("tensorboard", "wandb", "mlflow")
"""Where the numbers of a run can go, beside its own folder."""
Recorded = Literal["no", "plain", "nudged"]
"""Whether a run is recorded for `shoal verify`; "nudged": with weights that begin one rounding beside their own."""
MOST_TRACED = 100
"""Steps that can be asked for: each is a file of every worker's."""


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """Where a job came from, and its numbers."""

    file: str
    """The job file's own path; the run keeps a copy in code/."""
    variable: str = "job"
    """The name that holds the Job in that file."""
    num_samples: int
    """In an epoch; 0: of a stream that does not say."""
    batch_size: int
    steps: int
    seed: int
    unit: str
    recorded: Recorded = "no"
    """Whether the workers write down each parameter's gradient norm and the final parameters, for `shoal verify`."""
    is_program: bool = False
    """Whether it is a shoal.Program, of which samples and batches are unknown."""
    trace: str = ""
    """The steps that every worker writes a trace of, as "100:103"; empty: none was asked for."""
    log: tuple[str, ...] = ("tensorboard",)
    """Where its numbers go, of `LOGGERS`."""
    notes: tuple[str, ...] = ()
    """What is lost with data that does not come by number, in sentences."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The circumstances of a run."""

    name: str
    started: str
    command: str
    host: str
    versions: dict[str, str]


def traced_steps(text: str) -> range:
    """Return the steps of "100:103", both included, or of "100"; of "", none."""
    first, colon, last = text.partition(":")
    if not text:
        return range(0)
    if not text.isascii() or not first.isdecimal() or (colon and not last.isdecimal()):
        raise ConfigError(f"trace {text!r}: give the first and the last step, as in 100:103.")
    steps = range(int(first), int(last or first) + 1)
    if not 0 < steps.start < steps.stop or len(steps) > MOST_TRACED:
        raise ConfigError(
            f"trace {text!r}: from 1 to {MOST_TRACED} steps can be traced, the first step being 1; as in 100:103."
        )
    return steps


def read_loggers(asked: str | Iterable[str]) -> tuple[str, ...]:
    """Return the loggers of "tensorboard,wandb", or of a list of such names; of "none", no logger."""
    listed = asked.split(",") if isinstance(asked, str) else list(asked)
    names = tuple(dict.fromkeys(name.strip() for name in listed))
    if names in ((), ("none",)):
        return ()
    for name in names:
        if name not in LOGGERS:
            hint = did_you_mean(name, [*LOGGERS, "none"])
            raise ConfigError(f"log {name!r} is no logger.{hint} Several: log 'tensorboard,wandb'.")
    return names
