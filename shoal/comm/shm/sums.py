"""Adding up in a fixed order: worker 0 + worker 1 + ..., whatever came first, so that every run has the same bits."""

from collections.abc import Sequence

import torch

from shoal.core.errors import PlanError

CHUNK_BYTES = 128 << 10
"""So much of each worker at a time stays in a core's own cache (1 MB or more) from the first addition to the last copy,
for up to 8 workers, and outweighs the microsecond that each call of torch costs."""

_HALVES = (torch.float16, torch.bfloat16)


class Adder:
    """Adds tensors of one dtype. 16-bit ones are added in 32 bits and rounded once."""

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype is torch.bool:
            raise PlanError("bool cannot be summed over workers. Convert it to an integer type first.")
        self._sums = torch.empty(0)
        self._is_half = dtype in _HALVES

    def add(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Put the sum of `parts`, in their order, into `out`, which may be one of the first two."""
        if len(parts) == 1:
            if parts[0] is not out:
                out.copy_(parts[0])
        elif self._is_half and len(parts) > 2:
            self._add_halves(parts, out)
        else:
            torch.add(parts[0], parts[1], out=out)
            for part in parts[2:]:
                out.add_(part)

    def _add_halves(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        if self._sums.numel() < out.numel():
            self._sums = torch.empty(out.numel())
        sums = self._sums[: out.numel()]
        sums.copy_(parts[0])
        for part in parts[1:]:
            sums.add_(part)
        out.copy_(sums)


def slice_of(begin: int, end: int, *, index: int, count: int) -> tuple[int, int]:
    """Return the part of [begin, end) that worker `index` of `count` adds up; the parts are disjoint and cover it.

    They are cut at multiples of 64 elements: two workers then do not write to one line of the cache. Example: [0, 200)
    of 3 workers is [0, 128), [128, 200) and nothing.
    """
    each = -(-(end - begin) // (64 * count)) * 64
    return min(begin + index * each, end), min(begin + (index + 1) * each, end)
