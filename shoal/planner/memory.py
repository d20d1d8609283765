"""How much memory a worker needs.

    model (parameters, buffers) + gradients + optimizer state + transient * samples at once / samples traced

The gradients count in full all the time. So it is with several workers (DDP's buckets, of which the gradients
are views, are never freed) and while micro-batches accumulate. One worker without accumulation frees its gradients
between steps, yet the heap keeps most of their room: with a GPT of 10.8 M parameters the process grew by 341 MB at
8 samples and 194 MB at 1, where this sum says 334 and 195 and its tensors alone came to 291 and 174 (glibc, 2026-11).

The sum is about tensors; a process grows by more, as the heap breaks into pieces. Over 13 runs of one worker the sum
was 0.75 to 1.07 of the growth for GPTs and MLPs, but only half of it for a convolutional net, whose kernels also
take work space (10 % of the tensors). With MALLOC_MMAP_THRESHOLD_=200000 that net came to 0.85.

Example: 43 MB of parameters, as much of gradients, 86 MB for AdamW, 162 MB transient traced at 8 samples.
4 samples at once: 43 + 43 + 86 + 162 * 4/8 = 253 MB.
"""

from shoal.spec.profile import Profile


def peak_bytes(profile: Profile, *, samples: int, micro_batch: int | None) -> int:
    """Return the most bytes that a worker holds which takes `samples` of a global batch, `micro_batch` at a time."""
    at_once = samples if micro_batch is None else min(samples, micro_batch)
    lasting_bytes = profile.parameter_bytes + profile.gradient_bytes + profile.optimizer_bytes
    return lasting_bytes + -(-profile.transient_bytes * at_once // profile.micro_batch)
