"""A lock that a forked child finds free: threads that held one in the parent are not in the child to release it.

What it protects must be whole at any moment that another thread could run, as what one assignment changes is.
"""

import os
import threading
import weakref
from typing import Self


class ForkLock:
    """A threading.Lock, anew in every child."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _LOCKS.add(self)

    def __enter__(self) -> Self:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Be free, whoever has taken it."""
        self._lock = threading.Lock()


_LOCKS: "weakref.WeakSet[ForkLock]" = weakref.WeakSet()


def _renew_in_child() -> None:
    for lock in list(_LOCKS):
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_in_child)
