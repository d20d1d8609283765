"""What is measured of a device. The probes do what a training step does, so that no efficiency has to be guessed.

- Matrix products of several sizes: the three of a linear layer (output, gradient of the input, gradient of the
  weights), over several layers, as a model has them, with results that stay alive: one layer's alone would stay in the
  cache.
- Sums and activations over tensors that are not in the cache, into fresh memory that stays alive as in a forward.
- Averages in place, as an optimizer keeps them: without fresh memory they are much faster on a processor.
- Copies: from the host's memory to a GPU and back, on a processor from one place of the memory to another.
- A chain of operations on next to nothing, forward and backward: what starting an operation costs.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from shoal.profile.stopwatch import Probe

SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Rows, columns and inner dimension of the products."""
_LAYERS_BYTES, _MAX_LAYERS = 12 << 20, 16
_TENSORS, _FLOATS = 16, 1 << 20
"""64 MB in pieces of 4 MB: more than the caches of most hosts, in tensors of the usual size."""
_GPU_FLOATS = 1 << 24
"""On a GPU 1 GB in pieces of 64 MB: an H200 has 60 MB of cache."""
_COPY_BYTES = 64 << 20
_CHAIN = 50


def product_flops(size: int) -> int:
    """Return the operations of one product of `size` rows, columns and inner elements."""
    return 2 * size**3


def product_probe(size: int, dtype: torch.dtype, device: torch.device) -> Probe:
    """Return the probe of products of `size`; its unit is one product."""
    layer_bytes = 3 * size * size * dtype.itemsize
    count = max(1, min(_MAX_LAYERS, _LAYERS_BYTES // layer_bytes))
    layers = [tuple(torch.randn(size, size, device=device).to(dtype) for _ in range(3)) for _ in range(count)]

    def all_layers() -> None:
        # What they give stays alive, as in a step: on a processor, memory that is not in the cache costs a tenth.
        _ = [(inputs @ weights.t(), gradient @ weights, gradient.t() @ inputs) for inputs, weights, gradient in layers]

    work = _Captured(all_layers) if device.type == "cuda" else all_layers
    return Probe(name=f"{precision_of(dtype)} {size}", work=work, amount=3 * count)


class _Captured:
    """`work` as one CUDA graph: else small products would take what Python takes to start them."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work  # holds the tensors that the graph reads
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            work()

    def __call__(self) -> None:
        self._graph.replay()


def precision_of(dtype: torch.dtype) -> str:
    """Return the plan's word for `dtype`."""
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]


def memory_probe(device: torch.device) -> Probe:
    """Return the probe of operations on whole tensors; its unit is a byte read or written."""
    floats = _GPU_FLOATS if device.type == "cuda" else _FLOATS
    tensors = [torch.ones(floats, device=device) for _ in range(_TENSORS)]

    def passes() -> None:
        sums = [a + b for a, b in zip(tensors, reversed(tensors), strict=True)]
        _ = sums, [F.gelu(tensor) for tensor in tensors]

    # A float is 4 bytes: a sum reads two and writes one, an activation reads one and writes one.
    return Probe(name="memory", work=passes, amount=(3 + 2) * 4 * _TENSORS * floats)


def update_probe(device: torch.device) -> Probe:
    """Return the probe of operations in place, as an optimizer's; its unit is a byte read or written."""
    floats = _GPU_FLOATS if device.type == "cuda" else _FLOATS
    tensors = [torch.ones(floats, device=device) for _ in range(_TENSORS)]

    def updates() -> None:
        for state, gradient in zip(tensors, reversed(tensors), strict=True):
            state.lerp_(gradient, 0.1)

    return Probe(name="update", work=updates, amount=3 * 4 * _TENSORS * floats)  # two are read, one is written


def copy_probes(device: torch.device) -> list[Probe]:
    """Return the probes of copies to and from the device; their unit is a byte."""
    there = torch.ones(_COPY_BYTES // 4, device=device)
    here = torch.ones(_COPY_BYTES // 4, pin_memory=device.type == "cuda")

    def copying(to: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
        return lambda: to.copy_(source, non_blocking=True)

    return [
        Probe(name="copy to", work=copying(there, here), amount=_COPY_BYTES),
        Probe(name="copy from", work=copying(here, there), amount=_COPY_BYTES),
    ]


def operation_probe(device: torch.device) -> Probe:
    """Return the probe of operations on next to nothing; its unit is one operation."""
    start = torch.ones(8, device=device, requires_grad=True)

    def chain() -> None:
        tensor = start
        for _ in range(_CHAIN):
            tensor = tensor * 1.5
        torch.autograd.grad(tensor.sum(), start)

    return Probe(name="operation", work=chain, amount=2 * _CHAIN)  # each has one operation of the backward
