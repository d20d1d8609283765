"""How the slices of a state get into the slots of a file: planned once, the same at each snapshot."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.fault.shards import Shard
from shoal.fault.snapshot_file import SnapshotFile
from shoal.native.snapshot import pieces_copier, pieces_sum


@dataclass
class Moves:
    """What goes into one slot: by torch, where it is not in a row or on a GPU, and the rest by one native call."""

    by_torch: list[tuple[Tensor, Tensor]]
    native: Callable[[int], int]

    def make(self) -> int:
        """Copy everything, and return its sum."""
        for place, tensor in self.by_torch:
            place.copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for _, tensor in self.by_torch):
            torch.cuda.current_stream().synchronize()
        return self.native(pieces_sum([place for place, _ in self.by_torch]))


def plan_moves(shards: Sequence[Shard], file: SnapshotFile) -> list[Moves]:
    """Return the copies of `shards`, in their order, into each slot; the file was made for such ones."""
    count = sum(not _is_direct(shard.tensor) for shard in shards if shard.tensor.numel())
    tensors = [shard.tensor.detach() for shard in shards if shard.tensor.numel()]
    moves = []
    for places in file.places:
        full = [place for place in places if place.numel()]
        by_torch = list(zip(full[:count], tensors[:count], strict=True))
        moves.append(Moves(by_torch, pieces_copier(full[count:], tensors[count:])))
    return moves


def _is_direct(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def ordered(shards: Sequence[Shard]) -> list[Shard]:
    """Return those that torch copies first: the sum is made up in this order."""
    return sorted(shards, key=lambda shard: _is_direct(shard.tensor))


def event_of(shards: Sequence[Shard]) -> torch.cuda.Event | None:
    """Return when what has been asked of the GPU so far is done; None where nothing is on a GPU."""
    if not any(shard.tensor.is_cuda for shard in shards):
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def pin(file: SnapshotFile, shards: Sequence[Shard]) -> Callable[[], None]:
    """Let a GPU copy straight into the file's memory; return what ends that, to be called before it is let go.

    Where that cannot be, as with a file that is not in memory, copies are slower, and right.
    """
    device = next((shard.tensor.device for shard in shards if shard.tensor.is_cuda), None)
    if device is None:
        return lambda: None
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(file.address, file.num_bytes, 0)):
        with contextlib.suppress(RuntimeError):  # the error is reported by the next kernel, whichever it is: by this
            torch.ones(1, device=device)
        return lambda: None
    return lambda: runtime.cudaHostUnregister(file.address)
