"""How fast a folder's storage reads files that are not in the host's memory.

1. Write a file of random bytes there, of a size that the time allows, and have it reach the storage.
2. Ask the kernel to forget it (posix_fadvise), so that reading it again is cold. Storage that is memory (/dev/shm) and
   servers with a cache of their own answer from there, as they will in training.
3. Read it in large pieces, remove it, and return the rate.
"""

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from shoal.core.errors import ConfigError
from shoal.spec.cluster import Storage

_PIECE_BYTES = 4 << 20
_MOST_BYTES = 512 << 20
_MOST_OF_FREE = 0.05


def measure_storage(folder: Path, *, seconds: float) -> Storage:
    """Return what `folder` lies on, with its rate of cold reads, in about `seconds`. It is left as it was."""
    if not folder.is_dir():
        raise ConfigError(f"--storage {folder}: there is no such folder.")
    free_bytes = shutil.disk_usage(folder).free
    try:
        handle, name = tempfile.mkstemp(dir=folder, prefix=".shoal-probe-")
    except OSError as error:
        raise ConfigError(
            f"--storage {folder}: no file can be written there to read it back ({error.strerror})."
        ) from None
    try:
        size = _write(handle, most_bytes=int(min(_MOST_BYTES, _MOST_OF_FREE * free_bytes)), seconds=seconds / 2)
        rate = _read(handle, size)
    except OSError as error:
        raise ConfigError(f"--storage {folder}: reading and writing fails there ({error.strerror}).") from None
    finally:
        os.close(handle)
        Path(name).unlink(missing_ok=True)
    return Storage(path=str(folder.resolve()), read_bytes_per_s=rate, free_bytes=free_bytes)


def usual_folders() -> list[Path]:
    """Return where data usually lies: the current folder, memory, temporary files; each file system once."""
    folders, seen = [], set()
    for folder in (Path.cwd(), Path("/dev/shm"), Path(tempfile.gettempdir())):  # noqa: S108  to be measured
        with contextlib.suppress(OSError):
            device = folder.stat().st_dev
            if device not in seen and os.access(folder, os.W_OK):
                seen.add(device)
                folders.append(folder)
    return folders


def _write(handle: int, *, most_bytes: int, seconds: float) -> int:
    """Write pieces until `seconds` have passed or `most_bytes` are there; return how many bytes there are."""
    piece = os.urandom(_PIECE_BYTES)  # not zeros: some storage squeezes them
    end_s, size = time.perf_counter() + seconds, 0
    while size == 0 or (time.perf_counter() < end_s and size + _PIECE_BYTES <= most_bytes):
        size += os.write(handle, piece)
        os.fsync(handle)  # each piece: what waits in memory would take its time, unseen, at the end
    return size


def _read(handle: int, size: int) -> float:
    """Return the bytes per second of reading the file from its start."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    buffer = bytearray(_PIECE_BYTES)
    os.lseek(handle, 0, os.SEEK_SET)
    begin_s = time.perf_counter()
    while os.readv(handle, [buffer]):
        pass
    return size / (time.perf_counter() - begin_s)
