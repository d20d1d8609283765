"""Which samples make a global batch, by step, and which of them are a worker's."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shoal.data.order import Indices
from shoal.spec.parts import cut


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


@dataclass(frozen=True)
class Schedule:
    """Which positions worker `index` loads for which step; steps are counted from 0, over all epochs."""

    num_samples: int
    batch_size: int
    shares: tuple[float, ...] = (1.0,)
    index: int = 0
    drop_last: bool = False
    """Whether a last, partial batch is left out."""
    has_stand_ins: bool = False
    """Whether a part without samples, as a partial batch may leave one, is given the first sample of its batch."""

    @cached_property
    def steps_per_epoch(self) -> int:
        """How many global batches an epoch has."""
        return self.num_samples // self.batch_size if self.drop_last else -(-self.num_samples // self.batch_size)

    @cached_property
    def _bounds(self) -> list[int]:
        return cut(self.batch_size, self.shares)

    @property
    def part_samples(self) -> int:
        """How many samples this worker takes of a whole batch."""
        return self._bounds[self.index + 1] - self._bounds[self.index]

    def where(self, step: int) -> GlobalBatch:
        """Return the global batch of `step`."""
        epoch, number = divmod(step, self.steps_per_epoch)
        first = number * self.batch_size
        return GlobalBatch(epoch, first, min(first + self.batch_size, self.num_samples))

    def part(self, step: int) -> tuple[int, int]:
        """Return the positions [first, last) of the epoch that are this worker's in `step`."""
        where = self.where(step)
        is_whole = where.num_samples == self.batch_size
        bounds = self._bounds if is_whole else cut(where.num_samples, self.shares)
        return where.first + bounds[self.index], where.first + bounds[self.index + 1]

    def chunks(self, first_step: int, last_step: int, *, at_once: int) -> Iterator[range]:
        """Yield the steps [first_step, last_step) in order, up to `at_once` of them together, all of one epoch.

        It begins with one and doubles: the first batch is not waited for longer than it takes itself.
        """
        count = 1
        while first_step < last_step:
            epoch_end = (first_step // self.steps_per_epoch + 1) * self.steps_per_epoch
            end = min(first_step + count, last_step, epoch_end)
            yield range(first_step, end)
            first_step, count = end, min(2 * count, at_once)

    def positions(self, steps: range) -> tuple[Indices, tuple[int, ...]]:
        """Return this worker's positions in `steps`, one step after the other, and how many each step has."""
        first, last = self.part(steps[0])
        if len(self.shares) == 1:  # the usual case: one stretch, cut at every batch
            last = self.part(steps[-1])[1]
            rest = last - first - (len(steps) - 1) * self.batch_size
            return np.arange(first, last, dtype=np.int64), (self.batch_size,) * (len(steps) - 1) + (rest,)
        stretches = [self._stretch(step) for step in steps]
        positions = np.concatenate([np.arange(*stretch, dtype=np.int64) for stretch in stretches])
        return positions, tuple(end - begin for begin, end in stretches)

    def _stretch(self, step: int) -> tuple[int, int]:
        first, last = self.part(step)
        if first == last and self.has_stand_ins:
            start = self.where(step).first
            return start, start + 1
        return first, last
