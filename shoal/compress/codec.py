"""The contract of a codec: four verbs, and how the sum over workers is made of them.

1. compensate: what earlier steps did not send is added to the gradient. The sum of both is called `pending`.
2. encode: `pending` becomes a message of bytes, and what the message says is taken out of `pending`.
3. keep: so what is left in `pending` is exactly what was lost. It stays there for the next step.
4. decode: messages of all workers are added up, on every worker in the same order, so that all have the same bits.

Nothing is lost over time: all gradients so far, of all workers = all sums delivered so far + all that is pending.

Example: a worker has 0.30 pending, the gradient is 1.00 and the codec sends quarters: 1.25 travels, 0.05 is pending.

How the messages meet is the codec's affair: see `dense`, `sparse` and `powersgd`.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.compress.bucket import Bucket
from shoal.compress.collectives import Collectives
from shoal.core.errors import PlanError


@dataclass(frozen=True)
class Turn:
    """One exchange of one bucket, as a codec sees it."""

    bucket: Bucket
    seed: int
    number: int
    """How many exchanges there were before it. All workers make the same ones, in the same order."""
    worker: int
    memory: MutableMapping[str, Tensor]
    """What the codec remembers from one exchange to the next, by names of its own; part of the training state."""

    def key(self, part: int) -> int:
        """Return 63 bits that stand for message `part` of this worker in this exchange: the seed of its rounding."""
        words = f"{self.seed}/{self.number}/{self.worker}/{part}".encode()
        return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 1


class Codec(ABC):
    """How gradients are made smaller, and how their sum over workers is made. Settings only: memory is the Turn's."""

    name: ClassVar[str]
    serves_shards: ClassVar[bool] = True
    """Whether it can be used where each worker wants a slice of the sum only (ZeRO)."""

    def observe(self, gradient: Tensor, turn: Turn) -> None:  # noqa: B027 - most codecs need not look
        """Look at a gradient before it is compensated."""

    @abstractmethod
    def sum(self, pending: Tensor, out: Tensor, turn: Turn, workers: Collectives) -> None:
        """Put the sum over workers of what is sent into `out`, and leave what was not sent in `pending`.

        Called by every worker. `pending` is float32, 1-D, and as long as the bucket in whole blocks for each worker;
        `out`, float32 or bf16, is as long as the bucket. Ends with the same bits in `out` on all workers.
        """

    def reduce_scatter(self, pending: Tensor, out: Tensor, turn: Turn, workers: Collectives) -> None:  # noqa: ARG002
        """Put this worker's row of the sum over workers of `pending` [workers, width] into `out`.

        Called by every worker. What was not sent is left in `pending`; `out` may be shorter than a row.
        """
        raise no_shards(self)

    @abstractmethod
    def sent_bytes(self, numel: int, workers: int, shapes: Sequence[tuple[int, ...]] = ()) -> float:
        """Return what one worker sends in `sum` of a bucket of `numel`; `shapes` are those of its gradients.

        A message gathered by all counts once for each other worker, and an all-reduce of n bytes as 2(p-1)/p * n.
        """

    def scattered_bytes(self, width: int, workers: int) -> float:  # noqa: ARG002
        """Return what one worker sends in `reduce_scatter` of rows of `width`."""
        raise no_shards(self)


class Coded(Codec):
    """A codec whose messages are bytes that can be decoded one by one: all but those that are summed while encoded."""

    @abstractmethod
    def encode(self, values: Tensor, turn: Turn, part: int = 0) -> Tensor:
        """Return a message (uint8) about `values`, float32 in whole blocks, and take out of them what it says."""

    @abstractmethod
    def add(self, message: Tensor, into: Tensor) -> None:
        """Add what `message` says to `into`, float32; what it says of places beyond the end is left out."""

    def deliver(self, messages: Sequence[Tensor], out: Tensor) -> None:
        """Put the sum of what `messages` say into `out`, in their order."""
        is_float = out.dtype == torch.float32
        total = out.zero_() if is_float else out.new_zeros(out.shape, dtype=torch.float32)
        for message in messages:
            self.add(message, total)
        if not is_float:
            out.copy_(total)


def no_shards(codec: Codec) -> PlanError:
    """Return the error of a codec that does not serve shards."""
    return PlanError(
        f"codec={codec.name!r} needs whole gradients, and with zero=1 to 3 each worker has the sum of a slice only. "
        "Use zero=0, or one of bf16, int8, int4, sign, topk and threshold."
    )


def finish_slice(
    messages: Sequence[Tensor], own: Tensor, out: Tensor, index: int, add: Callable[[Tensor, Tensor], None]
) -> None:
    """Put `own`, the row of worker `index`, and what the `messages` of the others say of it into `out`.

    `add` decodes a message. Nothing of it is pending then: `own` is 0.
    """
    for worker, message in enumerate(messages):
        if worker != index:
            add(message, own)
    out.copy_(own[: out.numel()])
    own.zero_()
