"""What joins workers, measured: the latency and the rate of the link, by all-reduces as training does them.

A ring all-reduce of S bytes over n workers takes 2(n-1) messages of S/n bytes in turn:

    seconds = 2(n-1) * (latency + S / n / rate)

So the smallest all-reduce tells the latency, and what the largest takes longer tells the rate. Workers on one host
that share what carries the bytes (loopback) have 2/n of the rate that two alone have; the rate of two is returned.
Example: 2 workers, 0.5 ms for 4 KB, 26.7 ms for 25 MiB: latency 0.25 ms, rate 26.2 MB / 26.2 ms = 1 GB/s.

Shared memory is no ring, but it is told by the same two figures: of all workers that add up at once each has a part of
the memory's rate, (n-1) times as long for n workers as for two. 64 MB took 10.3 ms with 2 workers and 32 ms with 4 on
two cores (docs/communication.md).
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from shoal.comm.algorithms.two_level import Inside
from shoal.comm.group import all_reduce_sum, barrier
from shoal.comm.shm.group import SharedGroup
from shoal.comm.shm.memory import is_supported
from shoal.core.fit import typical
from shoal.spec.device import Link

MESSAGE_BYTES = (4 << 10, 64 << 10, 1 << 20, 8 << 20, 25 << 20)
"""From a handful of numbers to a bucket of DDP's default size."""
GPU_MESSAGE_BYTES = (*MESSAGE_BYTES, 256 << 20)
"""A bucket takes NVLink so little time that it does not tell the rate."""
_ROUNDS = 6


def can_share_memory(device: torch.device) -> bool:
    """Return whether workers of one host on `device` can meet in shared memory; what that stands on is Linux's."""
    return device.type == "cpu" and is_supported()


def agree_least(value: float) -> float:
    """Return the least `value` of all workers. Called by every worker."""
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    return float(tensor.item())


def time_all_reduces(
    device: torch.device, *, seconds: float, sizes: Sequence[int] | None = None
) -> list[tuple[int, float]]:
    """Return (bytes, seconds of one all-reduce) for `sizes`, by default from 4 KB on; takes about `seconds`.

    Called by every worker.
    """
    sizes = sizes or (GPU_MESSAGE_BYTES if device.type == "cuda" else MESSAGE_BYTES)
    calls = [partial(_all_reduce, torch.zeros(size // 4, device=device)) for size in sizes]
    if device.type == "cuda":
        settle = partial(torch.cuda.synchronize, device)
        return _timed(sizes, calls, seconds, together=barrier, agree=agree_least, settle=settle)
    return _timed(sizes, calls, seconds, together=barrier, agree=agree_least)


def time_shared_sums(
    group: SharedGroup, *, seconds: float, sizes: Sequence[int] = MESSAGE_BYTES
) -> list[tuple[int, float]]:
    """Return (bytes, seconds of one sum over all workers in shared memory, in place), as gradients are summed there.

    Called by every worker of the group.
    """
    buffer = group.buffer(sizes[-1] // 4, torch.float32)
    calls = [partial(buffer.all_reduce, 0, size // 4) for size in sizes]
    return _timed(sizes, calls, seconds, together=group.barrier, agree=partial(_first_says, group))


def time_shared_shards(
    group: SharedGroup, *, seconds: float, sizes: Sequence[int] = MESSAGE_BYTES
) -> list[tuple[int, float]]:
    """Return (bytes, seconds) of gathering and scattering ZeRO's shards through shared memory, with FSDP2's copies.

    A reduce-scatter and an all-gather together are an all-reduce. Called by every worker of the group.
    """
    calls = [partial(_scatter_and_gather, group, torch.zeros(group.count, size // 4 // group.count)) for size in sizes]
    return _timed(sizes, calls, seconds, together=group.barrier, agree=partial(_first_says, group))


def time_inside(group: SharedGroup, inside: Inside, *, seconds: float, sizes: Sequence[int]) -> list[tuple[int, float]]:
    """Return (bytes, seconds) of what `inside`, the inner of two levels over `group`, does with a bucket.

    Called by every worker of the group.
    """
    calls = [partial(_both_ways_inside, inside, torch.zeros(size // 4)) for size in sizes]
    return _timed(sizes, calls, seconds, together=group.barrier, agree=partial(_first_says, group))


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


def _timed(
    sizes: Sequence[int],
    calls: Sequence[Callable[[], None]],
    seconds: float,
    *,
    together: Callable[[], None],
    agree: Callable[[float], float],
    settle: Callable[[], None] = lambda: None,
) -> list[tuple[int, float]]:
    """Return (bytes, seconds of one call) for each; `agree` makes all workers call equally often.

    They begin `together`; what calls have only started is over after `settle`.
    """

    def seconds_of(call: Callable[[], None], repeats: int) -> float:
        together()
        begin_s = time.perf_counter()
        for _ in range(repeats):
            call()
        settle()
        return (time.perf_counter() - begin_s) / repeats

    turn_s = seconds / (_ROUNDS * len(calls))
    repeats = []
    for call in calls:
        seconds_of(call, 1)
        repeats.append(max(1, round(agree(turn_s / seconds_of(call, 2)))))
    rounds = [[seconds_of(call, n) for call, n in zip(calls, repeats, strict=True)] for _ in range(_ROUNDS)]
    return [(size, typical(times)) for size, times in zip(sizes, zip(*rounds, strict=True), strict=True)]


def _all_reduce(tensor: torch.Tensor) -> None:
    all_reduce_sum(tensor).wait()


def _scatter_and_gather(group: SharedGroup, whole: torch.Tensor) -> None:
    """Do what FSDP2 does: it copies whole gradients and gathered parameters once more, into memory that is new."""
    own = torch.empty_like(whole[0])
    group.reduce_scatter(own, whole.clone())
    gathered = torch.empty_like(whole)
    gathered[group.index].copy_(own)
    group.all_gather(gathered, gathered[group.index])
    gathered.clone()


def _both_ways_inside(inside: Inside, numbers: torch.Tensor) -> None:
    inside.reduce_scatter(numbers)
    inside.all_gather(numbers)


def _first_says(group: SharedGroup, value: float) -> float:
    """Return what worker 0 of the group says."""
    tensor = torch.tensor([value], dtype=torch.float64)
    group.broadcast(tensor, 0)
    return float(tensor.item())
