"""Which samples make a global batch, by step."""

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
