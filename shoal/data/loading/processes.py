"""Chunks of batches, loaded by processes: for datasets and transforms in Python, of which one thread runs at a time.

1. Each process is forked and knows the whole schedule: process w of W loads chunks w, w + W, w + 2W, ...
2. It loads into memory that it shares with this process: a few slots a process, filled again and again, because fresh
   shared memory is 25 times as slow (1.4 against 36 GB/s, 2026-11). A byte through a pipe says which slot is free, and
   the answer says where in it which tensor lies.
3. Chunks are taken from the processes in turn, so that they come in their order.
"""

import atexit
import contextlib
import mmap
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator
from itertools import islice
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess

import torch

from shoal.core.errors import ConfigError, DataError, ShoalError
from shoal.core.notice import leave_to_others
from shoal.data.loading.chunk import Load, Loaded
from shoal.data.loading.pace import Pace
from shoal.data.loading.patience import Patience
from shoal.data.loading.shared import SharedSlot, dump, shared_memory
from shoal.data.loading.shared import load as load_shared

_MOST_SLOT_BYTES = 4 << 30
_FAILED = 255
"""In the place of a slot's number: what follows is the error."""
_PIPES: set[Connection] = set()
"""The ends of this process, to all that load for it."""


class ProcessFeed:
    """What `load` makes of each of `work()`, once. The processes end with the iteration."""

    def __init__(
        self, work: Callable[[], Iterator[range]], load: Load, *, workers: int, pace: Pace, patience: Patience
    ) -> None:
        self._work, self._load, self._pace, self._patience = work, load, pace, patience
        self._workers = workers
        if current_process().daemon:
            raise ConfigError(
                f"{workers} loading processes were asked for in a daemonic process, which can have no children. Start "
                "it with daemon=False, or load by threads."
            )
        # The slot that is in use, and those that are filled meanwhile.
        self._slots = 1 + max(1, -(-pace.ahead // workers))
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._slot_bytes = min(_MOST_SLOT_BYTES, memory_bytes // (workers * self._slots)) // 4096 * 4096

    def chunks(self) -> Generator[Loaded, None, None]:
        """Yield what was loaded, in order; close it when you stop before the end."""
        processes: list[_Process] = []
        try:
            for number in range(self._workers):
                mine = islice(self._work(), number, None, self._workers)
                processes.append(_Process(mine, self._load, slots=self._slots, slot_bytes=self._slot_bytes))
            for number, _ in enumerate(self._work()):
                process = processes[number % self._workers]
                begin = time.perf_counter()
                loaded, slot, (load_s, load_cpu_s) = process.take(self._patience)
                given = time.perf_counter()
                yield loaded
                self._pace.note(
                    batches=len(loaded.batches),
                    waited_s=given - begin,
                    used_s=time.perf_counter() - given,
                    load_s=load_s,
                    load_cpu_s=load_cpu_s,
                )
                process.give_back(slot)
        finally:
            for process in processes:
                process.close()
            for process in processes:
                process.end()


class _Process:
    """One loading process, its slots, and the pipe to it."""

    def __init__(self, work: Iterator[range], load: Load, *, slots: int, slot_bytes: int) -> None:
        self._memories = [shared_memory(slot_bytes) for _ in range(slots)]
        self._pipe, theirs = get_context("fork").Pipe()
        _PIPES.add(self._pipe)
        arguments = (work, load, theirs, self._memories)
        self._process = ForkProcess(target=_serve, args=arguments, name="shoal-loader", daemon=True)
        with warnings.catch_warnings():
            # Python 3.12 warns of locks that another thread may hold at this moment. Those that the child takes are
            # free in it (core/fork_lock.py).
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        atexit.register(self._process.kill)  # multiprocessing's own way, SIGTERM, is not heard by it
        theirs.close()
        for slot in range(slots):
            self.give_back(slot)

    def take(self, patience: Patience) -> tuple[Loaded, int, tuple[float, float]]:
        """Return the next chunk, the slot that it is in, and how long loading took, and computing for it."""
        try:
            if not patience.lasts(self._pipe.poll):
                raise DataError(f"a loading process has delivered nothing for {patience.timeout_s:g} s (timeout_s).")
            slot = self._pipe.recv_bytes()[0]
            message = self._pipe.recv_bytes()
        except (EOFError, ConnectionError):
            self._process.join(timeout=5)
            raise DataError(f"a loading process ended by itself ({_cause(self._process.exitcode)}).") from None
        if slot == _FAILED:
            raise DataError(message.decode())
        loaded, seconds = load_shared(message, self._memories[slot])
        return loaded, slot, seconds

    def give_back(self, slot: int) -> None:
        """Let the process fill a slot again."""
        with contextlib.suppress(ConnectionError):  # it has ended: its work is done, or `take` says what happened
            self._pipe.send_bytes(bytes([slot]))

    def close(self) -> None:
        """Tell the process to end."""
        _PIPES.discard(self._pipe)
        self._pipe.close()

    def end(self) -> None:
        """Wait until it has ended."""
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(timeout=5)
        atexit.unregister(self._process.kill)


def _serve(work: Iterator[range], load: Load, pipe: Connection, memories: list[mmap.mmap]) -> None:
    """Load chunk after chunk, each into a slot that is free: what the process does."""
    for forked in _PIPES:  # or those who listen at the other ends would not see them closed before we end
        forked.close()
    # The one who started us then closes the pipe; or first loads some more, for its last steps.
    leave_to_others()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)  # and those of the parent were not forked with us
    parent = os.getppid()
    with contextlib.suppress(EOFError, ConnectionError):
        for steps in work:
            while not pipe.poll(5.0):
                if os.getppid() != parent:
                    return
            slot = pipe.recv_bytes()[0]
            head, message = _loaded(load, steps, slot, memories[slot])
            pipe.send_bytes(bytes([head]))
            pipe.send_bytes(message)
            if head == _FAILED:
                return
        while pipe.recv_bytes():  # the last chunks are still being read
            pass


def _loaded(load: Load, steps: range, slot: int, memory: mmap.mmap) -> tuple[int, bytes]:
    begin, begin_cpu = time.perf_counter(), time.process_time()
    try:
        shared = SharedSlot(memory)
        loaded = load(steps, shared)
        return slot, dump((loaded, (time.perf_counter() - begin, time.process_time() - begin_cpu)), shared)
    except ShoalError as error:
        return _FAILED, str(error).encode()
    except BaseException as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        return _FAILED, f"loading step {steps[0] + 1} failed in a loading process: {what}.".encode()


def _cause(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}; out of memory?"
    return f"exit code {exit_code}"
