"""A wire: how a worker sends parts of tensors to others and receives theirs, by number, with names in errors.

Over torch's point-to-point operations. Gloo takes them one by one, in any order, told apart by tags. NCCL takes those
of a step as one batch, or workers would wait for each other in a ring; see `run`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.algorithms.receipts import Receipts
from shoal.comm.failure import is_peer_failure
from shoal.comm.torch_private import backend_name, calm_gloo, store_of
from shoal.core.errors import PeerLost

PIECE_BYTES = 512 << 10
"""What travels as one message: large enough that a message costs little (0.1 ms beside 4 ms at 1 Gb/s), small enough
that adding the last one, which nothing overlaps, costs little, too."""


GUARDED_BYTES = 64 << 10
"""From here on a message is awaited by way of the watch, if there is one. That costs about 0.05 ms, and is for messages
that the loss of a worker can cut in two; smaller ones mostly come whole."""


Wait: TypeAlias = Callable[[], None]
"""What waits for a message."""


class Guard(Protocol):
    """Who can say which worker is gone, when the engine says that one is: `alive.Watch`."""

    def wait(self, work: Any) -> None:
        """Wait for an operation; raise PeerLost if a worker is gone."""

    def blame(self, error: BaseException) -> PeerLost | None:
        """Return the error that names the worker, or None where nobody has gone silent."""


class Wire:
    """Worker `index` of `count`, and its connections to the others. One thread uses a wire and its group at a time."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        hosts: Sequence[str] | None = None,
        watch: Guard | None = None,
        piece_bytes: int = PIECE_BYTES,
        stages_cpu: bool = False,
    ) -> None:
        """Use `group`, whose workers are on `hosts`, in their order; by default all on one.

        With `stages_cpu`, tensors of the processor are copied as those of a GPU are that the group cannot carry: for
        tests where there is none.
        """
        self._group: Any = group
        self._members: Sequence[int] = range(group.size())
        self.index, self.count = group.rank(), group.size()
        self.hosts = tuple(hosts) if hosts is not None else ("",) * self.count
        self.piece_bytes = piece_bytes
        self.sent_bytes = 0
        self.receipts: Receipts | None = None
        self._watch = watch
        self._stages_cpu = stages_cpu
        self.kept: dict[Any, Any] = {}
        """Memory for small tensors; see `run`."""
        self._scratch: list[Tensor] = []
        self._root = self
        calm_gloo()
        self._is_nccl = torch.cuda.is_available() and backend_name(group, torch.device("cuda")) == "nccl"

    def among(self, members: Sequence[int]) -> "Wire":
        """Return the wire between `members` alone, this worker among them, who are 0, 1, 2 ... there.

        Nothing is set up for it. What it sends counts here, too.
        """
        wire = object.__new__(Wire)
        wire.__dict__.update(self.__dict__)
        wire._members = [self._members[member] for member in members]
        wire.index, wire.count = list(members).index(self.index), len(members)
        wire.hosts = tuple(self.hosts[member] for member in members)
        wire.sent_bytes = 0
        wire._scratch, wire.kept = [], {}
        return wire

    @property
    def is_batched(self) -> bool:
        """Whether the messages of a step must be started together, because NCCL carries them."""
        return self._is_nccl

    @property
    def store(self) -> dist.Store:
        """Return the store of the group, under a prefix of the workers of this wire."""
        return dist.PrefixStore(f"wire {'-'.join(map(str, self._members))}", store_of(self._group))

    @contextmanager
    def carried(self, tensor: Tensor) -> Iterator[Tensor]:
        """Give `tensor` as a row of numbers that the group can carry; what is done to these is then done to it.

        That is the tensor itself, unless it has gaps, or is a GPU's and the group carries the processor's alone: then
        it is copied, into pinned memory, and back. After an error inside nothing is copied back.
        """
        whole = tensor.detach()
        carries = self._is_nccl if whole.is_cuda else not self._stages_cpu
        if carries and whole.is_contiguous():
            yield whole.view(-1)
            return
        device = whole.device if carries else torch.device("cpu")
        copy = torch.empty(whole.shape, dtype=whole.dtype, device=device, pin_memory=whole.is_cuda and not carries)
        copy.copy_(whole)
        yield copy.view(-1)
        whole.copy_(copy)

    def scratch(self, number: int, num_bytes: int, device: torch.device) -> Tensor:
        """Return `num_bytes` or more of memory `number`; it stays this wire's, to be used again."""
        while len(self._scratch) <= number:
            self._scratch.append(torch.empty(0, dtype=torch.uint8, device=device))
        if self._scratch[number].numel() < num_bytes or self._scratch[number].device != device:
            self._scratch[number] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._scratch[number]

    def send(self, data: Tensor, to: int, *, tag: int = 0) -> Wait:
        """Start sending `data`, a row of bytes; what is returned waits until it may change again."""
        self.count_bytes(data.numel())
        return self._started(self._group.send, data, to, tag)

    def receive(self, data: Tensor, source: int, *, tag: int = 0) -> Wait:
        """Start receiving into `data`, a row of bytes; what is returned waits until they are there."""
        return self._started(self._group.recv, data, source, tag)

    def exchange(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> None:
        """Send and receive as one batch, and wait: each is a row of bytes, and a worker."""
        self.count_bytes(sum(data.numel() for data, _ in sends))
        batch = [self._operation(dist.irecv, *message) for message in receives]
        batch += [self._operation(dist.isend, *message) for message in sends]
        others = ", ".join(str(self._members[other]) for other in sorted({other for _, other in [*sends, *receives]}))
        try:
            for work in dist.batch_isend_irecv(batch) if batch else []:
                self._wait(work, max((data for data, _ in [*sends, *receives]), key=Tensor.numel))
        except RuntimeError as error:
            raise self._lost(error, f"one of the workers {others}") from error

    def await_stream(self, tensor: Tensor) -> None:
        """Wait until what was received into `tensor` is there: of NCCL's messages only the stream knows until then."""
        if self._is_nccl and tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()

    def count_bytes(self, num_bytes: int) -> None:
        """Count `num_bytes` as sent."""
        self.sent_bytes += num_bytes
        if self._root is not self:
            self._root.sent_bytes += num_bytes

    def _operation(self, operation: Callable[..., Any], data: Tensor, other: int) -> dist.P2POp:
        return dist.P2POp(operation, data, group=self._group, group_peer=self._members[other])

    def _started(self, operation: Callable[..., Any], data: Tensor, other: int, tag: int) -> Wait:
        member = self._members[other]
        try:
            work = operation([data], member, tag)
        except RuntimeError as error:
            raise self._lost(error, f"worker {member}") from error

        def wait() -> None:
            try:
                self._wait(work, data)
            except RuntimeError as error:
                raise self._lost(error, f"worker {member}") from error

        return wait

    def _wait(self, work: Any, data: Tensor) -> None:
        if self._watch is None or data.is_cuda or data.numel() < GUARDED_BYTES:  # NCCL's: it waits on the stream alone
            work.wait()
        else:
            self._watch.wait(work)

    def _lost(self, error: RuntimeError, who: str) -> BaseException:
        """Return what to raise for the engine's `error`: PeerLost if it means that a worker is gone."""
        blamed = self._watch.blame(error) if self._watch is not None else None
        if blamed is not None or not is_peer_failure(error):
            return blamed or error
        return PeerLost(f"{who} does not answer worker {self._members[self.index]}: {error}")
