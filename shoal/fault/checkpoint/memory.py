"""What a worker saves, in memory, laid out as its file will be.

Memory is used again for every checkpoint of the same tensors: fresh memory is slow when it is first touched.
"""

from typing import Any

import torch
from torch import Tensor

from shoal.fault.checkpoint.direct import BLOCK_BYTES
from shoal.fault.checkpoint.file_format import NAMES, FileLayout, lay_out, view_of
from shoal.fault.shards import Shard


class FileMemory:
    """The bytes of one worker's file of tensors."""

    def __init__(self) -> None:
        self._layout: FileLayout | None = None
        self._shape_of_file: tuple[Any, ...] = ()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._places: list[Tensor] = []

    @property
    def bytes(self) -> Tensor:
        """All of the file, header included."""
        return self._memory

    def make_room(self, mine: list[Shard]) -> FileLayout:
        """Lay out the file, and get memory for it, unless the last one was of the same tensors."""
        described = tuple((shard.name, shard.offset, shard.tensor.dtype, shard.tensor.shape) for shard in mine)
        if self._layout is None or described != self._shape_of_file:
            self._layout = lay_out(
                {_entry_name(shard): (shard.tensor.dtype, shard.tensor.shape) for shard in mine}, {"format": "pt"}
            )
            self._shape_of_file = described
            pinned = any(shard.tensor.is_cuda for shard in mine)
            self._memory = _in_blocks(self._layout.num_bytes, pinned=pinned)
            header = torch.frombuffer(bytearray(self._layout.header), dtype=torch.uint8)
            self._memory[: len(header)].copy_(header)
            self._places = [view_of(self._memory, self._layout.entries[_entry_name(shard)]) for shard in mine]
        return self._layout

    def touch(self) -> None:
        """Write to all of the memory but the header, so that it is there when it is needed."""
        assert self._layout is not None
        self._memory[len(self._layout.header) :].zero_()

    def copy(self, mine: list[Shard]) -> FileLayout:
        """Copy the slices to their places."""
        layout = self.make_room(mine)
        with torch.no_grad():
            for place, shard in zip(self._places, mine, strict=True):
                place.copy_(shard.tensor, non_blocking=True)
        if self._memory.is_pinned():
            torch.cuda.synchronize()
        return layout


def _in_blocks(num_bytes: int, *, pinned: bool) -> Tensor:
    """Return memory that begins with a block, as what is written past the page cache must."""
    memory = torch.empty(num_bytes + BLOCK_BYTES, dtype=torch.uint8, pin_memory=pinned)
    skipped = -memory.data_ptr() % BLOCK_BYTES
    return memory[skipped : skipped + num_bytes]


def manifest_tensors(mine: list[Shard], layout: FileLayout, file: str) -> dict[str, Any]:
    """Return what the manifest says of the slices in `file`."""
    tensors: dict[str, Any] = {}
    for shard in mine:
        entry = layout.entries[_entry_name(shard)]
        held = {"file": file, "begin": entry.begin, "end": entry.end, "offset": shard.offset, "shape": entry.shape}
        fields = {"dtype": NAMES[entry.dtype], "shape": shard.shape, "slices": []}
        tensors.setdefault(shard.name, fields)["slices"].append(held)
    return tensors


def _entry_name(shard: Shard) -> str:
    """Return what a slice is called in its file."""
    if tuple(shard.tensor.shape) == shard.shape:
        return shard.name
    return f"{shard.name}@{','.join(map(str, shard.offset))}"
