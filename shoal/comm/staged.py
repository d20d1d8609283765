"""A process group for workers that share one GPU: Gloo, by way of the processor's memory.

NCCL refuses two workers on one GPU. Gloo takes them, but not all its operations take a tensor of the GPU (torch 2.11:
a functional all-gather crashes, a send fails). So each operation here goes

1. down: what it reads is copied into pinned memory of the processor, in a stream's order, and the copy awaited;
2. across: Gloo does the operation on the copies, while this call waits;
3. up: what it writes is copied back, and the copy awaited. The work that is returned is already done.

A send or a receive returns between 1 and 2, since the other side may not be there yet; `wait()` does the rest.
Tensors of the processor go straight to Gloo, which returns at once.

Example: two workers sum a gradient of 4 MB on one GPU. Each copies 4 MB down, Gloo exchanges them over the loopback,
each copies 4 MB up. The GPU idles meanwhile: this is for running many workers on one GPU at all, not for speed.
"""

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_NAME = "staged"
_DEVICES = ["cpu", "cuda"]

# What torch calls the operations (2.11 to 2.13; it renames some): those that read and write their first argument,
_IN_PLACE = ("allreduce", "allreduce_coalesced", "broadcast", "reduce")
# and those that read the second and write the first.
_INTO_FIRST = (
    "allgather",
    "allgather_coalesced",
    "all_gather_single",
    "_allgather_base",
    "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "_reduce_scatter_base",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "all_to_all_single",
    "alltoall_base",
    "alltoall",
)


def staged_backend(*, stages_cpu: bool = False) -> str:
    """Return the name by which `init_process_group` makes groups of this kind; it is made known to torch here.

    With `stages_cpu`, tensors of the processor are copied as if they were a GPU's: for tests where there is none.
    """
    name = f"{_NAME}_cpu" if stages_cpu else _NAME
    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(name, partial(StagedGroup, stages_cpu=stages_cpu), devices=_DEVICES)
    return name


class StagedGroup(dist.ProcessGroup):
    """A group whose operations take tensors of any device and are done by Gloo on copies.

    The operations of `_IN_PLACE` and `_INTO_FIRST` are added below the class. An error of Gloo's, a timeout for one,
    passes through; what the operation writes is then undefined.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, limit: timedelta, *, stages_cpu: bool = False) -> None:
        # Without the store: torch's constructor that takes one makes no group that Python can extend.
        super().__init__(rank, size)  # type: ignore[call-arg, arg-type, unused-ignore]  # not among torch's types
        self._store = store
        self._stages_cpu = stages_cpu
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout=limit)
        # Gloo behind torch's ordinary group: the only way to the coalesced operations, which Gloo's class hides.
        self._carrier = dist.ProcessGroup(store, rank, size)
        _attach(self._carrier, self._gloo, ["cpu"])
        # Whoever asks this group for its backend, its devices, its timeout or its end gets Gloo's.
        _attach(self, self._gloo, _DEVICES)

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """Return what this kind of group is called."""
        return _NAME

    def get_group_store(self) -> dist.Store:
        """Return the store through which the workers of the group found each other."""
        return self._store

    def barrier(self, *arguments: Any, **options: Any) -> dist.Work:
        """Start waiting for every worker of the group; the work that is returned is done when all are here."""
        work: dist.Work = self._gloo.barrier(*arguments, **options)
        return work

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> dist.Work:  # noqa: N803
        """Start sending: `tensors` may change at once, where they are staged. The peer must receive."""
        copies = [self.down(tensor, is_read=True) for tensor in tensors]
        return Transfer(self._carrier.send(copies, dstRank, tag), [], [], limit=self._limit())

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> dist.Work:  # noqa: N803
        """Start receiving; `tensors` hold what was sent once the work that is returned has been waited for."""
        copies = [self.down(tensor, is_read=False) for tensor in tensors]
        return Transfer(self._carrier.recv(copies, srcRank, tag), tensors, copies, limit=self._limit())

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        """Start receiving from whoever sends first; the work that is returned says, once waited for, who it was."""
        copies = [self.down(tensor, is_read=False) for tensor in tensors]
        return Transfer(self._carrier.recv_anysource(copies, tag), tensors, copies, limit=self._limit())

    def down(self, tensor: Tensor, *, is_read: bool) -> Tensor:
        """Return the buffer that stands for `tensor` in Gloo's hands: itself, if Gloo takes it as it is."""
        if tensor.device.type == "cpu" and not self._stages_cpu:
            return tensor
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
        if is_read:
            _copy(buffer, tensor)
        return buffer

    def across(self, name: str, written: Any, read: Any, arguments: tuple[Any, ...], options: Any) -> dist.Work:
        """Return the work of Gloo's operation `name`; `read` is None where `written` is what it reads, too."""
        copies = _each(written, partial(self.down, is_read=read is None))
        inputs = () if read is None else (_each(read, partial(self.down, is_read=True)),)
        work: dist.Work = getattr(self._carrier, name)(copies, *inputs, *arguments, **options)
        pairs = list(zip(_flat((written, read)), _flat((copies, *inputs)), strict=True))
        if all(tensor is copy for tensor, copy in pairs):
            return work
        work.wait()
        _up(_flat(written), _flat(copies))
        return Done(list(_flat(written)))

    def _limit(self) -> timedelta:
        """Return how long an operation may take, as it was last set; Gloo's own messages keep to the first setting."""
        limit: timedelta = self._gloo.options._timeout
        return limit


class Done(dist.Work):
    """The work of an operation that has already ended: `outputs` hold what it wrote."""

    def __init__(self, outputs: list[Tensor]) -> None:
        super().__init__()
        self._outputs = outputs

    def wait(self, *_limit: timedelta, **_named: timedelta) -> bool:
        """Return True, at once."""
        return True

    def get_future(self) -> Any:
        """Return a future that has the outputs, as Gloo's has."""
        # No devices: nothing of the GPU is still under way, so nothing need be awaited on a stream.
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._outputs)
        return future

    def result(self) -> list[Tensor]:
        """Return the outputs."""
        return self._outputs

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def is_success(self) -> bool:
        """Return True: a failure was raised by the operation itself."""
        return True

    def synchronize(self) -> None:
        """Do nothing: the copies have been awaited."""


class Transfer(dist.Work):
    """A send or a receive under way. Its `wait` must be called, as Gloo's must: it is what copies up."""

    def __init__(self, work: dist.Work, tensors: list[Tensor], copies: list[Tensor], *, limit: timedelta) -> None:
        super().__init__()
        self._work = work
        self._limit = limit
        self._tensors = tensors
        self._copies = copies
        self._is_done = False
        # The copy up goes behind what this stream still does with the tensor, whatever stream `wait` is called on.
        self._streams = [torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None for tensor in tensors]

    def wait(self, *limit: timedelta, **named: timedelta) -> bool:
        """Return True when the message has left, or has arrived in the tensors.

        It takes at most the time given (torch's `timeout`), or else the group's; torch gives 0 to mean the latter.
        """
        if not self._is_done:
            self._work.wait(next((given for given in (*limit, *named.values()) if given), self._limit))
            for tensor, copy, stream in zip(self._tensors, self._copies, self._streams, strict=True):
                with torch.cuda.stream(stream):
                    _up([tensor], [copy])
            self._is_done = True
        return True

    def is_completed(self) -> bool:
        """Return whether it has been waited for."""
        return self._is_done

    def is_success(self) -> bool:
        """Return the same: a failure is raised by `wait`."""
        return self._is_done

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def _source_rank(self) -> int:
        return self._work._source_rank()


def _staged(name: str, *, is_in_place: bool) -> Callable[..., dist.Work]:
    """Return torch's operation `name` as a method of StagedGroup. All but the tensors goes to Gloo as it comes."""

    def in_place(self: StagedGroup, tensors: Any, *arguments: Any, **options: Any) -> dist.Work:
        return self.across(name, tensors, None, arguments, options)

    def into_first(self: StagedGroup, outputs: Any, inputs: Any, *arguments: Any, **options: Any) -> dist.Work:
        return self.across(name, outputs, inputs, arguments, options)

    return in_place if is_in_place else into_first


for _operation in (*_IN_PLACE, *_INTO_FIRST):
    if hasattr(dist.ProcessGroup, _operation):  # not every version has every name
        setattr(StagedGroup, _operation, _staged(_operation, is_in_place=_operation in _IN_PLACE))


def _attach(group: dist.ProcessGroup, gloo: Any, devices: list[str]) -> None:
    for device in devices:
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)


def _each(tensors: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return what `function` makes of each tensor in a tensor, a list or a list of lists, in the same shape."""
    return function(tensors) if isinstance(tensors, Tensor) else [_each(part, function) for part in tensors]


def _flat(tensors: Any) -> Iterator[Tensor]:
    """Yield each tensor in a tensor, a list or a list of lists; None has none."""
    if isinstance(tensors, Tensor):
        yield tensors
    elif tensors is not None:
        for part in tensors:
            yield from _flat(part)


def _up(tensors: Any, copies: Any) -> None:
    for tensor, copy in zip(tensors, copies, strict=True):
        if tensor is not copy:
            _copy(tensor, copy)


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy, and wait until it is done."""
    # .data: autograd is not to see what the engine moves, and counts no write of NCCL's or Gloo's as a change either.
    target.data.copy_(source.data)
