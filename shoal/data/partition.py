"""Who takes what: global batches by step, and each worker's part of a global batch."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GlobalBatch:
    """Positions [first, last) of one epoch."""

    epoch: int
    first: int
    last: int

    @property
    def num_samples(self) -> int:
        """How many samples it has; the last one of an epoch may have fewer than the others."""
        return self.last - self.first


def global_batch(step: int, *, num_samples: int, batch_size: int) -> GlobalBatch:
    """Return the global batch of `step` (from 0): each epoch is cut afresh, and its last batch may be partial."""
    per_epoch = -(-num_samples // batch_size)
    epoch, number = divmod(step, per_epoch)
    first = number * batch_size
    return GlobalBatch(epoch, first, min(first + batch_size, num_samples))


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
