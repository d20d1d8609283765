"""How long a step takes, on workers that share one host.

    compute = samples * (flops / matmul rate + moved bytes / memory rate) + optimizer's bytes / memory rate
              + operations * what starting one costs
    comm    = what of the gradients' all-reduce is not hidden behind the backward

Workers on one host share its cores and its memory: each has 1/workers of the machine's rates.

A ring all-reduce of S bytes over n workers takes 2(n-1) messages of S/n bytes in turn. The link's rate is that between
two workers alone; n workers on one host share what carries it, and each has 2/n of that rate. So 2(n-1) latencies
and (n-1) S / rate. Held against Gloo on 2 cores, S = 43 MB: 2 workers 46 ms (54 measured), 4 workers 139 (145).

Where the link overlaps with computing, DDP reduces every bucket but the last while the backward goes on: what is
exposed is the last bucket, or what the backward was too short to hide. On a loopback link the cores that compute also
copy the messages, and nothing counts as hidden (4 workers: of 145 ms, 100 showed in the time of the step).
"""

import math
from collections.abc import Callable

from shoal.spec.profile import Profile

_BUCKET_BYTES = 25 * 1024 * 1024
"""DDP's default bucket_cap_mb."""
_BACKWARD_SHARE = 2 / 3
"""Of forward and backward: two of the three matrix products of a layer belong to the backward."""


def step_seconds(
    profile: Profile,
    *,
    samples: int,
    matmul_flops_per_s: float,
    memory_bytes_per_s: float,
    operation_s: float = 0.0,
    micro_batch: int | None = None,
    workers: int = 1,
    link_bytes_per_s: float = math.inf,
    link_latency_s: float = 0.0,
    link_overlaps: bool = False,
) -> tuple[float, float]:
    """Return (compute_s, comm_s) of a worker with `samples` of each global batch; the rates are the whole machine's."""
    micro_batch_s = profile.flops / matmul_flops_per_s + profile.moved_bytes / memory_bytes_per_s
    passes_s = workers * micro_batch_s * samples / profile.micro_batch
    optimizer_s = workers * profile.optimizer_moved_bytes / memory_bytes_per_s
    starts_s = operation_s * profile.operations * math.ceil(samples / (micro_batch or samples))

    def reduce_s(num_bytes: float) -> float:
        return all_reduce_seconds(num_bytes, workers=workers, bytes_per_s=link_bytes_per_s, latency_s=link_latency_s)

    comm_s = _exposed_s(profile.gradient_bytes, reduce_s, _BACKWARD_SHARE * passes_s if link_overlaps else 0.0)
    return passes_s + optimizer_s + starts_s, comm_s


def all_reduce_seconds(num_bytes: float, *, workers: int, bytes_per_s: float, latency_s: float) -> float:
    """Return how long a ring all-reduce of `num_bytes` takes among `workers` on one host; nothing for one worker."""
    return (workers - 1) * (2 * latency_s + num_bytes / bytes_per_s)


def _exposed_s(gradient_bytes: int, reduce_s: Callable[[float], float], backward_s: float) -> float:
    buckets = max(1, math.ceil(gradient_bytes / _BUCKET_BYTES))
    bucket_s = reduce_s(gradient_bytes / buckets)
    return max(bucket_s, buckets * bucket_s - backward_s)
