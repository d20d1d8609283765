"""What this host has: cores and memory as this process may use them."""

import os
import platform
from pathlib import Path


def usable_cores() -> int:
    """Return how many cores this process may use: its affinity, or the container's quota where that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def threads_per_worker(local_workers: int) -> int:
    """Return how many threads each of a node's workers may compute with, so that they do not fight for cores."""
    return max(1, usable_cores() // local_workers)


def memory_bytes() -> int:
    """Return the host's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def processor_name() -> str:
    """Return the processor's name as the kernel tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
