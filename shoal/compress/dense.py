"""How messages meet that say something of every element (bf16, int8, int4, sign): all to all, or slice by slice.

With p workers and messages of m bytes for the whole bucket:

1. Gathered: everybody sends its message to everybody, (p-1) m bytes, one round; each adds all of them up.
2. Sliced: the bucket is cut into p slices. (a) Worker i encodes its slice j and sends it to worker j, for every j but
   i. (b) Worker j adds what has come to its own slice, which need not be encoded: it does not travel. (c) It encodes
   the sum, and everybody gathers that. 2 (p-1)/p m bytes, two rounds. What (c) loses stays pending on worker j, in its
   slice: there (a) has lost nothing, so one residual serves both.

The one with fewer bytes is taken: gathered for 1 or 2 workers, otherwise sliced. Example: int8, 4 workers, 1M elements,
messages of 1.01 MB: gathered 3.02 MB, sliced 1.51 MB, and 6 MB for float32 without a codec.

Under ZeRO each worker wants its slice only: (a) and (b).
"""

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from shoal.compress.bucket import padded
from shoal.compress.codec import Coded, Turn, finish_slice
from shoal.compress.collectives import Collectives


class Dense(Coded):
    """A codec whose message about so many elements always has so many bytes."""

    @abstractmethod
    def message_bytes(self, numel: int) -> int:
        """Return the bytes of a message about `numel` elements, in whole blocks."""

    def sum(self, pending: Tensor, out: Tensor, turn: Turn, workers: Collectives) -> None:
        """See Codec."""
        if self._is_sliced(pending.numel(), workers.count):
            self._sum_sliced(pending.view(workers.count, -1), out, turn, workers)
        else:
            self.deliver(workers.all_gather(self.encode(pending, turn)), out)

    def reduce_scatter(self, pending: Tensor, out: Tensor, turn: Turn, workers: Collectives) -> None:
        """See Codec."""
        messages = self._slices(pending, turn, workers)
        finish_slice(messages, pending[workers.index], out, workers.index, self.add)

    def sent_bytes(self, numel: int, workers: int, shapes: Sequence[tuple[int, ...]] = ()) -> float:  # noqa: ARG002
        """See Codec."""
        whole = padded(numel, workers)
        if self._is_sliced(whole, workers):
            return 2 * (workers - 1) * self.message_bytes(whole // workers)
        return (workers - 1) * self.message_bytes(whole)

    def scattered_bytes(self, width: int, workers: int) -> float:
        """See Codec."""
        return (workers - 1) * self.message_bytes(padded(width, 1))

    def _is_sliced(self, numel: int, workers: int) -> bool:
        return 2 * self.message_bytes(numel // workers) < self.message_bytes(numel)

    def _sum_sliced(self, pending: Tensor, out: Tensor, turn: Turn, workers: Collectives) -> None:
        own = pending[workers.index]
        for worker, message in enumerate(self._slices(pending, turn, workers)):
            if worker != workers.index:
                self.add(message, own)
        sums = workers.all_gather(self.encode(own, turn, part=workers.count))
        width = pending.shape[1]
        for worker, message in enumerate(sums):
            if worker * width < out.numel():
                self.deliver([message], out[worker * width : (worker + 1) * width])

    def _slices(self, pending: Tensor, turn: Turn, workers: Collectives) -> list[Tensor]:
        """Return what each worker has to say of this worker's slice; at the own place there is nothing."""
        nothing = pending.new_empty(0).byte()
        messages = [
            nothing if worker == workers.index else self.encode(pending[worker], turn, part=worker)
            for worker in range(workers.count)
        ]
        return workers.all_to_all(messages)
