"""Collectives that count what is handed to them, and the workers of the pool around them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.group import joined
from shoal.comm.rank import Rank
from shoal.comm.store import connect
from shoal.compress.codec import Codec
from shoal.compress.codecs import codec_named
from shoal.compress.collectives import Collectives, GroupCollectives
from shoal.compress.feedback import ErrorFeedback

CPU = torch.device("cpu")

# Every codec, with settings under which small tests have something to send.
SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "int8": {},
    "int4": {},
    "sign": {},
    "powersgd": {"rank": 2},
    "topk": {"fraction": 0.05},
    "threshold": {"multiple": 2.0},
}


class Counted:
    """Collectives, and the bytes that this worker has handed to them for the others."""

    def __init__(self, workers: Collectives) -> None:
        self._workers = workers
        self.index, self.count = workers.index, workers.count
        self.sent_bytes = 0.0

    def all_reduce(self, tensor: Tensor) -> None:
        self.sent_bytes += 2 * (self.count - 1) / self.count * tensor.nbytes
        self._workers.all_reduce(tensor)

    def all_gather(self, tensor: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        self.sent_bytes += (self.count - 1) * tensor.nbytes
        return self._workers.all_gather(tensor, sizes)

    def all_to_all(self, parts: list[Tensor], sizes: Sequence[int] | None = None) -> list[Tensor]:
        self.sent_bytes += sum(part.nbytes for other, part in enumerate(parts) if other != self.index)
        return self._workers.all_to_all(parts, sizes)


class Alone:
    """The collectives of a worker without others."""

    index, count = 0, 1

    def all_reduce(self, tensor: Tensor) -> None:
        pass

    def all_gather(self, tensor: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        return [tensor]

    def all_to_all(self, parts: list[Tensor], sizes: Sequence[int] | None = None) -> list[Tensor]:
        return list(parts)


@contextmanager
def workers_of(rank: Rank) -> Iterator[Counted]:
    """Be in a group over Gloo for the length of a `with` block."""
    with joined(rank, connect(rank, timeout_s=60), device=CPU, timeout_s=60):
        assert dist.group.WORLD is not None
        yield Counted(GroupCollectives(dist.group.WORLD))


def with_every_codec(
    rank: Rank, *, exercise: str, names: Sequence[str], usual: bool = False, **arguments: Any
) -> dict[str, Any]:
    """Return what the function `exercise` ("module:function") returns for each codec. Runs in the pool.

    With `usual`, codecs have their usual settings.
    """
    module, _, function = exercise.partition(":")
    run: Callable[..., Any] = getattr(__import__(module, fromlist=[function]), function)
    with workers_of(rank) as workers:
        return {name: run(workers, codec_named(name) if usual else made(name), **arguments) for name in names}


def made(name: str) -> Codec:
    return codec_named(name, **SETTINGS[name])


def feedback(name: str, seed: int = 0) -> ErrorFeedback:
    return ErrorFeedback(made(name), seed=seed)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
