"""What goes on beside backward: gradients are sent to their servers as they become ready.

1. The row of all gradients is cut at the ends of slices and into chunks of about 1 MB (`link.CHUNK_NUMEL`).
2. Under `sending()`, around the last backward pass of a step, each gradient is copied into the row as soon as it is
   whole, last layers first. When all of a chunk is there, the link's thread sends it, and backward goes on.
3. `finish`, after backward, takes what is left: gradients that backward did not touch, or all if nothing was sent.

Example: 40 MB of gradients, 2 servers. Backward makes the upper half ready first, 20 chunks of server 1, which travel
while the lower half is computed; when backward ends, a chunk or two of server 0 are still to be sent.

Parameters beside forward: see `fetching`.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shoal.core.errors import JobError
from shoal.sync.server.link import CHUNK_NUMEL, Link

if TYPE_CHECKING:
    from shoal.sync.server.mode import Servers


class Overlap:
    """Beside one worker's backward. With clipping of a part's own gradient, nothing is sent before that is whole."""

    def __init__(self, servers: "Servers", *, is_off: bool) -> None:
        self._copies, self._is_off = servers.copies, is_off
        self._chunks: list[tuple[Link, int]] = [
            (link, chunk) for link in servers.opened.links for chunk in range(link.chunks)
        ]
        self._chunks_of = [self._touched(number) for number in range(len(self._copies.parameters))]
        self._is_sending = False
        self._taken: set[int] = set()
        self._unready: list[int] = []
        self._begin()
        self._hooks = [self._hook_on(number) for number in range(len(self._copies.parameters))]
        self.sent_early = 0
        """How many chunks were sent before backward was over."""

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Send gradients as they become ready, for a `with` block: around the last backward pass of a step."""
        self._is_sending = not self._is_off
        try:
            yield
        finally:
            self._is_sending = False

    def finish(self) -> None:
        """Have all gradients in the row: those that were not sent yet are sent with what the step weighs."""
        for number in range(len(self._copies.parameters)):
            if number not in self._taken:
                self._copies.take_gradient(number)
        self._begin()

    def close(self) -> None:
        """Leave the parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _begin(self) -> None:
        self._taken.clear()
        self._unready = [0] * len(self._chunks)
        for chunks in self._chunks_of:
            for chunk in chunks:
                self._unready[chunk] += 1

    def _touched(self, number: int) -> list[int]:
        """Return the chunks that a parameter has a part in."""
        begin = self._copies.begins[number]
        end, found = begin + self._copies.parameters[number].numel(), []
        for at, (link, chunk) in enumerate(self._chunks):
            first = link.slice.begin + chunk * CHUNK_NUMEL
            if max(begin, first) < min(end, first + CHUNK_NUMEL, link.slice.end):
                found.append(at)
        return found

    def _hook_on(self, number: int) -> Any:
        itself: Callable[[], Overlap | None] = weakref.ref(self)  # torch keeps hooks where no collector looks

        def on_gradient(_: Tensor) -> None:
            if (overlap := itself()) is not None and overlap._is_sending:
                overlap._take(number)

        parameter: Any = self._copies.parameters[number]
        return parameter.register_post_accumulate_grad_hook(on_gradient)

    def _take(self, number: int) -> None:
        if number in self._taken:
            raise JobError("backward ran twice under sending(): run all but the last micro-batch of a step outside.")
        self._taken.add(number)
        self._copies.take_gradient(number)
        for at in self._chunks_of[number]:
            self._unready[at] -= 1
            if not self._unready[at]:
                link, chunk = self._chunks[at]
                link.do(link.send_chunk, chunk)
                self.sent_early += 1
