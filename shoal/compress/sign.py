"""sign: one bit for each element, and the mean magnitude of each block. A thirtieth of float32.

1. A block is sent as its signs times the mean of its magnitudes, which of all such messages is nearest to it.
2. Eight signs go into a byte: seen as one 64-bit number, the signs of 8 elements (bytes 0 or -1) are masked to bit i of
   byte i, and a product with 0x0101010101010101 adds these up in the top byte. Decoding goes the other way.

Example: [0.5, -0.1, 0.3, -0.3] is sent as + - + - and 0.3; [0.2, 0.2, 0.0, 0.0] stays pending.

It is biased: without error feedback it does not converge.
"""

import torch
from torch import Tensor

from shoal.compress.blocks import Blocked
from shoal.compress.bucket import BLOCK


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits


_SIGN_BIT = -(2**31)
_ONE_BIT_EACH = _signed(0x8040201008040201)
_ONES = 0x0101010101010101
_TO_TOP_BIT = 0x00406070787C7E7F  # added to a byte i that is 0 or 2^i, gives one with the top bit 0 or 1
_TOP_BITS = _signed(0x8080808080808080)


class Sign(Blocked):
    """1 bit an element."""

    name = "sign"
    block_bytes = BLOCK // 8

    def encode_blocks(self, values: Tensor, codes: Tensor, scales: Tensor, uniform: Tensor, work: Tensor) -> None:  # noqa: ARG002
        """See Blocked."""
        scales.copy_(torch.abs(values, out=work).mean(1, keepdim=True))
        bits = work.view(torch.int32)
        torch.bitwise_right_shift(values.view(torch.int32), 31, out=bits)  # -1 where negative, otherwise 0
        eight = bits.to(torch.int8).view(torch.int64)
        codes.copy_(eight.bitwise_and_(_ONE_BIT_EACH).mul_(_ONES).bitwise_right_shift_(56))
        torch.bitwise_and(values.view(torch.int32), _SIGN_BIT, out=bits)
        values.sub_(bits.bitwise_or_(scales.float().view(torch.int32)).view(torch.float32))

    def add_blocks(self, codes: Tensor, scales: Tensor, into: Tensor, work: Tensor) -> None:
        """See Blocked."""
        eight = codes.view(torch.uint8).to(torch.int64).mul_(_ONES).bitwise_and_(_ONE_BIT_EACH)
        negative = eight.add_(_TO_TOP_BIT).bitwise_and_(_TOP_BITS).view(torch.int8)  # -128 where negative, otherwise 0
        mean = scales.float()
        into.add_(torch.addcmul(mean, work.copy_(negative), mean, value=1 / 64, out=work))
