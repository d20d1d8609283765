"""Device and Link: what computes, and what carries bytes between two of them."""

import math
from dataclasses import dataclass

from shoal.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Device:
    """What computes: the rates of one device (of all cores together, where it is a processor)."""

    source: str
    """Where the numbers come from."""
    title: str = ""
    """Its full name, as its driver says it."""
    memory_bytes: int = 0
    """What its driver reports in total; 0 where nobody looked."""
    reserved_bytes: int = 0
    """What a process takes on it before its first tensor: the driver's context."""
    library_bytes: int = 0
    """What libraries take of the allocator's memory for their work, such as cuBLAS at its first product."""
    heap_fraction: float = 0.0
    """What a processor's heap keeps beyond the tensors that come and go in a step, as a fraction of these."""
    memory_error: float = 0.05
    """How much more than predicted a worker may need: the error of the prediction, and what the allocator wastes."""
    link: str = ""
    """The link of the catalog that usually joins such devices inside a node."""
    matmul_flops_per_s: float
    """In float32."""
    bf16_matmul_flops_per_s: float
    memory_bytes_per_s: float
    """Bytes read plus bytes written by operations on whole tensors."""
    update_bytes_per_s: float = 0.0
    """The same for operations in place, on memory that is there already, as an optimizer's; 0: no other rate."""
    operation_s: float
    """What starting an operation costs, however small it is."""
    copy_to_bytes_per_s: float = 0.0
    """From the host's pinned memory to it (on a processor: from memory to memory); 0 where nobody measured."""
    copy_from_bytes_per_s: float = 0.0
    """And back."""
    matmul_fraction: float = 1.0
    """The part of the rates above that the largest products reach."""
    half_rate_flops: float = 0.0
    """The size of a product, in operations, at which half of that is reached in the faster of the two precisions:
    rate(f) = full * f / (f + half). In the other, products lose the same time to it."""

    def __post_init__(self) -> None:
        rates = (self.matmul_flops_per_s, self.bf16_matmul_flops_per_s, self.memory_bytes_per_s, self.matmul_fraction)
        if not all(0 < rate < math.inf for rate in rates):
            raise ConfigError(f"the device {self.title or self.source!r} has a rate that is not above 0.")


@dataclass(frozen=True, kw_only=True)
class Link:
    """What carries bytes from one device to another."""

    source: str
    """Where the numbers come from."""
    bytes_per_s: float
    """In one direction."""
    latency_s: float
    overlaps: bool = True
    """Whether it works beside the device's computing; not where the same cores do both."""
    crowd_s: float = 0.0
    """What each further message at the same time adds to the latency, where workers share the cores that send."""
    guessed: bool = False
    """Whether it only stands for one that nobody has named or measured: predictions go by it, and runs measure."""

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_s < math.inf or not 0 <= self.latency_s < math.inf:
            raise ConfigError(
                f"a link needs a rate above 0 and a latency, not {self.bytes_per_s} and {self.latency_s}."
            )
