"""powersgd: each matrix M as a product P Q^T of low rank (Vogels, Karimireddy and Jaggi, 2019).

Messages can be added while encoded, so all travel through two all-reduces:

1. P = M Q, with the Q of the step before; all P of a bucket, and all gradients that are not matrices or too small to
   gain by this, are summed together.
2. The columns of P are made orthonormal, by QR in float32: alike on all workers, since all have the same sum.
3. Q = M^T P. What a worker's own M has beside P (its own Q)^T stays pending; then all Q are summed.
4. The sum of all M is, as far as its rank goes, P Q^T. Q is kept: each step of training is one of a power iteration.

Example: rank 4 of a matrix [1024, 1024] sends 4 * 2048 numbers for 1,048,576: a 128th. A bias travels as it is.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.compress.codec import Codec, Turn
from shoal.compress.collectives import Collectives
from shoal.core.errors import PlanError

_LEAST_GAIN = 2  # a matrix goes whole unless P and Q together are this many times smaller


@dataclass
class _Part:
    """One gradient of a bucket: what is pending of it, where its sum goes, and its factors, if it has some."""

    name: str
    pending: Tensor
    out: Tensor
    rank: int
    """0: it travels whole."""

    @property
    def left_numel(self) -> int:
        """Numbers in the first all-reduce."""
        return self.pending.shape[0] * self.rank if self.rank else self.pending.numel()

    @property
    def right_numel(self) -> int:
        """Numbers in the second."""
        return self.pending.shape[-1] * self.rank


class PowerSGD(Codec):
    """Matrices of rank `rank`; a gradient of more dims is one with the first as its rows."""

    name = "powersgd"
    serves_shards = False

    def __init__(self, rank: int = 4) -> None:
        if rank < 1:
            raise PlanError(f"powersgd with rank={rank}. Use a rank of 1 or more.")
        self.rank = rank

    def sum(self, pending: Tensor, out: Tensor, turn: Turn, workers: Collectives) -> None:
        """See Codec."""
        parts = self._parts(pending, out, turn)
        firsts = pending.new_empty(sum(part.left_numel for part in parts))
        lefts = torch.split(firsts, [part.left_numel for part in parts])
        for part, left in zip(parts, lefts, strict=True):
            _begin(part, left, turn)
        workers.all_reduce(firsts)
        matrices = []
        for part, left in zip(parts, lefts, strict=True):
            if part.rank:
                matrices.append((part, torch.linalg.qr(left.view(-1, part.rank)).Q))
            else:
                part.out.copy_(left.view_as(part.out))
                part.pending.zero_()
        if matrices:
            _finish(matrices, turn, workers)

    def sent_bytes(self, numel: int, workers: int, shapes: Sequence[tuple[int, ...]] = ()) -> float:
        """See Codec."""
        numbers = 0
        for shape in shapes or [(numel,)]:
            rank = self._rank_of(shape)
            numbers += rank * sum(_sides(shape)) if rank else math.prod(shape)
        return 2 * (workers - 1) / workers * 4 * numbers

    def _rank_of(self, shape: tuple[int, ...]) -> int:
        """Return the rank that a gradient of `shape` is reduced to; 0: it does not pay, it travels whole."""
        rows, columns = _sides(shape)
        return self.rank if _LEAST_GAIN * self.rank * (rows + columns) <= rows * columns else 0

    def _parts(self, pending: Tensor, out: Tensor, turn: Turn) -> list[_Part]:
        parts, begin = [], 0
        for name, shape in zip(turn.bucket.names, turn.bucket.shapes, strict=True):
            end = begin + math.prod(shape)
            sides = _sides(shape)
            here, there = pending[begin:end].view(sides), out[begin:end].view(sides)
            parts.append(_Part(name, here, there, self._rank_of(shape)))
            begin = end
        return parts


def _begin(part: _Part, left: Tensor, turn: Turn) -> None:
    """Put what the first all-reduce sums into `left`."""
    if not part.rank:
        left.copy_(part.pending.reshape(-1))
        return
    right = turn.memory.get(_key(part.name))
    if right is None:
        right = _random(part, turn.seed)
    torch.mm(part.pending, right.to(part.pending.device), out=left.view(-1, part.rank))


def _finish(matrices: Sequence[tuple[_Part, Tensor]], turn: Turn, workers: Collectives) -> None:
    """Sum the right factors of `matrices`, given with their left ones, and put the products where they belong."""
    sizes = [part.right_numel for part, _ in matrices]
    flat = matrices[0][1].new_empty(sum(sizes))
    rights = [right.view(-1, part.rank) for right, (part, _) in zip(torch.split(flat, sizes), matrices, strict=True)]
    for (part, left), right in zip(matrices, rights, strict=True):
        torch.mm(part.pending.t(), left, out=right)
        part.pending.addmm_(left, right.t(), alpha=-1)
    workers.all_reduce(flat)
    for (part, left), right in zip(matrices, rights, strict=True):
        if part.out.dtype == torch.float32:
            torch.mm(left, right.t(), out=part.out)
        else:
            part.out.copy_(left @ right.t())
        turn.memory[_key(part.name)] = right


def _random(part: _Part, seed: int) -> Tensor:
    """Return the first Q: by the seed and the parameter's name, so alike on all workers."""
    digest = hashlib.blake2b(f"{seed}/{part.name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.randn(part.pending.shape[1], part.rank, generator=generator)


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows and columns of a gradient seen as a matrix."""
    rows = shape[0] if shape else 1
    return rows, math.prod(shape[1:])


def _key(name: str) -> str:
    return f"q/{name}"
