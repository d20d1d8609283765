"""Random numbers of a sample: a pure function of (seed, epoch, sample), so that no worker or thread changes them."""

import numpy as np
from numpy.typing import NDArray

from shoal.data.order import Indices, mix

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def sample_seeds(samples: Indices, *, seed: int, epoch: int) -> NDArray[np.uint64]:
    """Return 64 random bits for each sample."""
    key = np.random.SeedSequence((seed % 2**64, epoch, 0)).generate_state(2, np.uint64)
    return mix(mix(samples.astype(np.uint64) ^ key[0]) ^ key[1])


def uniform(seeds: NDArray[np.uint64], count: int) -> NDArray[np.float64]:
    """Return `count` numbers in [0, 1) for each of `seeds`: [seeds, count]. The first ones do not depend on `count`."""
    steps = _GOLDEN * np.arange(1, count + 1, dtype=np.uint64)  # splitmix64: a counter, mixed
    return (mix(seeds[:, None] + steps) >> np.uint64(11)).astype(np.float64) * 2.0**-53
