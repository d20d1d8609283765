"""The processes that follow a run for loggers which talk to a network: started, and ended, by whoever starts the run.

Each is `python -m shoal log RUN --to NAME --follow`, reads the run folder, and is none of training's business. Its
standard input is a pipe that nobody writes to: when that is closed, the run is over, be it that whoever started it was
killed. Then it delivers the rest and ends; here it is waited for, and ended after a while.
"""

import contextlib
import os
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import IO

from shoal.core.notice import SIGNALS, read_notice_s
from shoal.core.run_folder import RunFolder
from shoal.training.loggers.delivery import Delivery, Say
from shoal.training.loggers.registry import LOGGERS, loggers_of

LOOK_S = 1.0
"""How often events are looked for."""
_LOOK_S_PER_WORKER = 0.01
LAST_S = 60.0
"""How long the rest may take when a run is over; a part of the notice where it was stopped."""
_NOTICE_SHARE = 0.2


@contextlib.contextmanager
def followed(folder: RunFolder, *, say: Say) -> Iterator[None]:
    """Have the run's loggers that are processes follow it for the length of a `with` block.

    The run's result and page must be written within the block.
    """
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name in loggers_of(folder):
            if LOGGERS[name].is_apart:
                try:
                    started[name] = _start(folder, name)
                except OSError as error:  # no more processes, no more memory: not for a logger's sake
                    say(f"{name} does not follow {folder.name}: {error}. Training goes on.")
        yield
    finally:
        if started:
            _end(folder, started, say)


def _start(folder: RunFolder, name: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "shoal", "log", str(folder.path.resolve()), "--to", name, "--follow"]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches us alone, and what it starts can be ended with it
    )


def _end(folder: RunFolder, started: "dict[str, subprocess.Popen[bytes]]", say: Say) -> None:
    is_stopped = folder.read_result()["status"] in ("stopped", "unfinished")
    limit_s = min(LAST_S, _NOTICE_SHARE * read_notice_s()) if is_stopped else LAST_S
    for process in started.values():
        assert process.stdin is not None
        process.stdin.close()
    ends_s = time.monotonic() + limit_s
    for name, process in started.items():
        try:
            process.wait(timeout=max(0.0, ends_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            later = shlex.join(["shoal", "log", str(folder.path), "--to", name])
            say(f"{name} took more than {limit_s:g} s for the last of {folder.name}. The rest later: {later}")
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)  # with what the library has started
                process.wait()


def follow(folder: RunFolder, name: str, *, pipe: IO[bytes], say: Say) -> bool:
    """Be the process that follows a run for the logger `name`, until `pipe` is closed; return whether all is there."""
    # A batch system tells all processes, and the end comes by the pipe. Blocked, not ignored: that a library's own
    # processes inherit as well, whatever they are written in.
    signal.pthread_sigmask(signal.SIG_BLOCK, {*SIGNALS, signal.SIGINT})
    delivery = Delivery(folder, name, say=say)
    is_over = closing_of(pipe)
    while not is_over(max(LOOK_S, _LOOK_S_PER_WORKER * len(list(folder.events.glob("rank-*.jsonl"))))):
        delivery.advance()
    return delivery.finish()


def closing_of(pipe: IO[bytes]) -> Callable[[float], bool]:
    """Return a function that waits for so many seconds, and returns whether `pipe` was closed meanwhile."""
    selector = selectors.DefaultSelector()
    selector.register(pipe, selectors.EVENT_READ)

    def is_closed(wait_s: float) -> bool:
        return bool(selector.select(timeout=wait_s)) and not os.read(pipe.fileno(), 1024)

    return is_closed
