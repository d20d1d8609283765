"""Error feedback around any codec: what a step does not send goes with the next one.

1. A gradient is added to what is pending of its bucket (compensate).
2. The codec sends what it can of that, and leaves the rest where it is: see `codec`.
3. What is pending is kept by the names of the parameters, so that it can be saved, and follows them into other buckets.
   It takes 4 bytes for every parameter on every worker; under ZeRO too, where a worker sends to all slices.
4. Where there is nobody left to send it to, it is added to the gradients of the next step: `take_over`.

Example: top-1% of a gradient that never changes. The largest 1% travel in the first step and in many later ones; the
others grow, pending, until they are the largest. Over the steps the mean of what has arrived becomes the gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.compress.bucket import Bucket
from shoal.compress.codec import Codec, Turn
from shoal.compress.collectives import Collectives
from shoal.core.errors import ConfigError


class ErrorFeedback:
    """A codec, and what it has not sent yet. One on each worker; all make the same calls in the same order."""

    def __init__(self, codec: Codec, *, seed: int = 0, forgets: bool = False) -> None:
        """`forgets`: drop what is not sent, as a baseline to compare with."""
        self.codec = codec
        self._seed = seed
        self._forgets = forgets
        self._exchanges = 0
        self._pending: dict[Bucket, Tensor] = {}
        self._loose: dict[str, Tensor] = {}  # by parameter: loaded, or of a bucket that is no more
        self._memory: dict[str, Tensor] = {}

    @torch.no_grad()
    def sum(self, bucket: Bucket, gradient: Tensor, workers: Collectives) -> None:
        """Replace `gradient`, the flat bucket, by the sum over all workers of what they send.

        Called by every worker; all then have the same bits. On a failure raises what the engine raises; `gradient` and
        what is pending are then undefined.
        """
        pending, turn = self._compensated(bucket, gradient, workers)
        self.codec.sum(pending.view(-1), gradient, turn, workers)
        self._keep(bucket, pending)

    @torch.no_grad()
    def reduce_scatter(self, bucket: Bucket, out: Tensor, gradient: Tensor, workers: Collectives) -> None:
        """Put this worker's row of the sum over all workers of `gradient`, the flat bucket, into `out`.

        Called by every worker. On a failure raises what the engine raises; `out` and what is pending are undefined.
        """
        pending, turn = self._compensated(bucket, gradient, workers)
        self.codec.reduce_scatter(pending, out, turn, workers)
        self._keep(bucket, pending)

    @torch.no_grad()
    def take_over(self, gradient_of: Callable[[str], Tensor | None]) -> None:
        """Add what is pending to this worker's own gradients, in place: it has nobody to send it to.

        Then it is not pending any more, but for parameters that have no gradient yet.
        """
        for name in list(self._loose):  # all that there is, as nothing was sent from here
            if (gradient := gradient_of(name)) is not None:
                gradient.add_(self._loose.pop(name).to(gradient.device).view(gradient.shape))

    def state_dict(self) -> dict[str, Any]:
        """Return all that must be saved to go on alike, by the names of parameters. Called between steps."""
        pending = dict(self._loose)
        for bucket, flat in self._pending.items():
            bucket.split(flat[:, : bucket.width], pending)
        return {
            "codec": self.codec.name,
            "exchanges": self._exchanges,
            "pending": pending,
            "memory": {key: value.clone() for key, value in self._memory.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned, on this or another worker; see `carry` for another number of them."""
        if state["codec"] != self.codec.name:
            raise ConfigError(
                f"what was saved is pending for codec={state['codec']!r}, and this run has codec={self.codec.name!r}. "
                f"Resume with codec={state['codec']!r}."
            )
        self._exchanges = state["exchanges"]
        self._pending = {}
        self._loose = {name: _on_processor(value) for name, value in state["pending"].items()}
        self._memory = {key: _on_processor(value) for key, value in state["memory"].items()}

    def _compensated(self, bucket: Bucket, gradient: Tensor, workers: Collectives) -> tuple[Tensor, Turn]:
        pending = self._pending.get(bucket)
        if pending is None:
            pending = self._pending[bucket] = self._gathered(bucket, gradient, workers)
        turn = Turn(bucket, self._seed, self._exchanges, workers.index, self._memory)
        self._exchanges += 1
        self.codec.observe(gradient, turn)
        pending[:, : bucket.width].add_(gradient.view(bucket.rows, bucket.width))
        return pending, turn

    def _gathered(self, bucket: Bucket, gradient: Tensor, workers: Collectives) -> Tensor:
        """Return what is pending of a bucket that is new, from where its parameters were until now."""
        names = set(bucket.names)
        for other in [other for other in self._pending if not names.isdisjoint(other.names)]:
            other.split(self._pending.pop(other)[:, : other.width], self._loose)
        pending = torch.zeros(bucket.room(workers.count), dtype=torch.float32, device=gradient.device)
        bucket.join(self._loose, pending[:, : bucket.width])
        for name in names:
            self._loose.pop(name, None)
        return pending

    def _keep(self, bucket: Bucket, pending: Tensor) -> None:
        if self._forgets:
            pending.zero_()
        else:
            pending[:, bucket.width :].zero_()  # padding is nobody's gradient, but has a sign


def _on_processor(value: Tensor) -> Tensor:
    # On a GPU, exchanges run in a stream of their own. Memory of the loader's stream would be given away again while
    # they still read it; a copy from the processor is awaited.
    return value.detach().to("cpu", copy=True)
