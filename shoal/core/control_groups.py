"""What control groups allow this process: the limits of containers, and of jobs of Slurm. Versions 1 and 2."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_NONE = 1 << 60
"""Version 1 writes a huge number where there is no limit."""


def core_quota(root: Path = _ROOT, own: Path = _OWN) -> float | None:
    """Return how many cores' worth of time this process may use; None: any."""
    found = []
    for folder in _folders("cpu", root, own):
        with contextlib.suppress(OSError, ValueError):
            quota, period = folder.joinpath("cpu.max").read_text().split()
            found += [int(quota) / int(period)] if quota != "max" else []
        with contextlib.suppress(OSError, ValueError):
            quota_us = int(folder.joinpath("cpu.cfs_quota_us").read_text())
            found += [quota_us / int(folder.joinpath("cpu.cfs_period_us").read_text())] if quota_us > 0 else []
    return min(found, default=None)


def memory_limit(root: Path = _ROOT, own: Path = _OWN) -> int | None:
    """Return how many bytes this process and those beside it may take; None: any."""
    found = []
    for folder in _folders("memory", root, own):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # "max" is no number
                found.append(int(folder.joinpath(name).read_text()))
    return min((most for most in found if most < _NONE), default=None)


def memory_left(root: Path = _ROOT, own: Path = _OWN) -> int | None:
    """Return how many bytes of that are left; None: any. A cache of files is given up when memory is wanted."""
    found = []
    for folder in _folders("memory", root, own):
        for most, used, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            with contextlib.suppress(OSError, ValueError):
                limit, taken = (int(folder.joinpath(name).read_text()) for name in (most, used))
                stat = dict(line.split() for line in folder.joinpath("memory.stat").read_text().splitlines())
                found += [max(0, limit - taken + int(stat.get(cache, 0)))] if limit < _NONE else []
    return min(found, default=None)


def _folders(controller: str, root: Path, own: Path) -> Iterator[Path]:
    """Yield the folders that say what this process may have, its own and those above, in both versions."""
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" or controller in controllers.split(","):
                top = root / controllers if controllers else root
                group = top / path.lstrip("/")
                yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(top))
