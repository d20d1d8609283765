"""Batches in memory that two processes share: the tensors lie there, and only what they are goes through a pipe."""

import io
import math
import mmap
import pickle
from typing import Any

import numpy as np
import torch

from shoal.core.errors import DataError
from shoal.data.loading.slot import Slot

_ALIGN = 64
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if hasattr(mmap, "MAP_ANONYMOUS") else 0)


def shared_memory(num_bytes: int) -> mmap.mmap:
    """Return memory that forked processes share; only what is written to takes any."""
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NO_RESERVE)


class SharedSlot(Slot):
    """A slot in shared memory; made anew for every chunk, which begins at the start of the memory again."""

    def __init__(self, memory: mmap.mmap) -> None:
        super().__init__()
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._used = 0

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:  # noqa: ARG002
        """Return a tensor in the shared memory."""
        num_bytes = math.prod(shape) * dtype.itemsize
        first = self._used
        if first + num_bytes > len(self._bytes):
            raise DataError(
                f"a batch takes more than the {len(self._bytes):,} bytes that a loading process has for it. "
                f"Use fewer workers, or a smaller batch_size."
            )
        self._used = first + -(-num_bytes // _ALIGN) * _ALIGN
        return self._bytes[first : first + num_bytes].view(dtype).view(shape)

    def place_of(self, tensor: torch.Tensor) -> int:
        """Return where in the memory `tensor` lies; it is copied there if it does not yet."""
        place = tensor.data_ptr() - self._bytes.data_ptr()
        if tensor.is_contiguous() and 0 <= place <= len(self._bytes) - tensor.nbytes:
            return place
        self.tensor("", tuple(tensor.shape), tensor.dtype).copy_(tensor)
        return self._used - -(-tensor.nbytes // _ALIGN) * _ALIGN


def dump(value: Any, slot: SharedSlot) -> bytes:
    """Return `value` pickled, but for its tensors and NumPy arrays, which are left in the slot."""
    file = io.BytesIO()
    _Pickler(file, slot).dump(value)
    return file.getvalue()


def load(message: bytes, memory: mmap.mmap) -> Any:
    """Return what `dump` was given; its tensors are those in the memory."""
    return _Unpickler(io.BytesIO(message), memory).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, slot: SharedSlot) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._slot = slot

    def persistent_id(self, value: Any) -> Any:
        is_array = isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.isnative
        if is_array:
            value = torch.from_numpy(np.ascontiguousarray(value))
        if type(value) is not torch.Tensor or value.layout != torch.strided or value.device.type != "cpu":
            return None
        value = value.detach()
        dtype = str(value.dtype).removeprefix("torch.")
        return is_array, self._slot.place_of(value), tuple(value.shape), dtype


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory: mmap.mmap) -> None:
        super().__init__(file)
        self._memory = memory

    def persistent_load(self, pid: Any) -> Any:
        is_array, place, shape, name = pid
        dtype: torch.dtype = getattr(torch, name)
        count = math.prod(shape)
        tensor = torch.empty(shape, dtype=dtype)
        if count:
            whole = torch.frombuffer(self._memory, dtype=torch.uint8, count=count * dtype.itemsize, offset=place)
            tensor = whole.view(dtype).view(shape)
        return tensor.numpy() if is_array else tensor
