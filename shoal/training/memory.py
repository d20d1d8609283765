"""The most memory a worker has held since a moment, for what it trains."""

import contextlib
import resource
from pathlib import Path

import torch


class PeakMemory:
    """Watches the peak from its construction on: allocated bytes on a GPU, resident bytes on the CPU.

    On the CPU what the process held before (Python, torch's libraries, the dataset) is taken off.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        else:
            _load_lazy_parts()
            _reset_resident_peak()
            self._before = _status_bytes("VmRSS")

    def read(self) -> int:
        """Return the peak in bytes."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._before
        return max(0, _status_bytes("VmHWM") - self._before)


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
