"""Locks on files that a dead process cannot keep: the kernel lets go of them (flock)."""

import contextlib
import errno
import fcntl
import os
import weakref
from pathlib import Path
from typing import Self

_held: "weakref.WeakSet[FileLock]" = weakref.WeakSet()


class FileLock:
    """A lock on `path`, which is made where it is not there. Shared by any number of holders, or one's alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = -1

    @classmethod
    def adopt(cls, path: Path, descriptor: int) -> "FileLock":
        """Return the lock on `path` that `descriptor` holds; see `detach`."""
        lock = cls(path)
        lock._handle = descriptor
        os.set_inheritable(descriptor, False)
        _held.add(lock)
        return lock

    def take(self, *, shared: bool = False) -> bool:
        """Return whether the lock was had, at once. One that is held is changed from shared to alone, or back.

        False, too, where the file was removed meanwhile, by somebody who held the lock, or its folder is no more.
        Raises OSError where the file system has no locks, or the file can neither be opened nor made.
        """
        if not self._open():
            return False
        try:
            fcntl.flock(self._handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            self.release()
            if isinstance(error, BlockingIOError):
                return False
            raise
        if not self._is_still_there():
            self.release()
            return False
        return True

    def wait(self) -> bool:
        """Return whether the lock was had, alone, once nobody else has it; there is no end to the wait but that."""
        if not self._open():
            return False
        fcntl.flock(self._handle, fcntl.LOCK_EX)
        if not self._is_still_there():
            self.release()
            return False
        return True

    def release(self) -> None:
        """Let go of the lock. Nothing happens where it is not held."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        _held.discard(self)

    def detach(self) -> int:
        """Return the descriptor that holds the lock: it is the caller's from now on."""
        handle, self._handle = self._handle, -1
        _held.discard(self)
        return handle

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _open(self) -> bool:
        """Return whether the file is there to be locked."""
        if self._handle < 0:
            try:
                self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            except (FileNotFoundError, NotADirectoryError):
                return False
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EROFS) or not self.path.exists():
                    raise
                self._handle = os.open(self.path, os.O_RDONLY)  # another user's: enough for a lock, but on NFS
            _held.add(self)
        return True

    def _is_still_there(self) -> bool:
        try:
            named = self.path.stat()
        except OSError:
            return False
        ours = os.fstat(self._handle)
        return (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino)


def _forget_in_child() -> None:
    """Close a forked child's copies: a lock is held while any copy is open, so the child would outlive its parent's."""
    for lock in list(_held):
        with contextlib.suppress(OSError):
            lock.release()


os.register_at_fork(after_in_child=_forget_in_child)
