"""Communication: how the gradients of a run meet, decided when its workers start, and why."""

from dataclasses import dataclass

from shoal.spec.device import Link

EARLY_BYTES = 128 << 10
"""So much may come from two workers at once: the queues of a link hold it."""


@dataclass(frozen=True, kw_only=True)
class Communication:
    """What was measured, and what was chosen by it; worker 0 writes it into the run folder."""

    way: str
    """shared-memory, engine (the collective of Gloo or NCCL), or the name of an algorithm."""
    why: str
    bucket_bytes: int
    """Gradients travel in buckets of about this size, while backward still computes."""
    codec: str = "none"
    codec_why: str = ""
    inside: Link | None = None
    """Between two workers of one host, where it was measured."""
    between: Link | None = None
    """Between two hosts."""
    copied: Link | None = None
    """Between workers of one host for what is copied through its memory, where several hosts have several workers."""
