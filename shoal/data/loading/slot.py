"""Memory for batches that is filled again and again: fresh memory costs a page fault every 4 KB."""

import math
from typing import Any

import torch


class Slot:
    """The tensors of one chunk of batches, kept for the next chunk that is loaded into them.

    `pin`: in memory that a GPU copies from by itself.
    """

    def __init__(self, *, pin: bool = False) -> None:
        self._pin = pin
        self._tensors: dict[str, torch.Tensor] = {}
        self.sent: Any = None
        """The event after which a GPU has copied what is in here; None where nothing is under way."""

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor with whatever was in it; what was returned for `name` before is then overwritten."""
        numel = math.prod(shape)
        held = self._tensors.get(name)
        if held is None or held.dtype != dtype or held.numel() < numel:
            held = self._tensors[name] = torch.empty(numel, dtype=dtype, pin_memory=self._pin)
        return held[:numel].view(shape)

    def wait(self) -> None:
        """Wait until nobody reads what is in here any more."""
        if self.sent is not None:
            self.sent.synchronize()
            self.sent = None
