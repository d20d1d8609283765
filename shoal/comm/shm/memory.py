"""Memory without a name that several processes map. It is gone with the last of them, however that one ends."""

import contextlib
import ctypes
import fcntl
import mmap
import os
import sys

from shoal.core.errors import PlanError

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; not among the names of Python's mmap


def is_supported() -> bool:
    """Return whether the kernel has what shared memory stands on."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


def refuse_other_systems() -> None:
    """Raise PlanError where it has not."""
    if not is_supported():
        raise PlanError("shared memory between workers needs Linux 5.3 or newer. Use Gloo here.")


def create(num_bytes: int) -> int:
    """Return the descriptor of zeroed memory of that size, which nobody can shrink under the others' feet."""
    try:
        descriptor = os.memfd_create("shoal", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise PlanError(f"this system has no memory for workers to share: {error}. Use Gloo here.") from error
    try:
        os.ftruncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class SharedMap:
    """A map of the memory behind `descriptor`, which is closed. It lasts until the last view of it is gone."""

    def __init__(self, descriptor: int) -> None:
        try:
            self.map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)
        with contextlib.suppress(OSError):  # only where the system leaves huge pages of shared memory to the program
            self.map.madvise(mmap.MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def populate(self, begin: int, end: int) -> None:
        """Take the pages of bytes [begin, end) now: the first use is then as fast as any."""
        begin -= begin % mmap.PAGESIZE
        if begin < end:
            with contextlib.suppress(OSError):  # an older kernel: the first use is slower
                self.map.madvise(_POPULATE_WRITE, begin, end - begin)
