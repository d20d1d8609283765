"""Profile: what a model costs, traced without running it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The cost of one forward and backward of a micro-batch, and of one optimizer step."""

    micro_batch: int
    """The samples it was traced with."""
    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    """State the optimizer keeps between steps."""
    transient_bytes: int
    """The most memory alive at once beyond the above, at `micro_batch` samples: activations and work space."""
    flops: int
    """Operations in matrix products and convolutions, forward and backward."""
    moved_bytes: int
    """Bytes that all other operations read and write, forward and backward."""
    operations: int
    """How many operations do work, forward, backward and optimizer: each costs its start, however small it is."""
    optimizer_moved_bytes: int
    """Bytes that one optimizer step reads and writes."""
