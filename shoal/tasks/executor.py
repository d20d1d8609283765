"""A `concurrent.futures.Executor` whose workers stay warm, and whose small tasks are sent in chunks."""

import concurrent.futures
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from shoal.core.errors import ConfigError, WorkerFailed
from shoal.tasks.batch import Batch
from shoal.tasks.call import refuse_inside_worker
from shoal.tasks.outcome import Failure
from shoal.tasks.pool import Pool

T = TypeVar("T")

_LOOK_S = 1.0
"""After which it is looked whether anything will come at all."""
_MOST_KEPT = 1000
"""Tasks of one batch that is being submitted. It keeps what they were given and returned until all of it has ended."""


def check_retries(retries: int) -> None:
    """Raise ConfigError unless this is a number of times."""
    if retries < 0:
        raise ConfigError(f"retries={retries}: give 0, or how often a failed task is tried again.")


class Executor(concurrent.futures.Executor):
    """Worker processes on this machine; `submit`, `map`, `as_completed` and the rest as in `concurrent.futures`.

    There are `workers` of them, or as many as the machine has cores. A task that raises is tried `retries` times more.
    `say` is given the sentence about a worker that died.
    What a task raises is raised by `result()`, with the worker's traceback as its cause. A task whose worker dies is
    tried once more in a fresh one; if that dies too, `result()` raises WorkerFailed, which names the task.
    """

    def __init__(
        self, workers: int | None = None, *, retries: int = 0, say: Callable[[str], None] | None = None
    ) -> None:
        refuse_inside_worker()
        check_retries(retries)
        self._pool = Pool(workers, say=say)
        self.workers = self._pool.workers
        self._retries = retries
        self._lock = threading.Lock()
        self._numbers: dict[Any, int] = {}
        self._last: tuple[Any, Batch, list[concurrent.futures.Future[Any]]] | None = None
        self._batches: list[tuple[Batch, Sequence[concurrent.futures.Future[Any]]]] = []
        self._is_shut = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[T]:
        """Return the future of `fn(*args, **kwargs)`."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._lock:
            self._refuse_if_shut()
            number = self._number_of(fn)
            batch, futures = self._batch_for(number)
            futures.append(future)
            batch.append((args, kwargs))
            self._begin(batch, number, futures)
        return future

    def _batch_for(self, number: int) -> tuple[Batch, list[concurrent.futures.Future[Any]]]:
        """Return the batch that one more task of a function goes to, and its futures."""
        last = self._last
        if last is None or last[0] != number or not last[1].has_more() or len(last[2]) >= _MOST_KEPT:
            futures: list[concurrent.futures.Future[Any]] = []
            begin = _wanted(futures)
            batch = Batch([], _settle(futures), starred=True, retries=self._retries, begin=begin)
            self._last = last = (number, batch, futures)
        return last[1:]

    def map(self, fn: Callable[..., T], *iterables: Iterable[Any], **options: Any) -> Iterator[T]:
        """Return the results in order, as they come. Options are those of `concurrent.futures`.

        `timeout` is in seconds, for all; `chunksize` is not needed: it follows what tasks take.
        """
        limit_s = options.get("timeout")
        end_s = None if limit_s is None else time.monotonic() + limit_s
        if len(iterables) == 1:
            items: Sequence[Any] = list(iterables[0])
        else:
            items = [(args, {}) for args in zip(*iterables, strict=False)]
        return self.start(fn, items, starred=len(iterables) != 1).in_order(end_s)

    def start(
        self,
        function: Callable[..., T],
        items: Sequence[Any],
        *,
        starred: bool = False,
        is_builder: bool = False,
        done_items: Callable[[], Container[Any]] | None = None,
    ) -> "Started":
        """Start a task for each item at once, and return where their results come in."""
        with self._lock:
            self._refuse_if_shut()
            number = self._number_of(function, is_builder=is_builder)
            started = Started(len(items))
            started.batch = Batch(items, started.take, starred=starred, retries=self._retries, done_items=done_items)
            if items:
                self._begin(started.batch, number)
        return started

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let nothing more be submitted; wait for what was, or cancel it; end the workers."""
        with self._lock:
            self._is_shut = True
        for batch, futures in list(self._batches) if cancel_futures else ():
            for future in futures:
                future.cancel()  # its task is passed over when its turn comes
            if not futures:
                batch.cancel()
        self._pool.wake()
        if wait:
            self._finish()
        else:
            threading.Thread(target=self._finish, name="shoal tasks end").start()

    def kill(self) -> None:
        """End the workers at once, whatever they are doing."""
        self._is_shut = True
        self._pool.close(kill=True)
        for batch, futures in self._batches:
            batch.ended.set()  # with its workers, also where tasks are left: nobody has to wait for those
            for future in futures:
                if not future.cancel() and not future.done():
                    future.set_exception(WorkerFailed("the workers were ended before this task was done."))

    def _finish(self) -> None:
        for batch, _ in list(self._batches):
            batch.ended.wait()  # as long as tasks take: whoever wants less, cancels
        self._pool.close()

    def _begin(self, batch: Batch, number: int, futures: Sequence[concurrent.futures.Future[Any]] = ()) -> None:
        if not self._batches or self._batches[-1][0] is not batch:
            self._batches = [each for each in self._batches if not each[0].ended.is_set()]
            self._batches.append((batch, futures))
        self._pool.add(batch, number)

    def _number_of(self, function: Callable[..., Any], *, is_builder: bool = False) -> int:
        try:
            if function not in self._numbers:
                self._numbers[function] = self._pool.know(function, is_builder=is_builder)
            return self._numbers[function]
        except TypeError:  # not hashable: sent anew each time
            return self._pool.know(function, is_builder=is_builder)

    def _refuse_if_shut(self) -> None:
        if self._is_shut:
            raise RuntimeError("cannot schedule new futures after shutdown")


class Started:
    """Results of a map, as they come in."""

    def __init__(self, count: int) -> None:
        self.values: list[Any] = [None] * count
        self.failures: dict[int, Failure] = {}
        self.done = 0
        self.batch: Batch
        self._is_done = bytearray(count)
        self._news = threading.Condition()

    def take(self, positions: Sequence[int], values: Sequence[Any], failures: Mapping[int, Failure]) -> None:
        """Take results from the pool."""
        with self._news:
            if isinstance(positions, range):
                self.values[positions.start : positions.stop] = values
                self._is_done[positions.start : positions.stop] = b"\1" * len(positions)
            else:
                for position, value in zip(positions, values, strict=True):
                    self.values[position], self._is_done[position] = value, 1
            self.failures.update(failures)
            self.done += len(positions)
            self._news.notify_all()

    def wait(self, seen: int, *, seconds: float) -> int:
        """Wait until more than `seen` are done, at most so long; return how many are."""
        with self._news:
            self._news.wait_for(lambda: self.done > seen, seconds)
            return self.done

    def in_order(self, end_s: float | None = None) -> Iterator[Any]:
        """Yield the results in order; raise what a task raised when its turn comes."""
        try:
            position = 0
            while position < len(self.values):
                stop = self._await(position, end_s)
                yield from self.values[position:stop]  # all that is there: 5 times as fast as one by one
                position = stop
        finally:
            self.batch.cancel()

    def _await(self, position: int, end_s: float | None) -> int:
        """Return up to where results are there from `position` on, once one is; raise it if that is a failure."""
        with self._news:
            while not self._is_done[position]:
                if self.batch.ended.is_set():  # cancelled, or its workers are no more: nothing else comes
                    raise WorkerFailed("the workers were ended before this task was done.")
                left_s = _LOOK_S if end_s is None else min(_LOOK_S, end_s - time.monotonic())
                if left_s <= 0:
                    raise TimeoutError
                self._news.wait(left_s)
            if position in self.failures:
                raise self.failures[position].as_exception()
            stop = self._is_done.find(0, position)
            return min([stop if stop >= 0 else len(self.values), *(at for at in self.failures if at > position)])


def _settle(futures: list[concurrent.futures.Future[Any]]) -> Any:
    def deliver(positions: Sequence[int], values: Sequence[Any], failures: Mapping[int, Failure]) -> None:
        for position, value in zip(positions, values, strict=True):
            if position not in failures:
                futures[position].set_result(value)
            elif _is_open(futures[position]):
                futures[position].set_exception(failures[position].as_exception())

    return deliver


def _is_open(future: concurrent.futures.Future[Any]) -> bool:
    """Return whether a future, whose task may never have begun, can still be settled; it cannot be cancelled then."""
    return future.running() or (not future.done() and future.set_running_or_notify_cancel())


def _wanted(futures: list[concurrent.futures.Future[Any]]) -> Callable[[int], bool]:
    return lambda position: futures[position].set_running_or_notify_cancel()
