"""The copies of packs on a node: who uses them, who brings them, and their removal when nobody does.

1. A copy is a folder with the pack's manifest and those parts that have come. Every process that uses it holds a shared
   lock on its `owners.lock`; the kernel lets go of it when the process ends, however it ends.
2. One of them holds `leader.lock` and fetches the parts. When it dies, another one has the lock, and goes on.
3. Who leaves tries for `owners.lock` alone: if nobody else holds it, the folder is removed, that file last. A small
   process of its own, the sweeper (keeper.py), waits for the same, and removes what killed processes have left.
4. The desk, a folder of the node's temporary files, has a link to each copy. Whoever stages next (or `shoal stage
   --clean`) removes those copies that nobody owns: the sweeper was killed, too, or the host went down.

Example: workers 0 to 3 of a node stage corpus.pack. Worker 2 is first at the desk, measures, and makes the copy; the
others find it there. Worker 2 is killed at part 7: worker 0 has the lock a moment later, and fetches part 7 again.
"""

import contextlib
import hashlib
import json
import os
import platform
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError, DataError
from shoal.core.files import write_whole
from shoal.data.stage.locks import FileLock

OWNERS, LEADER, PLAN, RELEASE = "owners.lock", "leader.lock", "plan.json", "release"
_POLL_S = 0.02
_SWEPT_S = 5.0


class Copy:
    """A copy of a pack that this process owns, with others."""

    def __init__(self, path: Path, owners: FileLock) -> None:
        self.path, self.owners = path, owners
        self.leader = FileLock(path / LEADER)

    def leave(self) -> bool:
        """Own it no more; return whether it was removed, because nobody else does."""
        self.leader.release()
        if not self.owners.take():
            return _is_swept(self.path)
        remove(self.path)
        self.owners.release()
        return True


class Desk:
    """Where the copies of this user on this node are known."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or Path(tempfile.gettempdir()) / f"shoal-stage-{os.getuid()}-{platform.node()}"
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_own(self.path):
            raise ConfigError(f"{self.path} belongs to somebody else: set TMPDIR to a folder of your own.")

    @contextmanager
    def alone(self, *, timeout_s: float) -> Iterator[None]:
        """Be the only one of this node who makes copies, for the length of a `with` block."""
        lock, end_s = FileLock(self.path / "desk.lock"), time.monotonic() + timeout_s
        while not lock.take():
            if time.monotonic() > end_s:
                raise DataError(f"another process has been choosing where to stage for {timeout_s:g} s: {lock.path}.")
            time.sleep(_POLL_S)
        with lock:
            yield

    def copies(self) -> list[Path]:
        """Return the folders of all copies that are known, used or not."""
        found = []
        for link in sorted(self.path.iterdir()):
            if link.is_symlink():
                if link.is_dir():
                    found.append(link.resolve())
                else:
                    link.unlink(missing_ok=True)
        return found

    def clean(self, places: Iterable[Path] = ()) -> list[tuple[Path, int]]:
        """Remove the copies that nobody owns; return them, with the bytes that each gave back.

        Those that are known, and those in `places`, of which the desk may have been emptied since.
        """
        removed = []
        folders = [folder for folder in map(folder_in, places) if _is_own(folder)]
        for path in {*self.copies(), *(copy for folder in folders for copy in folder.glob("*.pack"))}:
            size = present_bytes(path)
            with FileLock(path / OWNERS) as lock:
                if (path / OWNERS).exists() and path.stat().st_uid == os.getuid() and lock.take():
                    remove(path)
                    removed.append((path, size))
        return removed

    def join(self, path: Path, *, timeout_s: float) -> Copy:
        """Return the copy at `path`, which is made where there is none."""
        end_s = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(FileNotFoundError):  # the folder around it is just being removed: once more
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                check_own(path.parent)
                path.mkdir(mode=0o700, exist_ok=True)
            owners = FileLock(path / OWNERS)
            if owners.take(shared=True):  # not while somebody removes it, or looks whether to
                break
            if time.monotonic() > end_s:
                raise DataError(f"{path} has been locked by another process for {timeout_s:g} s.")
            time.sleep(_POLL_S)
        link = self.path / hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
        with contextlib.suppress(FileExistsError):
            link.symlink_to(path.resolve())
        return Copy(path, owners)


def folder_of(place: Path, name: str) -> Path:
    """Return the folder of the copy `name` in `place`: this host's own, as a place may be shared by several."""
    return folder_in(place) / name


def folder_in(place: Path) -> Path:
    """Return the folder of all copies of this user and host in `place`."""
    return place / f"shoal-{os.getuid()}-{platform.node()}"


def check_own(folder: Path) -> None:
    """Raise ConfigError if another user has made the folder for our copies: they could change what is read there."""
    if os.path.lexists(folder) and not _is_own(folder):
        raise ConfigError(f"{folder} belongs to somebody else: no copy can be kept safely there. Name another folder.")


def _is_own(folder: Path) -> bool:
    """Return whether `folder` is there, is no link, and is ours; one that is, is closed to others."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
        return False
    if stat.S_IMODE(found.st_mode) != 0o700:
        folder.chmod(0o700)
    return True


def is_owned(path: Path) -> bool:
    """Return whether any process uses the copy at `path`."""
    with FileLock(path / OWNERS) as lock:
        return not lock.take()


def remove(path: Path) -> None:
    """Remove the copy at `path`, of which the caller holds `owners.lock` alone: that file goes last."""
    for entry in list(path.iterdir()):
        if entry.name == OWNERS:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
    (path / OWNERS).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # somebody has just begun to use it again
        path.rmdir()
        path.parent.rmdir()  # only if it was the last one of this user there


def _is_swept(path: Path) -> bool:
    """Return whether the copy at `path`, which could not be had alone, is gone: whoever has it alone removes it."""
    end_s = time.monotonic() + _SWEPT_S
    while path.exists() and time.monotonic() < end_s:
        try:
            handle = os.open(path / OWNERS, os.O_RDONLY)
        except FileNotFoundError:
            pass  # it went last: the folder follows
        else:
            with FileLock.adopt(path / OWNERS, handle) as lock:
                if lock.take(shared=True):
                    return False  # others share it
        time.sleep(_POLL_S)
    return not path.exists()


def present_bytes(path: Path) -> int:
    """Return the size of all files of the copy at `path`."""
    sizes = 0
    for file in (path / "parts").glob("*"):
        with contextlib.suppress(FileNotFoundError):
            sizes += file.stat().st_size
    return sizes


def pack_id(manifest: bytes) -> str:
    """Return what tells a pack from all others: the manifest has the checksums of all its parts."""
    return hashlib.sha256(manifest).hexdigest()[:12]


def write_plan(path: Path, plan: dict[str, Any]) -> None:
    """Write what is to come to the copy at `path`, and what cannot."""
    write_whole(path / PLAN, json.dumps(plan))


def read_plan(path: Path) -> dict[str, Any] | None:
    """Return the same, or None where nobody has written it yet."""
    try:
        plan: dict[str, Any] = json.loads((path / PLAN).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    return plan
