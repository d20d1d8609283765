"""Measure this machine: how fast it multiplies matrices and how fast it passes over memory, in a fraction of a second.

The probes do what a training step does, so that no efficiency has to be guessed:
the three matrix products of a linear layer (output, gradient of the input, gradient of the weights), and sums and
activations over tensors that are not in the cache, into fresh memory that stays alive as it does in a forward.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from shoal.core.host import usable_cores

_ROWS, _WIDTH = 512, 384
"""A linear layer of a small GPT; wider ones reach the same rate (measured from 384 to 1024, 2 cores, 2026-11)."""
_TENSORS, _FLOATS = 16, 1 << 20
"""64 MB in pieces of 4 MB: more than the caches of most hosts, in tensors of the usual size."""


@dataclass(frozen=True, kw_only=True)
class HostRates:
    """What all cores that this process may use do together."""

    matmul_flops_per_s: float
    bf16_matmul_flops_per_s: float
    memory_bytes_per_s: float
    """Bytes read plus bytes written by operations on whole tensors."""
    operation_s: float
    """What starting an operation costs, however small it is."""


def measure_host(*, seconds: float = 0.2) -> HostRates:
    """Return the rates of this machine, each the best of as many short repeats as fit into its quarter of `seconds`."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(usable_cores())
    try:
        with torch.random.fork_rng(devices=[]):
            return HostRates(
                matmul_flops_per_s=_matmul_rate(torch.float32, seconds / 4),
                bf16_matmul_flops_per_s=_matmul_rate(torch.bfloat16, seconds / 4),
                memory_bytes_per_s=_memory_rate(seconds / 4),
                operation_s=_operation_s(seconds / 4),
            )
    finally:
        torch.set_num_threads(threads_before)


def _matmul_rate(dtype: torch.dtype, seconds: float) -> float:
    inputs = torch.randn(_ROWS, _WIDTH).to(dtype)
    weights = torch.randn(4 * _WIDTH, _WIDTH).to(dtype)
    gradient = torch.randn(_ROWS, 4 * _WIDTH).to(dtype)

    def products() -> None:
        _ = inputs @ weights.t(), gradient @ weights, gradient.t() @ inputs

    return 3 * 2 * _ROWS * _WIDTH * 4 * _WIDTH / _shortest_s(products, seconds)


def _memory_rate(seconds: float) -> float:
    tensors = [torch.ones(_FLOATS) for _ in range(_TENSORS)]

    def passes() -> None:
        sums = [a + b for a, b in zip(tensors, reversed(tensors), strict=True)]
        _ = sums, [F.gelu(tensor) for tensor in tensors]

    # A float is 4 bytes: a sum reads two and writes one, an activation reads one and writes one.
    return (3 + 2) * 4 * _TENSORS * _FLOATS / _shortest_s(passes, seconds)


def _operation_s(seconds: float) -> float:
    start = torch.ones(8, requires_grad=True)
    forwards = 50

    def chain() -> None:
        tensor = start
        for _ in range(forwards):
            tensor = tensor * 1.5
        torch.autograd.grad(tensor.sum(), start)

    return _shortest_s(chain, seconds) / (2 * forwards)  # each has one operation of the backward


def _shortest_s(work: Callable[[], None], seconds: float) -> float:
    work()  # the first call also makes threads and buffers
    end = time.perf_counter() + seconds
    shortest = float("inf")
    while True:
        begin = time.perf_counter()
        work()
        now = time.perf_counter()
        shortest = min(shortest, now - begin)
        if now >= end:
            return shortest
