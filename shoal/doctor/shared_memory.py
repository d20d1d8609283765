"""Memory that the processes of this host share."""

import contextlib
import os
import tempfile
from pathlib import Path

from shoal.comm.shm.kept import SHARED, remove_dead
from shoal.comm.shm.memory import is_supported
from shoal.core.units import format_bytes
from shoal.doctor.finding import Finding, ok, warning

_SUBJECT = "shared memory"
_CONTAINER_BYTES = 64 << 20
"""What Docker and Kubernetes give a container that asks for nothing."""
_LITTLE_BYTES = 1 << 30
"""Less than the state of a model of 60 million parameters with Adam, in float32."""
_FOR_WHAT = (
    "snapshots, from which the others go on when a worker is lost, packs staged in memory, and DataLoader workers"
)


def check_shared_memory(folder: Path = SHARED, size_bytes: int | None = None) -> list[Finding]:
    """Look at /dev/shm; `size_bytes` is what the file system says of itself."""
    remedy = f"mount it: mount -t tmpfs -o size=50% tmpfs {folder}"
    if not folder.is_dir():
        return [warning(_SUBJECT, f"there is no {folder}, which is for {_FOR_WHAT}", remedy)]
    if said := _why_not_written(folder):
        return [warning(_SUBJECT, f"{folder} cannot be written to ({said}); it is for {_FOR_WHAT}", remedy)]
    found = os.statvfs(folder)
    size = found.f_blocks * found.f_frsize if size_bytes is None else size_bytes
    free = min(size, found.f_bavail * found.f_frsize)
    if min(size, free) < _LITTLE_BYTES:
        return [_little(folder, size, free)]
    if not is_supported():
        fact = f"{os.uname().sysname} {os.uname().release} lacks pidfd_open: gradients of one host go through sockets"
        return [warning(_SUBJECT, fact, "use Linux 5.3 or newer for the faster way through memory")]
    return [ok(_SUBJECT, f"{folder}: {format_bytes(free)} free of {format_bytes(size)}")]


def check_left(folder: Path = SHARED) -> list[Finding]:
    """Remove the snapshots of this user's runs of which no process is left, as the next run would, and say so."""
    removed = remove_dead(folder) if folder.is_dir() else {}
    if not removed:
        return []
    runs = "a run that was killed" if len(removed) == 1 else f"{len(removed)} runs that were killed"
    fact = f"the snapshots of {runs} were still in {folder}: {format_bytes(sum(removed.values()))}, removed now"
    return [ok(_SUBJECT, fact, *map(str, removed))]


def _little(folder: Path, size: int, free: int) -> Finding:
    if size <= _CONTAINER_BYTES:
        fact = f"{folder} has {format_bytes(size)}, as in a container that was given none, for {_FOR_WHAT}"
        remedy = "start the container with --shm-size=8g or --ipc=host (Kubernetes: an emptyDir with medium: Memory)"
        return warning(_SUBJECT, fact, remedy)
    if size < _LITTLE_BYTES:
        fact = f"{folder} has only {format_bytes(size)} for {_FOR_WHAT}"
        return warning(_SUBJECT, fact, f"as root: mount -o remount,size=50% {folder}")
    fact = f"{folder} has {format_bytes(free)} free of {format_bytes(size)}: little for {_FOR_WHAT}"
    remedy = f"see what fills it: du -sh {folder}/*; copies of packs that nobody uses go with: shoal stage --clean"
    return warning(_SUBJECT, fact, remedy)


def _why_not_written(folder: Path) -> str:
    """Return why no memory can be taken there, or nothing."""
    try:
        handle, name = tempfile.mkstemp(dir=folder, prefix=".shoal-doctor-")
    except OSError as error:
        return error.strerror or str(error)
    try:
        os.write(handle, b"shoal")
    except OSError as error:
        return error.strerror or str(error)
    finally:
        os.close(handle)
        with contextlib.suppress(OSError):
            Path(name).unlink()
    return ""
