"""Collectives over the workers of one axis of the mesh, as engines need them; see `group` for those of all workers."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp, Work

from shoal.comm.torch_private import timeout_of
from shoal.comm.traffic import TRAFFIC

# The names of torch 2.12 and before, which newer ones warn of.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

__all__ = [
    "ProcessGroup",
    "ReduceOp",
    "Waiting",
    "Work",
    "all_gather_into",
    "gather_parts",
    "reduce_scatter_into",
    "start_exchange",
    "start_gather",
    "start_sum",
    "subgroup",
    "sum_together",
]


Waiting: TypeAlias = Callable[[], AbstractContextManager[None]]
"""What to enter while this worker waits for communication: whoever measures that gives one."""


def start_sum(tensor: torch.Tensor, group: ProcessGroup) -> Work:
    """Start summing `tensor` over `group`, in place; after `.wait()` on what is returned, the sum is there."""
    work: Work = dist.all_reduce(tensor, op=ReduceOp.SUM, group=group, async_op=True)
    return work


def sum_together(tensors: Sequence[torch.Tensor], group: ProcessGroup) -> None:
    """Put the sums over `group` into tensors of one dtype, by one collective. Called by all its workers."""
    if not tensors:
        return
    together = torch.cat([tensor.reshape(-1) for tensor in tensors])
    start_sum(together, group).wait()
    parts = torch.split(together, [tensor.numel() for tensor in tensors])
    for tensor, values in zip(tensors, parts, strict=True):
        tensor.copy_(values.view_as(tensor))


def gather_parts(part: torch.Tensor, group: ProcessGroup) -> list[torch.Tensor]:
    """Return the part of each worker of `group`, in their order; all parts have one shape."""
    parts, work = start_gather(part, group)
    work.wait()
    return parts


def start_gather(part: torch.Tensor, group: ProcessGroup) -> tuple[list[torch.Tensor], Work]:
    """Return what will be the part of each worker of `group`, in their order, and the work to wait for.

    All parts have one shape. Called by every worker of `group`; after a failure the parts are undefined.
    """
    parts = [torch.empty_like(part) for _ in range(group.size())]
    work: Work = dist.all_gather(parts, part, group=group, async_op=True)
    return parts, work


def start_exchange(
    received: torch.Tensor, sent: torch.Tensor, takes: Sequence[int], gives: Sequence[int], group: ProcessGroup
) -> Work:
    """Start sending each worker its part of `sent`, and receiving a part from each into `received`, both 1-D.

    The parts lie there one after the other, in the order of the workers: `gives[j]` elements go to worker j, and
    `takes[j]` come from it. Called by every worker of `group`; after a failure `received` is undefined.
    """
    work: Work = dist.all_to_all_single(received, sent, list(takes), list(gives), group=group, async_op=True)
    return work


def all_gather_into(
    out: torch.Tensor, part: torch.Tensor, group: ProcessGroup, *, async_op: bool = False
) -> Work | None:
    """Put the parts of all workers of `group` one after the other into `out`."""
    begin = None if async_op else TRAFFIC.begin(out)
    work: Work | None = _all_gather_single(out, part, group=group, async_op=async_op)
    TRAFFIC.end(begin, "all-gather", "engine", out)
    return work


def reduce_scatter_into(
    out: torch.Tensor, whole: torch.Tensor, group: ProcessGroup, *, op: ReduceOp.RedOpType, async_op: bool = False
) -> Work | None:
    """Put this worker's part of the sum of all `whole` over `group` into `out`."""
    begin = None if async_op else TRAFFIC.begin(whole)
    work: Work | None = _reduce_scatter_single(out, whole, op=op, group=group, async_op=async_op)
    TRAFFIC.end(begin, "reduce-scatter", "engine", whole)
    return work


def subgroup(group: ProcessGroup, members: Sequence[int]) -> ProcessGroup:
    """Return the group of those `members`, by their numbers in `group`, with its timeout. Called by these alone."""
    ranks = [dist.get_global_rank(group, member) for member in members]
    made: ProcessGroup = dist.new_group(ranks, timeout=timeout_of(group), use_local_synchronization=True)
    return made


def timed(function: Callable[..., Any], waiting: Waiting) -> Callable[..., Any]:
    """Return `function`, run inside `waiting()`."""

    def waited(*args: Any, **kwargs: Any) -> Any:
        with waiting():
            return function(*args, **kwargs)

    return waited
