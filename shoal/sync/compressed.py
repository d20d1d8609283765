"""Gradients meet through a codec: under DDP as a whole, under FSDP2 slice by slice.

As in `allreduce`, they are summed: each worker's loss is scaled by its weight already.

1. DDP calls the hook with a bucket when all of its gradients are there. On the processor the background takes it from
   there, in the order in which buckets come, which is the same on all workers; backward goes on. On a GPU the kernels
   and the communication go to a stream of their own.
2. FSDP2 calls the reduce-scatter of a group of parameters when its gradients are there, and waits for it.
3. What is pending is kept by the names of parameters: DDP makes its buckets anew after the first step.

The background needs a process group of its own: two threads in one group mix up their messages.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.futures import Future

from shoal.comm.algorithms.wire import Guard
from shoal.comm.collectives import ProcessGroup
from shoal.compress.bucket import Bucket, ShardedBucket
from shoal.compress.codec import no_shards
from shoal.compress.collectives import Collectives, GroupCollectives
from shoal.compress.feedback import ErrorFeedback
from shoal.core.errors import JobError
from shoal.sync.background import Background


class CompressedAllReduce:
    """The communication hook of DDP, through a codec. It calls `on_bucket` when a bucket is ready to be sent.

    `parameters` are those of the model by their names in what is saved; `workers` are used by nobody else. Without a
    `background`, a bucket on the processor is summed before backward goes on.
    """

    def __init__(
        self,
        feedback: ErrorFeedback,
        parameters: Mapping[str, nn.Parameter],
        workers: Collectives,
        *,
        background: Background | None = None,
        on_bucket: Callable[[], None] = lambda: None,
    ) -> None:
        self._feedback = feedback
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._workers = workers
        self._background = background
        self._on_bucket = on_bucket
        self._stream: torch.cuda.Stream | None = None

    def hook(self, _state: None, bucket: GradBucket) -> Future[Tensor]:
        """Start the sum of one bucket. Called by DDP during backward, on every worker, in the same order.

        A failure, such as that of another worker, is raised by backward; gradients are then undefined.
        """
        self._on_bucket()
        parameters = bucket.parameters()
        names = tuple(self._names[parameter] for parameter in parameters)  # type: ignore[index]
        described = Bucket(names, tuple(tuple(parameter.shape) for parameter in parameters))
        gradient = bucket.buffer()

        def work() -> Tensor:
            self._feedback.sum(described, gradient, self._workers)
            return gradient

        if gradient.is_cuda:
            return self._on_stream(work, gradient.device)
        return _done(work()) if self._background is None else self._background.start(work)

    def _on_stream(self, work: Callable[[], Tensor], device: torch.device) -> Future[Tensor]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            return _done(work(), [device])


class CompressedReduceScatter:
    """What FSDP2 sums the gradients of one group of parameters with, through a codec."""

    def __init__(
        self,
        feedback: ErrorFeedback,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        *,
        group: str = "",
        watch: Guard | None = None,
    ) -> None:
        self._feedback = feedback
        self._names, self._shapes = tuple(names), tuple(shapes)
        self._group = group
        self._watch = watch
        self._workers: GroupCollectives | None = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for gradients, whole or sliced."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any = None, async_op: bool = False
    ) -> None:
        """Put this worker's slices of the summed gradients into `output_tensor`. Called by FSDP2, on every worker."""
        del op, async_op  # always a sum (see parallel/shard.py), and done when this returns
        if self._workers is None:
            self._workers = GroupCollectives(group, watch=self._watch)
        bucket = ShardedBucket(self._names, self._shapes, self._workers.count)
        if bucket.rows * bucket.width != input_tensor.numel():
            raise JobError(
                f"{self._group or 'the model'} has parameters that got no gradient in this step, which a codec cannot "
                f"account for. Use all of its {len(self._names)} parameters in the loss, or codec='none'."
            )
        self._feedback.reduce_scatter(bucket, output_tensor, input_tensor, self._workers)


def compress_shards(root: nn.Module, feedback: ErrorFeedback, *, watch: Guard | None = None) -> None:
    """Let the gradients of `root`, which FSDP2 shards, be summed through a codec. Called by every worker, once.

    With a `watch`, whoever waits for a worker that is lost is told by it. What is pending is of whole gradients, not of
    the worker's shard: it sends to the slices of all others.

    With copies of the model beside its shards (mesh.replicate above 1), FSDP2 sums over the copies by itself, without a
    codec: it has no entry for one there.
    """
    if not feedback.codec.serves_shards:
        raise no_shards(feedback.codec)
    names = {parameter: name for name, parameter in root.named_parameters()}
    for prefix, module in root.named_modules():
        if isinstance(module, FSDPModule):
            own = list(dict.fromkeys(p for p in _own_parameters(module) if isinstance(p, DTensor) and p.requires_grad))
            comm = CompressedReduceScatter(
                feedback, [names[p] for p in own], [_shape(p) for p in own], group=prefix, watch=watch
            )
            module.set_custom_reduce_scatter(comm)  # type: ignore[arg-type]


def _own_parameters(module: Any) -> Iterator[nn.Parameter]:
    """Yield the parameters that FSDP2 groups at `module`, in its order: those of the innermost modules first."""
    seen: set[nn.Module] = set()

    def visit(each: nn.Module) -> Iterator[nn.Parameter]:
        seen.add(each)
        for child in each.children():
            if child not in seen and not isinstance(child, FSDPModule):
                yield from visit(child)
        yield from each.parameters(recurse=False)

    return visit(module)


def _shape(parameter: DTensor) -> tuple[int, ...]:
    """Return the shape of a gradient before FSDP2 slices it: whole, or this worker's part along the axis `tensor`."""
    shape = list(parameter.shape)
    mesh = parameter.device_mesh
    for axis, (name, placement) in enumerate(zip(mesh.mesh_dim_names or (), parameter.placements, strict=False)):
        if name == "tensor" and isinstance(placement, Shard):
            shape[placement.dim] = -(-shape[placement.dim] // mesh.size(axis))
    return tuple(shape)


def _done(tensor: Tensor, devices: list[int | str | torch.device] | None = None) -> Future[Tensor]:
    """Return a future of `tensor`; whoever waits for it waits for the streams that are current on `devices` now."""
    future: Future[Tensor] = Future(devices=devices)
    future.set_result(tensor)
    return future
