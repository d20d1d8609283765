"""A worker's training state as slices of whole tensors: what a checkpoint, a snapshot and a new worker all move.

1. A `Shard` is a slice of the tensor `name`: the whole has `shape`, the slice begins at `offset` in it.
2. Where several workers hold the same slice, it `is_mine` on exactly one of them, which saves it.
3. `fill` fills slices in place from any that cover them, whoever held those: DCP's resharding finds the overlaps.

Example: a weight [6, 4] was saved by 2 workers with 3 rows each, at (0, 0) and (3, 0), and 3 workers go on with 2 rows
each. The second, at (2, 0), takes row 2 of the first slice and row 0 of the second.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shoal.core.errors import ConfigError

_INSTEAD = "Resume with the job that it was saved from, or start a new run."


@dataclass(frozen=True)
class Shard:
    """This worker's slice of a tensor."""

    name: str
    tensor: Tensor
    """The slice itself, live: plain, but perhaps a view that is not contiguous."""
    shape: tuple[int, ...]
    """Of the whole."""
    offset: tuple[int, ...]
    """Where the slice begins in the whole."""
    is_mine: bool = True
    """Whether this worker is the one that saves it."""


@dataclass
class SavedState:
    """Everything that one worker must keep to go on alike."""

    shards: list[Shard]
    own: dict[str, Any] = field(default_factory=dict)
    """What each worker has for itself, as JSON."""
    common: dict[str, Any] = field(default_factory=dict)
    """What all have alike, as JSON; worker 0's counts."""


class Slice(Protocol):
    """A slice that can be read from: a Shard, or a piece of a file."""

    @property
    def offset(self) -> tuple[int, ...]:
        """Where it begins in the whole."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Its own shape."""

    def read(self) -> Tensor:
        """Return its numbers."""


@dataclass(frozen=True)
class Found:
    """A tensor as it was saved."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    slices: Sequence[Slice]


def whole_shard(name: str, tensor: Tensor, *, is_mine: bool = True) -> Shard:
    """Return `tensor` as a slice that is all of it."""
    return Shard(name, tensor, tuple(tensor.shape), (0,) * tensor.dim(), is_mine)


@dataclass(frozen=True)
class _InMemory:
    shard: Shard

    @property
    def offset(self) -> tuple[int, ...]:
        return self.shard.offset

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.shard.tensor.shape)

    def read(self) -> Tensor:
        return self.shard.tensor


def found_in(shards: Sequence[Shard]) -> dict[str, Found]:
    """Return what `fill` takes, from slices in memory."""
    by_name: dict[str, list[Shard]] = {}
    for shard in shards:
        by_name.setdefault(shard.name, []).append(shard)
    return {
        name: Found(held[0].tensor.dtype, held[0].shape, [_InMemory(shard) for shard in held])
        for name, held in by_name.items()
    }


@torch.no_grad()
def fill(wanted: Sequence[Shard], found: Mapping[str, Found], *, source: str = "what was saved") -> None:
    """Fill the tensors of `wanted` in place from `found`, which must cover them; `source` names it in errors.

    Nothing is filled unless all of it can be.
    """
    by_name: dict[str, list[Shard]] = {}
    for shard in wanted:
        by_name.setdefault(shard.name, []).append(shard)
    copies = [copy for name, shards in by_name.items() for copy in _copies(name, shards, found, source)]
    for copy in copies:
        copy()


def _copies(name: str, shards: Sequence[Shard], found: Mapping[str, Found], source: str) -> list[Callable[[], None]]:
    """Return what fills `shards`, slices of the tensor `name`: one call for each slice that something is read from."""
    saved = found.get(name)
    if saved is None:
        raise ConfigError(
            f"{source} has no {name}: it is of another model. Resume with the job that it was saved from."
        )
    if saved.shape != shards[0].shape:
        raise ConfigError(
            f"{source} has {name} of shape {list(saved.shape)}, but the model's is {list(shards[0].shape)}: it is of "
            f"another model. {_INSTEAD}"
        )
    kept = [shard for shard in shards if shard.tensor.numel()]
    sources = [each for each in saved.slices if all(each.sizes)]
    metadata = TensorStorageMetadata(
        TensorProperties(dtype=saved.dtype),
        torch.Size(saved.shape),
        [_chunk(each.offset, each.sizes) for each in sources],
    )
    items = create_read_items_for_chunk_list(
        name, metadata, [_chunk(shard.offset, tuple(shard.tensor.shape)) for shard in kept]
    )
    moves: dict[int, list[tuple[Tensor, Any]]] = {}
    covered = [0] * len(kept)
    for item in items:
        here, there = item.dest_index.index, item.storage_index.index
        assert here is not None
        assert there is not None
        part = _narrowed(kept[here].tensor, item.dest_offsets, item.lengths)
        covered[here] += part.numel()
        moves.setdefault(there, []).append((part, item))
    for shard, count in zip(kept, covered, strict=True):
        if count < shard.tensor.numel():
            raise ConfigError(f"{source} lacks {shard.tensor.numel() - count:,} numbers of {name}: it is not complete.")
    return [_mover(sources[number], parts) for number, parts in moves.items()]


def _mover(source: Slice, parts: Sequence[tuple[Tensor, Any]]) -> Callable[[], None]:
    def move() -> None:
        numbers = source.read()  # once, however many slices take from it
        for part, item in parts:
            part.copy_(_narrowed(numbers, item.storage_offsets, item.lengths))

    return move


def _narrowed(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


def _chunk(offset: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes))
