"""ZeRO and hybrid sharding, on torch's fully_shard (FSDP2): each worker of the `shard` axis keeps a slice of every
parameter, its gradient and its optimizer state; copies along `replicate` sum what they have.

What lies whole on a worker during a step is what the three stages differ in:
1. ZeRO-1 gathers parameters once a step and keeps them; gradients pile up whole over the micro-batches, and only the
   last one sends them to their shards.
2. ZeRO-2 sends gradients to their shards in every micro-batch.
3. ZeRO-3 also frees a block's parameters after its forward, and gathers them again for its backward.

With a shard axis of 1, this is plain data parallelism for models whose parameters are divided already (tensor), which
DDP does not take.
"""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from shoal.comm.collectives import ProcessGroup, Waiting, all_gather_into, reduce_scatter_into, sum_together
from shoal.comm.shm.group import SharedGroup
from shoal.parallel.torch_private import time_waits


def apply_shard(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    blocks: Iterable[nn.Module],
    zero: int,
    waiting: Waiting | None = None,
    shared: SharedGroup | None = None,
) -> FSDPModule:
    """Shard `module` over the axes (replicate, shard) of `mesh`: a group for each of `blocks`, one for the rest.

    In place; called by every worker. Gradients are summed, not averaged: the loss is scaled by weight before. Scalar
    parameters, which the engine refuses, stay whole: `sum_scalars` sums their gradients. `waiting` is entered while
    the worker, or the GPU's stream that computes, waits for communication. `shared` are the workers of the shard axis,
    if they are processors of one host: shards then travel through its memory.
    """
    # torch warns of a root whose output is a view, as divided logits are: a hook would be lost if they were changed in
    # place. Nothing hangs on that hook, since the root stays gathered.
    warnings.filterwarnings("ignore", message=".*returned a view tensor")
    scalars = {parameter for parameter in module.parameters() if parameter.dim() == 0}
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=zero == 3, ignored_params=scalars)
    # The root's own parameters (embeddings, head) are needed again at once when the backward begins.
    fully_shard(module, mesh=mesh, reshard_after_forward=False, ignored_params=scalars)
    root: Any = module
    for each in _sharded_modules(module):
        each.set_gradient_divide_factor(1.0)
        each.set_force_sum_reduction_for_comms(True)
        each.set_custom_all_gather(_AllGather(shared))  # type: ignore[arg-type]
        each.set_custom_reduce_scatter(_ReduceScatter(shared))  # type: ignore[arg-type]
        if waiting is not None:
            time_waits(each, waiting)
    return root  # type: ignore[no-any-return]


def begin_micro_batch(root: FSDPModule, *, zero: int, is_last: bool) -> None:
    """Say what the next backward leaves whole: see the three stages above."""
    if zero < 2:
        root.set_requires_gradient_sync(is_last)
    if zero < 3:
        root.set_reshard_after_backward(is_last)
    root.set_is_last_backward(is_last)


def sum_scalars(parameters: Iterable[nn.Parameter], group: ProcessGroup) -> None:
    """Sum the gradients of scalar parameters over `group`. Called by all its workers."""
    sum_together([p.grad for p in parameters if p.grad is not None], group)


def _sharded_modules(module: nn.Module) -> list[FSDPModule]:
    return [each for each in module.modules() if isinstance(each, FSDPModule)]


class _Comm:
    """What both kinds of communication share: memory of their own for each call."""

    def __init__(self, shared: SharedGroup | None) -> None:
        self._shared = shared

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Comm):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        if self._shared is not None:
            return self._shared.all_gather(output_tensor, input_tensor)
        return all_gather_into(output_tensor, input_tensor, group, async_op=async_op)


class _ReduceScatter(_Comm):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        if self._shared is not None:
            return self._shared.reduce_scatter(output_tensor, input_tensor)
        return reduce_scatter_into(output_tensor, input_tensor, group, op=op, async_op=async_op)
