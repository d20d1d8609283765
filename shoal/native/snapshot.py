"""Copying many tensors at once, and summing them up on the way (snapshot.c says how)."""

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.native.library import library

_LINE_BYTES, _WORDS = 64, 8
_PRIME, _MASK = 0x100000001B3, (1 << 64) - 1
_LINES_AT_ONCE = 1 << 14


def pieces_copier(to: Sequence[Tensor], sources: Sequence[Tensor]) -> Callable[[int], int]:
    """Return what copies each of `sources` into its tensor of `to`, without Python's lock, and returns their sum.

    It takes the sum of what goes before them. They are contiguous tensors of the processor, alike in pairs; whoever
    calls it sees to it that they are still there.
    """
    for here, there in zip(to, sources, strict=True):
        if here.nbytes != there.nbytes or not (here.is_contiguous() and there.is_contiguous()):
            raise ValueError("pieces are contiguous, and of one size in pairs")
    native = library()
    if native is None:
        return lambda before: _copied_plainly(to, sources, before)
    native.shoal_copy_pieces.restype = ctypes.c_uint64
    arguments = (_addresses(to), _addresses(sources), _sizes(sources), ctypes.c_size_t(len(sources)))
    return lambda before: int(native.shoal_copy_pieces(*arguments, ctypes.c_uint64(before)))


def pieces_sum(pieces: Sequence[Tensor], before: int = 0) -> int:
    """Return the sum of contiguous tensors of the processor; `before` is that of what goes before them."""
    native = library()
    if native is None:
        return plain_sum(pieces, before)
    native.shoal_copy_pieces.restype = ctypes.c_uint64
    count, total = ctypes.c_size_t(len(pieces)), ctypes.c_uint64(before)
    return int(native.shoal_copy_pieces(None, _addresses(pieces), _sizes(pieces), count, total))


def plain_sum(pieces: Sequence[Tensor], before: int = 0) -> int:
    """Return the same sum by NumPy."""
    total = before
    for piece in pieces:
        first, second = _sums(piece.contiguous().reshape(-1).view(torch.uint8).numpy())
        for one, two in zip(first.tolist(), second.tolist(), strict=True):
            total = ((total ^ one) * _PRIME) & _MASK
            total = ((total ^ two) * _PRIME) & _MASK
            total ^= total >> 29
    return total


def _sums(data: NDArray[np.uint8]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    first, second = np.zeros(_WORDS, np.uint64), np.zeros(_WORDS, np.uint64)
    for begin in range(0, len(data), _LINES_AT_ONCE * _LINE_BYTES):
        part = data[begin : begin + _LINES_AT_ONCE * _LINE_BYTES]
        part = np.concatenate([part, np.zeros(-len(part) % _LINE_BYTES, np.uint8)])
        lines = part.view(np.uint64).reshape(-1, _WORDS)
        weights = np.arange(len(lines), 0, -1, dtype=np.uint64)[:, None]
        second = second + first * np.uint64(len(lines)) + (lines * weights).sum(0, dtype=np.uint64)
        first = first + lines.sum(0, dtype=np.uint64)
    return first, second


def _copied_plainly(to: Sequence[Tensor], sources: Sequence[Tensor], before: int) -> int:
    for here, there in zip(to, sources, strict=True):
        here.copy_(there)
    return plain_sum(to, before)


def _addresses(tensors: Sequence[Tensor]) -> "ctypes.Array[ctypes.c_void_p]":
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _sizes(tensors: Sequence[Tensor]) -> "ctypes.Array[ctypes.c_size_t]":
    return (ctypes.c_size_t * len(tensors))(*(tensor.nbytes for tensor in tensors))
