"""A run of a flattened tensor as boxes of the tensor: what DeepSpeed cuts, said as checkpoints say it.

DeepSpeed lays all parameters in one row and gives each worker an equal part of it, wherever that begins and ends. Such
a part of one parameter is some rows of it, and a piece of a row before and after; with more dims, the same again.

Example: of a [4, 3] tensor, the 7 numbers from 2 on are the box [1, 1] at (0, 2), the box [2, 3] at (1, 0).
"""

import math
from collections.abc import Iterator
from typing import NamedTuple


class Box(NamedTuple):
    """A box of a tensor; its numbers lie one after the other in the row, `start` after the run's first."""

    start: int
    sizes: tuple[int, ...]
    offset: tuple[int, ...]


def boxes(shape: tuple[int, ...], first: int, count: int) -> Iterator[Box]:
    """Yield the boxes that are the `count` numbers from `first` on of a flattened tensor of this `shape`, in order."""
    yield from _boxes(shape, first, count, start=0, above=())


def _boxes(shape: tuple[int, ...], first: int, count: int, *, start: int, above: tuple[int, ...]) -> Iterator[Box]:
    if count == 0:
        return
    if len(shape) <= 1:
        yield Box(start, (1,) * len(above) + ((count,) if shape else ()), (*above, *((first,) if shape else ())))
        return
    row = math.prod(shape[1:])
    end = first + count
    if first % row or count < row:  # a piece of a row
        number = first // row
        piece = min(end, (number + 1) * row) - first
        yield from _boxes(shape[1:], first - number * row, piece, start=start, above=(*above, number))
        yield from _boxes(shape, first + piece, count - piece, start=start + piece, above=above)
        return
    rows = count // row
    inner = (0,) * (len(shape) - 1)
    yield Box(start, (1,) * len(above) + (rows, *shape[1:]), (*above, first // row, *inner))
    yield from _boxes(shape, first + rows * row, count - rows * row, start=start + rows * row, above=above)
