"""bf16: the upper 16 bits of each float32, rounded to the nearest. Half the bytes: the 16-bit baseline.

Only messages are bf16. They are summed in float32: a sum kept in bf16 loses a digit with every few workers.

Example: 1.0039 travels as 1.0 and leaves 0.0039 pending; the next step sends it, if it is still there.
"""

import torch
from torch import Tensor

from shoal.compress.codec import Turn
from shoal.compress.dense import Dense
from shoal.compress.rounding import chunk_numel


class Bf16(Dense):
    """16 bits an element."""

    name = "bf16"

    def message_bytes(self, numel: int) -> int:
        """See Dense."""
        return 2 * numel

    def encode(self, values: Tensor, turn: Turn, part: int = 0) -> Tensor:  # noqa: ARG002
        """See Coded."""
        rounded = torch.empty(values.shape, dtype=torch.bfloat16, device=values.device)
        step = chunk_numel(values.device)
        for chunk, sent in zip(torch.split(values, step), torch.split(rounded, step), strict=True):
            chunk.sub_(sent.copy_(chunk).float())
        return rounded.view(torch.uint8)

    def add(self, message: Tensor, into: Tensor) -> None:
        """See Coded."""
        step = chunk_numel(into.device)
        sent = message.view(torch.bfloat16)[: into.numel()]
        for chunk, values in zip(torch.split(into, step), torch.split(sent, step), strict=True):
            chunk.add_(values.float())
