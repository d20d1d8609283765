"""What each kind of fault does to the process that it strikes."""

import contextlib
import errno
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_MOST_FILLED = 1 << 30
"""A disk with more space than this is somebody's: it is not filled."""


def kill(_seconds: float | None, _path: Path | None) -> None:
    """End this process as the kernel does when memory is short: nothing of it is told."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop(seconds: float | None, _path: Path | None) -> None:
    """Stop this process; with `seconds`, let another continue it after so long."""
    if seconds is not None:
        # A session of its own: stopped and ended with nobody. It ends by itself.
        command = f"sleep {seconds:f}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", command], start_new_session=True, stdin=subprocess.DEVNULL)
    os.kill(os.getpid(), signal.SIGSTOP)


def slow(seconds: float | None, _path: Path | None) -> None:
    """Take longer."""
    time.sleep(seconds or 0.0)


def cut(_seconds: float | None, _path: Path | None) -> None:
    """Shut down every TCP connection of this process: to the other workers and to the store. On Linux alone."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # closed meanwhile, or no socket
            if entry.readlink().name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        connection.getpeername()  # not one that listens
                        connection.shutdown(socket.SHUT_RDWR)


def corrupt(_seconds: float | None, path: Path | None) -> None:
    """Flip a bit in the middle of the file `path`; in a folder, of its largest file."""
    assert path is not None, "this point tells no path: give the fault one"
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    flip(max(files, key=lambda file: file.stat().st_size))


def fill_disk(_seconds: float | None, path: Path | None) -> None:
    """Raise what a write to a full disk raises."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path or ""))


KINDS: dict[str, Callable[[float | None, Path | None], None]] = {
    "kill": kill,
    "stop": stop,
    "slow": slow,
    "cut": cut,
    "corrupt": corrupt,
    "fill_disk": fill_disk,
}


def flip(file: Path, offset: int | None = None) -> None:
    """Flip the lowest bit of one byte of `file`, in place: the one in the middle, or at `offset`."""
    with file.open("r+b") as opened:
        size = opened.seek(0, os.SEEK_END)
        assert size, f"{file} is empty"
        opened.seek(size // 2 if offset is None else offset)
        byte = opened.read(1)
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte[0] ^ 1]))


@contextmanager
def filled(folder: Path, *, leave_bytes: int = 0) -> Iterator[None]:
    """Fill the small filesystem that holds `folder`, but for `leave_bytes`, for the length of a `with` block."""
    free = _free_bytes(folder)
    assert free <= _MOST_FILLED, f"{folder} has {free} bytes free: mount a small filesystem for it"
    filler = folder / ".filler"
    try:
        with filler.open("wb") as file:
            while (room := _free_bytes(folder) - leave_bytes) > 0:
                try:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), min(room, 1 << 20))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    break
        yield
    finally:
        filler.unlink(missing_ok=True)


def _free_bytes(folder: Path) -> int:
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize
