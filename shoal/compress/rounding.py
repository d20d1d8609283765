"""Random numbers for stochastic rounding: x becomes floor(x + u) with u uniform in (0, 1), which is x on average.

On the processor, drawing a number for each element would cost four times as much as all the rest of encoding. So a
table is drawn once, and each chunk of elements takes a stretch of it that begins at a place drawn for that chunk:

1. The table holds (k + 1/2) / 2^16 for every k, in random order: exactly uniform.
2. It goes round: the stretch that begins near the end goes on at the start. So over all 2^16 places to begin at, each
   element meets each number of the table exactly once: the mean over steps is the value itself.
3. The place is a hash of the message's key and the chunk's number: the same key gives the same bytes.

Example: chunk 3 of a message with key k takes table[h : h + 65536] with h = ((k + 3) * golden mod 2^64) / 2^48.

On a GPU the device's own generator, seeded with the key, is free next to the memory traffic.
"""

from functools import cache

import torch
from torch import Tensor

CHUNK = 2**16
"""Elements encoded at a time on the processor: with all temporaries 1 MB, which stays in the cache. With half as many,
fixed costs made int8 a quarter slower (a machine with 1.25 MB of second-level cache, 2026-11-15)."""

GPU_CHUNK = 2**24
"""Elements encoded at a time on a GPU: kernels that keep all of it busy, and temporaries of 64 MB each, however large
the gradients are that travel together (ZeRO's, of a whole block of layers)."""

_TABLE_BITS = 16
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, odd: spreads neighbouring numbers over all bits


class Noise:
    """Uniform numbers in (0, 1) for the chunks of one message."""

    def __init__(self, key: int, device: torch.device) -> None:
        self._key = key
        self._generator = None if device.type == "cpu" else torch.Generator(device).manual_seed(key)

    def chunk(self, number: int, shape: tuple[int, int]) -> Tensor:
        """Return the numbers of chunk `number`; chunks are asked for in order. They must not be written to."""
        if self._generator is not None:
            return torch.rand(shape, generator=self._generator, device=self._generator.device)
        begin = (self._key + number) * _GOLDEN % 2**64 >> (64 - _TABLE_BITS)
        return _table()[begin : begin + shape[0] * shape[1]].view(shape)


@cache
def _table() -> Tensor:
    size = 2**_TABLE_BITS
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    numbers = (order.double() + 0.5).div_(size).float()
    return torch.cat([numbers, numbers[:CHUNK]])


def chunk_numel(device: torch.device) -> int:
    """Return how many elements are encoded at a time: those that stay in a processor's cache; on a GPU many more."""
    return CHUNK if device.type == "cpu" else GPU_CHUNK
