"""How messages meet that say something of a few elements (topk, threshold).

1. Each worker finds its elements. Where their number is not fixed, all tell each other how many they have.
2. Gathered: everybody sends places and values to everybody, (p-1) * 4 k bytes, and each adds all of them up.
3. With many workers, or many elements, that is more than a dense exchange of everything in bf16, 2 (p-1)/p * 2 n bytes:
   then this is done instead, and less stays pending. All know all numbers of elements, so all choose alike.

Gathered wins while (density) * (workers) < 1. Example: 1% of 1M elements, 40 KB a worker, against 4 MB * (p-1)/p: up to
99 workers.

Under ZeRO each message goes to one worker only. One that would be longer than the slice in bf16 is sent as that.
"""

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from shoal.compress import places
from shoal.compress.bf16 import Bf16
from shoal.compress.codec import Coded, Turn
from shoal.compress.collectives import Collectives

_DENSE = Bf16()


class Sparse(Coded):
    """A codec that sends some elements and leaves the others for later."""

    @abstractmethod
    def select(self, values: Tensor, turn: Turn) -> Tensor:
        """Return the places of the `values` to send, in order."""

    @abstractmethod
    def tell(self, kept: int, workers: Collectives, like: Tensor) -> list[int]:
        """Return how many elements each worker sends to all, where this one sends `kept`."""

    def encode(self, values: Tensor, turn: Turn, part: int = 0) -> Tensor:  # noqa: ARG002
        """See Coded."""
        return places.take(values, self.select(values, turn))

    def add(self, message: Tensor, into: Tensor) -> None:
        """See Coded."""
        places.put(message, into)

    def sum(self, pending: Tensor, out: Tensor, turn: Turn, workers: Collectives) -> None:
        """See Codec."""
        values = pending[: out.numel()]
        selected = self.select(values, turn)
        kept = self.tell(len(selected), workers, values)
        if not gathers(out.numel(), kept):
            _DENSE.sum(pending, out, turn, workers)
            return
        sizes = [places.message_bytes(out.numel(), count) for count in kept]
        is_equal = len(set(sizes)) == 1
        self.deliver(workers.all_gather(places.take(values, selected), None if is_equal else sizes), out)

    def sent_bytes(self, numel: int, workers: int, shapes: Sequence[tuple[int, ...]] = ()) -> float:  # noqa: ARG002
        """See Codec."""
        return self.told_bytes(workers) + self.sum_bytes(numel, [self.expected(numel)] * workers)

    @abstractmethod
    def expected(self, numel: int) -> int:
        """Return how many of `numel` elements are sent, as far as that is known beforehand."""

    @abstractmethod
    def told_bytes(self, workers: int) -> int:
        """Return the bytes that one worker sends to tell the others how many elements it has."""

    @staticmethod
    def sum_bytes(numel: int, kept: Sequence[int], index: int = 0) -> float:
        """Return what worker `index` sends in a sum to which each worker brings `kept` elements; see told_bytes."""
        if gathers(numel, kept):
            return (len(kept) - 1) * places.message_bytes(numel, kept[index])
        return _DENSE.sent_bytes(numel, len(kept))


def gathers(numel: int, kept: Sequence[int]) -> bool:
    """Return whether gathering the elements of all workers sends fewer bytes than a dense exchange."""
    workers = len(kept)
    gathered = (workers - 1) * sum(places.message_bytes(numel, count) for count in kept)
    return gathered <= workers * _DENSE.sent_bytes(numel, workers)
