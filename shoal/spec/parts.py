"""Who takes what of a global batch: one rule, for the loader that cuts it and the planner that costs it."""

import heapq
import itertools
import math
from collections.abc import Sequence


def cut(num_samples: int, shares: Sequence[float]) -> list[int]:
    """Return the bounds that cut `num_samples` into parts by `shares`: worker i takes [bounds[i], bounds[i + 1]).

    The cumulative shares are rounded, so each part is within one sample of its share and no sample is left over.
    Example: 8 samples by .25, .25, .10, .4 are cut at 0, 2, 4, 5, 8.
    """
    # Rounded to a billionth first: .1 + .2 must cut where .3 does.
    bounds = [math.floor(round(num_samples * math.fsum(shares[:i]), 9) + 0.5) for i in range(len(shares))]
    return [*bounds, num_samples]


def parts(num_samples: int, shares: Sequence[float]) -> list[int]:
    """Return how many samples each worker takes of `num_samples`."""
    bounds = cut(num_samples, shares)
    return [last - first for first, last in itertools.pairwise(bounds)]


def hand_out(
    num_samples: int, *, sample_s: Sequence[float], fixed_s: Sequence[float] = (), most: Sequence[int] = ()
) -> list[int]:
    """Return how many samples each worker takes so that the last of them is done as early as can be; each at least one.

    `fixed_s` is what a worker takes however many samples it has, `sample_s` what each adds; none gets more than `most`,
    unless all together could not take them then. Each next sample goes to the worker that would be done with it first:
    no other way ends earlier, for the last took its last sample when every other would have ended later with one more.
    """
    fixed = list(fixed_s) or [0.0] * len(sample_s)
    limits = list(most) if sum(most) >= num_samples else [num_samples] * len(sample_s)

    def done_by(end_s: float) -> list[int]:
        rows = zip(sample_s, fixed, limits, strict=True)
        return [max(1, min(limit, int((end_s - fix) / each))) for each, fix, limit in rows]

    early, late = 0.0, max(fix + num_samples * each for each, fix in zip(sample_s, fixed, strict=True))
    for _ in range(64):  # those that are handed out before the last few: a batch may have many thousands
        middle = (early + late) / 2
        early, late = (middle, late) if sum(done_by(middle)) <= num_samples else (early, middle)
    taken = done_by(early)
    queue = [(fixed[i] + (n + 1) * sample_s[i], i) for i, n in enumerate(taken) if n < limits[i]]
    heapq.heapify(queue)
    for _ in range(num_samples - sum(taken)):
        _, i = heapq.heappop(queue)
        taken[i] += 1
        if taken[i] < limits[i]:
            heapq.heappush(queue, (fixed[i] + (taken[i] + 1) * sample_s[i], i))
    return taken
