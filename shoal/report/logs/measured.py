"""What the steps of a run come to: the loss, the split over time, each worker's steady step, who held whom up.

Means are over steady steps, without the first ones, which pay for what later ones do not (memory is claimed, kernels
are chosen, caches are cold): two when the run has more than ten steps, one when it has two to ten, none when it has a
single one.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

from shoal.core.events import PASSES, STEP_PARTS
from shoal.report.logs.log import Step, WorkerLog
from shoal.report.split import PARTS, split_step

_PASSES = tuple(STEP_PARTS.index(name) for name in PASSES)
MOST_STRETCHES = 1000
"""Over how many stretches of steps the split is drawn: one a pixel or so."""
MOST_PACES = 120
"""The same for each worker's pace."""


class Stretch(NamedTuple):
    """Some steps in a row."""

    first: int
    last: int
    parts_s: tuple[float, ...]
    """Seconds of `PARTS` in a step, the mean over the workers."""
    longest_s: float
    """The longest step among them."""


class StepTimes(NamedTuple):
    """How long the steady steps took, each as long as its slowest worker's."""

    median_s: float
    p95_s: float
    longest_s: float
    longest_step: int


@dataclass(frozen=True)
class Means:
    """One worker's steady step."""

    steps: int
    """How many steady steps it has: workers come and go within a run."""
    samples: float
    weight: float
    total_s: float
    parts: dict[str, float]
    """Seconds of `STEP_PARTS`."""
    split: dict[str, float]
    """Seconds of `PARTS`."""
    median_passes_s: float
    """Forward and backward of the median step: in others the machine may have done something else besides."""
    led: float = 0.0
    """In which part of the steps it was busy longest, so that the others waited for it."""
    held_up_s: float = 0.0
    """How much shorter a step would be if it were as fast as the next slowest, in the mean over all steps."""


@dataclass(frozen=True)
class Measured:
    """The steps of a run."""

    numbers: tuple[int, ...] = ()
    losses: tuple[float | None, ...] = ()
    warm_up_steps: int = 0
    steady_s: float = 0.0
    """Seconds of all steady steps, each as long as its slowest worker's."""
    steady_weight: float = 0.0
    """What they trained on, by weight."""
    means: tuple[Means | None, ...] = ()
    """Of each worker; None where its log holds no steady step."""
    stretches: tuple[Stretch, ...] = ()
    step_times: StepTimes | None = None
    paces: tuple[tuple[float | None, ...], ...] = ()
    """For each worker, the seconds it was busy in a step, over stretches that begin with `pace_steps`."""
    pace_steps: tuple[int, ...] = ()


def warm_up_count(steps: int) -> int:
    """Return how many of a run's first steps count as warm-up."""
    return 2 if steps > 10 else 1 if steps > 1 else 0


def buckets(count: int, most: int) -> list[range]:
    """Return range(count) cut into at most `most` stretches of nearly equal length."""
    pieces = min(count, most)
    return [range(count * i // pieces, count * (i + 1) // pieces) for i in range(pieces)]


def measure(logs: Sequence[WorkerLog], *, is_apart: bool) -> Measured:
    """Return what the steps in `logs` come to. Where workers are apart (sync.mode), none waits for another."""
    numbers = sorted({number for log in logs for number in log.steps})
    by_rank = [[log.steps.get(number) for number in numbers] for log in logs]
    by_step = [[steps[i] for steps in by_rank] for i in range(len(numbers))]
    splits = [_split(of_step, is_apart=is_apart) for of_step in by_step]
    busy = [[step and _busy_s(step) for step in of_step] for of_step in by_step]
    left_out = warm_up_count(len(numbers))
    longest_s = [max(step.total_s for step in of_step if step is not None) for of_step in by_step[left_out:]]
    paces = buckets(len(numbers), MOST_PACES)
    return Measured(
        numbers=tuple(numbers),
        losses=tuple(_loss(of_step, is_apart=is_apart) for of_step in by_step),
        warm_up_steps=left_out,
        steady_s=sum(longest_s),
        steady_weight=sum(_batch_weight(of_step) for of_step in by_step[left_out:]),
        means=tuple(_means(rank, by_step[left_out:], splits[left_out:], busy[left_out:]) for rank in range(len(logs))),
        stretches=tuple(_stretch(numbers, by_step, splits, bucket) for bucket in buckets(len(numbers), MOST_STRETCHES)),
        step_times=_step_times(longest_s, numbers[left_out:]),
        paces=tuple(tuple(_mean_known(busy[i][rank] for i in b) for b in paces) for rank in range(len(logs))),
        pace_steps=tuple(numbers[bucket[0]] for bucket in paces),
    )


def _step_times(longest_s: list[float], steps: Sequence[int]) -> StepTimes | None:
    """Return how long the steps took."""
    if not longest_s:
        return None
    ordered, worst = sorted(longest_s), max(range(len(longest_s)), key=lambda i: longest_s[i])
    middle, late = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return StepTimes(middle, late, longest_s[worst], steps[worst])


def per_second(measured: Measured, *, is_apart: bool) -> tuple[float | None, float | None]:
    """Return the samples, and their weight, that the run trains on in a second of its steady steps.

    Workers come and go within a run, and those of one tensor or pipeline train on the same samples: what was done is
    told by the weight of the global batches. Where workers may be apart (sync.mode), each has steps of its own, and it
    is the sum of what each does in a second.
    """
    known = [means for means in measured.means if means is not None]
    if is_apart:
        timed = [means for means in known if means.total_s]
        if not timed:
            return None, None
        return sum(means.samples / means.total_s for means in timed), sum(m.weight / m.total_s for m in timed)
    if measured.steady_s <= 0:
        return None, None
    weight_per_s = measured.steady_weight / measured.steady_s
    samples = sum(means.samples * means.steps for means in known)
    weight = sum(means.weight * means.steps for means in known)
    return (weight_per_s * samples / weight if weight > 0 else samples / measured.steady_s), weight_per_s


def _batch_weight(of_step: list[Step | None]) -> float:
    """Return the weight of a step's global batch; where no log says it, that of what the workers have done of it."""
    known = [step for step in of_step if step is not None]
    return max(step.batch_weight for step in known) or sum(step.weight for step in known)


def _split(of_step: list[Step | None], *, is_apart: bool) -> list[dict[str, float] | None]:
    """Return the split of each worker that has the step."""
    known = [step for step in of_step if step is not None]
    found = iter([split_step([step])[0] for step in known] if is_apart else split_step(known))
    return [None if step is None else next(found) for step in of_step]


def _busy_s(step: Step) -> float:
    parts = dict(zip(STEP_PARTS, step.parts_s, strict=True))
    return step.total_s - parts["comm_s"] - parts["bubble_s"]


def _loss(of_step: list[Step | None], *, is_apart: bool) -> float | None:
    """Return the loss of a step: all have the same; of workers that are apart and have one each, the mean by weight."""
    known = [step for step in of_step if step is not None]
    losses = [step.loss for step in known if step.loss is not None]
    total = sum(step.weight for step in known)
    if not is_apart or len(losses) < len(known) or not total:
        return known[0].loss
    mean = sum(loss * step.weight for loss, step in zip(losses, known, strict=True)) / total
    return mean if math.isfinite(mean) else known[0].loss


def _means(
    rank: int,
    by_step: list[list[Step | None]],
    splits: list[list[dict[str, float] | None]],
    busy: list[list[float | None]],
) -> Means | None:
    steps = [step for of_step in by_step if (step := of_step[rank]) is not None]
    if not steps:
        return None
    split = [found for of_step in splits if (found := of_step[rank]) is not None]
    leads = [lead for of_step in busy if (lead := _lead_s(of_step, rank)) is not None]
    return Means(
        steps=len(steps),
        samples=fmean(step.samples for step in steps),
        weight=fmean(step.weight for step in steps),
        total_s=fmean(step.total_s for step in steps),
        parts={name: fmean(step.parts_s[i] for step in steps) for i, name in enumerate(STEP_PARTS)},
        split={name: fmean(one[name] for one in split) for name in PARTS},
        median_passes_s=median(sum(step.parts_s[i] for i in _PASSES) for step in steps),
        led=len(leads) / len(by_step),
        held_up_s=sum(leads) / len(by_step),
    )


def _lead_s(busy_s: list[float | None], rank: int) -> float | None:
    """Return how much longer worker `rank` was busy than all others; None where it was not the busiest."""
    others = [seconds for other, seconds in enumerate(busy_s) if other != rank and seconds is not None]
    mine = busy_s[rank]
    if mine is None or not others or mine <= max(others):
        return None
    return mine - max(others)


def _stretch(
    numbers: list[int], by_step: list[list[Step | None]], splits: list[list[dict[str, float] | None]], bucket: range
) -> Stretch:
    known = [[one for one in splits[i] if one is not None] for i in bucket]
    parts_s = tuple(fmean(fmean(one[name] for one in of_step) for of_step in known) for name in PARTS)
    longest_s = max(step.total_s for i in bucket for step in by_step[i] if step is not None)
    return Stretch(numbers[bucket[0]], numbers[bucket[-1]], parts_s, longest_s)


def _mean_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
