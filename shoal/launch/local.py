"""The local launcher: the workers of a run as processes of this machine, watched until the last has ended.

1. Host the rendezvous store on loopback, on a free port; start the workers, each in a session of its own.
2. Pass on what they print, line by line, and look at their ends as they come.
3. When one fails (and not merely because another is gone: then the one that is the cause gets `GRACE_S` to say so
   itself), or somebody asks to stop, end all the others: SIGTERM, and SIGKILL for those still there after
   `GRACE_S`. No process outlives this function; if this process itself is killed, the kernel ends the workers.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO

from shoal.core.errors import PeerLost, Stopped
from shoal.core.host import threads_per_worker

GRACE_S = 2.0
_TICK_S = 0.1


@dataclass
class Worker:
    """A worker process, seen from outside."""

    rank: int
    process: "subprocess.Popen[bytes]"
    unfinished_line: bytes = b""
    exit_code: int | None = None
    """Negative: the signal that killed it."""
    is_ended_by_us: bool = False


@dataclass
class Watch:
    """What the caller wants to know while workers run."""

    on_line: Callable[[int, str], None] = lambda rank, line: print(f"[worker {rank}] {line}")
    """Called with each line that a worker prints."""
    on_tick: Callable[[], None] = lambda: None
    """Called several times a second."""


def launch_local(command: list[str], *, workers: int, timeout_s: float, watch: Watch) -> list[Worker]:
    """Run `command` as `workers` worker processes on this machine until all have ended, and return them.

    Raises Stopped on SIGTERM (exit code 75) and on Ctrl-C (130), after every worker has ended.
    """
    from shoal.comm.store import LOOPBACK, host_store  # imports torch

    store, port = host_store(host=LOOPBACK, timeout_s=timeout_s)
    env = _environment(workers, LOOPBACK, port)
    started: list[Worker] = []
    with _stop_requests() as requests:
        try:
            for rank in range(workers):
                started.append(_start(command, rank, env))
            _watch(started, watch, requests)
        finally:
            _end_all(started, watch)
    del store  # it had to outlive the workers
    if requests:
        raise _stopped(requests[0])
    return started


def _environment(workers: int, host: str, port: int) -> dict[str, str]:
    """Return the environment of the workers, with torchrun's names, so that they start alike under both."""
    threads = str(threads_per_worker(workers))
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # Without gaps in a GPU's memory, which took up to a quarter of the peak (docs/accuracy.md).
        "PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        **os.environ,
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PYTHONUNBUFFERED": "1",
    }


def _start(command: list[str], rank: int, env: dict[str, str]) -> Worker:
    process = subprocess.Popen(
        command,
        env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C reaches us alone, and what a worker starts can be ended with it
    )
    return Worker(rank, process)


def _watch(workers: list[Worker], watch: Watch, requests: list[int]) -> None:
    """Return when all workers have ended, when one has failed, or when a stop is requested."""
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            assert worker.process.stdout is not None
            os.set_blocking(worker.process.stdout.fileno(), False)
            selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
        patience = _Patience()
        while not requests and not patience.is_over([_poll(worker) for worker in workers]):
            for key, _ in selector.select(timeout=_TICK_S):
                if not _read(key.data, watch):
                    selector.unregister(key.fileobj)
            if not selector.get_map():
                time.sleep(_TICK_S)  # all have closed their output; their ends follow
            watch.on_tick()


class _Patience:
    """How long to go on watching: until all have ended or one has failed, and after an echo a little longer."""

    def __init__(self) -> None:
        self._deadline: float | None = None

    def is_over(self, codes: list[int | None]) -> bool:
        """Return whether there is nothing more to wait for from workers with these exit codes (None: it runs)."""
        if None not in codes or any(code not in (None, 0, PeerLost.exit_code) for code in codes):
            return True
        if PeerLost.exit_code not in codes:
            return False
        self._deadline = self._deadline or time.monotonic() + GRACE_S
        return time.monotonic() > self._deadline


def _read(worker: Worker, watch: Watch) -> bool:
    """Pass on the whole lines the worker has printed; return whether more can come."""
    pipe: IO[bytes] | None = worker.process.stdout
    assert pipe is not None
    try:
        data = os.read(pipe.fileno(), 65536)
    except BlockingIOError:
        return True
    *lines, worker.unfinished_line = (worker.unfinished_line + data).split(b"\n")
    if not data and worker.unfinished_line:
        lines, worker.unfinished_line = [worker.unfinished_line], b""
    for line in lines:
        watch.on_line(worker.rank, line.decode(errors="replace"))
    return bool(data)


def _poll(worker: Worker) -> int | None:
    if worker.exit_code is None:
        worker.exit_code = worker.process.poll()
    return worker.exit_code


def _end_all(workers: list[Worker], watch: Watch) -> None:
    """End every worker that still runs, with all it started, and pass on its last words."""
    for kind, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        running = [worker for worker in workers if _poll(worker) is None]
        for worker in running:
            worker.is_ended_by_us = True
            _signal(worker, kind)
        _wait(running, wait_s)
    for worker in workers:
        _signal(worker, signal.SIGKILL)  # what is left of its session: processes the worker had started
        while _read_rest(worker, watch):
            pass
        if worker.process.stdout:
            worker.process.stdout.close()


def _read_rest(worker: Worker, watch: Watch) -> bool:
    pipe = worker.process.stdout
    if pipe is None or pipe.closed:
        return False
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        return bool(selector.select(timeout=0)) and _read(worker, watch)


def _signal(worker: Worker, kind: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.process.pid, kind)


def _wait(workers: list[Worker], wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while any(_poll(worker) is None for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.01)


@contextlib.contextmanager
def _stop_requests() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM into a list for the length of a `with` block, instead of dying of them."""
    requests: list[int] = []
    previous = {}
    with contextlib.suppress(ValueError):  # not the main thread: signals go to whoever handles them there
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, lambda number, _frame: requests.append(number))
    try:
        yield requests
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _stopped(number: int) -> Stopped:
    if number == signal.SIGINT:
        return Stopped("stopped by Ctrl-C; all workers have ended.", exit_code=128 + signal.SIGINT)
    return Stopped(f"stopped by {signal.Signals(number).name}; all workers have ended.")
