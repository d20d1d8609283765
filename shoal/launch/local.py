"""The launcher of one host: workers of a run as processes of this machine, watched until the last has ended.

1. `launch_local` hosts the rendezvous store on loopback, on a free port: all workers are here. `launch_part` has a part
   of them, and those of other hosts are watched by launchers there (slurm/hosting.py). Each worker is started in a
   session of its own (starting.py).
2. Pass on what they print, line by line, and look at their ends as they come.
3. SIGTERM, SIGUSR1 and SIGUSR2 are passed on to the workers, who stop in order (fault/preempt.py): they have the
   notice for it. So have the others when one has stopped by itself.
4. With `on_loss`, workers that are lost are replaced, and the others go on; and if the run is asked to go on with more
   or fewer, some are started or ended (replacing.py).
5. When one fails (and not merely because another is gone: then the one that is the cause gets `ECHO_S` to say so
   itself), when the notice is over, at a second signal, or at Ctrl-C, end all the others: SIGHUP, which workers do not
   take for a request to stop in order, and SIGKILL for those still there after `GRACE_S`; launchers on other hosts are
   told, and do the same. No process outlives this function; if this process itself is killed, the kernel ends the
   workers.
"""

import contextlib
import functools
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from shoal.comm.rank import MEMBER
from shoal.core.host import threads_per_worker
from shoal.core.notice import read_notice_s
from shoal.core.run_folder import RunFolder
from shoal.launch.part import Part
from shoal.launch.patience import STOPPED, Patience
from shoal.launch.replacing import Replacing
from shoal.launch.requests import Requests, stop_requests, stopped
from shoal.launch.starting import NotStarted, Process, Starting, Vain, worker_environment
from shoal.launch.wishes import Wishes
from shoal.spec.on_loss import OnLoss

GRACE_S = 2.0
_TICK_S = 0.1


@dataclass
class Worker:
    """A worker process, seen from outside."""

    rank: int
    process: Process
    unfinished_line: bytes = b""
    exit_code: int | None = None
    """Negative: the signal that killed it."""
    is_ended_by_us: bool = False
    member: str = ""
    """What it is called among the workers of a run that replaces lost ones."""
    is_lost: bool = False
    """Whether it was lost, and the others have gone on."""
    is_done: bool = False
    """Whether the run has come to its end, with this worker or, if that was lost, without it."""

    @property
    def has_failed(self) -> bool:
        """Whether it has ended neither in order nor as one without which the others go on."""
        return not self.is_lost and self.exit_code not in (None, 0, STOPPED)


@dataclass
class Watch:
    """What the caller wants to know while workers run."""

    on_line: Callable[[int, str], None] = lambda rank, line: print(f"[worker {rank}] {line}")
    """Called with each line that a worker prints."""
    on_tick: Callable[[], None] = lambda: None
    """Called several times a second."""
    on_note: Callable[[str], None] = lambda line: print(line, file=sys.stderr)
    """Called with what the launcher itself has to say."""

    @classmethod
    def by(cls, say: Callable[[str], None], *, on_tick: Callable[[], None]) -> "Watch":
        """Return one that gives everything to `say`."""
        return cls(lambda rank, line: say(f"[worker {rank}] {line}"), on_tick, say)


def launch_local(
    starting: Starting,
    *,
    workers: int,
    timeout_s: float,
    watch: Watch,
    on_loss: OnLoss | None = None,
    folder: RunFolder | None = None,
) -> list[Worker]:
    """Run `workers` worker processes on this machine until all have ended, and return them: see `launch_part`.

    `folder`: that of their run, through which it can be asked to go on with more or fewer (wishes.py).
    """
    from shoal.comm.store import LOOPBACK, host_store  # imports torch

    store, port = host_store(host=LOOPBACK, timeout_s=timeout_s)
    part = Part(store, LOOPBACK, port, workers=workers, ranks=range(workers))
    wishes = Wishes(folder, workers) if folder is not None and on_loss is not None and on_loss.go_on else None
    return launch_part(starting, part, watch=watch, on_loss=on_loss, wishes=wishes)


def launch_part(
    starting: Starting, part: Part, *, watch: Watch, on_loss: OnLoss | None = None, wishes: Wishes | None = None
) -> list[Worker]:
    """Run a part of a run's workers on this machine until all of them have ended, and return them.

    With `on_loss`, lost ones are replaced, if it says so, and as many as is asked for by `wishes` (where all workers
    are here) train: the last process of each worker is returned. Raises Stopped
    after every worker has ended: on Ctrl-C (exit code 130), and on a signal that was passed on (75) if not all of them
    stopped in order upon it, with 75, or were just done.
    """
    notice_s = read_notice_s()
    started: list[Worker] = []
    replacing = None
    with stop_requests() as requests, contextlib.ExitStack() as opened:
        opened.callback(starting.close)
        starting.open(_environment(part))
        start = functools.partial(_start, starting, part, in_vain=lambda: requests.ends_at_once)
        if on_loss is not None and on_loss.go_on:
            replacing = Replacing(part.store, on_loss, start=start, say=watch.on_note, wishes=wishes)
            opened.enter_context(kept_memory(part.store))
        try:
            with contextlib.suppress(Vain):
                for worker in replacing.start_all(part.ranks) if replacing else map(start, part.ranks):
                    started.append(worker)
                _watch(started, watch, requests, notice_s=notice_s, replacing=replacing, part=part)
            if requests.ends_at_once or any(worker.has_failed for worker in started):
                part.tell_over()
        finally:
            _end_all(started, watch)
        _note_done(started, replacing)
        if not all(worker.is_lost for worker in started):
            part.tell_ended()
    in_order = all(worker.exit_code in (0, STOPPED) for worker in started)
    if requests.numbers and (requests.ends_at_once or not in_order):
        raise stopped(requests.numbers[-1])
    return started


@contextlib.contextmanager
def kept_memory(store: Any) -> Iterator[None]:
    """Keep the workers' snapshots in this host's memory for the length of a `with` block, whoever of them is alive."""
    from shoal.comm.shm.kept import open_room, remove_room, token_of
    from shoal.comm.shm.sweeper import Sweeper

    token, room, sweeper = token_of(store), None, None
    try:
        with contextlib.suppress(OSError):  # a host without shared memory: workers find that out for themselves
            room = open_room(token)
            sweeper = Sweeper(room.path)
        yield
    finally:
        remove_room(token)
        if room is not None:
            room.close()
        if sweeper is not None:
            sweeper.leave()


def _note_done(workers: list[Worker], replacing: Replacing | None) -> None:
    if replacing is None or not replacing.is_finished():
        return
    for worker in workers:
        worker.is_done = worker.is_lost or (worker.exit_code == 0 and replacing.has_done(worker))


def _environment(part: Part) -> dict[str, str]:
    """Return the environment of the workers, with torchrun's names, so that they start alike under both."""
    threads = threads_per_worker(len(part.ranks))
    return worker_environment(os.environ, threads=threads, host=part.host, port=part.port) | {
        "WORLD_SIZE": str(part.workers),
        "LOCAL_WORLD_SIZE": str(len(part.ranks)),
    }


def _start(starting: Starting, part: Part, rank: int, member: str = "", *, in_vain: Callable[[], bool]) -> Worker:
    names = {"RANK": str(rank), "LOCAL_RANK": str(rank - part.ranks.start), MEMBER: member}
    try:
        return Worker(rank, starting.start(names, in_vain), member=member)
    except OSError as error:
        raise NotStarted(f"worker {rank} could not be started: {error.strerror or error}.") from error


def _watch(
    workers: list[Worker], watch: Watch, requests: Requests, *, notice_s: float, replacing: Replacing | None, part: Part
) -> None:
    """Return when all workers have ended, when one has failed, here or elsewhere, or when the rest is to be ended."""
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as opened:
        for worker in workers:
            _listen_to(worker, selector, opened)
        patience = Patience(notice_s)
        while not requests.ends_at_once:
            is_asked = requests.pass_on(workers)
            codes = [_poll(worker) for worker in workers]
            if replacing is not None:
                before = list(workers)
                started = replacing.look(workers, is_ending=is_asked or STOPPED in codes)
                for worker in [worker for worker in before if worker not in workers]:
                    _let_go(worker, watch, selector)
                for worker in started:
                    _listen_to(worker, selector, opened)
                codes = [worker.exit_code for worker in workers if not worker.is_lost]
            ended = [worker for worker in workers if worker.exit_code == 0]
            has_left = replacing is not None and not all(map(replacing.has_done, ended))
            if has_left or part.is_over() or patience.is_over(codes, is_asked=is_asked):
                break
            for key, _ in selector.select(timeout=_TICK_S):
                if not (isinstance(key.data, Worker) and _read(key.data, watch)):
                    selector.unregister(key.fileobj)
            if not selector.get_map():
                time.sleep(_TICK_S)  # all have closed their output; their ends follow
            watch.on_tick()


def _let_go(worker: Worker, watch: Watch, selector: selectors.BaseSelector) -> None:
    """Forget a worker that was replaced, after its last words."""
    with contextlib.suppress(KeyError):  # it has closed its output before
        selector.unregister(worker.process.stdout)  # type: ignore[arg-type]  # it has a pipe
    _clear(worker, watch)


def _listen_to(worker: Worker, selector: selectors.BaseSelector, opened: contextlib.ExitStack) -> None:
    """Have `selector` tell what the worker prints, and when it ends."""
    assert worker.process.stdout is not None
    os.set_blocking(worker.process.stdout.fileno(), False)
    selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
    with contextlib.suppress(OSError):  # it has ended already
        end = worker.process.open_end()
        opened.callback(os.close, end)
        selector.register(end, selectors.EVENT_READ)


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
    for kind, wait_s in ((signal.SIGHUP, GRACE_S), (signal.SIGKILL, GRACE_S)):
        running = [worker for worker in workers if _poll(worker) is None]
        for worker in running:
            worker.is_ended_by_us = True
            _signal(worker, kind)
        _wait(running, wait_s)
    for worker in workers:
        _clear(worker, watch)


def _clear(worker: Worker, watch: Watch) -> None:
    """End what a worker that has ended had started, and pass on its last words."""
    _signal(worker, signal.SIGKILL)  # what is left of its session
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
