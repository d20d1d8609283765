"""Tiny micro-batches: forward and backward start their operations again and again, for a few samples each time.

1. n micro-batches take n * fixed + samples * each. What all of it takes was measured: of the median step, for what else
   the machine does now and then is no part of it. How the two divide is the planner's (`Predicted.fixed_s` and
   `sample_s`), scaled to that, for a busy machine is slower at both. What is beyond three times what the planner knows
   of is something else, and taken to grow with the samples.
2. The planner's division rests on a device that was measured in a moment: starts may cost half or twice as much beside
   samples. Of the sizes 2, 4, 8, ... times as large, that fit into memory, those are looked at whose gain is within 25%
   whatever of that is so; and of these the smallest is taken that is within 5% of the best. A later run can say more.
3. Where a run took clearly less than predicted, one of the two was measured far too high, and nobody knows which: all
   that is beyond the one may be the other. Then only what doubling the size brings at least is said.

Example: 32 micro-batches of 1 sample take 320 ms, of which 7 ms each are fixed. With 8 micro-batches of 4 samples it is
8 * 7 + 32 * 3 = 152 ms, 2.1 times as many a second; 1.7 times if starts cost half as much beside samples, 2.6 times if
twice. With one micro-batch of 32 it would be 3.1 times, or anything between 2.1 and 4.6.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shoal.report.advice.advice import Advice, percent, times
from shoal.report.advice.evidence import Busy, Evidence

_MOST_SCALE, _LEAST_SCALE = 3.0, 0.8
_DOUBT = 2.0
"""How much more or less starts may cost beside samples than planned: by brief measurements of one machine, busy with
other work, they cost 4.3 to 14 times as much as a sample of tests/advice/jobs/tiny_computed.py (AMD EPYC, 2026-11)."""
_NEAR = 0.25
ENOUGH = 0.95
"""A size is enough that brings so much of what the best one would."""


@dataclass(frozen=True)
class Passes:
    """Forward and backward of one worker: what a micro-batch takes by itself, and each of its samples."""

    samples: int
    size: int
    """Samples of a micro-batch."""
    fixed_s: float
    sample_s: float
    is_sure: bool = True
    """Whether both together are about what was predicted, or more."""

    @property
    def count(self) -> int:
        """How many micro-batches a step has."""
        return math.ceil(self.samples / self.size)

    def seconds(self, size: int) -> float:
        """Return what all micro-batches of a step take with `size` samples each."""
        return math.ceil(self.samples / size) * self.fixed_s + self.samples * self.sample_s


def passes_of(worker: Busy, run: Evidence) -> Passes | None:
    """Return how the forward and backward that were measured divide; None without a prediction to divide them by."""
    return next(_divided(worker, run, worker.passes_s), None)


def _divided(worker: Busy, run: Evidence, passes_s: float) -> Iterator[Passes]:
    """Yield how `passes_s` may divide: first as predicted, then all the ways in which that may be wrong."""
    predicted = run.plan.predicted
    samples = max(1, round(worker.samples))
    size = min(samples, run.plan.batch.micro_batch or samples)
    if predicted is None or not predicted.sample_s > 0:
        return
    count = math.ceil(samples / size)
    scale = passes_s / (count * predicted.fixed_s + samples * predicted.sample_s)
    fixed_s = min(scale, _MOST_SCALE) * predicted.fixed_s
    each_s = max(0.0, passes_s - count * fixed_s) / samples
    starts = [fixed_s, *(_odds(fixed_s, each_s, size, doubt) for doubt in (_DOUBT, 1 / _DOUBT))]
    if scale < _LEAST_SCALE:
        starts += [passes_s / count - size * predicted.sample_s, predicted.fixed_s]
    for start_s in starts:
        fixed_s = min(max(0.0, start_s), passes_s / count)
        each_s = max(0.0, passes_s - count * fixed_s) / samples
        yield Passes(samples, size, fixed_s, each_s, is_sure=scale >= _LEAST_SCALE)


def _odds(fixed_s: float, each_s: float, size: int, doubt: float) -> float:
    """Return what a start takes if it costs `doubt` times as much beside samples, and both as much together."""
    apart_s = doubt * fixed_s + size * each_s
    return doubt * fixed_s * (fixed_s + size * each_s) / apart_s if apart_s > 0 else 0.0


def on_micro_batch(run: Evidence) -> Advice | None:
    """Return a larger size."""
    worker = run.critical
    ways = list(_divided(worker, run, worker.typical_s))
    if not ways or ways[0].count < 2 or run.plan.mesh.pipeline > 1 or worker.typical_s <= 0:
        return None
    passes, room = ways[0], _room(worker, run)
    sizes = [passes.size * 2**power for power in range(1, 20) if passes.size * 2**power < passes.samples]
    sizes = [size for size in [*sizes, passes.samples] if size <= passes.size * room]
    if not sizes:
        return None
    gains = {size: [_gain(run, worker, way, size) for way in ways] for size in sizes}
    sure = {size: each[0] for size, each in gains.items() if passes.is_sure and _are_near(each)}
    if not sure:
        return _advice(worker, passes, sizes[0], min(gains[sizes[0]]), is_bound=True)
    size = next(each for each in sure if sure[each] >= ENOUGH * max(sure.values()))
    return _advice(worker, passes, size, sure[size], is_bound=False)


def _are_near(gains: list[float]) -> bool:
    """Return whether all are within 25% of the first."""
    return max(gains) <= (1 + _NEAR) * gains[0] and min(gains) >= (1 - _NEAR) * gains[0]


def _advice(worker: Busy, passes: Passes, size: int, gain: float, *, is_bound: bool) -> Advice:
    share = passes.count * passes.fixed_s / (worker.total_s - worker.passes_s + worker.typical_s)
    change: dict[str, object] = {"batch.micro_batch": size}
    were = f"{passes.count} micro-batches of {passes.size} sample{'s' * (passes.size > 1)}"
    sentence = (
        f"{percent(share)} of each step goes into starting its {were}, however small they are; micro-batches of {size} "
        f"are predicted to bring {times(gain)}{' at least' * is_bound}."
    )
    return Advice("micro-batch", share, sentence, change, gain, is_bound)


def _gain(run: Evidence, worker: Busy, passes: Passes, size: int) -> float:
    """Return how many times as fast a typical step is with micro-batches of `size`."""
    rest_s = max(0.0, run.step_s - worker.passes_s)
    then_s = rest_s + passes.seconds(size)
    return (rest_s + worker.typical_s) / then_s if then_s > 0 else 1.0


def _room(worker: Busy, run: Evidence) -> float:
    """Return how many times as large a micro-batch may be, as if all that a worker holds grew with it."""
    return run.memory_bytes / worker.peak_bytes if worker.peak_bytes else math.inf
