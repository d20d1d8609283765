"""Gradients meet by all-reduce, in the buckets of torch's DistributedDataParallel, while backward still runs.

Exactness costs no pass over the gradients: each worker scales its loss by (its weight / the weight of the global
batch) before backward, so the plain sum over the workers is the weighted mean over the global batch. DDP's own
division by the number of workers, which would be wrong for unequal parts, falls away.
"""

from collections.abc import Callable

import torch
from torch.distributed import GradBucket

from shoal.comm.calls import CALLS
from shoal.comm.endable import endable
from shoal.comm.group import all_reduce_sum
from shoal.comm.traffic import TRAFFIC


class AllReduce:
    """The communication hook of DDP. It calls `on_bucket` when a bucket of gradients is ready to be sent.

    After the last bucket, all that backward still does is wait for the others.
    """

    def __init__(self, on_bucket: Callable[[], None]) -> None:
        self._on_bucket = on_bucket

    def hook(self, _state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the sum of one bucket. Called by DDP during backward, on every worker, in the same order."""
        self._on_bucket()
        gradient = bucket.buffer()
        CALLS.note_bucket(gradient.numel(), bucket.index())
        begin = TRAFFIC.begin(gradient)

        def summed(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            TRAFFIC.end(begin, "all-reduce", "engine", gradient)
            return future.value()[0]

        future = all_reduce_sum(gradient).get_future()
        return (future if gradient.is_cuda else endable(future)).then(summed)


class PendingTotal:
    """A number's sum over all workers, under way while the forward pass runs. Made by every worker once a step."""

    def __init__(self, weight: float) -> None:
        self._sum = torch.tensor([weight], dtype=torch.float64)
        self._work = all_reduce_sum(self._sum)

    def wait(self) -> float:
        """Return the sum, once it is there."""
        self._work.wait()
        return float(self._sum.item())
