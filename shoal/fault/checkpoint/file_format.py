"""The files of numbers in a checkpoint: safetensors, laid out before a byte is copied.

1. The header's length (8 bytes), a header of JSON (for each tensor its dtype, shape and where its bytes begin and end),
   padded to a multiple of 64, then the bytes of all tensors.
2. A slice is a tensor of its own, called NAME, or NAME@OFFSET where it is not the whole: "model/out.weight@3,0".
3. The whole file is made in memory: the training loop copies numbers to their places, and the thread that writes has
   one run of bytes to write and to sum up.
"""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import ConfigError

_ALIGN = 64
_MOST_HEADER_BYTES = 100_000_000
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its bytes are [begin, end) of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class FileLayout:
    """Where everything goes in a file."""

    header: bytes
    entries: dict[str, Entry]
    num_bytes: int


def lay_out(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str]) -> FileLayout:
    """Return the layout of a file of tensors, given their dtypes and shapes."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    ordered = sorted(tensors.items(), key=lambda item: -item[1][0].itemsize)  # so that every one is aligned
    for name, (dtype, shape) in ordered:
        if dtype not in NAMES:
            raise ConfigError(f"{name} is of {dtype}, which a checkpoint cannot hold.")
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    start = 8 + len(text)
    entries = {
        name: Entry(dtype, tuple(shape), *(start + offset for offset in header[name]["data_offsets"]))
        for name, (dtype, shape) in ordered
    }
    return FileLayout(struct.pack("<Q", len(text)) + text, entries, start + position)


def view_of(memory: Tensor, entry: Entry) -> Tensor:
    """Return the tensor that lies in `memory`, the bytes of a whole file, as `entry` says."""
    return memory[entry.begin : entry.end].view(entry.dtype).view(entry.shape)


def read_entries(path: Path) -> dict[str, Entry]:
    """Return what the header of a safetensors file says is in it."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(_MOST_HEADER_BYTES, size - 8):
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
        return {name: _entry(fields, 8 + length, size) for name, fields in header.items() if name != "__metadata__"}
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}.") from None
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ConfigError(f"{path} is no safetensors file, or damaged: {error}.") from None


def _entry(fields: Mapping[str, Any], start: int, file_bytes: int) -> Entry:
    begin, end = (start + int(offset) for offset in fields["data_offsets"])
    entry = Entry(DTYPES[fields["dtype"]], tuple(map(int, fields["shape"])), begin, end)
    if not start <= begin <= end <= file_bytes:
        raise ValueError("a tensor ends behind the end of the file")
    if end - begin != math.prod(entry.shape) * entry.dtype.itemsize:
        raise ValueError("a tensor's bytes are not those of its shape")
    return entry


def read_tensor(path: Path, entry: Entry) -> Tensor:
    """Return the tensor that `entry` describes of the file at `path`."""
    memory = torch.empty(entry.end - entry.begin, dtype=torch.uint8)
    if memory.numel():
        with path.open("rb", buffering=0) as file:
            file.seek(entry.begin)
            rest = memory.numpy().data
            while rest:
                count = file.readinto(rest)
                if not count:
                    raise ConfigError(f"{path} ends in the middle of a tensor: it is truncated.")
                rest = rest[count:]
    return memory.view(entry.dtype).view(entry.shape)
