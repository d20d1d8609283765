"""What a worker holds: the most memory since a moment, and the bytes of its model state by kind.

On the processor glibc's heap must be told to give freed tensors back. By itself it raises the size from which a tensor
gets pages of its own to that of the largest freed so far, up to 32 MB; from then on gathered blocks and activations lie
in one heap among small objects that pin it, and it grows with every step. A worker of ZeRO-3 on 4 workers, with 102 MB
of parameters, was resident with 666 MB after 3 steps; told so, with 224 MB, 190 of them tensors (benchmarks/zero.py).
"""

import contextlib
import ctypes
import os
import resource
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from shoal.parallel.layout import Layout

_OWN_PAGES_BYTES = 256 * 1024
"""From this size on a tensor gets pages of its own. Their first touch costs about 3% of a step of 512 tokens, 10% of
one of 256 (GPT of 25M parameters, one thread; least processor time of 6 and 12 steps on a noisy machine, 2026-11)."""
_STATM = Path("/proc/self/statm")
_M_MMAP_THRESHOLD = -3
"""Of malloc.h."""


class PeakMemory:
    """Watches the peak from its construction on: allocated bytes on a GPU, resident bytes on the CPU.

    On the CPU what the process held before (Python, torch's libraries, the dataset) is taken off. Where the model is
    divided among workers, and so memory is what counts, the heap is told to give back what is freed; a whole model is
    left to the heap's own habits, which are faster and keep more (`heap_fraction` in the catalog). Copies of the state
    for when a worker is lost (`leave_out`) are in the host's memory, also when this process has gone: no part of it.
    """

    def __init__(self, device: torch.device, *, divided: bool) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        else:
            _load_lazy_parts()
            if divided:
                return_freed_tensors()
            _reset_resident_peak()
            self._before = _status_bytes("VmRSS")
        self._left_out, self._most = 0, 0

    def leave_out(self, num_bytes: int) -> None:
        """Count so many resident bytes, and no others, not as the worker's from here on: before they are taken."""
        if self._device.type != "cuda":
            self._most = self._resident_peak()
            self._left_out = num_bytes
            _reset_resident_peak()

    def read(self, *, sharers: int = 1) -> int:
        """Return the peak in bytes; of memory that `sharers` workers share, resident in each as a whole, a part."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._before
        shared = _status_bytes("RssShmem") - self._left_out if sharers > 1 else 0
        return max(0, self._resident_peak() - max(0, shared) * (sharers - 1) // sharers)

    def _resident_peak(self) -> int:
        return max(self._most, _status_bytes("VmHWM") - self._before - self._left_out)

    def restart(self) -> None:
        """Forget the peak so far: from here on it is that of what comes."""
        self._most = 0
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            _reset_resident_peak()

    def now(self) -> int:
        """Return what is held at the moment, counted as the peak is; in 20 microseconds. 0 where there is no Linux."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device) - self._before
        try:
            resident = int(_STATM.read_bytes().split()[1]) * resource.getpagesize()
            return max(0, resident - self._before - self._left_out)
        except OSError:
            return 0


def free_bytes(device: torch.device) -> int:
    """Return the memory that is free where `device` computes, what torch keeps for later included; 0: unknown."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # no Linux
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)


def state_bytes(layout: Layout, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes that a worker holds now of parameters, gathered parameters, gradients and optimizer state.

    "parameters" are its own slices, and what is not trained; "gathered" are those that are whole at the moment.
    Counted is the memory behind the tensors, each piece once: views of one bucket, padding and tied weights come out
    right. What an engine keeps for itself is not: DDP's buckets, which stay when gradients have gone, FSDP2's buffers.
    """
    own = {id(parameter): parameter for parameter in layout.parameters.values()}
    registered = {id(parameter): parameter for root in layout.roots for parameter in root.parameters()}
    others = [parameter for key, parameter in registered.items() if key not in own]
    gathered = [parameter for parameter in others if parameter.requires_grad]
    frozen = [parameter for parameter in others if not parameter.requires_grad]
    gradients = [p.grad for p in (*own.values(), *gathered) if p.grad is not None]
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "parameters": _bytes_behind([*own.values(), *frozen, *layout.engine_holds()]),
        "gathered": _bytes_behind(gathered),
        "gradients": _bytes_behind(gradients),
        "optimizer": _bytes_behind(value for value in states if isinstance(value, torch.Tensor)),
    }


def return_freed_tensors() -> None:
    """Make the processor's heap give the memory of a freed tensor back at once, where it is glibc's.

    Unless the user has set it otherwise. What is free already is given back, too.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    with contextlib.suppress(OSError, AttributeError):  # another system, or another heap
        heap = ctypes.CDLL(None)
        heap.mallopt(_M_MMAP_THRESHOLD, _OWN_PAGES_BYTES)
        heap.malloc_trim(0)


def _bytes_behind(tensors: Iterable[torch.Tensor]) -> int:
    storages = {}
    for tensor in tensors:
        storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _load_lazy_parts() -> None:
    """Make torch load now what its first optimizer loads (its compiler, 80 MB): that is none of the model's."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])


def _reset_resident_peak() -> None:
    with contextlib.suppress(OSError):  # some containers forbid it: the peak then counts from the process's start
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident set size


def _status_bytes(name: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # not Linux: a peak in bytes (macOS)
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))
