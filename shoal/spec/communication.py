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
    """What gradients go through; with `sync.codec = "auto"`, what that is here."""
    codec_why: str = ""
    inside: Link | None = None
    """Between two workers of one host, as it was measured at the start or as the cluster's file names it."""
    between: Link | None = None
    """Between two hosts, likewise."""
    copied: Link | None = None
    """Between workers of one host for what is copied through its memory, where several hosts have several workers."""
