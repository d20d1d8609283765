"""What a codec asks of the workers around it, and the same over a process group of the engine."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from shoal.comm.algorithms.wire import Guard
from shoal.comm.collectives import ProcessGroup, Work, start_exchange, start_gather, start_sum
from shoal.comm.traffic import TRAFFIC


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
    """Collectives of the workers of a process group (Gloo on the processor, NCCL between GPUs).

    With a `watch`, whoever waits for a worker that is lost is told by it, whatever the engine does.
    """

    def __init__(self, group: ProcessGroup, *, watch: Guard | None = None) -> None:
        self._group = group
        self._watch = watch
        self.index: int = group.rank()
        self.count: int = group.size()

    def all_reduce(self, tensor: Tensor) -> None:
        """See Collectives."""
        with TRAFFIC.timing("all-reduce", "engine", tensor):
            self._wait(start_sum(tensor, self._group), tensor)

    def all_gather(self, tensor: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        """See Collectives."""
        if sizes is not None:  # the engines gather only what has one size everywhere
            return self.all_to_all([tensor] * self.count, sizes)
        with TRAFFIC.timing("all-gather", "engine", tensor):
            parts, work = start_gather(tensor, self._group)
            self._wait(work, tensor)
        return parts

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int] | None = None) -> list[Tensor]:
        """See Collectives."""
        own = parts[self.index]
        gives = [0 if other == self.index else part.numel() for other, part in enumerate(parts)]
        takes = [0 if other == self.index else size for other, size in enumerate(sizes or [max(gives)] * self.count)]
        sent = torch.cat([part for other, part in enumerate(parts) if other != self.index] or [own[:0]])
        received = own.new_empty(sum(takes))
        if self.count > 1:
            with TRAFFIC.timing("all-to-all", "engine", sent):
                self._wait(start_exchange(received, sent, takes, gives, self._group), sent)
        pieces = list(torch.split(received, takes))
        pieces[self.index] = own
        return pieces

    def _wait(self, work: Work, tensor: Tensor) -> None:
        if self._watch is None or tensor.is_cuda:  # NCCL's: it waits on the stream alone
            work.wait()
        else:
            self._watch.wait(work)
