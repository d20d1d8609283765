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

A block shuffle is for storage that hates random reads: it reads blocks of neighbouring rows whole.

1. The rows lie in blocks of `block_rows`; what is left over is one shorter block.
2. The whole blocks are permuted, and the shorter one goes in between at a place drawn from (seed, epoch).
3. `GROUP_BLOCKS` neighbours in that order are one group, and the rows of a group are permuted among each other.

Example: 10 rows in blocks of 3, the shorter one at place 1, groups of 2: blocks 2, short, 0, 1 make the groups
(6, 7, 8, 9) and (0, 1, 2, 3, 4, 5), each in an order of its own.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.native.order import permute

Indices: TypeAlias = NDArray[np.int64]

# Four rounds make a Feistel network look random to a bounded observer (Luby and Rackoff, 1988); six leave a margin.
# Under 12 samples six are measurably uneven (chi-square over pairs of positions, 20,000 seeds), twelve are not.
_ROUNDS = 6
_ROUNDS_FEW = 12
_FEW = 64

GROUP_BLOCKS = 16
"""How many blocks are mixed with each other: these are what a loader of shuffled blocks has open at a time."""


class Permutation:
    """The order of `num_samples` samples in one epoch; of group `group` of a block shuffle, where that is given."""

    def __init__(self, num_samples: int, *, seed: int, epoch: int, group: int | None = None) -> None:
        assert 0 < num_samples < 2**62, num_samples
        self._n = num_samples
        side = _ceil_sqrt(num_samples)
        self.grid = side, -(-num_samples // side)
        self.keys = _keys(seed, epoch, group, rounds=_ROUNDS_FEW if num_samples < _FEW else _ROUNDS)

    def __call__(self, positions: Indices) -> Indices:
        """Return the sample at each of `positions`, which lie in [0, num_samples)."""
        samples = permute(positions, num_samples=self._n, grid=self.grid, keys=self.keys)
        return self.plainly(positions) if samples is None else samples

    def plainly(self, positions: Indices) -> Indices:
        """Return the same as a call, in NumPy: what the C code is held against."""
        samples = self._rounds(positions.astype(np.uint64))
        outside = samples >= self._n
        while outside.any():
            samples[outside] = self._rounds(samples[outside])
            outside = samples >= self._n
        return samples.astype(np.int64)

    def _rounds(self, points: NDArray[np.uint64]) -> NDArray[np.uint64]:
        a, b = map(np.uint64, self.grid)
        left, right = points // b, points % b
        for number, key in enumerate(self.keys):
            if number % 2 == 0:
                left = (left + mix(right ^ key) % a) % a
            else:
                right = (right + mix(left ^ key) % b) % b
        return left * b + right


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of each 64-bit word: the finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class Order:
    """Which sample stands at which position of an epoch."""

    num_samples: int
    seed: int = 0
    is_shuffled: bool = True
    block_rows: int | None = None
    """Shuffle blocks of so many rows; None shuffles single rows."""

    def samples(self, positions: Indices, *, epoch: int) -> Indices:
        """Return the sample at each of `positions`, which lie in [0, num_samples)."""
        if not self.is_shuffled:
            return positions
        if self.block_rows is None:
            return _permutation(self.num_samples, self.seed, epoch)(positions)
        return _Blocks(self.num_samples, self.block_rows, self.seed, epoch).samples(positions)


class _Blocks:
    """One epoch of a block shuffle."""

    def __init__(self, num_rows: int, block_rows: int, seed: int, epoch: int) -> None:
        self._rows, self._seed, self._epoch = block_rows, seed, epoch
        self._num_rows = num_rows
        self._whole, self._short = divmod(num_rows, block_rows)
        draw = int(_keys(seed, epoch, -1, rounds=1)[0])
        self._short_at = draw % (self._whole + 1) if self._short else self._whole + 1

    def samples(self, positions: Indices) -> Indices:
        samples = np.empty_like(positions)
        groups = self._group_of(positions)
        for group in np.unique(groups).tolist():
            mine = groups == group
            samples[mine] = self._in_group(group, positions[mine])
        return samples

    def _in_group(self, group: int, positions: Indices) -> Indices:
        first, last = self._start(group * GROUP_BLOCKS), self._start((group + 1) * GROUP_BLOCKS)
        mixed = first + _permutation(last - first, self._seed, self._epoch, group)(positions - first)
        is_after = mixed >= self._start(self._short_at + 1)
        is_short = (mixed >= self._start(self._short_at)) & ~is_after
        place, row = np.divmod(mixed - np.where(is_after, self._short, 0), self._rows)
        blocks = np.full_like(place, self._whole)
        if self._whole:
            whole = ~is_short
            blocks[whole] = _permutation(self._whole, self._seed, self._epoch)(place[whole])
        return blocks * self._rows + row

    def _start(self, place: int) -> int:
        """Return the position at which the block at `place` begins."""
        return min(place * self._rows - (self._rows - self._short if place > self._short_at else 0), self._num_rows)

    def _group_of(self, positions: Indices) -> Indices:
        gap = self._rows - self._short if self._short else 0
        is_after = positions >= self._start(self._short_at + 1)
        return (positions + np.where(is_after, gap, 0)) // self._rows // GROUP_BLOCKS


def order(num_samples: int, positions: Indices, *, seed: int, epoch: int) -> Indices:
    """Return the sample at each position of an epoch: a pure function of seed, epoch and position."""
    return Permutation(num_samples, seed=seed, epoch=epoch)(positions)


@lru_cache(maxsize=64)
def _permutation(num_samples: int, seed: int, epoch: int, group: int | None = None) -> Permutation:
    return Permutation(num_samples, seed=seed, epoch=epoch, group=group)


def _keys(seed: int, epoch: int, group: int | None, *, rounds: int) -> NDArray[np.uint64]:
    """Return one key a round: SeedSequence spreads (seed, epoch) over all bits, also for neighbours like 0 and 1."""
    entropy = (seed % 2**64, epoch) if group is None else (seed % 2**64, epoch, 2 + group)
    return np.random.SeedSequence(entropy).generate_state(rounds, np.uint64).astype(np.uint64)


def _ceil_sqrt(number: int) -> int:
    return math.isqrt(number - 1) + 1
