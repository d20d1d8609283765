"""Codecs as the arithmetic sees them: how much each leaves of a gradient, and how what it leaves travels.

What they do is in shoal/compress; tests/planner/test_compression.py holds the bytes that these send against it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.planner.memory.residual import LEAST_GAIN, RANK


@dataclass(frozen=True, kw_only=True)
class Codec:
    """How much a codec leaves of a gradient, and how what it leaves can travel."""

    ratio: float
    """Encoded bytes over bytes of the gradient in float32."""
    travels: str
    """summed: through an all-reduce, while encoded; sliced; gathered; sparse: gathered, or sliced in bf16."""
    rounds: int = 1
    """All-reduces of a step, of equal size, each waiting for the one before."""
    by_engine: bool = False
    """Whether the engine's own all-reduce carries it, whatever would be the fastest: over Gloo that is a ring."""

    def __post_init__(self) -> None:
        assert self.travels in ("summed", "sliced", "gathered", "sparse"), self.travels


def sparse(density: float) -> Codec:
    """Return a codec that sends this fraction of the values: 2 bytes each, as much for where, and counts.

    A count of 4 bytes goes with every 65,536 elements (compress/places.py).
    """
    return Codec(ratio=density + 1 / 65536, travels="sparse")


def low_rank(shapes: Sequence[tuple[int, ...]], rank: int = RANK) -> Codec:
    """Return PowerSGD for gradients of these shapes: P is summed, then Q (Vogels et al., 2019).

    What is no matrix, or too small to gain by it, travels whole. Example: [1024, 1024], rank 4: 4 * 2048 / 1024^2.
    """
    numel = [math.prod(shape) for shape in shapes]
    sides = [(shape[0] if shape else 1) + math.prod(shape[1:]) for shape in shapes]
    sent = [
        rank * side if LEAST_GAIN * rank * side <= whole else whole for side, whole in zip(sides, numel, strict=True)
    ]
    return Codec(ratio=sum(sent) / max(1, sum(numel)), travels="summed", rounds=2, by_engine=True)


_SCALE_BYTES = 2 / 256
"""What a block's scale adds to each of its elements (compress/bucket.py)."""
_THRESHOLD = 8.0
"""What threshold sends exceeds this multiple of the mean magnitude (compress/threshold.py)."""

CODECS = {
    "none": Codec(ratio=1.0, travels="summed"),
    "bf16": Codec(ratio=0.5, travels="sliced"),
    "int8": Codec(ratio=(1 + _SCALE_BYTES) / 4, travels="sliced"),
    "int4": Codec(ratio=(1 / 2 + _SCALE_BYTES) / 4, travels="sliced"),
    "sign": Codec(ratio=(1 / 8 + _SCALE_BYTES) / 4, travels="sliced"),
    "topk": sparse(0.01),
    # As far as it is known beforehand: how often a random walk, which has normal steps, gets that far.
    "threshold": sparse(math.pi / (2 * _THRESHOLD**2)),
    "powersgd": low_rank([(1024, 1024)]),
}


def codec_for(name: str, shapes: Sequence[tuple[int, ...]]) -> Codec:
    """Return the codec `name` for gradients of these shapes: how small low rank makes them depends on that."""
    return low_rank(shapes) if name == "powersgd" and shapes else CODECS[name]


def codec_of(name: str) -> Codec:
    """Return the codec of a plan; auto counts as none: whether one pays is known when the link has been measured."""
    return CODECS["none" if name == "auto" else name]
