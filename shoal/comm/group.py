"""The group of all workers: joining it, leaving it, and the few collectives the rest of shoal needs."""

import gc
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.calls import CALLS
from shoal.comm.endable import may_leave_threads
from shoal.comm.rank import Rank
from shoal.comm.staged import staged_backend
from shoal.comm.torch_private import (
    abandon_groups,
    calm_gloo,
    forget_meshes,
    record_collectives,
    set_timeout,
    store_of,
    timeout_of,
)

FORM_S = 60.0
"""How long workers that have just agreed to form a group wait for each other: if one does not come, they agree anew."""


@contextmanager
def joined(rank: Rank, store: dist.Store | None, *, device: torch.device, timeout_s: float) -> Iterator[None]:
    """Be in the group of all workers for the length of a `with` block. Called by every worker.

    A worker alone has no group. On an error inside, the group is given up at once, without waiting for the others; a
    process that will form another one, or in which a thread of the group may wait on, abandons it (`abandon_groups`).

    Whatever holds the group, as DDP does, should be gone when the block ends. If it goes later, the group's threads are
    joined by whoever frees it, holding Python's lock; and if one of them still needs that lock to free its last
    message, both wait for ever (seen after about 40 runs of 4 workers, torch 2.13).
    """
    if store is None:
        yield
        return
    if rank.local_workers == rank.workers:  # one node: nothing need listen beyond loopback
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    CALLS.joined_ns = time.time_ns()
    record_collectives()
    try:
        dist.init_process_group(
            backend=_backend(rank, device),
            store=dist.PrefixStore("group", store),
            rank=rank.index,
            world_size=rank.workers,
            timeout=timedelta(seconds=min(timeout_s, FORM_S) if rank.member else timeout_s),
        )
        if rank.member and timeout_s > FORM_S:
            set_timeout(dist.group.WORLD, timedelta(seconds=timeout_s))
        calm_gloo()
        yield
    except BaseException:
        if rank.member or may_leave_threads():
            abandon_groups()
        raise
    finally:
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_meshes()


def all_workers() -> dist.ProcessGroup:
    """Return the group of all workers."""
    assert dist.group.WORLD is not None, "a worker alone has none"
    return dist.group.WORLD


def new_group() -> dist.ProcessGroup:
    """Return another group of all workers, for a thread that has it for itself. Called by every worker.

    Its operations wait as long as those of the first: of itself torch gives it half an hour.
    """
    group: dist.ProcessGroup = dist.new_group(timeout=timeout_of(dist.group.WORLD))
    return group


def all_reduce_sum(tensor: torch.Tensor) -> dist.Work:
    """Start summing `tensor` over all workers, in place; after `.wait()` on what is returned, the sum is there."""
    work: dist.Work = dist.all_reduce(tensor, op=dist.ReduceOp.SUM, async_op=True)
    return work


def reduce_over(tensor: torch.Tensor, op: str, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return `tensor`, reduced in place over `group` (None: all workers) by sum, min, max or product."""
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op.upper()), group=group)
    return tensor


def tell_all(value: Any, *, source: int = 0) -> Any:
    """Return what worker `source` gives, on every worker; it must bear pickling. Called by every worker."""
    told = [value]
    dist.broadcast_object_list(told, src=source)
    return told[0]


@torch.no_grad()
def begin_alike(tensors: Iterable[torch.Tensor]) -> None:
    """Let every worker have worker 0's numbers in `tensors`. Called by every worker, with the same shapes."""
    for work in [dist.broadcast(tensor, src=0, async_op=True) for tensor in tensors]:
        work.wait()


def is_joined() -> bool:
    """Return whether this process is in a group of workers already."""
    return bool(dist.is_initialized())


def world_store() -> dist.Store:
    """Return the store through which all workers, whoever has joined them, found each other."""
    return store_of(dist.group.WORLD)


def barrier() -> None:
    """Wait until every worker is here."""
    dist.barrier()


def _backend(rank: Rank, device: torch.device) -> str:
    """NCCL where each worker of the node has a GPU of its own; it refuses to share one. Gloo for the processor."""
    if device.type != "cuda":
        return "gloo"
    return "cuda:nccl,cpu:gloo" if rank.local_workers <= torch.cuda.device_count() else staged_backend()
