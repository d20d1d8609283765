"""What a codec asks of the workers around it, and the same over a process group of the engine."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.collectives import ProcessGroup, gather_parts, start_sum


class Collectives(Protocol):
    """The workers that exchange gradients, seen from one of them. Every call is made by all of them, in one order.

    Where one fails, it raises what the engine raises; the tensors given to it, and residuals, are then undefined.
    """

    @property
    def index(self) -> int:
        """Which of the workers this is."""

    @property
    def count(self) -> int:
        """How many workers there are."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum `tensor` over the workers, in place, to the same bits on all of them."""

    def all_gather(self, tensor: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        """Return the 1-D tensor of each worker, in their order; `sizes` are their lengths, where they differ."""

    def all_to_all(self, parts: list[Tensor], sizes: Sequence[int] | None = None) -> list[Tensor]:
        """Send `parts[j]`, 1-D, to worker j and return what each has sent here; the own part comes back as it is.

        `sizes` are the lengths of what will come, where they are not that of any part sent.
        """


class GroupCollectives:
    """Collectives of the workers of a process group (Gloo on the processor, NCCL between GPUs)."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.index: int = group.rank()
        self.count: int = group.size()

    def all_reduce(self, tensor: Tensor) -> None:
        """See Collectives."""
        start_sum(tensor, self._group).wait()

    def all_gather(self, tensor: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        """See Collectives."""
        if sizes is None:
            return gather_parts(tensor, self._group)
        return self.all_to_all([tensor] * self.count, sizes)  # the engines gather only what has one size everywhere

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int] | None = None) -> list[Tensor]:
        """See Collectives."""
        own = parts[self.index]
        gives = [0 if other == self.index else part.numel() for other, part in enumerate(parts)]
        takes = [0 if other == self.index else size for other, size in enumerate(sizes or [max(gives)] * self.count)]
        sent = torch.cat([part for other, part in enumerate(parts) if other != self.index] or [own[:0]])
        received = own.new_empty(sum(takes))
        _exchange(received, sent, takes, gives, self._group)
        pieces = list(torch.split(received, takes))
        pieces[self.index] = own
        return pieces


def _exchange(received: Tensor, sent: Tensor, takes: list[int], gives: list[int], group: Any) -> None:
    if group.size() > 1:
        dist.all_to_all_single(received, sent, takes, gives, group=group)
