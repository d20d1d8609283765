"""Buckets: how much of the gradients travels at once.

A bucket must be large enough that its messages are mostly bytes: with p workers a ring sends p-ths of it, of which a
codec leaves a part, and the latency is to be a twentieth of each. Smaller ones begin to travel earlier, so it is no
larger, within bounds.

Example: 4 workers at 125 MB/s and 0.2 ms: 19 * 0.2 ms * 125 MB/s * 4 = 1.9 MB. At 12.5 MB/s it would be 190 kB, so it
is the least, 1 MiB; through a codec that leaves a hundredth, 19 MB.
"""

from shoal.spec.device import Link

LATENCY_SHARE = 0.05
LEAST_BUCKET_BYTES, MOST_BUCKET_BYTES = 1 << 20, 64 << 20
SHARED_BUCKET_BYTES = 4 << 20
"""Of gradients in shared memory: no latency to speak of, and the first sums begin early (docs/communication.md)."""
PLAIN_BUCKET_BYTES = 25 << 20
"""DDP's default, where no link decides: of a worker alone, and of engines that send what they hold by themselves."""


def bucket_bytes(link: Link, workers: int, *, ratio: float = 1.0) -> int:
    """Return the size of a bucket whose messages, `ratio` of its bytes, are bytes for 0.95 of their time on `link`."""
    return bucket_at(link.bytes_per_s, link.latency_s, workers, ratio=ratio)


def bucket_at(bytes_per_s: float, latency_s: float, workers: int, *, ratio: float = 1.0) -> int:
    """Return the same for a link of that rate and latency."""
    size = (1 / LATENCY_SHARE - 1) * latency_s * bytes_per_s * workers / ratio
    return int(min(max(size, LEAST_BUCKET_BYTES), MOST_BUCKET_BYTES))
