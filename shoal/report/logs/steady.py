"""One worker of a run: what its log says, and its steady step (see measured.py)."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import reduce

from shoal.report.logs.facts import Call, Loading, Saved
from shoal.report.logs.log import WorkerLog
from shoal.report.logs.measured import Means

_PREDICTED = ("forward_s", "backward_s", "comm_s", "bubble_s", "optimizer_s")


@dataclass(frozen=True)
class Worker:
    """One worker. What is about its steady step is None when its log holds none."""

    rank: int
    steps: int
    """How many steps its log holds, warm-up included."""
    samples: float | None
    """Samples in a step."""
    weight: float | None
    total_s: float | None
    """A whole step, data loading included."""
    step_s: float | None
    """A step without data loading and saving, as `Predicted.step_s` counts it."""
    parts: dict[str, float] | None
    """Seconds of each of `STEP_PARTS`."""
    peak_bytes: int | None
    error: str | None
    median_passes_s: float | None = None
    """Forward and backward of the median step."""
    split: dict[str, float] | None = None
    """Seconds of each of `PARTS`."""
    led: float = 0.0
    """In which part of the steps it was busy longest, so that the others waited for it."""
    held_up_s: float = 0.0
    """How much shorter a step would be if it were as fast as the next slowest."""
    calls: tuple[Call, ...] = ()
    """What it communicated over the run."""
    calls_steps: int = 0
    """In how many steps."""
    loading: Loading | None = None
    """What its loader did over the run, with the threads, depth and storage that it had last."""
    saved: tuple[Saved, ...] = ()
    state_bytes: dict[str, float] = field(default_factory=dict)
    """What it held at the end, by what it was."""

    @property
    def busy_s(self) -> float:
        """Seconds of a step in which this worker does not wait for the others."""
        return (self.total_s or 0.0) - (self.parts or {}).get("comm_s", 0.0)


def worker_of(log: WorkerLog, means: Means | None) -> Worker:
    """Return the worker that wrote `log`, whose steady step is `means`."""
    worker = Worker(
        rank=log.rank,
        steps=log.num_steps,
        samples=None,
        weight=None,
        total_s=None,
        step_s=None,
        parts=None,
        peak_bytes=log.peak_bytes,
        error=log.error,
        calls=tuple(log.calls.values()),
        calls_steps=log.calls_steps,
        loading=reduce(_after, (over.loading for over in log.loading)) if log.loading else None,
        saved=tuple(log.saved),
        state_bytes=log.state_bytes,
    )
    if means is None:
        return worker
    return replace(
        worker,
        samples=means.samples,
        weight=means.weight,
        total_s=means.total_s,
        step_s=sum(means.parts[name] for name in _PREDICTED),
        parts=means.parts,
        median_passes_s=means.median_passes_s,
        split=means.split,
        led=means.led,
        held_up_s=means.held_up_s,
    )


def _after(so_far: Loading, later: Loading) -> Loading:
    """Return both together."""
    return replace(
        later,
        steps=so_far.steps + later.steps,
        samples=so_far.samples + later.samples,
        bytes=so_far.bytes + later.bytes,
        wait_s=so_far.wait_s + later.wait_s,
        fill_s=so_far.fill_s + later.fill_s,
        fill_cpu_s=so_far.fill_cpu_s + later.fill_cpu_s,
    )


def slowest_of(workers: Iterable[Worker]) -> Worker | None:
    """Return the worker the others wait for: the one that is busy longest in a step.

    Its own wait for communication is what the network costs; another worker's also holds its wait for the slowest.
    """
    return max((worker for worker in workers if worker.parts), key=lambda worker: worker.busy_s, default=None)
