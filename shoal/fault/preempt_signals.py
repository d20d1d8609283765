"""Signals as something that a thread can wait for, while the main thread is deep in an engine.

Python runs a handler between two of the main thread's instructions: not while that waits in a collective. Its C part,
though, writes the signal's number at once to a descriptor (`signal.set_wakeup_fd`), on which a thread waits here.
Where somebody else has that descriptor, as an event loop, the handler itself writes, and the thread learns later.
"""

import contextlib
import os
import select
import signal
import socket
import threading
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

_POKE = 0
"""No signal has this number."""


class Listener:
    """Takes note of signals until `close`; handlers that were there before are called as well.

    Made in a thread other than the main one, it takes note of none: Python lets only that one handle signals.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._is_woken = False
        self._previous: dict[int, Any] = {}
        # Kept: each mention of `self._handle` makes another object, and ours must be known again when it is taken out.
        self._handler = self._handle
        if threading.current_thread() is threading.main_thread():
            self._install(numbers)
            _LISTENERS.add(self)

    @property
    def numbers(self) -> list[int]:
        """Which signals it takes note of."""
        return list(self._previous)

    def wait(self, timeout_s: float) -> list[int]:
        """Return the signals that came, after waiting `timeout_s` at most."""
        select.select([self._reader], [], [], max(0.0, timeout_s))
        with contextlib.suppress(BlockingIOError):
            return [number for number in self._reader.recv(4096) if number in self._previous]
        return []

    def poke(self) -> None:
        """Make `wait` return."""
        self._write(_POKE)

    def close(self) -> None:
        """Put back what was there before; where somebody has put himself before us meanwhile, he stays."""
        _LISTENERS.discard(self)
        self.take_out()
        self._previous = {}
        self._reader.close()
        self._writer.close()

    def take_out(self) -> None:
        """Give the handlers back, as far as they are still ours."""
        with contextlib.suppress(ValueError):  # not the main thread
            for number, previous in self._previous.items():
                if signal.getsignal(number) is self._handler:
                    signal.signal(number, previous if previous is not None else signal.SIG_DFL)
            if self._is_woken:
                now = signal.set_wakeup_fd(-1)
                if now not in (-1, self._writer.fileno()):
                    signal.set_wakeup_fd(now)
                self._is_woken = False

    def _install(self, numbers: Sequence[int]) -> None:
        before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._is_woken = before == -1
        if not self._is_woken:
            signal.set_wakeup_fd(before)
        for number in numbers:
            self._previous[number] = signal.getsignal(number)
            signal.signal(number, self._handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_woken:
            self._write(number)
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, frame)

    def _write(self, number: int) -> None:
        with contextlib.suppress(OSError):  # full: enough has been said; or closed
            self._writer.send(bytes([number]))


_LISTENERS: "weakref.WeakSet[Listener]" = weakref.WeakSet()


# A forked process has its parent's handlers and descriptor: ended by SIGTERM, it would ask its parent to stop. So they
# are taken out of it, and what comes before waits until then.
_mask = threading.local()


def _hold_back() -> None:
    numbers = {number for listener in list(_LISTENERS) for number in listener.numbers}
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _let_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _forget_in_child() -> None:
    for listener in list(_LISTENERS):
        listener.take_out()
    _let_through()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_back, after_in_parent=_let_through, after_in_child=_forget_in_child)
