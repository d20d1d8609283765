"""What a run folder keeps about its job and its circumstances: job.toml and run.toml."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """Where a job came from, and its numbers."""

    file: str
    """The job file's own path; the run keeps a copy in code/."""
    variable: str = "job"
    """The name that holds the Job in that file."""
    num_samples: int
    batch_size: int
    steps: int
    seed: int
    unit: str
    is_recorded: bool = False
    """Whether the workers write down each parameter's gradient norm and the final parameters, for `shoal verify`."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The circumstances of a run."""

    name: str
    started: str
    command: str
    host: str
    versions: dict[str, str]
