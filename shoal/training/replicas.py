"""Copies of a whole model on all workers, and how their gradients meet: in shared memory, or through DDP's buckets.

Both leave the sum of all workers' gradients in the parameters: each worker's loss is scaled by its weight before.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.shm.group import SharedGroup
from shoal.parallel.replicate import Hook, apply_replicate
from shoal.sync.background import Background
from shoal.sync.shared import SharedGradients
from shoal.training.clock import StepClock


class Replicas(Protocol):
    """This worker's copy, and its meeting with the others."""

    def __call__(self, *args: Any) -> torch.Tensor:
        """Run the module."""

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward from `loss`, which the module has returned."""

    def accumulating(self) -> AbstractContextManager[object]:
        """Return what all micro-batches but the last of a step run in: their gradients stay here."""

    def finish(self) -> None:
        """Wait until the sums are there, after the last backward. Called by every worker."""


class SharedReplicas:
    """Workers of one host, on processors."""

    def __init__(self, module: nn.Module, group: SharedGroup, *, bucket_bytes: int, clock: StepClock) -> None:
        self._module, self._clock = module, clock
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:  # as DDP does: all begin with worker 0's
                group.broadcast(tensor, 0)
        self._gradients = SharedGradients(module.parameters(), group, bucket_bytes=bucket_bytes)

    def __call__(self, *args: Any) -> torch.Tensor:
        """Run the module."""
        return cast(torch.Tensor, self._module(*args))

    def backward(self, loss: torch.Tensor) -> None:
        """See Replicas."""
        loss.backward()  # type: ignore[no-untyped-call]

    def accumulating(self) -> AbstractContextManager[object]:
        """See Replicas."""
        return self._gradients.accumulating()

    def finish(self) -> None:
        """See Replicas."""
        self._clock.mark("backward_s")
        self._gradients.finish()
        self._clock.mark("comm_s")


class DdpReplicas:
    """Workers anywhere, on torch's DistributedDataParallel; `hook` sums its buckets."""

    def __init__(
        self,
        module: nn.Module,
        hook: Hook,
        *,
        bucket_bytes: int,
        clock: StepClock,
        background: Background | None = None,
    ) -> None:
        self._clock, self._background = clock, background
        self._replica: DistributedDataParallel = apply_replicate(module, hook=hook, bucket_bytes=bucket_bytes)

    def __call__(self, *args: Any) -> torch.Tensor:
        """Run the module."""
        return cast(torch.Tensor, self._replica(*args))

    def backward(self, loss: torch.Tensor) -> None:
        """See Replicas."""
        with self._background.explained() if self._background else nullcontext():
            loss.backward()  # type: ignore[no-untyped-call]

    def accumulating(self) -> AbstractContextManager[object]:
        """See Replicas."""
        return self._replica.no_sync()

    def finish(self) -> None:
        """See Replicas. DDP has waited at the end of backward; since its last bucket there was nothing to compute."""
        self._clock.mark_noted("backward_s", "comm_s")
