"""A worker's snapshots in one file of shared memory: two slots, of which at least one is always complete.

    header      magic, sizes                                                64 bytes
    slots       for each of the two: sequence, step, sum, bytes of text     64 bytes each
    table       JSON: whose it is, and the name, dtype, shape, offset, sizes and place of every slice
    slot 0, 1   text (JSON of what is the worker's own, and of what all have alike), then the slices

1. A file is made under another name, with all its memory taken, and then gets its own: it is whole or not there.
2. A slot that is being written has an odd sequence. Text and slices are copied, then step and sum are written, and last
   the sequence, even again. Whoever is killed in between leaves an odd one: such a slot counts for nothing.
3. Whoever reads compares the sum, and looks whether the sequence is still the same.
"""

import json
import math
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.comm.shm.kept import Room
from shoal.comm.shm.memory import SharedMap
from shoal.core.units import format_bytes
from shoal.fault.checkpoint.file_format import DTYPES, NAMES
from shoal.fault.shards import Shard
from shoal.native.snapshot import pieces_sum

_MAGIC, _FORMAT = b"shoalmem", 1
_HEADER = struct.Struct("<8s5Q")  # magic, format, bytes of the table, of a slot's text, of its slices, of the file
_LINE_BYTES, SLOTS = 64, 2
_SEQUENCE, _STEP, _SUM, _TEXT_BYTES = 0, 1, 2, 3  # words of a slot's line
_TABLE_AT = _LINE_BYTES * (1 + SLOTS)
_MASK = (1 << 63) - 1
SUFFIX = ".snapshot"


@dataclass(frozen=True)
class Slot:
    """A complete snapshot as it lies in a file."""

    step: int
    text: dict[str, Any]
    """own and common."""
    shards: list[Shard]


@dataclass(frozen=True)
class Layout:
    """Where everything lies in a file."""

    table: bytes
    text_bytes: int
    data_bytes: int

    @property
    def slot_bytes(self) -> int:
        """How much a slot takes."""
        return _padded(self.text_bytes) + _padded(self.data_bytes)

    def slot_at(self, slot: int) -> int:
        """Return where a slot begins, with its text."""
        return _padded(_TABLE_AT + len(self.table)) + slot * self.slot_bytes

    def data_at(self, slot: int) -> int:
        """Return where the slices of a slot begin."""
        return self.slot_at(slot) + _padded(self.text_bytes)

    @property
    def file_bytes(self) -> int:
        """How much the whole file takes."""
        return self.slot_at(SLOTS)

    def slices(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...], tuple[int, ...], int, int]]:
        """Yield of every slice its name, dtype, shape, offset, sizes, place in the slot and bytes."""
        for name, dtype_name, shape, offset, sizes, place in json.loads(self.table)["slices"]:
            dtype = DTYPES[dtype_name]
            size = math.prod(sizes) * dtype.itemsize
            if not 0 <= place <= place + size <= self.data_bytes or len(sizes) != len(shape):
                raise ValueError(f"a table of snapshots contradicts itself at {name}")
            yield name, dtype, tuple(shape), tuple(offset), tuple(sizes), place, size


def _padded(num_bytes: int, unit: int = mmap.PAGESIZE) -> int:
    return -(-num_bytes // unit) * unit


def lay_out(shards: Sequence[Shard], whose: dict[str, Any], *, text_bytes: int) -> Layout:
    """Return the layout of a file for snapshots of `shards`. KeyError where there is a dtype that none can hold."""
    rows, data_bytes = _rows(shards)
    table = json.dumps({**whose, "slices": rows}, separators=(",", ":")).encode()
    return Layout(table, text_bytes, data_bytes)


def _rows(shards: Sequence[Shard]) -> tuple[list[list[Any]], int]:
    """Return what the table says of each slice, and how much all of them take."""
    position, rows = 0, []
    for shard in shards:
        box = [list(shard.shape), list(shard.offset), list(shard.tensor.shape)]
        rows.append([shard.name, NAMES[shard.tensor.dtype], *box, position])
        position += _padded(shard.tensor.nbytes, _LINE_BYTES)
    return rows, position


class SnapshotFile:
    """The file of one worker, open for writing; by one thread at a time."""

    def __init__(self, path: Path, layout: Layout) -> None:
        """Make the file at `path`. Raises OSError where there is not enough memory."""
        self.path, self.layout, self.num_bytes = path, layout, layout.file_bytes
        made = path.with_suffix(".unfinished")
        handle = os.open(made, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(handle, 0, layout.file_bytes)  # all of it now: later, a lack of memory would be SIGBUS
            sizes = (_FORMAT, len(layout.table), layout.text_bytes, layout.data_bytes, layout.file_bytes)
            os.pwrite(handle, _HEADER.pack(_MAGIC, *sizes), 0)
            os.pwrite(handle, layout.table, _TABLE_AT)
            self._memory = SharedMap(os.dup(handle))
            made.rename(path)
        except BaseException:
            made.unlink(missing_ok=True)
            raise
        finally:
            os.close(handle)
        self._lines = memoryview(self._memory.map)[_LINE_BYTES:_TABLE_AT].cast("q")
        whole = torch.frombuffer(self._memory.map, dtype=torch.uint8)
        self.address = whole.data_ptr()
        """Where the file begins in this process's memory."""
        self.places = [_places(whole, layout, slot) for slot in range(SLOTS)]
        """For each slot, where each slice goes."""

    def holds(self, shards: Sequence[Shard]) -> bool:
        """Return whether it was made for just such slices, in this order."""
        return bool(json.loads(self.layout.table)["slices"] == _rows(shards)[0])

    def populate(self) -> None:
        """Take the pages of the file: the first copies are then as fast as any."""
        self._memory.populate(0, self.num_bytes)

    def begin(self, slot: int) -> None:
        """Say that `slot` is being written: it counts for nothing until `commit`."""
        at = slot * (_LINE_BYTES // 8) + _SEQUENCE
        self._lines[at] = self._lines[at] | 1

    def commit(self, slot: int, step: int, total: int, text: bytes) -> None:
        """Say that `slot` holds the state after `step`, whose slices have the sum `total`."""
        if len(text) > self.layout.text_bytes:
            raise ValueError(f"{len(text)} bytes of text do not fit into {self.layout.text_bytes}")
        self.memory(slot)[: len(text)] = text
        self._set(slot, step, (total ^ _text_sum(text)) & _MASK, len(text))

    def memory(self, slot: int) -> "memoryview[int]":
        """Return all bytes of a slot."""
        at = self.layout.slot_at(slot)
        return memoryview(self._memory.map)[at : at + self.layout.slot_bytes]

    def line(self, slot: int) -> tuple[int, int, int]:
        """Return the step, the sum and the bytes of text of a slot."""
        at = slot * (_LINE_BYTES // 8)
        return self._lines[at + _STEP], self._lines[at + _SUM], self._lines[at + _TEXT_BYTES]

    def accept(self, slot: int, step: int, total: int, text_bytes: int) -> bool:
        """Commit a slot whose bytes another process has had, if they have the sum that they had there."""
        if not 0 <= text_bytes <= self.layout.text_bytes:
            return False
        found = pieces_sum([place for place in self.places[slot] if place.numel()])
        if (found ^ _text_sum(bytes(self.memory(slot)[:text_bytes]))) & _MASK != total:
            return False
        self._set(slot, step, total, text_bytes)
        return True

    def _set(self, slot: int, step: int, total: int, text_bytes: int) -> None:
        at = slot * (_LINE_BYTES // 8)
        self._lines[at + _STEP], self._lines[at + _SUM], self._lines[at + _TEXT_BYTES] = step, total, text_bytes
        self._lines[at + _SEQUENCE] += 1  # last

    def steps(self) -> list[int]:
        """Return the step that each slot holds; -1 where it holds none."""
        return _steps(self._lines)

    def remove(self) -> None:
        """Remove the file; what has it mapped keeps it."""
        self.path.unlink(missing_ok=True)


def make_file(room: Room, path: Path, layout: Layout) -> SnapshotFile:
    """Make a file in the room. Raises OSError, which says how much is free, where that is not enough."""
    with room.alone():
        free = room.free_bytes()
        if layout.file_bytes > free:
            raise OSError(f"{format_bytes(layout.file_bytes)} are needed, and {format_bytes(free)} can be used")
        return SnapshotFile(path, layout)


class SnapshotReader:
    """A file of snapshots, open for reading. Raises ValueError or OSError where it is not one of this user's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = os.fstat(handle)
            if found.st_uid != os.geteuid() or found.st_size < _TABLE_AT:
                raise ValueError(f"{path} is no file of snapshots of this user")
            # Not read-only: torch warns of tensors that cannot be written to. What is written stays in this process.
            self._private = mmap.mmap(handle, found.st_size, mmap.MAP_PRIVATE)
            self._shared = mmap.mmap(handle, found.st_size, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(handle)
        magic, number, table_bytes, text_bytes, data_bytes, size = _HEADER.unpack_from(self._shared)
        if magic != _MAGIC or number != _FORMAT or size != found.st_size or _TABLE_AT + table_bytes > size:
            raise ValueError(f"{path} is no file of snapshots of this version")
        self._layout = Layout(self._shared[_TABLE_AT : _TABLE_AT + table_bytes], text_bytes, data_bytes)
        if self._layout.file_bytes != size:
            raise ValueError(f"{path} contradicts itself")
        self.table: dict[str, Any] = json.loads(self._layout.table)
        self._lines = memoryview(self._shared)[_LINE_BYTES:_TABLE_AT].cast("q")

    def steps(self) -> list[int]:
        """Return the step that each slot holds; -1 where it holds none."""
        return _steps(self._lines)

    def complete(self, *, is_checked: bool = True) -> list[Slot]:
        """Return the snapshots that are complete; with `is_checked`, those whose sum is right."""
        return [found for slot in range(SLOTS) if (found := self._slot(slot, is_checked=is_checked)) is not None]

    def _slot(self, slot: int, *, is_checked: bool) -> Slot | None:
        line = self._lines[slot * _LINE_BYTES // 8 : (slot + 1) * _LINE_BYTES // 8].tolist()
        sequence, step, total, text_bytes = line[: _TEXT_BYTES + 1]
        if sequence <= 0 or sequence % 2 or not 0 <= text_bytes <= self._layout.text_bytes:
            return None
        at = self._layout.slot_at(slot)
        text = self._shared[at : at + text_bytes]
        shards = list(self._shards(slot))
        if is_checked:
            found = pieces_sum([shard.tensor for shard in shards if shard.tensor.numel()])
            if (found ^ _text_sum(text)) & _MASK != total:
                return None
        if self._lines[slot * _LINE_BYTES // 8] != sequence:
            return None
        return Slot(step, json.loads(text), shards)

    def _shards(self, slot: int) -> Iterator[Shard]:
        places = _places(torch.frombuffer(self._private, dtype=torch.uint8), self._layout, slot)
        for place, (name, _, shape, offset, *_rest) in zip(places, self._layout.slices(), strict=True):
            yield Shard(name, place, shape, offset, is_mine=False)


def _places(whole: Tensor, layout: Layout, slot: int) -> list[Tensor]:
    """Return the slices of a slot, given the bytes of the whole file."""
    begin = layout.data_at(slot)
    return [
        whole[begin + place : begin + place + size].view(dtype).view(sizes)
        for _, dtype, _, _, sizes, place, size in layout.slices()
    ]


def _steps(lines: "memoryview[int]") -> list[int]:
    found = []
    for slot in range(SLOTS):
        sequence, step = lines[slot * _LINE_BYTES // 8 + _SEQUENCE], lines[slot * _LINE_BYTES // 8 + _STEP]
        found.append(step if sequence > 0 and sequence % 2 == 0 else -1)
    return found


def _text_sum(text: bytes) -> int:
    return pieces_sum([torch.frombuffer(bytearray(text), dtype=torch.uint8)]) if text else 0
