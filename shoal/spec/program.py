"""Program: what to run where a Job does not fit: workers with different parts, which call each other."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Program:
    """A function that every worker runs, with torch RPC among them: an actor-learner loop, a pool of simulators.

    It starts as a Job does, with `shoal train FILE --workers N`, and leaves a run folder as one does. What needs a
    model (`shoal fit`, `plan`, `verify`) does not know it.
    """

    main: Callable[[Any], None]
    """`main(run)`: called on every worker; see `shoal.ProgramRun`. A worker that returns serves the others' calls until
    all have returned."""
    steps: int | None = None
    """How many steps it is going to note (`run.stepped`). Without it, nobody knows how far it is."""
    unit: str = "samples"
    """What its steps count, the word in "episodes/s"."""
    seed: int = 0
    """Of torch's generator, on every worker."""
    call_timeout_s: float = 60.0
    """How long a call may take, that of `run.call` and `run.start` alike."""
    threads: int = 4
    """How many calls a worker serves at once."""

    def __post_init__(self) -> None:
        self._check("main", callable(self.main), "must be a function of the run")
        whole = isinstance(self.steps, int) and self.steps >= 1
        self._check("steps", self.steps is None or whole, "must be a whole number of at least 1, or left out")
        self._check("seed", isinstance(self.seed, int), "must be a whole number")
        self._check("call_timeout_s", self.call_timeout_s > 0, "must be more than 0")
        self._check("threads", isinstance(self.threads, int) and self.threads >= 1, "must be at least 1")

    def _check(self, name: str, good: bool, rule: str) -> None:
        if not good:
            raise ConfigError(f"Program.{name} {rule}, not {getattr(self, name)!r}.")

    @property
    def total_steps(self) -> int:
        """How many steps it is going to note; 0: nobody knows."""
        return self.steps or 0

    def with_steps(self, steps: int | None) -> "Program":
        """Return the same program with another length; None leaves it as it is."""
        return self if steps is None else dataclasses.replace(self, steps=steps)
