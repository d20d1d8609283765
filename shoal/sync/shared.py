"""Gradients of CPU workers on one host meet in shared memory, bucket by bucket, while backward still runs.

1. All gradients lie in one shared buffer (one for each dtype), in the order in which backward makes them ready: reverse
   registration in the first step, then worker 0's order of that step.
2. As soon as a gradient is ready it is copied into the buffer, hot from the cache, and `p.grad` becomes a view of it.
3. When all gradients of a bucket are there, this worker says so to the others. It never waits inside backward: whenever
   it comes by and finds that all others have said so too, it adds up its slice of the bucket.
4. `finish` does what is left and waits for the others. Then every `p.grad` holds the sum, with no copy back.

There is no thread: as many workers as cores leave no core for one, and adding up in passing finds the gradients still
in the shared cache.

Example: 2 workers, 40 MB of gradients in buckets of 4 MB, worker 1 slower. Worker 0 announces buckets 0 to 3 and adds
up its half of 0 to 2 while it computes gradients of bucket 4; worker 1 finds all of them announced and never waits.
"""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.comm.shm.buffer import SharedBuffer
from shoal.comm.shm.group import SharedGroup
from shoal.comm.traffic import SHARED, TRAFFIC
from shoal.core.errors import JobError
from shoal.native.memory import copy

_ALIGNED = 64  # elements: a gradient begins on a line of the cache of its own


@dataclass(frozen=True)
class _Bucket:
    """A range of one buffer, summed as a whole."""

    buffer: SharedBuffer
    begin: int
    end: int
    members: tuple[int, ...]
    """The numbers of its parameters."""


class SharedGradients:
    """Sums the gradients of `parameters` over `group`. Made by every worker, with the same parameters in one order.

    In each step: gradients are cleared (`zero_grad`), backward runs, `finish()` is called; with several micro-batches,
    all but the last run under `accumulating()`. Views are used again: who keeps a gradient beyond the step copies it.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: SharedGroup,
        *,
        bucket_bytes: int,
        report_exposed_s: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._group, self._bucket_bytes, self._report_exposed_s = group, bucket_bytes, report_exposed_s
        numels: dict[torch.dtype, int] = {}
        for parameter in self._parameters:
            numels[parameter.dtype] = numels.get(parameter.dtype, 0) + _aligned(parameter.numel())
        self._buffers = {dtype: group.buffer(numel, dtype) for dtype, numel in numels.items()}
        # Which parameters any worker has a gradient for. Its bells serve all buckets; it is the last of them.
        self._uses = group.buffer(len(self._parameters), torch.int32)
        self._is_accumulating, self._has_learned = False, group.count == 1
        self._views: list[torch.Tensor] = []
        self._buckets: list[_Bucket] = []
        self._lay_out(list(reversed(range(len(self._parameters)))))
        self._begin()
        self._hooks = [self._hook_on(number, parameter) for number, parameter in enumerate(self._parameters)]

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Leave the sum over workers to a later backward pass: around all but the last micro-batch of a step."""
        self._is_accumulating = True
        try:
            yield
        finally:
            self._is_accumulating = False

    def finish(self) -> None:
        """Wait until every `p.grad` holds the sum over all workers, the same bits on each. Called by every worker.

        A worker without a gradient for a parameter counts as zero; a parameter that nobody has one for keeps none, as
        in one process. Raises PeerLost when a worker is lost; gradients are then undefined.
        """
        begin_s = time.perf_counter()
        self._bring_the_rest()
        for bucket in range(self._announced, len(self._buckets)):
            self._unready[bucket] = 0
        self._announce()
        while self._reduced < len(self._buckets):
            wait_s = time.perf_counter()
            self._uses.ready.wait(f"the sum of gradients, bucket {self._reduced} of {len(self._buckets)}")
            self._reduce_next(wait_s)
        self._uses.done.ring()
        self._uses.done.wait("the sum of gradients")
        self._keep_the_used()
        if not self._has_learned:
            self._learn_order()
        self._begin()
        self._report_exposed_s(time.perf_counter() - begin_s)

    def close(self) -> None:
        """Leave the parameters alone from now on. Gradients that are there stay."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _hook_on(self, number: int, parameter: Any) -> Any:
        itself = weakref.ref(self)  # torch keeps hooks where Python's collector does not look: all would stay for ever

        def on_gradient(parameter: torch.Tensor) -> None:
            if (gradients := itself()) is not None:
                gradients._on_gradient(number, parameter)

        return parameter.register_post_accumulate_grad_hook(on_gradient)

    def _on_gradient(self, number: int, parameter: torch.Tensor) -> None:
        self._bring(number, parameter)
        if not self._is_accumulating:
            self._note_ready(number)

    def _bring(self, number: int, parameter: torch.Tensor) -> None:
        """Make the gradient of `parameter` a view of the buffer, if it is not one yet."""
        gradient, view = parameter.grad, self._views[number]
        if gradient is None:
            return
        if gradient.layout != torch.strided:
            raise JobError("sparse gradients cannot meet in shared memory. Build the embedding with sparse=False.")
        if gradient.data_ptr() == view.data_ptr():
            return
        copy(view, gradient)
        parameter.grad = view

    def _note_ready(self, number: int) -> None:
        if self._is_ready[number]:
            raise JobError(
                "backward ran twice before finish(): gradients that were being summed have changed. Run all but the "
                "last micro-batch under accumulating()."
            )
        self._is_ready[number] = True
        self._order.append(number)
        bucket = self._bucket_of[number]
        self._unready[bucket] -= 1
        if not self._unready[bucket]:
            self._announce()
        while self._reduced < self._announced and self._uses.ready.heard():
            self._reduce_next()

    def _announce(self) -> None:
        """Tell the others of each bucket that is complete, in their order: the n-th ring is bucket n."""
        while self._announced < len(self._buckets) and not self._unready[self._announced]:
            self._uses.ready.ring()
            self._announced += 1

    def _reduce_next(self, begin_s: float | None = None) -> None:
        """Add up this worker's slice of the next bucket, which was waited for from `begin_s` on."""
        bucket, begin_s = self._buckets[self._reduced], begin_s or time.perf_counter()
        bucket.buffer.reduce_slice(bucket.begin, bucket.end)
        num_bytes = (bucket.end - bucket.begin) * bucket.buffer.dtype.itemsize
        TRAFFIC.add(begin_s, time.perf_counter(), "all-reduce", SHARED, num_bytes, link="shm")
        self._reduced += 1

    def _bring_the_rest(self) -> None:
        """Bring gradients that backward did not touch: those of an earlier micro-batch, or zero where there is none."""
        for number, parameter in enumerate(self._parameters):
            if not self._is_ready[number]:
                self._bring(number, parameter)
                if parameter.grad is None:
                    self._views[number].zero_()
        uses = [parameter.grad is not None for parameter in self._parameters]
        self._uses.tensor.copy_(torch.tensor(uses, dtype=torch.int32))

    def _keep_the_used(self) -> None:
        for parameter, view, uses in zip(self._parameters, self._views, self._uses.tensor.tolist(), strict=True):
            parameter.grad = view if uses else None

    def _begin(self) -> None:
        """Be ready for the next step."""
        self._is_ready = [False] * len(self._parameters)
        self._order: list[int] = []
        # The last bucket, which tells the uses, is nobody's to complete but finish's.
        self._unready = [len(bucket.members) or 1 for bucket in self._buckets]
        self._announced = self._reduced = 0

    def _learn_order(self) -> None:
        """Lay the gradients out in the order in which they became ready on worker 0. Called by every worker."""
        rest = [number for number in range(len(self._parameters)) if not self._is_ready[number]]
        order = torch.tensor(self._order + rest, dtype=torch.int64)
        self._group.broadcast(order, 0)
        gradients = [None if p.grad is None else p.grad.clone() for p in self._parameters]
        for buffer in self._buffers.values():
            buffer.tensor.zero_()
        self._lay_out(order.tolist())
        for parameter, view, gradient in zip(self._parameters, self._views, gradients, strict=True):
            if gradient is not None:
                view.copy_(gradient)
                parameter.grad = view
        self._has_learned = True

    def _lay_out(self, order: Sequence[int]) -> None:
        """Give every parameter its place, and cut the buffers into buckets, in that order."""
        views: dict[int, torch.Tensor] = {}
        ends = dict.fromkeys(self._buffers, 0)
        open_buckets: dict[torch.dtype, tuple[int, list[int]]] = {dtype: (0, []) for dtype in self._buffers}
        self._buckets = []
        for number in order:
            parameter = self._parameters[number]
            dtype, begin = parameter.dtype, ends[parameter.dtype]
            views[number] = _view(self._buffers[dtype].tensor, begin, parameter)
            ends[dtype] = end = begin + _aligned(parameter.numel())
            bucket_begin, members = open_buckets[dtype]
            members.append(number)
            if (end - bucket_begin) * dtype.itemsize >= self._bucket_bytes:
                self._buckets.append(_Bucket(self._buffers[dtype], bucket_begin, end, tuple(members)))
                open_buckets[dtype] = (end, [])
        for dtype, (bucket_begin, members) in open_buckets.items():
            if members:
                self._buckets.append(_Bucket(self._buffers[dtype], bucket_begin, ends[dtype], tuple(members)))
        self._buckets.append(_Bucket(self._uses, 0, self._uses.numel, ()))
        self._views = [views[number] for number in range(len(self._parameters))]
        self._bucket_of = {number: at for at, bucket in enumerate(self._buckets) for number in bucket.members}


def _aligned(numel: int) -> int:
    return -(-numel // _ALIGNED) * _ALIGNED


def _view(buffer: torch.Tensor, begin: int, parameter: torch.Tensor) -> torch.Tensor:
    """Return the place of a gradient, laid out in memory like its parameter where that has no holes."""
    place = buffer[begin : begin + parameter.numel()]
    is_channels_last = parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    if is_channels_last and not parameter.is_contiguous():
        return place.as_strided(parameter.shape, parameter.stride())
    return place.view(parameter.shape)
