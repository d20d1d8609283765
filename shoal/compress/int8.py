"""int8: a byte for each element, and a scale for each block. A quarter of float32.

1. The block's largest magnitude, and a little, is 127.
2. Each element is rounded to a whole number of steps, up or down at random, so that its mean is itself.
3. Decoding multiplies by the step.

Example: a block whose largest magnitude is 2.54 has steps of 0.02 (and a little). 0.05 is 2.5 steps: it travels as 2 or
as 3, each half of the time.
"""

from torch import Tensor

from shoal.compress.blocks import Blocked, round_to_levels, steps_of
from shoal.compress.bucket import BLOCK

LEVELS = 127


class Int8(Blocked):
    """8 bits an element, stochastic rounding."""

    name = "int8"
    block_bytes = BLOCK

    def encode_blocks(self, values: Tensor, codes: Tensor, scales: Tensor, uniform: Tensor, work: Tensor) -> None:
        """See Blocked."""
        round_to_levels(values, scales, uniform, work, levels=LEVELS)
        codes.copy_(work)

    def add_blocks(self, codes: Tensor, scales: Tensor, into: Tensor, work: Tensor) -> None:
        """See Blocked."""
        into.addcmul_(work.copy_(codes), steps_of(scales, LEVELS))
