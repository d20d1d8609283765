"""int4: half a byte for each element, and a scale for each block. An eighth of float32.

1. As int8, with 7 steps up and 7 down.
2. Element i of a block and element i + 128 share a byte: a + 16 b + 8, which is -111 to 127. It is packed and taken
   apart while still floating point, which the processor does eight to sixteen at a time: since a is -7 to 7, b is
   (byte - 8) / 16 rounded to the nearest, and a what is left.

Example: a = -3 and b = 2 are 37: (37 - 8) / 16 = 1.8, so b = 2, and a = 29 - 32 = -3.
"""

import torch
from torch import Tensor

from shoal.compress.blocks import Blocked, round_to_levels, steps_of
from shoal.compress.bucket import BLOCK

LEVELS = 7
_HALF = BLOCK // 2


class Int4(Blocked):
    """4 bits an element, stochastic rounding."""

    name = "int4"
    block_bytes = _HALF

    def encode_blocks(self, values: Tensor, codes: Tensor, scales: Tensor, uniform: Tensor, work: Tensor) -> None:
        """See Blocked."""
        round_to_levels(values, scales, uniform, work, levels=LEVELS)
        low, high = work[:, :_HALF], work[:, _HALF:]
        codes.copy_(low.add_(high, alpha=16).add_(8))

    def add_blocks(self, codes: Tensor, scales: Tensor, into: Tensor, work: Tensor) -> None:
        """See Blocked."""
        low, high = work[:, :_HALF], work[:, _HALF:]
        low.copy_(codes).sub_(8)
        torch.mul(low, 1 / 16, out=high).round_()
        low.sub_(high, alpha=16)
        into.addcmul_(work, steps_of(scales, LEVELS))
