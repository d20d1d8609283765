"""Waiting for an operation of an engine in such a way that something else can end the wait.

Gloo does not always tell whoever waits that the connection is closed: not for a message of which a part has arrived or
left (its Pair::signalException passes over those; 2026-04, torch 2.11 to 2.13). That wait then lasts until the group's
timeout. So a thread waits in Gloo, and the caller waits for the thread, or for the news that it is in vain.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeAlias

_Errand: TypeAlias = tuple[Callable[[], Any], "_Answer"]


class _Answer:
    def __init__(self) -> None:
        self.is_there = threading.Event()
        self.error: BaseException | None = None


class Waiter:
    """Waits for one operation at a time. A wait that was given up goes on in its thread, until the process ends."""

    def __init__(self) -> None:
        self._errands: SimpleQueue[_Errand | None] | None = None

    def wait(
        self, operation: Callable[[], Any], *, in_vain: Callable[[], BaseException | None], every_s: float
    ) -> None:
        """Return when `operation`, which waits, has returned; raise its error, or that of `in_vain` if it has one.

        `in_vain` is asked every `every_s`.
        """
        errands, answer = self._thread(), _Answer()
        errands.put((operation, answer))
        while not answer.is_there.wait(every_s):
            error = in_vain()
            if error is not None and not answer.is_there.wait(every_s):  # a little longer: it may yet say so itself
                self._errands = None  # the thread is lost to that operation
                raise error
        if answer.error is not None:
            raise answer.error

    def close(self) -> None:
        """End the thread, if it is not waiting."""
        if self._errands is not None:
            self._errands.put(None)
            self._errands = None

    def _thread(self) -> "SimpleQueue[_Errand | None]":
        if self._errands is None:
            self._errands = SimpleQueue()
            threading.Thread(target=_serve, args=(self._errands,), name="waiter", daemon=True).start()
        return self._errands


def _serve(errands: "SimpleQueue[_Errand | None]") -> None:
    while (errand := errands.get()) is not None:
        operation, answer = errand
        try:
            operation()
        except BaseException as error:  # it is the caller's
            answer.error = error
        del errand, operation  # or what it has sent or received would stay in memory until the next one
        answer.is_there.set()
        del answer
