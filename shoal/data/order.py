"""The order of samples: a permutation that is computed, never stored.

`order(seed, epoch, position) -> sample` is a keyed bijection of [0, n): a Feistel network over the grid a x b, with
a * b just above n, in O(1) memory for any n.

1. Write the position as (left, right) = divmod(position, b), with a = ceil(sqrt(n)) and b = ceil(n / a).
2. Six rounds (twelve where n is small), alternately left = (left + F_k(right)) mod a and
   right = (right + F_k(left)) mod b. Each round can be undone, so all of them together are a bijection of the a * b
   points, whatever F is. F_k mixes all bits of its argument with a key made from (seed, epoch, round).
3. A point that falls outside [0, n) goes through the rounds again until it falls inside (cycle walking): still a
   bijection, and rare, because a * b < n + a.

Example: n = 10 gives a = 4, b = 3, twelve points; of these two lie outside and are walked on.
"""

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Indices: TypeAlias = NDArray[np.int64]

# Four rounds make a Feistel network look random to a bounded observer (Luby and Rackoff, 1988); six leave a margin.
# Under 12 samples six are measurably uneven (chi-square over pairs of positions, 20,000 seeds), twelve are not.
_ROUNDS = 6
_ROUNDS_FEW = 12
_FEW = 64


class Permutation:
    """The order of `num_samples` samples in one epoch."""

    def __init__(self, num_samples: int, *, seed: int, epoch: int) -> None:
        assert 0 < num_samples < 2**62, num_samples
        self._n = num_samples
        self._a = _ceil_sqrt(num_samples)
        self._b = -(-num_samples // self._a)
        self._keys = _keys(seed, epoch, rounds=_ROUNDS_FEW if num_samples < _FEW else _ROUNDS)

    def __call__(self, positions: Indices) -> Indices:
        """Return the sample at each of `positions`, which lie in [0, num_samples)."""
        samples = self._rounds(positions.astype(np.uint64))
        outside = samples >= self._n
        while outside.any():
            samples[outside] = self._rounds(samples[outside])
            outside = samples >= self._n
        return samples.astype(np.int64)

    def _rounds(self, points: NDArray[np.uint64]) -> NDArray[np.uint64]:
        a, b = np.uint64(self._a), np.uint64(self._b)
        left, right = points // b, points % b
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                left = (left + _mix(right ^ key) % a) % a
            else:
                right = (right + _mix(left ^ key) % b) % b
        return left * b + right


def order(num_samples: int, positions: Indices, *, seed: int, epoch: int) -> Indices:
    """Return the sample at each position of an epoch: a pure function of seed, epoch and position."""
    return Permutation(num_samples, seed=seed, epoch=epoch)(positions)


def _keys(seed: int, epoch: int, *, rounds: int) -> NDArray[np.uint64]:
    """Return one key a round: SeedSequence spreads (seed, epoch) over all bits, also for neighbours like 0 and 1."""
    entropy = (seed % 2**64, epoch)
    return np.random.SeedSequence(entropy).generate_state(rounds, np.uint64).astype(np.uint64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of each 64-bit word: the finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _ceil_sqrt(number: int) -> int:
    return math.isqrt(number - 1) + 1
