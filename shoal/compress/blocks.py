"""Codes with a scale for each block of elements: what int8, int4 and sign share.

A message is the codes of all blocks, then their scales in bf16. A block with a NaN or an infinite value has a scale
that is one, so all of it is NaN or infinite where it is decoded: nothing is hidden. Elements are worked on in chunks
that stay in the cache, without a temporary of the size of the gradient.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from shoal.compress.bucket import BLOCK
from shoal.compress.codec import Turn
from shoal.compress.dense import Dense
from shoal.compress.rounding import Noise, chunk_numel

SCALE_BYTES = 2  # bf16: the range of float32; scales need no digits, since encoding divides by the rounded scale itself

# A scale is rounded to 8 bits, so up to 2^-9 too small; with steps this much larger, no code is out of range.
_HEADROOM = 1 + 2**-7
# The least scale, zeros included: 1 over its step is still a float32.
_LEAST_SCALE = 1e-35


class Blocked(Dense):
    """A codec with a scale for each block."""

    block_bytes: ClassVar[int]
    """Bytes of the codes of one block."""

    @abstractmethod
    def encode_blocks(self, values: Tensor, codes: Tensor, scales: Tensor, uniform: Tensor, work: Tensor) -> None:
        """Fill `codes` (int8) and `scales` (bf16) of blocks `values` [blocks, BLOCK], and take out what they say.

        `uniform` are random numbers of that shape, `work` memory of that shape.
        """

    @abstractmethod
    def add_blocks(self, codes: Tensor, scales: Tensor, into: Tensor, work: Tensor) -> None:
        """Add what `codes` and `scales` say to `into` [blocks, BLOCK]."""

    def message_bytes(self, numel: int) -> int:
        """See Dense."""
        return numel // BLOCK * (self.block_bytes + SCALE_BYTES)

    def encode(self, values: Tensor, turn: Turn, part: int = 0) -> Tensor:
        """See Coded."""
        blocks = values.view(-1, BLOCK)
        message = torch.empty(self.message_bytes(values.numel()), dtype=torch.uint8, device=values.device)
        noise = Noise(turn.key(part), values.device)
        for number, (chunk, codes, scales, work) in enumerate(_chunks(blocks, *self._parts(message))):
            self.encode_blocks(chunk, codes, scales, noise.chunk(number, (len(chunk), BLOCK)), work)
        return message

    def add(self, message: Tensor, into: Tensor) -> None:
        """See Coded."""
        codes, scales = self._parts(message)
        whole = into.numel() // BLOCK
        blocks = into[: whole * BLOCK].view(-1, BLOCK)
        for chunk, codes_here, scales_here, work in _chunks(blocks, codes[:whole], scales[:whole]):
            self.add_blocks(codes_here, scales_here, chunk, work)
        rest = into[whole * BLOCK :]
        if rest.numel():
            last = into.new_zeros(1, BLOCK)
            self.add_blocks(codes[whole : whole + 1], scales[whole : whole + 1], last, torch.empty_like(last))
            rest.add_(last[0, : rest.numel()])

    def _parts(self, message: Tensor) -> tuple[Tensor, Tensor]:
        blocks = message.numel() // (self.block_bytes + SCALE_BYTES)
        codes = message[: blocks * self.block_bytes].view(torch.int8).view(blocks, self.block_bytes)
        return codes, message[blocks * self.block_bytes :].view(torch.bfloat16).view(blocks, 1)


def _chunks(blocks: Tensor, codes: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield the blocks, codes and scales of each chunk, and memory to work in, of the shape of its blocks."""
    length = min(chunk_numel(blocks.device) // BLOCK, max(len(blocks), 1))
    work = blocks.new_empty(length, BLOCK)
    parts = (torch.split(each, length) for each in (blocks, codes, scales))
    for part in zip(*parts, strict=True) if len(blocks) else ():
        yield *part, work[: len(part[0])]


def round_to_levels(values: Tensor, scales: Tensor, uniform: Tensor, work: Tensor, *, levels: int) -> None:
    """Put `values` as whole numbers from -levels to levels into `work`, their blocks' largest magnitude into `scales`.

    Rounded up or down at random, so that the mean is the value; what that loses is left in `values`.
    """
    scales.copy_(torch.abs(values, out=work).amax(1, keepdim=True).clamp_(min=_LEAST_SCALE))
    steps = steps_of(scales, levels)
    torch.addcmul(uniform, values, steps.reciprocal(), out=work).floor_()
    values.addcmul_(work, steps, value=-1)


def steps_of(scales: Tensor, levels: int) -> Tensor:
    """Return the distance between neighbouring codes in each block."""
    return scales.float().mul_(_HEADROOM / levels)
