"""How members of a new generation talk while they bring a state together: small messages to all, bytes to one."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.failure import is_peer_failure
from shoal.core.errors import PeerLost

_TAG = 7001


class Handle(Protocol):
    """A message under way."""

    def wait(self) -> object:
        """Wait until it has left, or has come."""


class Wire(Protocol):
    """What an exchange needs of a group."""

    index: int
    count: int

    def gather(self, data: bytes) -> list[bytes]:
        """Return what each member has given, in their order. Called by every member."""

    def send(self, to: int, data: Tensor) -> Handle:
        """Begin to send bytes to a member."""

    def receive(self, source: int, data: Tensor) -> Handle:
        """Begin to receive bytes of a member."""


def gather_values(wire: Wire, value: Any) -> list[Any]:
    """Return the value, as JSON carries it, that each member of `wire` has given. Called by every member."""
    return [json.loads(text) for text in wire.gather(json.dumps(value).encode())]


class GroupWire:
    """The group of all workers, by tensors of the processor; one alone has none."""

    def __init__(self) -> None:
        is_alone = not dist.is_initialized()
        self.index = 0 if is_alone else dist.get_rank()
        self.count = 1 if is_alone else dist.get_world_size()

    def gather(self, data: bytes) -> list[bytes]:
        """Return what each member has given, in their order. Called by every member; PeerLost if one goes."""
        if self.count == 1:
            return [data]
        with _blaming():
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
            dist.all_gather(sizes, torch.tensor([len(data)]))
            most = max(int(size) for size in sizes)
            texts = [torch.empty(most, dtype=torch.uint8) for _ in range(self.count)]
            dist.all_gather(texts, torch.frombuffer(bytearray(data.ljust(most, b" ")), dtype=torch.uint8))
        pairs: Sequence[tuple[Tensor, Tensor]] = list(zip(texts, sizes, strict=True))
        return [text[: int(size)].numpy().tobytes() for text, size in pairs]

    def send(self, to: int, data: Tensor) -> Handle:
        """Begin to send bytes to a member."""
        with _blaming():
            work = dist.isend(data, to, tag=_TAG)
        assert work is not None
        return _Blaming(work)

    def receive(self, source: int, data: Tensor) -> Handle:
        """Begin to receive bytes of a member."""
        with _blaming():
            work = dist.irecv(data, source, tag=_TAG)
        assert work is not None
        return _Blaming(work)


class _Blaming:
    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self) -> None:
        with _blaming():
            self._work.wait()


@contextlib.contextmanager
def _blaming() -> Iterator[None]:
    """Raise PeerLost for what the engine says when another worker goes."""
    try:
        yield
    except RuntimeError as error:
        if is_peer_failure(error):
            raise PeerLost(f"a worker was lost while the state was brought together: {error}") from error
        raise
