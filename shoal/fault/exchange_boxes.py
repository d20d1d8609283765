"""Boxes in a tensor, and how one is covered by others.

A box is where it begins and its sizes, one of each for every dimension. Example: rows 2 and 3 of a weight [6, 4] are
((2, 0), (2, 4)). Covered by rows 0 to 2 and rows 3 to 5, it takes row 2 from the first and row 3 from the second.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from torch import Tensor


class Box(NamedTuple):
    """A box in a tensor."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many numbers are in it."""
        return math.prod(self.sizes)


Source = TypeVar("Source")


def overlap_of(one: Box, other: Box) -> Box | None:
    """Return the box of what is in both, or None if nothing is."""
    begin = tuple(map(max, one.offset, other.offset))
    ends = (
        min(at + size, other_at + other_size)
        for at, size, other_at, other_size in zip(one.offset, one.sizes, other.offset, other.sizes, strict=True)
    )
    sizes = tuple(end - at for end, at in zip(ends, begin, strict=True))
    return Box(begin, sizes) if all(size > 0 for size in sizes) else None


def without(box: Box, part: Box) -> list[Box]:
    """Return what is left of `box` without `part`, a box inside it, as boxes that do not overlap."""
    left, (offset, sizes) = [], box
    for dim, (at, size) in enumerate(zip(part.offset, part.sizes, strict=True)):
        before, after = at - offset[dim], offset[dim] + sizes[dim] - at - size
        if before:
            left.append(Box(offset, (*sizes[:dim], before, *sizes[dim + 1 :])))
        if after:
            left.append(Box((*offset[:dim], at + size, *offset[dim + 1 :]), (*sizes[:dim], after, *sizes[dim + 1 :])))
        offset = (*offset[:dim], at, *offset[dim + 1 :])
        sizes = (*sizes[:dim], size, *sizes[dim + 1 :])
    return left


def cover(wanted: Box, sources: Iterable[tuple[Box, Source]]) -> tuple[list[tuple[Box, Source]], int]:
    """Return which parts of `wanted` come from which of `sources`, the first ones first, and how many numbers lack."""
    taken: list[tuple[Box, Source]] = []
    left = [wanted] if wanted.numel else []
    for box, source in sources:
        if not left:
            break
        rest: list[Box] = []
        for piece in left:
            part = overlap_of(piece, box)
            if part is None:
                rest.append(piece)
                continue
            taken.append((part, source))
            rest += without(piece, part)
        left = rest
    return taken, sum(piece.numel for piece in left)


def view_of(tensor: Tensor, offset: Sequence[int], box: Box) -> Tensor:
    """Return the numbers of `box` in `tensor`, which begins at `offset` of the whole."""
    for dim, (at, size) in enumerate(zip(box.offset, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, at - offset[dim], size)
    return tensor
