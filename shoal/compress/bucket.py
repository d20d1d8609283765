"""Which gradients travel together, and where each of them lies in one flat tensor.

A bucket of replicas holds them one after the other. A bucket of shards is what FSDP2 hands to its reduce-scatter: a row
for each worker, and in it that worker's slice of each gradient, cut along dim 0 and padded to equal slices.

Example: weights [3, 2] and a bias [3], over 2 workers. As replicas: 9 numbers. As shards: each gradient is padded to 4
rows, so each worker's row has 2 * 2 numbers of the weights and 2 of the bias: [2, 6], the last ones of the second row
being padding.

What is kept for a gradient is kept by its name, in its own shape. So it survives another bucketing (DDP makes its
buckets anew after the first step) and another number of workers.
"""

import math
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 256
"""Elements that share a scale of 2 bytes, which adds 0.8% to int8, 1.6% to int4 and 6% to sign. Blocks half as long add
twice that, and lower the error of rounding by 7%; blocks of 1,024 span rows of different magnitude and raise it by a
third (benchmarks/codecs.py --blocks)."""


@dataclass(frozen=True)
class Bucket:
    """Gradients one after the other, as they lie on a worker that holds all of them."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def rows(self) -> int:
        """How many rows its flat tensor has: each is exchanged as a whole."""
        return 1

    @property
    def width(self) -> int:
        """How many numbers a row has."""
        return sum(math.prod(shape) for shape in self.shapes)

    def room(self, workers: int) -> tuple[int, int]:
        """Return the shape of a tensor that holds the bucket in whole blocks for each of `workers`."""
        return 1, padded(self.width, workers)

    def join(self, parts: Mapping[str, Tensor], into: Tensor) -> None:
        """Copy `parts`, by name, to their places in `into` [rows, width]; those that are missing are left out."""
        begin = 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            if name in parts:
                into[0, begin : begin + math.prod(shape)].copy_(parts[name].reshape(-1))
            begin += math.prod(shape)

    def split(self, flat: Tensor, into: MutableMapping[str, Tensor]) -> None:
        """Put a copy of each part of `flat` [rows, width] into `into`, by name, in its own shape."""
        begin = 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            into[name] = flat[0, begin : begin + math.prod(shape)].reshape(shape).clone()
            begin += math.prod(shape)


@dataclass(frozen=True)
class ShardedBucket(Bucket):
    """Gradients of which each of `workers` will have a slice, as FSDP2's reduce-scatter lays them out."""

    workers: int

    @property
    def rows(self) -> int:
        """A row for each worker."""
        return self.workers

    @property
    def width(self) -> int:
        """How many numbers each worker gets, padding included."""
        return sum(self._slice(shape) for shape in self.shapes)

    def room(self, workers: int) -> tuple[int, int]:
        """Return the shape of a tensor that holds the bucket in whole blocks."""
        assert workers == self.workers, f"a bucket cut for {self.workers} workers, exchanged by {workers}"
        return self.rows, padded(self.width, 1)

    def join(self, parts: Mapping[str, Tensor], into: Tensor) -> None:
        """See Bucket."""
        begin = 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            size = self._slice(shape)
            if name in parts:
                whole = into.new_zeros(self.workers * size)
                whole[: math.prod(shape)].copy_(parts[name].reshape(-1))
                into[:, begin : begin + size].copy_(whole.view(self.workers, size))
            begin += size

    def split(self, flat: Tensor, into: MutableMapping[str, Tensor]) -> None:
        """See Bucket."""
        begin = 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            size = self._slice(shape)
            whole = flat[:, begin : begin + size].reshape(-1)
            into[name] = whole[: math.prod(shape)].reshape(shape).clone()
            begin += size

    def _slice(self, shape: tuple[int, ...]) -> int:
        return -(-shape[0] // self.workers) * math.prod(shape[1:])


def padded(numel: int, workers: int) -> int:
    """Return the least number, `numel` or more, that is whole blocks for each of `workers`."""
    return -(-numel // (BLOCK * workers)) * BLOCK * workers


def bucket_of(name: str, tensor: torch.Tensor) -> Bucket:
    """Return the bucket of one tensor."""
    return Bucket((name,), (tuple(tensor.shape),))
