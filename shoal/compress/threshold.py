"""threshold: all elements above a multiple of the gradient's running mean magnitude, however many these are.

1. The mean magnitude of the gradient, before what is pending is added, is followed over some ten exchanges.
2. Elements of gradient and pending together that exceed `multiple` times this mean are sent.

An element whose gradient is small but steady is sent too, when enough of it is pending: after `multiple` * mean / |it|
steps. (A threshold that followed what is pending would run away from it.)

Example: mean 0.001, multiple 8: 0.0090 is sent at once; a steady 0.0005 every sixteenth step.

How many will be sent is known only when they are (`kept`). Expected is: an element whose gradients are independent,
with variance v, has more than t pending after t^2 / v steps on average, as a random walk has. For a normal distribution
v is pi / 2 times the square of the mean magnitude, so a fraction of pi / (2 multiple^2) is sent in a step: 2.5% with 8.
(examples/gpt.py's model with 2 layers of width 128, 4 workers, AdamW, 150 steps: 3.9% with 8, 7.7% with 4.)
"""

import math

import torch
from torch import Tensor

from shoal.compress import places
from shoal.compress.bf16 import Bf16
from shoal.compress.bucket import padded
from shoal.compress.codec import Turn, finish_slice
from shoal.compress.collectives import Collectives
from shoal.compress.sparse import Sparse
from shoal.core.errors import PlanError

_FORGETS = 0.1  # of the running mean in each exchange: about ten of them count
_TOLD_BYTES = 8  # an int64
_DENSE = Bf16()


class Threshold(Sparse):
    """The elements above `multiple` times the mean magnitude."""

    name = "threshold"

    def __init__(self, multiple: float = 8.0) -> None:
        if not multiple > 0:
            raise PlanError(f"threshold sends what exceeds multiple={multiple:g} times the mean. Use a number above 0.")
        self.multiple = multiple
        self.kept = 0
        """How many elements this worker had to send in the last sum."""

    def observe(self, gradient: Tensor, turn: Turn) -> None:
        """See Codec."""
        if gradient.numel() == 0:
            return
        now = places.mean_magnitude(gradient)
        before = next((turn.memory[key] for key in map(_key, turn.bucket.names) if key in turn.memory), now)
        mean = torch.lerp(before.to(now.device), now, _FORGETS)
        turn.memory.update({_key(name): mean for name in turn.bucket.names})

    def select(self, values: Tensor, turn: Turn) -> Tensor:
        """See Sparse."""
        if values.numel() == 0:
            return torch.zeros(0, dtype=torch.int64, device=values.device)
        return places.above(values, self.multiple * float(turn.memory[_key(turn.bucket.names[0])]))

    def tell(self, kept: int, workers: Collectives, like: Tensor) -> list[int]:
        """See Sparse."""
        self.kept = kept
        told = torch.tensor([kept], device=like.device)
        return [int(count) for count in torch.cat(workers.all_gather(told)).tolist()]

    def expected(self, numel: int) -> int:
        """See Sparse."""
        return round(numel * min(1.0, math.pi / (2 * self.multiple**2)))

    def told_bytes(self, workers: int) -> int:
        """See Sparse."""
        return _TOLD_BYTES * (workers - 1)

    def reduce_scatter(self, pending: Tensor, out: Tensor, turn: Turn, workers: Collectives) -> None:
        """See Codec."""
        own = pending[workers.index]
        nothing = own.new_empty(0).byte()
        rows = enumerate(pending)
        messages = [nothing if row == workers.index else self._shortest(values, turn) for row, values in rows]
        told = [torch.tensor([len(message)], device=own.device) for message in messages]
        sizes = [int(size) for size in torch.cat(workers.all_to_all(told)).tolist()]
        finish_slice(workers.all_to_all(messages, sizes), own, out, workers.index, self._add_shortest)

    def scattered_bytes(self, width: int, workers: int) -> float:
        """See Codec."""
        row = padded(width, 1)
        message = min(places.message_bytes(row, self.expected(row)), _DENSE.message_bytes(row))
        return (workers - 1) * (_TOLD_BYTES + message)

    def _shortest(self, values: Tensor, turn: Turn) -> Tensor:
        selected = self.select(values, turn)
        if places.message_bytes(len(values), len(selected)) < _DENSE.message_bytes(len(values)):
            return places.take(values, selected)
        return _DENSE.encode(values, turn)

    def _add_shortest(self, message: Tensor, into: Tensor) -> None:
        is_dense = len(message) == _DENSE.message_bytes(into.numel())  # a sparse one is shorter
        (_DENSE if is_dense else self).add(message, into)


def _key(name: str) -> str:
    return f"mean/{name}"
