"""What the process of a nursery does (nursery.py): it forks workers on request, and tells how they end."""

import contextlib
import errno
import gc
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable

from shoal.core.notice import SIGNALS

NUMBER = struct.Struct("i")
_LARGEST_REQUEST_BYTES = 64 << 10
_REFUSED_S = 5.0
"""How long a system may refuse a process or a descriptor: a worker that has just died frees its own within that."""
_ASK_AGAIN_S = 0.1


def serve(control: socket.socket) -> list[str] | None:
    """Fork workers on request, until the launcher is gone. Returns in them as well, with the arguments to run."""
    gc.collect()
    gc.freeze()  # or the first collection in a worker would copy all of it
    nursery = os.getpid()
    ends: dict[int, tuple[int, int]] = {}  # by the descriptor of a child: its process id, and where its end is told
    with control, selectors.DefaultSelector() as selector:
        with contextlib.suppress(BrokenPipeError):  # the launcher is gone
            control.send(b"imported")
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():  # the launcher's end ends it too
                if key.fd != control.fileno():
                    selector.unregister(key.fd)
                    _tell_end(key.fd, *ends.pop(key.fd))
                    continue
                data, descriptors, _, _ = socket.recv_fds(control, _LARGEST_REQUEST_BYTES, 2)
                if not data:
                    return None
                output, tells = descriptors
                signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # ignored in a worker until it has become one
                pid, child = _fork()
                if pid == 0:
                    for earlier, (_, other) in ends.items():
                        os.close(earlier)
                        os.close(other)
                    os.close(tells)
                    return _become(output, nursery, **json.loads(data))
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
                os.close(output)
                os.write(tells, NUMBER.pack(pid))
                if pid < 0:
                    os.close(tells)
                    continue
                ends[child] = (pid, tells)
                selector.register(child, selectors.EVENT_READ)


def _fork() -> tuple[int, int]:
    """Return the process id of a new child, and a descriptor of it; a negative error number if neither can be had.

    In the child, the id is 0.
    """
    try:
        pid = _ask(os.fork)
        if pid == 0:
            return 0, -1
        try:
            return pid, _ask(lambda: os.pidfd_open(pid))
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
    except OSError as error:
        return -(error.errno or errno.EAGAIN), -1


def _ask(call: Callable[[], int]) -> int:
    """Return what `call` gives; where the system refuses it, for a while again and again."""
    end_s = time.monotonic() + _REFUSED_S
    while True:
        try:
            return call()
        except OSError:
            if time.monotonic() >= end_s:
                raise
        time.sleep(_ASK_AGAIN_S)


def _become(output: int, nursery: int, arguments: list[str], env: dict[str, str]) -> list[str]:
    """Be a process of one's own, as if started by `python -m shoal ARGUMENTS`."""
    os.setsid()
    for number in SIGNALS:  # which the nursery ignores
        signal.signal(number, signal.SIG_DFL)
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    os.environ.update(env)
    arguments = [*arguments, "--parent", str(nursery)]  # who may be gone already
    sys.argv[1:] = arguments
    return arguments


def _tell_end(child: int, pid: int, tells: int) -> None:
    """Tell the launcher how a worker has ended."""
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):  # nobody wants to know
        os.write(tells, NUMBER.pack(os.waitstatus_to_exitcode(status)))
    os.close(tells)
    os.close(child)
