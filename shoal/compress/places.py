"""A few elements of many: finding those above a magnitude, and a message of their places and values.

Finding (`above`), at about an eighth of the cost of asking for the places of a mask:

1. Chunk by chunk, magnitudes over the threshold are cut at 1 and truncated to int8: 1 where above, otherwise 0.
2. Eight of these bytes are looked at as one 64-bit number. Few of them are not 0, and only within those each byte is.
3. A NaN would be lost in step 1. The sum of what was cut at 1 shows it; then a plain mask is used.

A message about k elements of n, 4 k + 4 ceil(n / 65536) bytes:

1. their values in bf16 (the digits that this loses stay pending),
2. the lower 16 bits of their places, in order,
3. how many of them lie in each stretch of 65,536 elements, which gives the upper bits back.

Example: places 5, 70000 and 70001 of 100,000 travel as 5, 4464, 4465 and the counts 1, 2.
"""

import torch
from torch import Tensor

from shoal.compress.rounding import chunk_numel

_STRETCH = 2**16
VALUE_BYTES, PLACE_BYTES, COUNT_BYTES = 2, 2, 4


def message_bytes(numel: int, kept: int) -> int:
    """Return the bytes of a message about `kept` elements of `numel`."""
    return kept * (VALUE_BYTES + PLACE_BYTES) + -(-numel // _STRETCH) * COUNT_BYTES


def above(values: Tensor, threshold: float) -> Tensor:
    """Return the places of those `values` whose magnitude is `threshold` or more, in order. A NaN counts as such."""
    whole = values.numel() // 8 * 8
    marks = torch.empty(whole, dtype=torch.int8, device=values.device)
    step, sums = chunk_numel(values.device), []
    for chunk, marked in zip(torch.split(values[:whole], step), torch.split(marks, step), strict=True):
        cut = chunk.abs().div_(threshold).clamp_(max=1.0)
        marked.copy_(cut)
        sums.append(cut.sum())
    if not (threshold > 0 and bool(torch.isfinite(torch.stack(sums).sum()))):  # NaN has become 0 in int8
        return torch.nonzero(~(values.abs() < threshold)).squeeze(1)
    eights = torch.nonzero(marks.view(torch.int64)).squeeze(1)
    found = torch.nonzero(marks.view(-1, 8)[eights])
    places = eights[found[:, 0]].mul_(8).add_(found[:, 1])
    rest = torch.nonzero(values[whole:].abs() >= threshold).squeeze(1)
    return torch.cat([places, rest.add_(whole)]) if len(rest) else places


def mean_magnitude(values: Tensor) -> Tensor:
    """Return the mean of the magnitudes of `values`, one or more, as a float32 without dims."""
    chunks = torch.split(values, chunk_numel(values.device))
    return torch.stack([chunk.abs().sum(dtype=torch.float32) for chunk in chunks]).sum() / values.numel()


def take(values: Tensor, places: Tensor) -> Tensor:
    """Return a message about `values` at `places`, which are in order, and take out of them what it says."""
    numel, kept = values.numel(), len(places)
    message = torch.empty(message_bytes(numel, kept), dtype=torch.uint8, device=values.device)
    sent, low, counts = _parts(message, numel)
    chosen = values[places]
    sent.copy_(chosen)
    values[places] = chosen.sub_(sent.float())
    low.copy_(places & (_STRETCH - 1))
    starts = torch.arange(0, numel + _STRETCH, _STRETCH, device=values.device)[: len(counts) + 1]
    counts.copy_(torch.searchsorted(places, starts).diff())
    return message


def put(message: Tensor, into: Tensor) -> None:
    """Add the values of `message` to `into` at their places; `into` is as long as what the message was made of."""
    sent, low, counts = _parts(message, into.numel())
    starts = torch.arange(0, len(counts) * _STRETCH, _STRETCH, device=into.device)
    places = torch.repeat_interleave(starts, counts, output_size=len(sent))
    into.index_add_(0, places.add_(low.to(torch.int64) & (_STRETCH - 1)), sent.float())


def _parts(message: Tensor, numel: int) -> tuple[Tensor, Tensor, Tensor]:
    stretches = -(-numel // _STRETCH)
    kept = (message.numel() - stretches * COUNT_BYTES) // (VALUE_BYTES + PLACE_BYTES)
    ends = kept * VALUE_BYTES, kept * (VALUE_BYTES + PLACE_BYTES)
    sent, low, counts = message[: ends[0]], message[ends[0] : ends[1]], message[ends[1] :]
    return sent.view(torch.bfloat16), low.view(torch.int16), counts.view(torch.int32)
