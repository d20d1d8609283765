"""The workers of one host as a group that meets in shared memory."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from shoal.comm.shm.buffer import SharedBuffer, buffer_bytes, name_of, prepare_buffer
from shoal.comm.shm.meeting import Meeting, gather, reach
from shoal.comm.shm.memory import SharedMap, create, refuse_other_systems
from shoal.comm.shm.turns import SLOT_BYTES, Turns
from shoal.comm.shm.watch import LINE_BYTES, SLICE_S, Watch
from shoal.comm.traffic import SHARED, TRAFFIC
from shoal.core.errors import PlanError


def join(
    store: dist.Store, *, index: int, count: int, timeout_s: float, numbers: Sequence[int] | None = None
) -> "SharedGroup":
    """Return the group of `count` workers of this host, of which this is worker `index`. Called by each of them.

    `store` serves these workers alone: workers of other hosts use a prefix of theirs. `numbers` are what errors call
    the workers, if they have other numbers among those of all hosts. Raises PeerLost if one does not come in
    `timeout_s`; later, one that is silent for so long is lost.
    """
    refuse_other_systems()
    numbers = list(range(count)) if numbers is None else list(numbers)
    own_store = dist.PrefixStore("shared memory", store)
    join_number = own_store.add(f"joins of {index}", 1)  # the n-th join of each worker is the same group
    memory, meeting, pidfds = _meet(
        own_store, index=index, count=count, numbers=numbers, timeout_s=timeout_s, join_number=join_number
    )
    watch = Watch(memoryview(memory.map), pidfds, index=index, numbers=numbers, timeout_s=timeout_s)
    try:
        return SharedGroup(meeting, watch, index=index, count=count)
    except BaseException:
        watch.leave()
        meeting.close()
        raise


def _meet(
    store: dist.Store, *, index: int, count: int, numbers: Sequence[int], timeout_s: float, join_number: int
) -> tuple[SharedMap, Meeting, list[int]]:
    """Return the control memory, the connections, and the pidfds of all workers."""
    if index > 0:
        meeting, received = reach(
            store, index=index, count=count, numbers=numbers, timeout_s=timeout_s, join_number=join_number
        )
        return SharedMap(received[0]), meeting, received[1:]
    meeting, pidfds = gather(store, count=count, numbers=numbers, timeout_s=timeout_s, join_number=join_number)
    control = create(count * LINE_BYTES)
    for other in meeting.others:
        with contextlib.suppress(OSError):  # whoever is gone again is found by its pidfd
            meeting.send(other, {}, [control, *pidfds])
    return SharedMap(control), meeting, pidfds


class SharedGroup:
    """Collectives over the workers of one host; made by `join`, left by `close` or at the end of a `with` block.

    Every worker calls the same collectives in the same order, from one thread at a time. When a worker dies, leaves, or
    is silent for the timeout, the others raise PeerLost that names it; what the call should have written is then
    undefined, and every later call raises at once. Nothing stays behind, however the workers end.
    """

    def __init__(self, meeting: Meeting, watch: Watch, *, index: int, count: int) -> None:
        self.index, self.count = index, count
        self._meeting, self._watch, self._is_open = meeting, watch, True
        self._turns = Turns(self._buffer(2 * SLOT_BYTES, torch.uint8), watch, index=index, count=count)
        self.barrier()

    def buffer(self, numel: int, dtype: torch.dtype) -> SharedBuffer:
        """Return memory of `numel` elements a worker, all zero, that can be summed in place. Called by every worker.

        It lives as long as its tensors do, also after `close`.
        """
        made = self._buffer(numel, dtype)
        made.populate_own()
        self.barrier()
        made.populate_all()
        return made

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Put the sum over all workers into `tensor`, the same bits on each. Called by every worker."""
        with TRAFFIC.timing("all-reduce", SHARED, tensor, link="shm"):
            self._with_flat(tensor, self._turns.all_reduce)

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """Put part `index` of the sum of all `tensor` into `out`, `count` times smaller. Called by every worker."""
        self._refuse_uneven(tensor, out, "reduce_scatter(out, tensor)")
        parts = _flat(tensor).view(self.count, out.numel())
        with TRAFFIC.timing("reduce-scatter", SHARED, tensor, link="shm"):
            self._with_flat(out, lambda flat: self._turns.reduce_scatter(flat, parts), fills=True)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """Put `tensor` of all workers one after the other into `out`, `count` times larger. Called by every worker."""
        self._refuse_uneven(out, tensor, "all_gather(out, tensor)")
        part = _flat(tensor)

        def gathered(flat: torch.Tensor) -> None:
            self._turns.all_gather(flat.view(self.count, tensor.numel()), part)

        with TRAFFIC.timing("all-gather", SHARED, out, link="shm"):
            self._with_flat(out, gathered, fills=True)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Put what worker `source` has in `tensor` into everybody's. Called by every worker."""
        self._with_flat(tensor, lambda flat: self._turns.broadcast(flat, source))

    def barrier(self) -> None:
        """Wait until every worker is here. Called by every worker."""
        self._turns.barrier()

    def close(self) -> None:
        """Leave the group: those who still wait for this worker raise PeerLost. Can be called again."""
        if self._is_open:
            self._is_open = False
            self._watch.leave()
            self._meeting.close()

    def __enter__(self) -> "SharedGroup":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _buffer(self, numel: int, dtype: torch.dtype) -> SharedBuffer:
        self._watch.check()
        asked = f"{numel} of {name_of(dtype)}"
        if self.index == 0:
            memory = self._host_memory(buffer_bytes(numel * dtype.itemsize, self.count), asked)
        else:
            memory = self._ask_for_memory(asked)
        return SharedBuffer(memory, numel, dtype, index=self.index, count=self.count, watch=self._watch)

    def _host_memory(self, num_bytes: int, asked: str) -> SharedMap:
        """Return memory that worker 0 has made and given to all others, who have `asked` for the same."""
        by_others = {other: self._receive(other)[0]["asked"] for other in self._meeting.others}
        wrong = [f"worker {other} {theirs}" for other, theirs in by_others.items() if theirs != asked]
        if wrong:
            refusal = f"workers ask for different buffers: worker 0 {asked}, {', '.join(wrong)}. All must ask alike."
            for other in self._meeting.others:
                self._send(other, {"refused": refusal})
            raise PlanError(refusal)
        descriptor = create(num_bytes)
        memory = SharedMap(os.dup(descriptor))
        try:
            prepare_buffer(memory, self.count)
            for other in self._meeting.others:
                self._send(other, {}, [descriptor])
        finally:
            os.close(descriptor)
        return memory

    def _ask_for_memory(self, asked: str) -> SharedMap:
        """Return memory that worker 0 has made."""
        self._send(0, {"asked": asked})
        answer, descriptors = self._receive(0, most_descriptors=1)
        if "refused" in answer:
            raise PlanError(answer["refused"])
        return SharedMap(descriptors[0])

    def _send(self, other: int, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        try:
            self._meeting.send(other, message, descriptors)
        except OSError as error:
            self._lose(other, error)

    def _receive(self, other: int, most_descriptors: int = 0) -> tuple[dict[str, Any], list[int]]:
        deadline_s = time.monotonic() + self._watch.timeout_s
        try:
            while True:
                try:
                    return self._meeting.receive(other, most_descriptors, timeout_s=SLICE_S)
                except TimeoutError as error:
                    self._watch.note_waiting(other)
                    if self._watch.verdict_on(other) or time.monotonic() > deadline_s:
                        self._lose(other, error)
                except OSError as error:
                    self._lose(other, error)
        finally:
            self._watch.note_going_on()

    def _lose(self, other: int, error: OSError) -> NoReturn:
        verdict = self._watch.verdict_on(other)
        if verdict is None:
            is_silent = isinstance(error, TimeoutError)
            verdict = self._watch.silence_of(other) if is_silent else self._watch.hang_up_of(other)
        raise self._watch.lose(verdict, "making a shared buffer") from error

    def _with_flat(self, tensor: torch.Tensor, work: Callable[[torch.Tensor], None], *, fills: bool = False) -> None:
        """Do `work` on the elements of `tensor` in a row: its own memory, or a copy where they are not in a row."""
        if tensor.is_contiguous():
            work(_flat(tensor))
            return
        flat = torch.empty(tensor.numel(), dtype=tensor.dtype) if fills else _flat(tensor)
        work(flat)
        tensor.detach().copy_(flat.view(tensor.shape))

    def _refuse_uneven(self, whole: torch.Tensor, part: torch.Tensor, call: str) -> None:
        if whole.numel() != part.numel() * self.count or whole.dtype != part.dtype:
            raise PlanError(
                f"{call} of {self.count} workers needs {self.count} times as many elements of one dtype on one side: "
                f"got {whole.numel()} of {whole.dtype} and {part.numel()} of {part.dtype}."
            )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in a row; a view where they are."""
    if tensor.device.type != "cpu":
        raise PlanError(f"shared memory holds tensors of the processor, not of {tensor.device}. Use NCCL or Gloo.")
    return tensor.detach().reshape(-1)
