"""Which parts of a pack a node reads, in the order in which it first does: the order in which they are staged.

1. The positions of an epoch that are the node's are those whose place in their global batch is between two bounds:
   workers of a node stand next to each other.
2. The order (shoal/data/order.py) says which sample is at each, and the manifest which part holds it.
3. Of a long epoch only some positions are looked at: all at its beginning, where most parts are met if samples are
   shuffled; later one in so many, which finds parts that are read in long stretches.

Example: 4 parts of 100 samples, blocks of 50, batches of 8: the epoch begins with the blocks 5, 0, 6, so the parts come
in the order 2, 0, 3, 1. Shuffled one by one, the first batch alone may want all four.
"""

import math

import numpy as np

from shoal.data.order import Indices, Order

_DENSE, _SPARSE = 1 << 17, 1 << 17
"""How many positions are looked at, at the beginning and after it: about 10 ms."""


def first_reads(
    starts: Indices, order: Order, *, batch_size: int, mine: tuple[int, int], num_reads: int, looks: int = _DENSE
) -> list[int]:
    """Return the parts that a node reads, in order; `starts` are the first samples of each part, and the end.

    `mine`: the node's places [begin, end) in each global batch. `num_reads`: how many samples all nodes together read.
    """
    end = min(num_reads, order.num_samples)
    positions, is_exact = _looked_at(end, batch_size, looks)
    places = positions % batch_size
    positions = positions[(places >= mine[0]) & (places < mine[1])]
    if len(positions) == 0:  # a share too small for the few batches there are
        return []
    samples = order.samples(positions, epoch=0)
    parts, first = np.unique(np.searchsorted(starts, samples, side="right") - 1, return_index=True)
    found: list[int] = parts[np.argsort(first)].tolist()
    is_all = is_exact and (num_reads <= order.num_samples or not order.is_shuffled)
    return found if is_all else [*found, *sorted(set(range(len(starts) - 1)) - set(found))]


def _looked_at(end: int, batch_size: int, looks: int) -> tuple[Indices, bool]:
    """Return which of the positions [0, `end`) are looked at, and whether that is all of them."""
    dense = np.arange(min(end, looks), dtype=np.int64)
    step = -(-max(0, end - looks) // _SPARSE)
    if step <= 1:
        return np.arange(end, dtype=np.int64), True
    while math.gcd(step, batch_size) > 1:  # else it would meet the same few places of every batch
        step += 1
    return np.concatenate([dense, np.arange(looks, end, step, dtype=np.int64)]), False
