"""topk: the elements of the largest magnitude, a fixed fraction of them. 1% of the elements is 1% of the bytes.

Sorting a gradient costs fifty times as much as reading it, so few elements are sorted:

1. Every 256th element is looked at. Their top quantile gives a magnitude that about 1.3 times as many as wanted exceed.
2. The elements above it are found; of these few the exact top k are taken.
3. If they were too few after all (ties, zeros, a period of 256 in the gradient), all elements are sorted.

Example: 1% of 4,194,304 is 41,944. The sample has 16,384, of which the 213th largest is the guess; 54,500 elements or
so exceed it, and the 41,944 largest of those travel.
"""

import math

import torch
from torch import Tensor

from shoal.compress import places
from shoal.compress.bucket import padded
from shoal.compress.codec import Turn, finish_slice
from shoal.compress.collectives import Collectives
from shoal.compress.sparse import Sparse
from shoal.core.errors import PlanError

_EVERY = 256
# With 1.3 times as many expected, and 213 of the sample above the guess, too few are found once in 10,000 times: the
# number found is within 1 / sqrt(213) = 7% of the expected at one standard deviation.
_MARGIN = 1.3
_SMALLEST_SAMPLE = 128  # of the elements wanted: below, all are sorted


class TopK(Sparse):
    """The largest `fraction` of the elements."""

    name = "topk"

    def __init__(self, fraction: float = 0.01) -> None:
        if not 0 < fraction <= 0.25:
            raise PlanError(f"topk keeps fraction={fraction:g}. Use 0.25 or less: above 0.5 it is longer than bf16.")
        self.fraction = fraction

    def expected(self, numel: int) -> int:
        """See Sparse."""
        return min(numel, math.ceil(numel * self.fraction))

    def select(self, values: Tensor, turn: Turn) -> Tensor:  # noqa: ARG002
        """See Sparse."""
        kept = self.expected(values.numel())
        found = self._candidates(values)
        if found is None or len(found) < kept:
            return torch.topk(values.abs(), kept, sorted=False).indices.sort().values
        is_kept = torch.zeros(len(found), dtype=torch.bool, device=values.device)
        is_kept[torch.topk(values[found].abs_(), kept, sorted=False).indices] = True
        return found[is_kept]

    def tell(self, kept: int, workers: Collectives, like: Tensor) -> list[int]:  # noqa: ARG002
        """See Sparse."""
        return [kept] * workers.count

    def told_bytes(self, workers: int) -> int:  # noqa: ARG002
        """See Sparse."""
        return 0

    def reduce_scatter(self, pending: Tensor, out: Tensor, turn: Turn, workers: Collectives) -> None:
        """See Codec."""
        nothing = pending.new_empty(0).byte()
        rows = enumerate(pending)
        messages = [nothing if row == workers.index else self.encode(values, turn) for row, values in rows]
        finish_slice(workers.all_to_all(messages), pending[workers.index], out, workers.index, self.add)

    def scattered_bytes(self, width: int, workers: int) -> float:
        """See Codec."""
        row = padded(width, 1)
        return (workers - 1) * places.message_bytes(row, self.expected(row))

    def _candidates(self, values: Tensor) -> Tensor | None:
        sample = values[::_EVERY]
        rank = int(len(sample) * self.fraction * _MARGIN) + 1
        if rank < _SMALLEST_SAMPLE:
            return None
        return places.above(values, float(torch.topk(sample.abs(), rank, sorted=False).values.min()))
