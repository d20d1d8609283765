"""Where a pack can be staged: the storage tiers of this node, measured, and the choice between them.

1. Candidates are folders of four kinds: memory, the node's own disk, scratch, project; each file system once. When
   several nodes stage together, only the first two: in a place that they share, each would have a copy of its own.
2. Each is measured: how fast it reads (shoal.data.storage) and what room it has, less a reserve. A file system in
   memory has no more room than the memory that is available to this job, a quarter of all memory kept for training.
3. The fastest with room for the whole pack is taken; else the fastest with room for the parts that this node reads;
   else the roomiest, for as many of these as fit, in the order in which they are wanted. The rest is read in place.
4. A tier that is not clearly faster than where the pack lies is not worth the copy, and neither is the same one.

Example: 300 GB on a shared file system at 0.8 GB/s; /dev/shm reads 8 GB/s with room for 180 GB, a local disk 3 GB/s
with room for 900 GB: the disk. With 150 GB, memory. With 2 TB of which this node reads 100 GB: memory, these alone.
"""

import contextlib
import math
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.core.errors import ConfigError
from shoal.core.host import available_memory, memory_bytes
from shoal.core.units import format_bytes
from shoal.data.stage.copies import check_own, folder_in
from shoal.data.stage.locks import FileLock
from shoal.data.storage import measure_storage

WORTH = 1.2
"""How much faster a tier must be than the source."""
MEASURE_S = 0.2
_DISK_RESERVE, _MEMORY_RESERVE = 0.05, 0.25
_SAMPLE_BYTES, _PIECE_BYTES = 32 << 20, 4 << 20
_FOLDERS = {
    "memory": ("/dev/shm",),  # noqa: S108  to be measured
    "local": ("$SLURM_TMPDIR", "$LOCAL_SCRATCH", "$LSCRATCH", "$JOBFS", "$TMPDIR", "", "/local", "/localscratch"),
    "scratch": ("$SCRATCH", "$WORK"),
    "project": ("$PROJECT",),
}
"""Where sites put them; "" is Python's folder for temporary files."""


_SHARED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "afs", "wekafs", "pvfs", "orangefs", "fuse.")
"""How the names of file systems begin that several hosts share."""
LOCAL_KINDS = ("memory", "local")


@dataclass(frozen=True)
class Tier:
    """A place for copies."""

    kind: str
    path: Path
    read_bytes_per_s: float
    room_bytes: int

    def __str__(self) -> str:
        rate = f"{format_bytes(self.read_bytes_per_s)}/s, " if math.isfinite(self.read_bytes_per_s) else ""
        return f"{self.path} ({rate}room for {format_bytes(self.room_bytes)})"


@dataclass(frozen=True)
class Choice:
    """Where the pack goes, and why."""

    tier: Tier | None
    """None: it stays where it is."""
    parts: tuple[int, ...]
    """Those that are copied, in the order in which they come."""
    reason: str


def places() -> dict[Path, str]:
    """Return the folders of this node that copies can go to, each file system once, with their kinds."""
    found, seen = {}, set()
    for kind, names in _FOLDERS.items():
        for name in names:
            folder = _folder(name)
            with contextlib.suppress(OSError):
                device = folder.stat().st_dev
                if device not in seen and folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
                    seen.add(device)
                    found[folder] = _kind(folder, kind)
    return found


def find_tiers(*, seconds: float = MEASURE_S, reserve_bytes: int | None = None) -> list[Tier]:
    """Return this node's tiers, measured for `seconds` each, fastest first."""
    tiers = []
    for folder, kind in places().items():
        with contextlib.suppress(ConfigError, OSError):  # full, without locks, another's, or broken: no place for it
            check_locks(folder)
            check_own(folder_in(folder))
            tiers.append(measured(kind, folder, seconds, reserve_bytes))
    return sorted(tiers, key=lambda tier: -tier.read_bytes_per_s)


def given_tier(folder: Path, *, reserve_bytes: int | None = None) -> Tier:
    """Return the tier that somebody asked for by its folder: however fast it is, and made where it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--to {folder}: no folder can be made there ({error.strerror}).") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--to {folder}: it cannot be written to.")
    try:
        check_locks(folder)
    except OSError as error:
        raise ConfigError(
            f"--to {folder}: its file system has no locks ({error.strerror}), by which the processes that use a copy "
            "know of each other. Name another folder; Lustre has them when it is mounted with `flock`."
        ) from None
    check_own(folder_in(folder))
    return Tier("given", folder, math.inf, room(folder, reserve_bytes=reserve_bytes))


def check_locks(folder: Path) -> None:
    """Raise OSError where files in `folder` cannot be locked."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".shoal-lock-") as file, FileLock(Path(file.name)) as lock:
        lock.take()


def measured(kind: str, folder: Path, seconds: float, reserve_bytes: int | None) -> Tier:
    """Return the tier that `folder` is."""
    room_bytes = room(folder, reserve_bytes=reserve_bytes)
    return Tier(kind, folder, measure_storage(folder, seconds=seconds).read_bytes_per_s, room_bytes)


def room(folder: Path, *, reserve_bytes: int | None = None) -> int:
    """Return how many bytes may be put into `folder` so that `reserve_bytes` stay free there.

    By default these are a twentieth of a disk, and of memory a quarter.
    """
    usage = shutil.disk_usage(folder)
    kept = int(_DISK_RESERVE * usage.total) if reserve_bytes is None else reserve_bytes
    if not is_memory(folder):
        return max(0, usage.free - kept)
    kept = int(_MEMORY_RESERVE * memory_bytes()) if reserve_bytes is None else reserve_bytes
    return max(0, min(usage.free, available_memory() - kept))


def is_memory(folder: Path) -> bool:
    """Return whether `folder` is on a file system in memory."""
    return file_system(folder) in ("tmpfs", "ramfs")


def _kind(folder: Path, kind: str) -> str:
    """Return which kind `folder` is, which is usually `kind`."""
    if is_memory(folder):
        return "memory"
    return "scratch" if kind == "local" and is_shared(folder) else kind


def is_shared(folder: Path) -> bool:
    """Return whether `folder` is on a file system that several hosts share."""
    return file_system(folder).startswith(_SHARED)


def file_system(folder: Path) -> str:
    """Return the type of the file system that `folder` is on, as the kernel calls it, or ""."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return ""
    types = {fields[1]: fields[2] for fields in mounts}
    resolved = folder.resolve()
    return next((types[str(path)] for path in (resolved, *resolved.parents) if str(path) in types), "")


def source_rate(file: Path) -> float:
    """Return how fast the first part of `file` is read, when it is not in memory, in bytes a second."""
    buffer, size = bytearray(_PIECE_BYTES), 0
    with file.open("rb", buffering=0) as opened:
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.fsync(opened.fileno())  # what was just written is only forgotten when it is on the disk
            os.posix_fadvise(opened.fileno(), 0, _SAMPLE_BYTES, os.POSIX_FADV_DONTNEED)
        begin_s = time.perf_counter()
        while size < _SAMPLE_BYTES and (count := opened.readinto(buffer)):
            size += count
    return size / (time.perf_counter() - begin_s)


def choose(
    tiers: Sequence[Tier], sizes: Sequence[int], *, wanted: Sequence[int] | None = None, source_bytes_per_s: float = 0.0
) -> Choice:
    """Return where a pack goes whose parts have `sizes` bytes, and of which this node reads `wanted`, in this order."""
    first = list(dict.fromkeys(wanted if wanted is not None else range(len(sizes))))
    whole = [*first, *sorted(set(range(len(sizes))) - set(first))]
    faster = [tier for tier in tiers if tier.read_bytes_per_s >= WORTH * source_bytes_per_s]
    if not faster:
        best = f"; the fastest is {tiers[0]}" if tiers else ""
        rate = format_bytes(source_bytes_per_s)
        return Choice(None, (), f"read in place at {rate}/s: no storage of this node is clearly faster{best}.")
    for parts, what in ((whole, "whole pack"), (first, f"{len(first)} parts that this node reads")):
        needed_bytes = sum(sizes[part] for part in parts)
        for tier in faster:
            if tier.room_bytes >= needed_bytes:
                slower = "".join(f"; {other} has no room" for other in faster[: faster.index(tier)])
                # One that was asked for by its folder has no others beside it.
                first_of = "the fastest with room" if math.isfinite(tier.read_bytes_per_s) else "it has room"
                return Choice(tier, tuple(parts), f"{tier}: {first_of} for the {what}{slower}.")
    tier = max(faster, key=lambda each: each.room_bytes)
    fitting = _fitting(first, sizes, tier.room_bytes)
    if not fitting:
        return Choice(None, (), f"read in place: not one part fits; the most room is in {tier}.")
    return Choice(
        tier, fitting, f"{tier}: room for {len(fitting)} of {len(first)} parts; the others are read in place."
    )


def _fitting(parts: Sequence[int], sizes: Sequence[int], room_bytes: int) -> tuple[int, ...]:
    taken = 0
    for count, part in enumerate(parts):
        taken += sizes[part]
        if taken > room_bytes:
            return tuple(parts[:count])
    return tuple(parts)


def _folder(name: str) -> Path:
    if name.startswith("$"):
        return Path(os.environ.get(name[1:], "") or os.devnull)
    return Path(name or tempfile.gettempdir())
