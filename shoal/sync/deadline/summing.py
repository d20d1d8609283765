"""Summing the gradients of those who take part in a step, among themselves.

1. All gradients lie behind each other in one row of numbers, scaled by what this worker's weighs of the whole; zeros
   where it counts nothing. A row of a GPU is copied into the processor's memory: Gloo carries it, which lets some of a
   group talk while others are elsewhere.
2. The row is summed over those on the list by an algorithm of `comm.algorithms`: the same bits on all of them.
3. The sums go back into `.grad`.

Example: 3 of 4 workers with 8, 8 and 4 samples scale by 8/20, 8/20 and 4/20; the ring is 0 -> 1 -> 3 -> 0.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shoal.comm.algorithms import ALL_REDUCE, Wire

SMALL_BYTES = 64 << 10
"""Up to here the number of messages is what counts, and not what they carry."""
_KEPT = 4
"""How many sets of workers have their wire, with its memory, kept: mostly the same few meet again."""


class Row:
    """The gradients of one worker, one after the other."""

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self._parameters = parameters
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
        sizes = [parameter.numel() for parameter in parameters]
        self._here = torch.zeros(sum(sizes), dtype=dtype, device=device)
        self.numbers = self._here if device.type == "cpu" else torch.zeros(sum(sizes), dtype=dtype, pin_memory=True)
        """Those of the processor."""
        self._places = [
            place.view(parameter.shape)
            for place, parameter in zip(torch.split(self._here, sizes), parameters, strict=True)
        ]

    def fill(self, scale: float) -> None:
        """Put the gradients there, times `scale`. With 0, zeros, even where a gradient is not finite."""
        for parameter, place in zip(self._parameters, self._places, strict=True):
            if parameter.grad is None or scale == 0:
                place.zero_()
            else:
                place.copy_(parameter.grad)
        if scale != 0:
            self._here.mul_(scale)
        if self.numbers is not self._here:
            self.numbers.copy_(self._here)

    def put_back(self) -> None:
        """Make the gradients what is there."""
        if self.numbers is not self._here:
            self._here.copy_(self.numbers)
        for parameter, place in zip(self._parameters, self._places, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(place)


class Summing:
    """Sums rows among some of the workers of a wire."""

    def __init__(self, wire: Wire, way: str) -> None:
        """Use the algorithm that `way` names, or, where it names none that can be used, one by the size."""
        self._wire, self._way = wire, way
        self._wires: OrderedDict[tuple[int, ...], Wire] = OrderedDict()

    def sum(self, numbers: Tensor, workers: tuple[int, ...]) -> None:
        """Sum `numbers` over `workers`, in place. Called by all of them; if one is gone, raises PeerLost."""
        if len(workers) > 1:
            ALL_REDUCE[self._name(numbers)](numbers, self._among(workers))

    def _name(self, numbers: Tensor) -> str:
        if self._way in ALL_REDUCE and self._way != "two-level":  # which would need to know who is on which host
            return self._way
        return "recursive-doubling" if numbers.numel() * numbers.element_size() <= SMALL_BYTES else "ring"

    def _among(self, workers: tuple[int, ...]) -> Wire:
        wire = self._wires.pop(workers, None) or self._wire.among(workers)
        self._wires[workers] = wire
        if len(self._wires) > _KEPT:
            self._wires.popitem(last=False)
        return wire
