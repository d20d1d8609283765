"""Tensors as runs of bytes to send: small ones together, large ones cut."""

from collections.abc import Sequence

import torch
from torch import Tensor

_PIECE_BYTES = 8 << 20
"""Enough that a message's latency is nothing beside it, and little enough to hold a few."""


def pieces_of(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the tensors in runs of about `_PIECE_BYTES`, large ones cut; both sides cut alike, by sizes alone."""
    pieces: list[list[Tensor]] = []
    left = 0
    for tensor in tensors:
        for part in _cut(tensor):
            if part.nbytes > left:
                pieces.append([])
                left = max(_PIECE_BYTES, part.nbytes)
            pieces[-1].append(part)
            left -= part.nbytes
    return pieces


def _cut(tensor: Tensor) -> Sequence[Tensor]:
    """Return the rows of a tensor in parts that are not too large."""
    if tensor.nbytes <= _PIECE_BYTES or tensor.dim() == 0:
        return [tensor]
    rows = max(1, _PIECE_BYTES // (tensor.nbytes // tensor.shape[0]))
    return [tensor[at : at + rows] for at in range(0, tensor.shape[0], rows)]


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of the tensors, one after the other."""
    return torch.cat([tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])


@torch.no_grad()
def unpack(data: Tensor, places: Sequence[Tensor]) -> None:
    """Put bytes that were packed into their places."""
    at = 0
    for place in places:
        numbers = data[at : at + place.nbytes].clone().view(place.dtype)  # a clone is aligned
        place.copy_(numbers.view(place.shape))
        at += place.nbytes
