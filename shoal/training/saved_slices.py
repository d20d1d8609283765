"""Which slices of a whole tensor a worker holds, and which of them it saves.

1. A plain parameter is whole. A sharded or divided one (a DTensor) was cut along the tensor axis first, each of its
   sections by itself, and its rows then along the shard axis (see `building.materialise`): that is undone here.
2. Where several workers hold the same slice, each saves a part of its rows; small ones are saved by one of them, by
   the name, so that all write about as much.

Example: queries, keys and values in one weight [12, 4] (sections of 4 rows), tensor=2, shard=2. Tensor worker 1 has
rows 2, 3, 6, 7, 10, 11, of which shard worker 0 has the first three: rows 2 and 3 of the whole, and row 6: two slices.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.comm.mesh import Position
from shoal.fault.shards import Shard
from shoal.parallel.layout import Layout, local_of

_WORTH_DIVIDING = 1 << 16  # numbers: a quarter of a megabyte takes about as long to write as its name


@dataclass(frozen=True)
class _Block:
    """A block of a worker's tensor, and where it lies in the whole."""

    start: tuple[int, ...]
    sizes: tuple[int, ...]
    offset: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """What one worker holds of a parameter."""

    name: str
    shape: tuple[int, ...]
    """Of the whole."""
    local_shape: tuple[int, ...]
    blocks: tuple[_Block, ...]
    copy: int
    copies: int
    """How many workers hold the same, of which this is number `copy`; -1: one that saves nothing of it."""

    def shards(self, name: str, tensor: Tensor) -> Iterator[Shard]:
        """Yield the slices of the tensor `name`, of which this worker holds `tensor`, laid out as the parameter is."""
        for block in self.blocks:
            for part, owner in self._divided(block):
                held = tensor
                for dim, (start, size) in enumerate(zip(part.start, part.sizes, strict=True)):
                    held = held.narrow(dim, start, size)
                yield Shard(name, held, self.shape, part.offset, is_mine=owner == self.copy)

    def single(self, name: str, tensor: Tensor) -> Shard:
        """Return a small tensor that all who hold the parameter have alike, such as a count of steps."""
        return Shard(name, tensor, tuple(tensor.shape), (0,) * tensor.dim(), is_mine=self._owner() == self.copy)

    def _owner(self) -> int:
        return zlib.crc32(self.name.encode()) % self.copies

    def _divided(self, block: _Block) -> Iterator[tuple[_Block, int]]:
        """Yield the parts of a block, and which copy saves each."""
        numel = 1
        for size in block.sizes:
            numel *= size
        rows = block.sizes[0] if block.sizes else 0
        if self.copies == 1 or numel < _WORTH_DIVIDING or rows < self.copies:
            yield block, self._owner()
            return
        for owner in range(self.copies):
            first, last = rows * owner // self.copies, rows * (owner + 1) // self.copies
            yield (
                _Block(
                    (block.start[0] + first, *block.start[1:]),
                    (last - first, *block.sizes[1:]),
                    (block.offset[0] + first, *block.offset[1:]),
                ),
                owner,
            )


def place(layout: Layout, position: Position, name: str, parameter: nn.Parameter) -> Placement:
    """Return what this worker holds of the parameter `name`."""
    shape, local_shape = tuple(parameter.shape), tuple(local_of(parameter.detach()).shape)
    copy, copies = _copy_of(layout, position, name, parameter)
    if layout.parts.get(name) == 0.0:
        copy = -1  # a tied weight: its first stage saves it
    blocks = tuple(_blocks(layout, position, name, parameter)) if isinstance(parameter, DTensor) else ()
    whole = _Block((0,) * len(local_shape), local_shape, (0,) * len(shape))
    is_cut = isinstance(parameter, DTensor) and parameter.dim() > 0
    return Placement(name, shape, local_shape, blocks if is_cut else (whole,), copy, copies)


def _copy_of(layout: Layout, position: Position, name: str, parameter: nn.Parameter) -> tuple[int, int]:
    """Return which of the workers that hold the same numbers this one is, and how many there are."""
    mesh = position.mesh
    copy, copies = position.replicate, mesh.replicate
    if not isinstance(parameter, DTensor) or parameter.dim() == 0:
        copy, copies = position.data, mesh.data
    if layout.division is None or name not in layout.division.cuts:
        copy, copies = copy * mesh.tensor + position.tensor, copies * mesh.tensor
    return copy, copies


def _blocks(layout: Layout, position: Position, name: str, parameter: nn.Parameter) -> Iterator[_Block]:
    """Yield the blocks of a parameter that is sharded or divided."""
    shape, local_shape = tuple(parameter.shape), local_of(parameter.detach()).shape
    if not shape:
        return
    cut = layout.division.cuts.get(name) if layout.division is not None else None
    count = layout.division.count if layout.division is not None and cut is not None else 1
    index = layout.division.index if layout.division is not None and cut is not None else 0
    dim = cut.dim if cut is not None else 0
    sections = (cut.sections if cut is not None else ()) or (shape[dim],)
    part_rows = shape[0] // count if dim == 0 else shape[0]
    each = -(-part_rows // position.mesh.shard)
    first_row = min(part_rows, position.shard * each)
    last_row = min(part_rows, first_row + each)
    assert local_shape[0] == last_row - first_row, f"{name}: {local_shape[0]} rows, not {last_row - first_row}"
    before = in_part = 0  # where the section begins in the whole, and in this worker's part of the tensor axis
    for section in sections:
        size = section // count
        first, last = (first_row, last_row) if dim == 0 else (in_part, in_part + size)
        first, last = max(first, in_part), min(last, in_part + size)
        if first < last:
            start, sizes, offset = [0] * len(shape), list(local_shape), [0] * len(shape)
            offset[0] = first_row
            start[dim] = first - first_row if dim == 0 else first
            sizes[dim] = last - first
            offset[dim] = before + index * size + first - in_part
            yield _Block(tuple(start), tuple(sizes), tuple(offset))
        before, in_part = before + section, in_part + size
