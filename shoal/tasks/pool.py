"""A pool of warm worker processes on this machine.

1. Workers start when there is work, one each turn until all are there, and stay: each loads a function once. Where
   there are GPUs, each sees its part of them; who comes in the place of another, the same.
2. An idle worker gets the next chunk of tasks, as many as take some 20 ms by what was measured (batch.py).
3. A worker that dies is named with the task it was at; that task is tried once more in a fresh worker, alone; the
   others of its chunk run again.
4. One thread does all of it: it waits for whichever worker answers first. Where no worker can be started, or anything
   else befalls that thread, every task fails with the reason: nobody else would ever run it.
"""

import contextlib
import os
import pickle
import selectors
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from shoal.core.errors import ConfigError
from shoal.core.host import threads_per_worker, usable_cores
from shoal.tasks.batch import Batch
from shoal.tasks.call import refer
from shoal.tasks.crew import CLOSE_S, STALL_S, Worker
from shoal.tasks.gpus import gpus_of, visible_gpus
from shoal.tasks.outcome import Failure, describe
from shoal.tasks.wire import receive, send

_VAIN_STARTS = 3
_TELL_S = 1.0


class Pool:
    """Workers that run batches of tasks, one batch after the other."""

    def __init__(self, workers: int | None = None, *, say: Callable[[str], None] | None = None) -> None:
        if workers is not None and workers < 1:
            raise ConfigError(f"workers={workers}: give at least 1.")
        self.workers = workers or usable_cores()
        self._say = say
        self._gpus = gpus_of(visible_gpus(os.environ), self.workers)
        self._queue: deque[Batch] = deque()
        self._lock = threading.Lock()
        self._functions: list[Any] = []
        self._task_s: dict[int, float] = {}
        self._crew: list[Worker] = []
        self._started, self._vain = 0, 0
        self._is_closing = self._is_killed = False
        self._failure: Failure | None = None
        """Why no task is run any more."""
        self._selector = selectors.DefaultSelector()
        self._wake_end, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._selector.register(self._wake_end, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._loop, name="shoal tasks", daemon=True)
        self._thread.start()

    def know(self, function: Callable[..., Any] | Any, *, is_builder: bool = False) -> int:
        """Return the number for `function` that batches name it by; a builder is called in the worker to give it."""
        self._functions.append(function if is_builder else refer(function))
        return len(self._functions) - 1

    def add(self, batch: Batch, function: int) -> None:
        """Run the tasks of `batch` with a known function, after those before; again, after more were appended."""
        batch.function = function
        batch.task_s = batch.task_s or self._task_s.get(function)
        with self._lock:
            if self._failure is None and not batch.is_queued:
                batch.is_queued = True
                self._queue.append(batch)
        if self._failure is not None:
            batch.give_up(self._failure)
        self.wake()

    def wake(self) -> None:
        """Look for new tasks."""
        with contextlib.suppress(OSError):  # full: it will wake anyway; or closed, and nobody is there to be woken
            self._waker.send(b"x")

    def close(self, *, kill: bool = False) -> None:
        """End the workers: at once, or when each has run its chunk. Nothing happens where that has been done."""
        self._is_closing = True
        if kill:
            self._is_killed = True
            for worker in list(self._crew):
                worker.process.kill()
        self.wake()
        self._thread.join(STALL_S)
        self._selector.close()
        self._wake_end.close()
        self._waker.close()

    def _loop(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._abandon(describe(error))
        # Here, not after: the kernel kills workers when the thread ends that started them (launch/parent.py).
        for worker in self._crew:
            worker.end.close()
        for worker in self._crew:
            worker.stop(grace_s=CLOSE_S)

    def _work(self) -> None:
        while not (self._is_closing and all(worker.batch is None for worker in self._crew)):
            if not self._is_closing:
                self._feed()
            for key, _ in self._selector.select(_TELL_S):
                if key.data is None:
                    self._wake_end.recv(4096)
                else:
                    self._hear(key.data)

    def _abandon(self, failure: Failure) -> None:
        """Fail all tasks, also those that come later."""
        with self._lock:
            self._failure = failure
            left: dict[Batch, list[int]] = {batch: [] for batch in self._queue}
            self._queue.clear()
        for worker in self._crew:
            if worker.batch is not None:
                left.setdefault(worker.batch, []).extend(worker.positions)
        for batch, positions in left.items():
            batch.give_up(failure, under_way=positions)

    def _feed(self) -> None:
        while self._queue:
            batch = self._queue[0]
            if not batch.has_more():
                with self._lock:
                    self._queue.popleft()
                    batch.is_queued = False
                if batch.has_more():  # appended in between
                    self.add(batch, batch.function)
                continue
            worker = next((each for each in self._crew if each.batch is None), None)
            if worker is None:
                worker = self._start_worker() if len(self._crew) < self.workers else None
            if worker is None:
                return
            self._send(worker, batch)

    def _start_worker(self) -> Worker | None:
        """Return another worker; None where there can be no more, and those that there are do it alone."""
        place = min(set(range(self.workers)) - {each.place for each in self._crew})
        threads = str(threads_per_worker(self.workers))
        env = {"OMP_NUM_THREADS": threads, **os.environ, **self._gpus[place]}
        try:
            worker = Worker(self._started, place, env)
        except OSError as error:
            if not self._crew:
                raise
            self.workers = len(self._crew)
            if self._say is not None:
                self._say(f"no more workers can be started: {error}. The tasks run on {self.workers}.")
            return None
        self._started += 1
        self._crew.append(worker)
        if self._is_killed:  # while it was being started
            worker.process.kill()
        self._selector.register(worker.end, selectors.EVENT_READ, worker)
        return worker

    def _send(self, worker: Worker, batch: Batch) -> None:
        positions = batch.take(self.workers)
        if not positions:
            return
        worker.begin(batch, positions)
        whole = isinstance(positions, range)
        items = batch.items[positions[0] : positions[-1] + 1] if whole else [batch.items[each] for each in positions]
        try:
            pickled = pickle.dumps(items, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            worker.rest()
            self._refuse(batch, positions, error)
            return
        try:
            if batch.function not in worker.known:
                worker.known.add(batch.function)
                send(worker.end, ("load", batch.function, self._functions[batch.function], sys.path))
            send(worker.end, ("run", batch.function, batch.starred, pickled))
        except OSError:
            self._bury(worker)

    def _refuse(self, batch: Batch, positions: Sequence[int], error: Exception) -> None:
        """Items that cannot be pickled: the tasks of those fail, the others are sent alone."""
        failures = {}
        for position in positions:
            try:
                pickle.dumps(batch.items[position])
            except Exception as why:
                failures[position] = describe(why)
        failures = failures or dict.fromkeys(positions, describe(error))
        others = [position for position in positions if position not in failures]
        batch.lost(others, -1, describe(error))
        batch.done(list(failures), [None] * len(failures), failures, 0.0)

    def _hear(self, worker: Worker) -> None:
        try:
            data = receive(worker.end)
        except OSError:  # silent in the middle of a message
            data = None
        if data is None:
            self._bury(worker)
            return
        batch, positions = worker.batch, worker.positions
        assert batch is not None
        seconds, results, failures = pickle.loads(data)  # noqa: S301  # from our own worker
        try:
            values = pickle.loads(results) if results else [None] * len(positions)  # noqa: S301  # the same
        except Exception as error:
            values, failures = [None] * len(positions), describe(error)
        if isinstance(failures, Failure):
            found = dict.fromkeys(positions, failures)
        else:
            found = {positions[at]: failure for at, failure in failures.items()}
        batch.done(positions, values, found, seconds)
        worker.rest()
        self._vain = 0
        self._task_s[batch.function] = batch.task_s or 0.0
        self._queue_again(batch)

    def _queue_again(self, batch: Batch) -> None:
        """Put a batch in front whose tasks must be tried again, where all of it had been sent."""
        with self._lock:
            if not batch.is_queued and batch.has_more():
                batch.is_queued = True
                self._queue.appendleft(batch)

    def _bury(self, worker: Worker) -> None:
        """Take leave of a worker that is gone, and see to its tasks."""
        self._selector.unregister(worker.end)
        self._crew.remove(worker)
        code = worker.stop(grace_s=CLOSE_S)
        batch, at = worker.batch, worker.at
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if batch is None or self._is_closing:
            return
        self._see_to(worker, batch, at, how)
        self._queue_again(batch)

    def _see_to(self, worker: Worker, batch: Batch, at: int, how: str) -> None:
        if at < 0:
            self._vain += 1
            failure = Failure(f"worker {worker.number} (process {worker.process.pid}) {how} before its first task.")
            batch.lost(worker.positions, -1, failure)
            if self._vain >= _VAIN_STARTS:
                batch.give_up(failure)
            return
        who = f"worker {worker.number} (process {worker.process.pid})"
        which = _shown(batch.items[worker.positions[at]])
        failure = Failure(f"{who} {how} at task {worker.positions[at]}: {which}", is_death=True)
        if self._say is not None:
            self._say(failure.said)
        batch.lost(worker.positions, at, failure)


def _shown(item: Any) -> str:
    try:
        text = repr(item)
    except Exception:
        text = f"a {type(item).__name__}"
    return text if len(text) <= 100 else f"{text[:97]}..."
