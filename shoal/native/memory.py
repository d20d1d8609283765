"""Copies and sums of large tensors on the CPU, in one pass each."""

import ctypes
from collections.abc import Callable, Sequence

import torch

from shoal.native.library import library

RowsAdder = Callable[[int, int], None]
_NAMES = {torch.float32: "shoal_add_rows_float32", torch.float64: "shoal_add_rows_float64"}


def copy(to: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` into `to`; where both are contiguous and alike, without reading what is overwritten."""
    native = library()
    if native is None or not _are_alike(to, source):
        to.copy_(source)
        return
    native.shoal_copy(ctypes.c_void_p(to.data_ptr()), ctypes.c_void_p(source.data_ptr()), ctypes.c_size_t(to.nbytes))


def rows_adder(rows: Sequence[torch.Tensor]) -> RowsAdder | None:
    """Return what puts the sum of elements [begin, end) of all rows, added in their order, into each of them.

    The rows are contiguous and outlive it. None for what the library cannot add: other dtypes than float32 and float64.
    """
    native, name = library(), _NAMES.get(rows[0].dtype)
    if native is None or name is None or len(rows) < 2:
        return None
    function, count = getattr(native, name), ctypes.c_size_t(len(rows))
    addresses = (ctypes.c_void_p * len(rows))(*(row.data_ptr() for row in rows))

    def add(begin: int, end: int) -> None:
        function(addresses, count, ctypes.c_size_t(begin), ctypes.c_size_t(end))

    return add


def _are_alike(to: torch.Tensor, source: torch.Tensor) -> bool:
    return (
        to.dtype == source.dtype
        and to.shape == source.shape
        and to.is_contiguous()
        and source.is_contiguous()
        and to.device.type == source.device.type == "cpu"
    )
