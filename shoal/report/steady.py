"""What a worker does in a steady step: means over its steps, without the first ones.

The first steps pay for what later ones do not (memory is claimed, kernels are chosen, caches are cold), so they are
left out: two when the run has more than ten steps, one when it has two to ten, none when it has a single one.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.core.events import STEP_PARTS
from shoal.report.log import Step, WorkerLog


@dataclass(frozen=True)
class Worker:
    """One worker's steady step."""

    rank: int
    steps: int
    """How many steps its log holds, warm-up included."""
    samples: float | None
    """Samples in a step; None, as what follows, when the log holds no steady step."""
    weight: float | None
    total_s: float | None
    """A whole step, data loading included."""
    step_s: float | None
    """A step without data loading, as `Predicted.step_s` counts it."""
    parts: dict[str, float] | None
    """Seconds of each of `STEP_PARTS`."""
    peak_bytes: int | None
    error: str | None

    @property
    def busy_s(self) -> float:
        """Seconds of a step in which this worker does not wait for the others."""
        return (self.total_s or 0.0) - (self.parts or {}).get("comm_s", 0.0)


def warm_up(step_numbers: Iterable[int]) -> frozenset[int]:
    """Return the steps that count as warm-up."""
    ordered = sorted(step_numbers)
    return frozenset(ordered[: 2 if len(ordered) > 10 else 1 if len(ordered) > 1 else 0])


def steady_worker(log: WorkerLog, left_out: frozenset[int]) -> Worker:
    """Return the means over the steps of `log` that are not in `left_out`."""
    steps = [step for number, step in log.steps.items() if number not in left_out]
    if not steps:
        return Worker(log.rank, len(log.steps), None, None, None, None, None, log.peak_bytes, log.error)
    parts = dict(zip(STEP_PARTS, mean_parts(steps), strict=True))
    total_s = _mean([step.total_s for step in steps])
    return Worker(
        rank=log.rank,
        steps=len(log.steps),
        samples=_mean([step.samples for step in steps]),
        weight=_mean([step.weight for step in steps]),
        total_s=total_s,
        step_s=total_s - parts["data_s"],
        parts=parts,
        peak_bytes=log.peak_bytes,
        error=log.error,
    )


def slowest_of(workers: Iterable[Worker]) -> Worker | None:
    """Return the worker the others wait for: the one that is busy longest in a step.

    Its own wait for communication is what the network costs; another worker's also holds its wait for the slowest.
    """
    return max((worker for worker in workers if worker.parts), key=lambda worker: worker.busy_s, default=None)


def per_second(amounts: Iterable[float | None], workers: tuple[Worker, ...], *, is_apart: bool = False) -> float | None:
    """Return the workers' amounts a step, summed, over the seconds of a step (of the worker whose step is longest).

    Where workers may be apart (sync.mode), each has steps of its own, and it is the sum of what each does in a second.
    """
    if is_apart:
        each = [(amount or 0.0) / w.total_s for amount, w in zip(amounts, workers, strict=True) if w.total_s]
        return sum(each) if each else None
    seconds = max((worker.total_s or 0.0 for worker in workers), default=0.0)
    return sum(amount or 0.0 for amount in amounts) / seconds if seconds > 0 else None


def mean_parts(steps: list[Step]) -> tuple[float, ...]:
    """Return the mean seconds of each of `STEP_PARTS`."""
    return tuple(sum(column) / len(steps) for column in zip(*(step.parts_s for step in steps), strict=True))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
