"""What this host is, and what it has: cores and memory as this process may use them."""

import contextlib
import functools
import os
import platform
import socket
from pathlib import Path

from shoal.core.control_groups import core_quota, memory_left

THREADS = "SHOAL_THREADS"
"""The variable by which a launcher says that workers share the cores among as many as there are: "shared"; else ""."""


@functools.cache
def host_id() -> str:
    """Return a word that this host has alone, until it is started anew: names, as `localhost`, may be those of several.

    Containers with names of their own count as hosts.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        boot = ""
    return f"{socket.gethostname()} {boot}"


def usable_cores() -> int:
    """Return how many cores this process may use: its affinity, or the container's quota where that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = core_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def threads_per_worker(local_workers: int) -> int:
    """Return how many threads each of a node's workers may compute with, so that they do not fight for cores."""
    return max(1, usable_cores() // local_workers)


def memory_bytes() -> int:
    """Return the host's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory() -> int:
    """Return the memory that this process can still take: the host's, or what its control group has left."""
    left = memory_bytes()
    with contextlib.suppress(OSError, ValueError, KeyError):
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        left = int(fields["MemAvailable"].split()[0]) * 1024
    of_group = memory_left()
    return left if of_group is None else min(left, of_group)


def processor_name() -> str:
    """Return the processor's name as the kernel tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
