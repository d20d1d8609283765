"""How a run stands at one moment, in one value: the terminal, the plain lines and the web page are drawn from it."""

from dataclasses import asdict, dataclass
from typing import Any

STARTING, RUNNING, WAITING, LATE, SILENT, BLAMED, LOST, FAILED, STOPPED, DONE = STATES = (
    "starting",
    "running",
    "waiting",  # for one that is blamed
    "late",
    "silent",
    "blamed",  # it holds the others up
    "lost",
    "failed",
    "stopped",
    "done",
)
TROUBLE = (LATE, SILENT, BLAMED, LOST, FAILED)
"""The states that somebody should look at."""


@dataclass(frozen=True, kw_only=True)
class WorkerState:
    """One worker; None stands for what is not known yet."""

    rank: int
    state: str
    """One of `STATES`."""
    words: str
    """The same for people: "step 412", "late: step 409, 3 behind"."""
    step: int | None
    share: float | None
    """Its fraction of the last global batch."""
    host: str
    peak_bytes: int | None
    predicted_bytes: int | None
    split: dict[str, float]
    """Its latest steps as fractions, by `split.PARTS`; empty before the first."""


@dataclass(frozen=True, kw_only=True)
class LiveState:
    """One run; None stands for what is not known yet."""

    run: str
    status: str
    """done, failed, stopped or unfinished."""
    message: str
    goes_on: bool
    """Whether it has stopped, and its job on a cluster will go on with it."""
    step: int
    steps: int | None
    """How many there will be."""
    loss: float | None
    is_lost_loss: bool
    """Whether the loss of the last step was not finite."""
    unit: str
    units_per_s: float | None
    step_s: float | None
    """From one step to the next, as they come: evaluations and checkpoints included."""
    left_s: float | None
    silent_s: float | None
    """Since when no worker has written anything, where that is remarkable."""
    split: dict[str, float]
    """The latest steps as fractions, by `split.PARTS`, over all workers; empty before the first."""
    workers: tuple[WorkerState, ...]
    hang: str
    """Why nothing goes on, as long as nothing does."""
    losses: tuple[tuple[int, float | None], ...]
    """The loss over the run, thinned."""
    rates: tuple[tuple[int, float | None], ...]
    """`units_per_s` over the run, thinned."""

    @property
    def is_over(self) -> bool:
        """Whether the run has said how it ended."""
        return self.status != "unfinished"

    @property
    def counts(self) -> dict[str, int]:
        """How many workers are in each state that some are in."""
        found = {state: sum(worker.state == state for worker in self.workers) for state in STATES}
        return {state: count for state, count in found.items() if count}

    @property
    def fullest(self) -> WorkerState | None:
        """The worker whose memory is nearest to its prediction, or beyond; without predictions, that with the most."""
        known = [worker for worker in self.workers if worker.peak_bytes is not None]
        return max(known, key=lambda worker: (worker.peak_bytes or 0) / (worker.predicted_bytes or 1), default=None)

    def as_json(self) -> dict[str, Any]:
        """Return the state as plain JSON values."""
        return asdict(self) | {"is_over": self.is_over, "counts": self.counts}


class Curve:
    """Values over steps, as many as can be drawn: when there are too many, every other one goes. The last is kept."""

    def __init__(self, most: int = 1000) -> None:
        self._most, self._every = most, 1
        self._points: list[tuple[int, float | None]] = []
        self._last: list[tuple[int, float | None]] = []
        """The last one, where it is not far enough from the last of the others to stay."""

    def add(self, step: int, value: float | None) -> None:
        """Add the value of a step; those of steps from there on, as after going back, are forgotten."""
        while self._points and self._points[-1][0] >= step:
            self._points.pop()
        self._last = [(step, value)]
        if self._points and step - self._points[-1][0] < self._every:
            return
        self._points += self._last
        self._last = []
        if len(self._points) > self._most:
            self._points = self._points[::2]
            self._every = max(2 * self._every, (self._points[-1][0] - self._points[0][0]) // len(self._points))

    @property
    def points(self) -> tuple[tuple[int, float | None], ...]:
        """All points, in order."""
        return (*self._points, *self._last)
