"""What is done to a batch between the loader and the model: moved to the device, cut into micro-batches, weighed."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from shoal.core.errors import JobError, PlanError
from shoal.data.loading.leaves import map_leaves
from shoal.spec.job import Job


def to_device(batch: Any, device: torch.device) -> Any:
    """Return `batch` with every tensor in it on `device`."""
    if device.type == "cpu":
        return batch
    return map_leaves(lambda x: _moved(x, device) if isinstance(x, torch.Tensor) else x, batch)


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `tensor` on `device`, without waiting for what that still has to do: only pinned memory goes so."""
    return (tensor if tensor.is_pinned() or tensor.is_cuda else tensor.pin_memory()).to(device, non_blocking=True)


def micro_batches(batch: Any, *, num_samples: int, micro_batch: int | None) -> Iterator[tuple[Any, int]]:
    """Yield `batch` in pieces of at most `micro_batch` samples, each with its number of samples.

    The pieces are views of the batch's tensors, cut along their first dim.
    """
    if micro_batch is None or micro_batch >= num_samples:
        yield batch, num_samples
        return
    for first in range(0, num_samples, micro_batch):
        last = min(first + micro_batch, num_samples)
        yield map_leaves(_slicer(first, last, num_samples), batch), last - first


def weigh(job: Job, batch: Any, *, num_samples: int) -> float:
    """Return what the loss of `batch` is a mean over: its samples, or what the job's `weight` counts."""
    if job.weight is None:
        return float(num_samples)
    weight = float(job.weight(batch))
    if not 0 <= weight < float("inf"):
        raise JobError(f"weight(batch) returned {weight:g}. It counts what the loss is a mean over: 0 or more.")
    return weight


def _slicer(first: int, last: int, num_samples: int) -> Callable[[Any], Any]:
    def slice_leaf(leaf: Any) -> Any:
        length = leaf.shape[0] if isinstance(leaf, torch.Tensor) and leaf.dim() else _length(leaf)
        if length != num_samples:
            what = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else f"{leaf!r}"
            raise PlanError(
                f"{what} in a batch of {num_samples} samples cannot be cut into micro-batches: its first dim must be "
                f"the samples. Train without --micro-batch, or change collate."
            )
        return leaf[first:last]

    return slice_leaf


def _length(leaf: Any) -> int:
    return len(leaf) if isinstance(leaf, (list, tuple)) else -1
