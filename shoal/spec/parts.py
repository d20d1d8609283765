"""Who takes what of a global batch: one rule, for the loader that cuts it and the planner that costs it."""

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
