"""The order of a sampler of torch: drawn anew for each epoch, the same on every worker.

1. For each epoch the sampler is copied, and told what it is to depend on: its `generator`, where it has one, is seeded
   by (seed, epoch), and `set_epoch(epoch)` is called, where it has that; likewise for a sampler inside it.
2. What it then gives is the order of the epoch. A sampler of batches gives it batch by batch, all of one size.

A sampler that gives another order when it is asked for the same epoch again is refused: nobody could resume with it.
"""

import copy
import threading
from itertools import chain
from typing import Any

import numpy as np
import torch

from shoal.core.errors import ConfigError, DataError
from shoal.data.order import Indices
from shoal.profile.sample import process_untouched


class SampledOrder:
    """Which sample stands at which position of an epoch: as a sampler says. Like `order.Order`."""

    block_rows = None

    def __init__(self, sampler: Any, *, num_samples: int, seed: int) -> None:
        """`num_samples` is what the dataset has; that of the order is the sampler's."""
        self.seed, self._sampler, self._below = seed, sampler, num_samples
        self.num_samples = sampler_length(sampler)
        self._drawn: dict[int, Indices] = {}
        self._lock = threading.Lock()

    def samples(self, positions: Indices, *, epoch: int) -> Indices:
        """Return the sample at each of `positions`, which lie in [0, num_samples)."""
        with self._lock:
            if epoch not in self._drawn:
                self._drawn = {number: drawn for number, drawn in self._drawn.items() if number == epoch - 1}
                self._drawn[epoch] = self._draw(epoch)
            return self._drawn[epoch][positions]

    def _draw(self, epoch: int) -> Indices:
        drawn = draw(self._sampler, seed=self.seed, epoch=epoch)
        name = type(self._sampler).__name__
        if len(drawn) != self.num_samples:
            raise DataError(
                f"{name} gave {len(drawn)} samples in epoch {epoch}, and {self.num_samples} in the first. "
                "Each epoch must have as many, or nobody knows which step belongs to which."
            )
        if drawn.min() < 0 or drawn.max() >= self._below:
            raise DataError(f"{name} gave samples {drawn.min()} to {drawn.max()} of a dataset of {self._below}.")
        return drawn


def draw(sampler: Any, *, seed: int, epoch: int) -> Indices:
    """Return the samples that `sampler` gives in `epoch`, in their order."""
    given = list(seeded(sampler, seed, epoch))
    if given and isinstance(given[0], (list, tuple)):
        given = list(chain.from_iterable(given))
    return np.asarray([int(sample) for sample in given], dtype=np.int64)


def sampler_length(sampler: Any) -> int:
    """Return how many samples an epoch of `sampler` has."""
    first = next(iter(seeded(sampler, 0, 0)), 0)
    return len(draw(sampler, seed=0, epoch=0)) if isinstance(first, (list, tuple)) else len(sampler)


def check_sampler(sampler: Any, *, seed: int) -> None:
    """Raise ConfigError if `sampler` is not a function of the seed and the epoch."""
    name = type(sampler).__name__
    with process_untouched():
        try:
            first, _, again = (draw(sampler, seed=seed, epoch=epoch) for epoch in (0, 1, 0))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{name} does not give numbers of samples: {error}.") from None
    if not len(first):
        raise ConfigError(f"{name} gives no samples: there is nothing to train on.")
    if not np.array_equal(first, again):
        raise ConfigError(
            f"{name} gives another order each time it is asked: workers would load different batches, and no run could "
            "be resumed. Let it draw from an attribute `generator` (a torch.Generator), or from what set_epoch(epoch) "
            "was told; or leave it out, and shoal shuffles."
        )


def batch_sizes(sampler: Any) -> set[int]:
    """Return which sizes the batches of a sampler of batches have, but for the last."""
    with process_untouched():
        batches = [len(batch) for batch in seeded(sampler, 0, 0)]
    return set(batches[:-1] or batches)


def seeded(sampler: Any, seed: int, epoch: int) -> Any:
    """Return a copy of `sampler` that depends on `seed` and `epoch` alone, as far as it lets itself be told."""
    one = copy.copy(sampler)
    if isinstance(getattr(one, "generator", 0), torch.Generator | None):
        words = np.random.SeedSequence((seed % 2**64, epoch)).generate_state(1, np.uint64)
        one.generator = torch.Generator().manual_seed(int(words[0]) % 2**63)
    if hasattr(one, "set_epoch"):
        one.set_epoch(epoch)
    if hasattr(one, "sampler"):
        one.sampler = seeded(one.sampler, seed, epoch)
    return one
