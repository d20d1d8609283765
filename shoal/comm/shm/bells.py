"""Doorbells between workers of one host: semaphores in shared memory, one for each ordered pair.

1. A worker rings: it adds one to its semaphore of each other worker. What it wrote to memory before is then visible to
   whoever hears that (the C library orders memory around semaphores, on every processor).
2. A worker waits: it takes one ring of each other. Who has rung already costs no system call; for the others it sleeps
   in the kernel, without spinning, except shortly where every worker can have a core of its own.
3. It sleeps in slices; between them `Watch` tells who is dead, gone or silent, and `CALLS` what others have found out.

Example: 3 workers ring and wait. Worker 2 comes last: 0 and 1 sleep, each woken by its own semaphore; 2 finds two rings
there and goes on at once.
"""

import ctypes
import errno
import os
import time
from functools import cache
from typing import Any

from shoal.comm.calls import CALLS
from shoal.comm.shm.memory import SharedMap
from shoal.comm.shm.watch import LINE_BYTES, SLICE_S, Watch

SPIN_S = 50e-6
"""About what it costs to fall asleep and be woken by another core (2 virtual cores, November 2026)."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@cache
def _library(*, keeps_lock: bool) -> Any:
    """Return the C library; its calls keep Python's lock where they are over in no time, and let it go where not."""
    library = ctypes.PyDLL(None) if keeps_lock else ctypes.CDLL(None, use_errno=True)
    library.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
    library.sem_post.argtypes = [ctypes.c_void_p]
    library.sem_trywait.argtypes = [ctypes.c_void_p]
    library.sem_timedwait.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    if hasattr(library, "sem_clockwait"):  # glibc 2.30; the older call goes wrong when somebody sets the clock
        library.sem_clockwait.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    return library


def bells_bytes(count: int) -> int:
    """Return the bytes of one set of bells among `count` workers."""
    return count * count * LINE_BYTES  # sem_t is 32 bytes or less on Linux


def make_bells(memory: SharedMap, offset: int, count: int) -> None:
    """Initialise one set of bells at `offset`. Called by one worker, before the others know of it."""
    for number in range(count * count):
        _library(keeps_lock=True).sem_init(memory.address + offset + number * LINE_BYTES, 1, 0)


class Bells:
    """One worker's end of a set of bells."""

    def __init__(self, memory: SharedMap, offset: int, *, index: int, count: int, watch: Watch) -> None:
        self._memory = memory  # what the addresses below point into
        address = memory.address + offset
        others = [other for other in range(count) if other != index]
        self._out = [address + (index * count + other) * LINE_BYTES for other in others]
        self._in = {other: address + (other * count + index) * LINE_BYTES for other in others}
        self._missing = list(others)  # who has not rung yet in this round
        self._watch = watch
        self._spin_s = SPIN_S if count <= len(os.sched_getaffinity(0)) else 0.0
        quick = _library(keeps_lock=True)
        self._post, self._try = quick.sem_post, quick.sem_trywait
        self.entered = 0
        """How often this worker has rung."""
        self.waiting = ""
        """What it waits in, once it has for a slice."""
        self.members = watch.numbers
        CALLS.add_lane(watch.new_lane(), self)

    def ring(self) -> None:
        """Tell every other worker that this one is here."""
        if self._watch.failure:
            self._watch.check()
        self.entered += 1
        post = self._post
        for bell in self._out:
            post(bell)

    def heard(self) -> bool:
        """Return whether each other worker has rung once more; takes those rings if so. Never waits."""
        self._missing = [other for other in self._missing if self._try(self._in[other]) != 0]
        if self._missing:
            return False
        self._missing = list(self._in)
        return True

    def wait(self, during: str) -> None:
        """Wait until each other worker has rung once more, and take those rings.

        Raises PeerLost, saying `during` what, when one is dead, has left, or is silent for the group's timeout.
        """
        if self.heard():
            return
        until_s = time.perf_counter() + self._spin_s
        while time.perf_counter() < until_s:
            if self.heard():
                return
        while self._missing:
            self._wait_for(self._missing[-1], during)
            self._missing.pop()
        self._missing = list(self._in)

    def _wait_for(self, other: int, during: str) -> None:
        watch, bell = self._watch, self._in[other]
        watch.check()
        deadline_s = time.monotonic() + watch.timeout_s
        try:
            while not _sleep(bell):
                watch.note_waiting(other)
                self.waiting = during
                verdict = watch.verdict_on(other)
                if verdict is None and time.monotonic() > deadline_s:
                    verdict = watch.silence_of(other)
                if verdict is not None:
                    # What it rang before it went counts: a worker may leave after the last thing that it has to do.
                    if self._try(bell) == 0:
                        return
                    raise watch.lose(verdict, during)
                CALLS.check()  # known from elsewhere: waiting is in vain, whoever it is for
        finally:
            self.waiting = ""
            watch.note_going_on()


def _sleep(bell: int) -> bool:
    """Return True when the bell rings, False when it has not for a slice, or when a signal came."""
    library = _library(keeps_lock=False)
    has_clock = hasattr(library, "sem_clockwait")
    clock = time.CLOCK_MONOTONIC if has_clock else time.CLOCK_REALTIME
    end_ns = time.clock_gettime_ns(clock) + int(SLICE_S * 1e9)
    end = _Timespec(*divmod(end_ns, 1_000_000_000))
    if has_clock:
        failed = library.sem_clockwait(bell, clock, ctypes.byref(end))
    else:
        failed = library.sem_timedwait(bell, ctypes.byref(end))
    if failed and ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
        raise OSError(ctypes.get_errno(), "a semaphore in shared memory cannot be waited for")
    return not failed
