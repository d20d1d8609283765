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

import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from shoal.comm.collectives import all_gather_into, reduce_scatter_into, start_sum

OnWait = Callable[[float], None]
"""Is told how many seconds a worker has waited for communication."""


def apply_shard(
    module: nn.Module, mesh: DeviceMesh, *, blocks: Iterable[nn.Module], zero: int, on_wait: OnWait | None = None
) -> FSDPModule:
    """Shard `module` over the axes (replicate, shard) of `mesh`: a group for each of `blocks`, one for the rest.

    In place; called by every worker. Gradients are summed, not averaged: the loss is scaled by weight before. Scalar
    parameters, which the engine refuses, stay whole: `sum_scalars` sums their gradients. `on_wait` is told what the
    worker waits for communication, on a processor, where that blocks it.
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
        is_timed = on_wait is not None and mesh.device_type == "cpu"
        _set_communication(each, on_wait if is_timed else None, sums_replicas=mesh.size(0) > 1)
    return root  # type: ignore[no-any-return]


def begin_micro_batch(root: FSDPModule, *, zero: int, is_last: bool) -> None:
    """Say what the next backward leaves whole: see the three stages above."""
    if zero < 2:
        root.set_requires_gradient_sync(is_last)
    if zero < 3:
        root.set_reshard_after_backward(is_last)
    root.set_is_last_backward(is_last)


def sum_scalars(parameters: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
    """Sum the gradients of scalar parameters over all workers of `mesh`'s axes. Called by every worker."""
    gradients = [p.grad for p in parameters if p.dim() == 0 and p.grad is not None]
    if not gradients:
        return
    together = torch.stack(gradients)
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            start_sum(together, mesh.get_group(axis)).wait()
    for gradient, value in zip(gradients, together, strict=True):
        gradient.copy_(value)


def _sharded_modules(module: nn.Module) -> list[FSDPModule]:
    return [each for each in module.modules() if isinstance(each, FSDPModule)]


def _set_communication(module: FSDPModule, on_wait: OnWait | None, *, sums_replicas: bool) -> None:
    timer = _Timer(on_wait)
    module.set_custom_all_gather(_AllGather(timer))  # type: ignore[arg-type]
    module.set_custom_reduce_scatter(_ReduceScatter(timer))  # type: ignore[arg-type]
    if sums_replicas and on_wait is not None:
        # The engine sums over the replicas between the reduce-scatter and this hook, and does nothing else there.
        module.set_all_reduce_hook(lambda _: timer.lap())


class _Timer:
    """Tells `on_wait`, if there is one, the seconds of each piece of communication."""

    def __init__(self, on_wait: OnWait | None) -> None:
        self._on_wait = on_wait
        self._since_s: float | None = None

    def around(self, communicate: Callable[[], Any]) -> Any:
        if self._on_wait is None:
            return communicate()
        begin_s = time.perf_counter()
        work = communicate()
        self._since_s = time.perf_counter()
        self._on_wait(self._since_s - begin_s)
        return work

    def lap(self) -> None:
        """Count the time since the last communication ended."""
        if self._since_s is not None and self._on_wait is not None:
            self._on_wait(time.perf_counter() - self._since_s)
            self._since_s = None


class _Comm:
    """What both kinds of communication share: memory of their own for each call."""

    def __init__(self, timer: _Timer) -> None:
        self._timer = timer

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Comm):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        return self._timer.around(lambda: all_gather_into(output_tensor, input_tensor, group, async_op=async_op))


class _ReduceScatter(_Comm):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        return self._timer.around(
            lambda: reduce_scatter_into(output_tensor, input_tensor, group, op=op, async_op=async_op)
        )
