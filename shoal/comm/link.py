"""What joins workers, measured: the latency and the rate of the link, by all-reduces as training does them.

A ring all-reduce of S bytes over n workers takes 2(n-1) messages of S/n bytes in turn:

    seconds = 2(n-1) * (latency + S / n / rate)

So the smallest all-reduce tells the latency, and what the largest takes longer tells the rate. Workers on one host
that share what carries the bytes (loopback) have 2/n of the rate that two alone have; the rate of two is returned.
Example: 2 workers, 0.5 ms for 4 KB, 26.7 ms for 25 MiB: latency 0.25 ms, rate 26.2 MB / 26.2 ms = 1 GB/s.
"""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from shoal.comm.group import all_reduce_sum, barrier
from shoal.core.fit import typical
from shoal.spec.device import Link

MESSAGE_BYTES = (4 << 10, 64 << 10, 1 << 20, 8 << 20, 25 << 20)
"""From a handful of numbers to a bucket of DDP's default size."""
GPU_MESSAGE_BYTES = (*MESSAGE_BYTES, 256 << 20)
"""A bucket takes NVLink so little time that it does not tell the rate."""
_ROUNDS = 6


def agree_least(value: float) -> float:
    """Return the least `value` of all workers. Called by every worker."""
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    return float(tensor.item())


def time_all_reduces(device: torch.device, *, seconds: float) -> list[tuple[int, float]]:
    """Return (bytes, seconds of one all-reduce) for sizes from 4 KB on; takes about `seconds`.

    Called by every worker.
    """
    sizes = GPU_MESSAGE_BYTES if device.type == "cuda" else MESSAGE_BYTES
    tensors = [torch.zeros(count // 4, device=device) for count in sizes]
    turn_s = seconds / (_ROUNDS * len(tensors))
    calls = []
    for tensor in tensors:
        _seconds_of(tensor, calls=1)
        calls.append(max(1, round(agree_least(turn_s / _seconds_of(tensor, calls=2)))))
    rounds = [[_seconds_of(t, calls=n) for t, n in zip(tensors, calls, strict=True)] for _ in range(_ROUNDS)]
    return [(count, typical(times)) for count, times in zip(sizes, zip(*rounds, strict=True), strict=True)]


def link_from(times: Sequence[tuple[int, float]], *, workers: int, shared: bool, source: str) -> Link:
    """Return the link among `workers` whose all-reduces took `times`; see above for `shared`."""
    (small_bytes, small_s), (large_bytes, large_s) = times[0], times[-1]
    byte_s = max(large_s - small_s, 1e-12) / (large_bytes - small_bytes)
    turns = 2 * (workers - 1)
    link_share = 2 / workers if shared else 1.0
    return Link(
        source=source,
        bytes_per_s=turns / workers / byte_s / link_share,
        latency_s=small_s / turns,
        overlaps=not shared,
    )


def _seconds_of(tensor: torch.Tensor, *, calls: int) -> float:
    """Return the seconds of one all-reduce of `tensor` among `calls`, begun by all workers at the same time."""
    barrier()
    begin_s = time.perf_counter()
    for _ in range(calls):
        all_reduce_sum(tensor).wait()
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
    return (time.perf_counter() - begin_s) / calls
