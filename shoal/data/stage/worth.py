"""Whether a job should stage its pack at all: what is known before anything is measured.

1. A pack on storage of this node's own is read where it lies; so is one that is in memory already.
2. So is one of which the job reads less than half: a copy of all of it would cost more than it saves.
3. All others are measured (tiers.py), and go to storage that is clearly faster.

Example: corpus.pack on NFS, and the job takes 10 steps to try something out: it is read in place.
"""

import contextlib
import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shoal.data.pack.manifest import Manifest
from shoal.data.stage.tiers import file_system, is_shared

LEAST_READ = 0.5
"""What part of a pack's samples the job must read, at least."""
_IN_MEMORY = 0.9
_LOOKED_AT = 16


def why_not(path: Path, manifest: Manifest, *, read_fraction: float) -> str | None:
    """Return why the pack at `path` stays there, of which the job reads `read_fraction`; None if that must be measured.

    The answer goes on after "corpus.pack is".
    """
    if not is_shared(path):
        return f"read in place: it is on storage of this node ({file_system(path) or 'of unknown kind'})."
    if read_fraction < LEAST_READ:
        return f"read in place: the job reads {read_fraction:.1%} of its samples."
    if resident_fraction(path, manifest) >= _IN_MEMORY:
        return "read in place: it is in this node's memory already."
    return None


def resident_fraction(path: Path, manifest: Manifest) -> float:
    """Return about how much of the pack at `path` is in memory, by a look at some files; 0 where nobody can tell."""
    files = [file.name for part in manifest.parts for file in part.files]
    resident = pages = 0
    for name in files[:: -(-len(files) // _LOOKED_AT)]:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            found = _resident_pages(path / name)
            resident, pages = resident + int(found.sum()), pages + len(found)
    return resident / pages if pages else 0.0


def _resident_pages(file: Path) -> NDArray[np.bool_]:
    """Return for each page of `file` whether it is in memory: mincore(2)."""
    about = file.stat()
    count = -(-about.st_size // mmap.PAGESIZE)
    found = np.zeros(count, dtype=np.uint8)
    if about.st_uid != os.geteuid() and not os.access(file, os.W_OK):
        return found > 0  # of files of others, the kernel says that all is there, whether it is or not
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, dtype=np.uint8)
        address, length = ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(about.st_size)
        answer = ctypes.CDLL(None, use_errno=True).mincore(address, length, ctypes.c_void_p(found.ctypes.data))
        del view  # the map cannot be closed before
    if answer != 0:
        raise OSError(ctypes.get_errno(), "mincore")
    return found % 2 > 0
